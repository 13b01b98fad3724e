"""Kernels of other libraries have rules by name; stand-ins of the same schema are split by them and give the same."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.export import capture
from autopar.errors import CaptureError
from autopar.ir.program.autograd_function import function_call
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.mesh import Mesh
from autopar.ir.sharding.operation import Call
from autopar.strategies.roles import RoledProgram
from autopar.strategies.ruled import NO_RULE, ruled
from tests.support.eager import run

B, S, H, G, D = 4, 8, 4, 2, 4


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool, slopes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return flash attention of [b, s, h, d] and its log-sum-exp, all scores written out."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    back = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if slopes is not None:
        scores = scores - slopes.view(*slopes.shape, 1, 1) * back.abs()
    if causal:
        scores = scores.masked_fill(back > 0, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, lse = attended(q, k, v, causal, alibi_slopes)
    return out.contiguous(), lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


@flash.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *further: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1])
    return torch.empty_like(q), lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def flash_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parts = []
    for first, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        out, lse = attended(q[None, first:end], k[None, first:end], v[None, first:end], causal, None)
        parts.append((out[0], lse[0]))
    outs, all_lse = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(all_lse, -1), q.new_empty(0), torch.zeros(2, dtype=torch.int64)


@flash_packed.register_fake
def _(q: Tensor, *further: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[1], q.shape[0])
    return torch.empty_like(q), lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


def differentiated(operator: Any) -> None:
    """Give a stand-in the gradients of what it computes."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
        ctx.places = [place for place, x in enumerate(inputs) if isinstance(x, Tensor)]
        ctx.inputs = [None if isinstance(x, Tensor) else x for x in inputs]

    def backward(ctx: Any, *grads: Tensor) -> Any:
        args = list(ctx.inputs)
        for place, x in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[place] = x.detach().requires_grad_(x.is_floating_point())
        with torch.enable_grad():
            found = operator._init_fn(*args)[:2]
        learning = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        given = dict(zip(map(id, learning), torch.autograd.grad(found, learning, grads[:2]), strict=True))
        return tuple(given.get(id(x)) for x in args)

    operator.register_autograd(backward, setup_context=keep)


differentiated(flash)
differentiated(flash_packed)


def heads(*sizes: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(B, S, size, D).double() for size in sizes)


def ways(target: Any, *args: Any) -> list[str]:
    return [str(each).partition(":")[0] for each in autopar.check_rule(target, *args)]


@pytest.mark.parametrize("slopes", [None, (H,), (B, H)])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_is_split_by_samples_and_heads(slopes: tuple[int, ...] | None, causal: bool) -> None:
    given = None if slopes is None else torch.rand(slopes).double()
    specified = 0.0, 0.5, causal, -1, -1, 0.0, given, False
    found = ways("flash_attn::_flash_attn_forward", *heads(H, G, G), *specified)
    assert {"b", "h"} <= set(found)


def test_packed_documents_are_split_by_heads_alone() -> None:
    q, k, v = (x.flatten(0, 1) for x in heads(H, H, H))
    ends = torch.tensor([0, 5, 20, B * S], dtype=torch.int32)
    found = ways("flash_attn::_flash_attn_varlen_forward", q, k, v, ends, ends, 15, 15, 0.0, 0.5, True)
    assert "h" in found and len([each for each in found if each not in ("-", "h")]) == 0


def test_the_kernels_of_pytorch_are_split_by_samples_and_heads() -> None:
    q, k, v = (x.transpose(1, 2).contiguous() for x in heads(H, H, H))
    found = ways("aten::_scaled_dot_product_flash_attention_for_cpu", q, k, v, 0.0, False)
    assert {"b", "h"} <= set(found)


@pytest.mark.parametrize("name", ["efficient", "flash", "cudnn"])
def test_the_kernels_of_a_gpu_are_split_by_samples_and_heads(name: str) -> None:
    """Their results without values are enough: (b, h, s, d), the log-sum-exp, and numbers of a generator."""
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default
    further = {"efficient": (None, True), "flash": (), "cudnn": (None, True)}[name]

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(H * D, 3 * H * D, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.proj(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
            return operator(q, k, v, *further, 0.0, True)[0].float().square().mean()

    program = capture(Attention(), (torch.randn(B, S, H * D, dtype=torch.bfloat16),), {}, training=True)
    (call,) = [each for each in RoledProgram.of(program).calls.values() if each.call.target is operator]
    assert not call.ruled.reason and set(call.ruled.splittable) == {"b", "h"}
    assert call.op.flops == 2 * B * H * (S * S // 2) * 2 * D


def _function(name: str, eager: Callable[..., Any]) -> type[torch.autograd.Function]:
    def forward(ctx: Any, *args: Any) -> Any:
        assert args[0].data_ptr(), "a kernel takes addresses"
        ctx.save_for_backward(*(x for x in args if isinstance(x, Tensor)))
        ctx.places = [place for place, x in enumerate(args) if isinstance(x, Tensor)]
        ctx.args = [None if isinstance(x, Tensor) else x for x in args]
        return eager(*args)

    def backward(ctx: Any, *grads: Tensor) -> Any:
        args = list(ctx.args)
        for place, x in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[place] = x.detach().requires_grad_(x.is_floating_point())
        with torch.enable_grad():
            found = eager(*args)
        outs = found if isinstance(found, tuple) else (found,)
        learning = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        given = dict(zip(map(id, learning), torch.autograd.grad(outs, learning, grads), strict=True))
        return tuple(given.get(id(x)) for x in args)

    module, _, qualname = name.rpartition(".")
    parts = {"__module__": module, "__qualname__": qualname}
    parts |= {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(qualname, (torch.autograd.Function,), parts)


def _rms_norm(x: Tensor, w: Tensor, eps: float, *further: Any) -> Tensor:
    return nn.functional.rms_norm(x, (x.shape[-1],), w, eps)


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *further: Any) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]

    return turned(q), turned(k)


LIGER = "liger_kernel.ops"
NORM = _function(f"{LIGER}.rms_norm.LigerRMSNormFunction", _rms_norm)
SWIGLU = _function(f"{LIGER}.swiglu.LigerSiLUMulFunction", lambda a, b, *further: nn.functional.silu(a) * b)
ROPE = _function(f"{LIGER}.rope.LigerRopeFunction", _rope)
LOSS = _function(f"{LIGER}.cross_entropy.LigerCrossEntropyFunction", nn.functional.cross_entropy)
FLASH = _function(
    "flash_attn.flash_attn_interface.FlashAttnFunc",
    lambda q, k, v, p, scale, causal, *_: attended(q, k, v, causal, None)[0],
)


PACKED = _function(
    "flash_attn.flash_attn_interface.FlashAttnVarlenFunc",
    lambda q, k, v, ends, *args: flash_packed._init_fn(q, k, v, ends, ends, 9, 9, 0.0, 0.5, args[6])[0],
)
XFORMERS = _function(
    "xformers.ops.fmha._fMHA", lambda fw, bw, q, k, v, bias, p, *_: attended(q, k, v, bias is not None, None)[0]
)


class LowerTriangularMask:
    """Stand-in with the name of xformers' causal mask."""


def test_the_functions_of_flash_attention_are_split() -> None:
    specified = 0.0, None, True, (-1, -1), 0.0, None, False, False, True
    assert {"b", "h"} <= set(ways(FLASH, *heads(H, G, G), *specified))
    q, k, v = (x.flatten(0, 1) for x in heads(H, G, G))
    ends = torch.tensor([0, 9, 12, 20, B * S], dtype=torch.int32)
    packed = ways(PACKED, q, k, v, ends, ends, 12, 12, *specified)
    assert set(packed) == {"h", "-"}


def test_a_call_that_drops_is_left_whole() -> None:
    specified = 0.5, None, True, (-1, -1), 0.0, None, False, False, True
    infos = tuple(TensorInfo(tuple(x.shape), x.dtype, True) for x in heads(H, G, G))
    arguments = {str(number): each for number, each in enumerate((*infos, *specified))}
    call = Call(function_call(FLASH), infos, infos[:1], arguments)
    assert ruled(call).reason == NO_RULE
    assert not ruled(Call(function_call(FLASH), infos, infos[:1], {**arguments, "3": 0.0})).reason


@pytest.mark.parametrize(("mask", "names"), [(LowerTriangularMask(), {"b", "h"}), (object(), {"h"})])
def test_attention_of_xformers_is_split_as_its_mask_allows(mask: object, names: set[str]) -> None:
    infos = tuple(TensorInfo(tuple(x.shape), x.dtype, True) for x in heads(H, H, H))
    target = function_call(XFORMERS, None, ((0, object()), (1, object()), (5, mask)))
    arguments = dict.fromkeys(map(str, range(8))) | dict(zip("234", infos, strict=True)) | {"6": 0.0}
    found = ruled(Call(target, infos, infos[:1], arguments))
    assert not found.reason and set(found.splittable) == names
    assert found.op.flops == 2 * B * H * (S * S // 2 if "b" in names else S * S) * 2 * D


class Block(nn.Module):
    """A layer of kernels: norm, rotation, gated activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.rand(16))
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 8)
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = NORM.apply(x, self.norm, 1e-6, 0.0, "llama", False)
        q, k = (layer(h).unflatten(-1, (-1, D)).transpose(1, 2) for layer in (self.query, self.key))
        angles = torch.arange(float(x.shape[1]))[None, :, None].expand(1, -1, D)
        q, k = ROPE.apply(q, k, angles.cos(), angles.sin())
        y = nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        y = x + y.transpose(1, 2).flatten(2)
        return (y + self.down(SWIGLU.apply(self.gate(y), self.up(y)))).square().mean()


def test_kernels_of_liger_are_split_and_give_what_they_give_alone() -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(B, S, 16)
    program = capture(model, (x,), {}, training=True)
    run(program, dict(model.named_parameters()), {}, (x,)).backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(x).backward()
    for ours, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, p.grad)
    plan = autopar.plan(model, Mesh({"dp": 2, "tp": 2}), (x,), strategy="megatron")
    splits = {row.operation.rpartition(".")[2]: row.splits for row in plan.rows if "liger" in row.operation}
    assert splits["LigerRMSNormFunction"][0] == "data" and splits["LigerSiLUMulFunction"] == ("data", "column")
    assert splits["LigerRopeFunction"][0] == "data" and not plan.kept_whole


def test_a_loss_of_liger_is_refused_with_what_to_use() -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return LOSS.apply(x, labels)

    with pytest.raises(
        CaptureError, match=r"LigerCrossEntropyFunction does not run .* in tiles by Memory\(loss_tiles="
    ):
        capture(Loss(), (torch.randn(8, 4), torch.zeros(8, dtype=torch.long)), {}, training=True)


def test_an_operator_with_triton_kernels_is_kept_and_split_by_a_rule() -> None:
    name = f"kernels_{uuid.uuid4().hex}::doubled"

    def twice(x: Tensor) -> Tensor:
        return x * 2

    doubled: Any = torch.library.triton_op(name, twice, mutates_args=())
    doubled.register_autograd(lambda ctx, grad: grad * 2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return doubled(self.layer(x)).square().mean()

    inputs = (torch.randn(512, 16),)
    assert [each.operation for each in autopar.plan(Model(), Mesh({"dp": 2}), inputs).kept_whole] == [name]
    autopar.register_rule(name, "~b d -> b d")
    assert not autopar.plan(Model(), Mesh({"dp": 2}), inputs).kept_whole
