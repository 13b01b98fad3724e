"""Normalisations: dims that share a mean or a variance stay whole; all are linear in weight and bias.

BatchNorm shares its statistics over the batch: in training, a split batch needs an implementation that sums them.
Its running statistics are written in place, on every rank alike, so the channels stay whole while they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.operation import Call, Collective, Implementation, LocalSizes, OpRule
from autopar.ir.sharding.rule import WHOLE
from autopar.strategies.notation import Entry, names, rule, term

aten = torch.ops.aten

FLOAT32_BYTES, FLOAT64_BYTES = 4, 8


def affine(call: Call, dims: list[str]) -> list[str]:
    """The terms of weight and bias, if there are; they are partial only together."""
    weight, bias = (call.arguments.get(name) is not None for name in ("weight", "bias"))
    marked = len(call.outputs) == 1 and weight
    return [term(dims, "~" if marked else "")] * weight + [term(dims, "+" if marked else "")] * bias


def over_last(call: Call) -> str:
    """Normalised over the last dims; mean and deviation, where they are returned, have size one there."""
    count = len(call["normalized_shape"])
    free = names(len(call.inputs[0].shape) - count)
    dims = [*free, *[WHOLE] * count]
    statistics = [term([*free, *"1" * count])] * (len(call.outputs) - 1)
    return rule([term(dims), *affine(call, [WHOLE] * count)], [term(dims), *statistics])


def group_norm(call: Call) -> str:
    """Normalised over groups of channels; split groups would need another `num_groups` on each rank."""
    dims = ["n", *[WHOLE] * (len(call.inputs[0].shape) - 1)]
    return rule([term(dims), *affine(call, [WHOLE])], [term(dims)])


def batch_norm(call: Call) -> OpRule:
    """Normalised over all dims but the channels, or by running statistics, which makes every dim free."""
    running = [info for info in (call["running_mean"], call["running_var"]) if isinstance(info, TensorInfo)]
    by_batch = call["training"] or not running
    spatial = len(call.inputs[0].shape) - 2
    if by_batch:
        channel = WHOLE if running else "c"
        dims = ["n", channel, *[WHOLE] * spatial]
    else:
        channel = "c"
        dims = ["n", channel, *names(26)[3 : 3 + spatial]]
    statistics = [term([channel])] * len(running)
    text = rule([term(dims), *affine(call, [channel]), *statistics], [term(dims)])
    if not by_batch:
        return OpRule(text)
    return OpRule(text, (SyncedBatchNorm(),))


@dataclass(frozen=True, slots=True)
class SyncedBatchNorm(Implementation):
    """Batch norm by the statistics of all ranks that split the batch."""

    function: str = "normalization:batch_norm"
    factors: frozenset[str] | None = frozenset({"n"})
    ordered: frozenset[str] | None = frozenset()

    def traffic(self, call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
        """Return two sums per channel: of values and squares in fp64, of gradients in fp32 or wider."""
        x = call.inputs[0]
        num_sums = 2 * sizes.get("c", x.shape[1])
        forward = Collective("all_reduce", "n", FLOAT64_BYTES * num_sums)
        backward = Collective("all_reduce", "n", max(FLOAT32_BYTES, x.dtype.itemsize) * num_sums, backward=True)
        return (forward, backward) if x.requires_grad else (forward,)


def instance_norm(call: Call) -> str:
    """Normalised over the spatial dims of each image and channel."""
    running = [info for info in (call["running_mean"], call["running_var"]) if isinstance(info, TensorInfo)]
    channel, batch = (WHOLE, WHOLE) if running else ("c", "n")
    dims = [batch, channel, *[WHOLE] * (len(call.inputs[0].shape) - 2)]
    return rule([term(dims), *affine(call, [channel]), *[term([channel])] * len(running)], [term(dims)])


def weight_norm(call: Call) -> str:
    """A direction v and the length g that it gets, along all dims but one (-1: along all of them)."""
    ndim, dim = len(call["v"].shape), call["dim"]
    dims = ["c" if i == dim else WHOLE for i in range(ndim)]
    lengths = term(["c" if i == dim else WHOLE for i in range(len(call["g"].shape))], "~")
    return rule([term(dims), lengths], [term(dims)])


RULES: dict[torch._ops.OpOverload, Entry] = {
    aten.layer_norm.default: over_last,
    aten.native_layer_norm.default: over_last,
    aten.rms_norm.default: over_last,
    aten._fused_rms_norm.default: over_last,
    aten.group_norm.default: group_norm,
    aten.batch_norm.default: batch_norm,
    aten.instance_norm.default: instance_norm,
    aten._weight_norm.default: weight_norm,
}
