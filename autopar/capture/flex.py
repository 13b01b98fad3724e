"""`torch.nn.attention.flex_attention` while a model is traced: its functions become plain calls of the graph.

    mask    mask_mod of all (b, h, q, k), by torch.vmap: calls on vectors of positions and on what the function captures
    scores  FLEX_SCORES(query, key, scale)
    score_mod of all scores, by torch.vmap; none: the call is scaled dot product attention under the mask
    y       FLEX_VALUES(scores, mask, value, raw scores)

`capture.masks.flex` makes one call of the last three, or takes them apart. That follows from `mask_mod` alone: blocks
that a BlockMask leaves out, though its function shows them, are not left out. It is the same on all devices, also where
the kernel has no backward (a CPU), and however a model refers to `flex_attention`: compiled functions run as they are.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

from autopar.errors import CaptureError
from autopar.ir.program.operators.attention.flex_calls import FLEX_SCORES, FLEX_VALUES

LN_2 = math.log(2)
"""The kernel gives logarithms to the base 2, which `flex_attention` converts."""


@contextlib.contextmanager
def flex_attention_taken_apart() -> Iterator[None]:
    """Let a trace record what `flex_attention` computes; CaptureError for what it cannot."""
    with contextlib.ExitStack() as stack:
        for name, replacement in (
            ("flex_attention_hop", _attention),
            ("_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),  # the call is not compiled
            ("setup_compilation_env", _as_it_is),
            ("_validate_device", lambda query, key, value: None),  # refuses gradients on a CPU
            ("_apply_kernel_options", _further_outputs),  # refuses some outputs on a CPU
            ("create_mask", functools.partial(_on_cpu, flex.create_mask)),
        ):
            stack.enter_context(mock.patch.object(flex, name, replacement))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextlib.contextmanager
def _as_it_is() -> Iterator[str]:
    yield "eager"


def _further_outputs(
    query: Tensor, key: Tensor, value: Tensor, return_lse: bool, kernel_options: Any, return_aux: Any = None
) -> dict[str, Any]:
    """Return the outputs requested in addition to the result; other options are those of a kernel."""
    wanted = return_lse or (return_aux is not None and return_aux.lse)
    return {"OUTPUT_LOGSUMEXP": wanted, "OUTPUT_MAX": return_aux is not None and return_aux.max_scores, "BACKEND": ""}


def _on_cpu(create_mask: Callable[..., Tensor], *args: Any, device: Any = None) -> Tensor:
    """Return the mask on the CPU, where a trace is, whatever device the model names."""
    return create_mask(*args[:5], device="cpu")


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, the log-sum-exp of the scores, and an empty tensor in the place of their maxima."""
    if key.shape[0] != query.shape[0]:
        raise CaptureError(
            f"flex_attention has queries of {query.shape[0]} samples and keys of {key.shape[0]}, and autopar splits "
            "samples of both alike; expand the keys and values to the samples of the queries."
        )
    if kernel_options.get("OUTPUT_MAX"):
        raise CaptureError(
            "flex_attention returns the maxima of its scores (AuxRequest(max_scores=True)), which autopar does not "
            "keep with a sharded result; leave max_scores out."
        )
    sizes = *query.shape[:3], key.shape[2]
    indices = [torch.arange(size, device=query.device) for size in sizes]
    mask_mod = block_mask[-1]
    with TransformGetItemToIndex():
        mask = None if mask_mod is flex.noop_mask else flex._vmap_for_bhqkv(mask_mod, prefix=())(*indices)
    if mask is not None and mask.dtype is not torch.bool:
        raise CaptureError(f"the mask_mod of flex_attention gives {mask.dtype}, and needed are truth values (bool).")
    nothing = query.new_zeros(0)
    if score_mod is flex._identity and not kernel_options.get("OUTPUT_LOGSUMEXP"):
        shared = key.shape[1] != query.shape[1]
        out = functional.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=shared)
        return out, nothing, nothing
    raw = scores = FLEX_SCORES(query, key, scale)
    if score_mod is not flex._identity:
        with TransformGetItemToIndex():
            scores = flex._vmap_for_bhqkv(score_mod, prefix=(0,))(scores, *indices)
    out, lse = FLEX_VALUES(scores, mask, value, raw)
    return out, lse / LN_2, nothing
