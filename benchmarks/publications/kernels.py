"""Kernels that the measured frameworks fuse, as operations of their own: one call each, which autopar prices as one.

rotary    the rotary embedding of flash-attn, which saves no activation
softmax   Megatron's scaled softmax with an upper triangular mask, which saves its result
swiglu    Megatron's SwiGLU (bias_activation_fusion), which saves its inputs
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import autopar

# Shapes: B samples, H heads, S positions, T positions looked at, D features of a head.


@torch.library.custom_op("published::rotary", mutates_args=())
def rotary(x_BHSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Features of each head turned by the angles of their positions."""
    first, second = x_BHSD.chunk(2, dim=-1)
    return x_BHSD * cos_SD + torch.cat((-second, first), dim=-1) * sin_SD


@torch.library.custom_op("published::rms_norm", mutates_args=())
def rms_norm(x_BSF: Tensor, weight_F: Tensor, eps: float = 1e-5) -> Tensor:
    """Features divided by the root of their mean square."""
    return torch.nn.functional.rms_norm(x_BSF, weight_F.shape, weight_F, eps)


@torch.library.custom_op("published::swiglu", mutates_args=(), tags=(torch.Tag.pointwise,))
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of a gate, times what it lets through."""
    return torch.nn.functional.silu(gate) * up


@torch.library.custom_op("published::causal_softmax", mutates_args=())
def causal_softmax(scores_BHST: Tensor, scale: float) -> Tensor:
    """Softmax of scaled scores over what is not later."""
    size = scores_BHST.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=scores_BHST.device).triu(1)
    return (scores_BHST * scale).masked_fill(later, float("-inf")).softmax(-1)


def _as_first(first: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(first)


def _keep_angles(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _turned_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    cos, sin = ctx.saved_tensors
    return rotary(gradient, cos, -sin), None, None


def _keep_result(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale = inputs[1]


def _of_scores(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (result,) = ctx.saved_tensors
    weighted = gradient * result
    return ctx.scale * (weighted - result * weighted.sum(-1, keepdim=True)), None


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.eps = inputs[2]


def _of_normed(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    root = x.float().square().mean(-1, keepdim=True).add(ctx.eps).rsqrt()
    normed, scaled = x * root, (gradient * weight).float()
    of_x = root * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    of_weight = (gradient * normed).sum(tuple(range(x.dim() - 1)))
    return of_x.to(x.dtype), of_weight.to(weight.dtype), None


def _keep_gate_and_up(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _of_gated(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    share = gate.sigmoid()
    return gradient * up * share * (1 + gate * (1 - share)), gradient * gate * share


rms_norm.register_fake(_as_first)
rms_norm.register_autograd(_of_normed, setup_context=_keep_inputs)
rotary.register_fake(_as_first)
rotary.register_autograd(_turned_back, setup_context=_keep_angles)
causal_softmax.register_fake(_as_first)
causal_softmax.register_autograd(_of_scores, setup_context=_keep_result)
swiglu.register_fake(_as_first)
swiglu.register_autograd(_of_gated, setup_context=_keep_gate_and_up)
autopar.register_rule("published::swiglu", "..., ... -> ...")
autopar.register_rule("published::rms_norm", "... _, _ -> ... _")
autopar.register_rule("published::rotary", "~b h s _, s _, s _ -> b h s _")
autopar.register_rule("published::causal_softmax", "b h _ _ -> b h _ _")
