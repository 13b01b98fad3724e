"""Kernels of other libraries by name: flash-attn, xformers, Liger, and the kernels of PyTorch's own attention.

Attention is split by samples and heads: a kernel aligns a causal mask, a window and slopes with the last of the
positions it is given, so that it needs all of them. Packed documents (`varlen`) have one dim for samples and
positions, of which a part means another thing, and are split by heads. A call that drops is left whole: what a kernel
draws follows from where it draws, and would be another thing on each layout. Norms are split by rows, activations and
rotations by all dims that they do not mix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.ir.program.autograd_function import FunctionCall
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.operation import Call, OpRule
from autopar.ir.sharding.rule import WHOLE
from autopar.strategies.notation import Entry, broadcast, names, rule, term

aten = torch.ops.aten
FUSED_BACKWARD = 2.5
"""The same factors as PyTorch's own attention (`layers.attention`)."""
CAUSAL_OBJECTS = ("LowerTriangularMask", "LowerTriangularFromBottomRightMask")
"""Masks of xformers that say nothing of samples."""


def _head_dims(query: int, key: int) -> tuple[str, str]:
    """Return the dims of query and key heads, which query heads share in groups."""
    if query == key:
        return "h", "h"
    return ("h", "1") if key == 1 else ("(h r)", "h")


def _rule(
    call: Call,
    heads_first: bool,
    tensors: Sequence[TensorInfo],
    causal: bool,
    masks: Sequence[TensorInfo] = (),
    samples: str = "b",
    slopes: Sequence[TensorInfo] = (),
) -> OpRule:
    """Return the rule of attention on [samples, positions, heads, features], or with heads before positions.

    Masks are broadcast to the scores, and `slopes` have a dim of heads, behind one of samples.
    """
    query, key, value = (info.shape for info in tensors)
    head, place = (1, 2) if heads_first else (2, 1)
    heads = _head_dims(query[head], key[head])

    def laid(of: str) -> list[str]:
        return [samples, of, WHOLE, WHOLE] if heads_first else [samples, WHOLE, of, WHOLE]

    scores = (query[0], query[head], query[place], key[place])
    dims = [samples, heads[0], WHOLE, WHOLE]
    terms = [term(laid(heads[0])), term(laid(heads[1])), term(laid(heads[1]))]
    terms += [term(broadcast(info.shape, scores, dims)) for info in masks]
    terms += [term(dims[2 - len(info.shape) : 2]) for info in slopes]
    outputs = [_output_term(info.shape, query, value, scores, laid(heads[0]), dims) for info in call.outputs]
    pairs = math.prod(scores) // (2 if causal and query[place] == key[place] else 1)
    return OpRule(
        rule(terms, outputs),
        flops=2 * pairs * (query[3] + value[3]),
        backward=FUSED_BACKWARD,
        efficiency="masked attention" if causal else "attention",
        head_size=query[3],
    )


def _output_term(
    shape: Sequence[int],
    query: Sequence[int],
    value: Sequence[int],
    scores: Sequence[int],
    laid: Sequence[str],
    dims: Sequence[str],
) -> str:
    """Return the term of a result, of the log-sum-exp, or of other outputs of a kernel (seeds, offsets)."""
    if tuple(shape) == (*query[:3], value[3]):
        return term(list(laid))
    if len(shape) == 3 and tuple(shape[:2]) == tuple(scores[:2]):
        return term(list(dims[:3]))
    return term([WHOLE] * len(shape))


def _named(call: Call, arguments: Sequence[str]) -> list[TensorInfo]:
    return [call[name] for name in arguments if isinstance(call.arguments.get(name), TensorInfo)]


def flash_attention(call: Call) -> OpRule | None:
    """`flash_attn::_flash_attn_forward(q, k, v, …)` of [b, s, h, d]."""
    if call["dropout_p"] > 0:
        return None
    slopes = _named(call, ("alibi_slopes",))
    return _rule(call, False, _named(call, ("q", "k", "v")), bool(call["causal"]), slopes=slopes)


def flash_function(call: Call) -> OpRule | None:
    """The autograd.Function behind `flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, …)`."""
    if call["3"] > 0:
        return None
    return _rule(call, False, call.inputs[:3], bool(call["5"]), slopes=call.inputs[3:])


def packed_attention(call: Call) -> OpRule | None:
    """`flash_attn::_flash_attn_varlen_forward(q, k, v, cu_seqlens_q, …)` of [tokens, h, d], split by heads."""
    if call["dropout_p"] > 0:
        return None
    return _packed(call, call["max_seqlen_k"], bool(call["causal"]))


def packed_function(call: Call) -> OpRule | None:
    """The autograd.Function behind `flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, …)`."""
    if call["7"] > 0:
        return None
    return _packed(call, call["6"], bool(call["9"]))


def _packed(call: Call, longest: int, causal: bool) -> OpRule:
    query, key, value = (info.shape for info in call.inputs[:3])
    heads = _head_dims(query[1], key[1])
    terms = [term([WHOLE, heads[0], WHOLE]), *(term([WHOLE, heads[1], WHOLE]) for _ in range(2))]
    for info in call.inputs[3:]:
        slopes = info.dtype.is_floating_point and info.shape[-1:] == (query[1],)
        terms.append(term([*[WHOLE] * (len(info.shape) - 1), heads[0] if slopes else WHOLE]))
    outputs = []
    for info in call.outputs:
        dims = [WHOLE] * len(info.shape)
        if info.shape == (*query[:2], value[2]):
            dims[1] = heads[0]
        elif info.shape == (query[1], query[0]):
            dims[0] = heads[0]
        outputs.append(term(dims))
    pairs = query[0] * query[1] * longest // (2 if causal else 1)
    return OpRule(
        rule(terms, outputs),
        flops=2 * pairs * (query[2] + value[2]),
        backward=FUSED_BACKWARD,
        efficiency="masked attention" if causal else "attention",
        head_size=query[2],
    )


def aten_kernel(call: Call) -> OpRule | None:
    """A kernel that `scaled_dot_product_attention` chooses, called by its own name; [b, h, s, d]."""
    if call["dropout_p"] > 0:
        return None
    masks = _named(call, ("attn_bias", "attn_mask"))
    return _rule(call, True, _named(call, ("query", "key", "value")), bool(call["is_causal"]), masks)


def xformers(call: Call) -> OpRule | None:
    """The autograd.Function behind `memory_efficient_attention`: (op_fw, op_bw, q, k, v, attn_bias, p, scale, …)."""
    assert isinstance(call.target, FunctionCall)
    objects = {position: type(each).__name__ for position, each in call.target.objects}
    if call["6"] > 0 or len(call.inputs[0].shape) != 4:
        return None
    packed = 5 in objects and objects[5] not in CAUSAL_OBJECTS
    causal = objects.get(5) in CAUSAL_OBJECTS
    return _rule(call, False, call.inputs[:3], causal, call.inputs[3:], samples=WHOLE if packed else "b")


def rows_alone(call: Call) -> str:
    """A norm of the last dim: `x` (…, d) with weights (d)."""
    first, *weights = call.inputs
    dims = names(len(first.shape) - 1)
    return rule([term([*dims, WHOLE]), *(term([WHOLE] * len(each.shape)) for each in weights)], [term([*dims, WHOLE])])


def elementwise(call: Call) -> str:
    """Tensors of one shape."""
    dims = names(len(call.inputs[0].shape))
    return rule([term(dims)] * len(call.inputs), [term(dims)] * len(call.outputs))


def rotation(call: Call) -> str:
    """Rotary embedding: `q` and `k` (b, h, s, d), `cos` and `sin` (b or 1, s, d)."""
    query, _, *angles = call.inputs
    whole = [term(["b" if each.shape[0] == query.shape[0] > 1 else WHOLE, "s", WHOLE]) for each in angles]
    laid = [term(["b", head, "s", WHOLE]) for head in ("h", "g")]
    return rule([*laid, *whole], laid)


FLASH, LIGER = "flash_attn.flash_attn_interface", "liger_kernel.ops"
BY_NAME: Mapping[str, Entry] = {
    "flash_attn._flash_attn_forward.default": flash_attention,
    "flash_attn._flash_attn_varlen_forward.default": packed_attention,
    f"{FLASH}.FlashAttnFunc": flash_function,
    f"{FLASH}.FlashAttnVarlenFunc": packed_function,
    "xformers.ops.fmha._fMHA": xformers,
    f"{LIGER}.rms_norm.LigerRMSNormFunction": rows_alone,
    f"{LIGER}.layer_norm.LigerLayerNormFunction": rows_alone,
    f"{LIGER}.swiglu.LigerSiLUMulFunction": elementwise,
    f"{LIGER}.geglu.LigerGELUMulFunction": elementwise,
    f"{LIGER}.rope.LigerRopeFunction": rotation,
}
_ATEN: Sequence[Callable[..., Any]] = (
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
RULES: dict[object, Entry] = dict.fromkeys(_ATEN, aten_kernel)
