"""Losses: sums over the batch become partial, means are divided by the whole count.

Cross-entropy of classes may be split along the batch n, along the classes v (vocabulary parallel: the function joins
the maxima and sums itself), or both. Its mean counts only targets that are not ignored, so ranks join sum and count.
Class probabilities as targets have no rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from autopar.sharding.operation import Call, Collective, Implementation, OpRule
from autopar.sharding.rule import WHOLE
from autopar.strategies.notation import Answer, Entry, broadcast, names, pointwise, rule, tensor_arguments, term

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""PyTorch's numbers for the argument `reduction`."""
FLOAT32_BYTES = 4
MEAN_BYTES = 2 * 8  # a sum and what divides it, float64


def cross_entropy(call: Call) -> Answer:
    """`self` (n, v, …) or (v), `target` (n, …) or () of classes."""
    logits, target = call["self"].shape, call["target"]
    if target.dtype.is_floating_point:
        return None
    dims = ["v"] if len(logits) == 1 else ["n", "v", *names(len(logits) - 2)]
    kept = [name for name in dims if name != "v"]
    joined = frozenset(dims) if call["reduction"] == MEAN else frozenset({"v"})
    vocabulary_parallel = Implementation(
        "loss:cross_entropy", joined, joined=joined, padded=frozenset({"v"}), traffic=cross_entropy_traffic
    )
    return OpRule(_loss_text(call, dims, kept), (vocabulary_parallel,), moved_bytes=with_probabilities)


def with_probabilities(inputs: int, outputs: int) -> int:
    """Probabilities as large as the logits are written for the backward."""
    return inputs + inputs + outputs


def _loss_text(call: Call, dims: list[str], kept: list[str], classes: str = "v", mark: str = "") -> str:
    # For a mean, the weights are also in the divisor.
    weight = [term([classes], "~" if call["reduction"] != MEAN else "")] if call["weight"] is not None else []
    output = kept if call["reduction"] == NONE else []
    return rule([term(dims, mark), term(kept), *weight], [term(output)])


def cross_entropy_traffic(call: Call, sizes: Mapping[str, int]) -> tuple[Collective, ...]:
    """Over rows, a mean's sum and divisor; over classes, the maximum of every row, then sums, in fp32 or wider."""
    rows = [name for name in sizes if name != "v"]
    row_bytes = math.prod(sizes[name] for name in rows) * max(FLOAT32_BYTES, call["self"].dtype.itemsize)
    weighted, smoothed = call["weight"] is not None, call["label_smoothing"] > 0
    # Sum of exponentials and target logit; weight of the target, sum of the logits, sum of the weights.
    num_sums = 2 + weighted + smoothed + (weighted and smoothed)
    means = [Collective("all_reduce", name, MEAN_BYTES) for name in rows if call["reduction"] == MEAN]
    return (*means, Collective("all_reduce", "v", row_bytes), Collective("all_reduce", "v", num_sums * row_bytes))


def nll(call: Call) -> str:
    """The negative of the target's entry; linear in `self`. Its mean counts what is not ignored: all whole."""
    ndim = len(call["self"].shape)
    dims = [WHOLE] if ndim == 1 else ["n", WHOLE, *names(ndim - 2)]
    if call["reduction"] == MEAN:
        dims = [WHOLE] * ndim
    kept = [] if ndim == 1 else [dims[0], *dims[2:]]
    return _loss_text(call, dims, kept, WHOLE, "~")


def distance(function: str) -> Callable[[Call], Answer]:
    """A loss of two tensors of the same shape, element by element; `function` computes its mean in parts."""

    def entry(call: Call) -> Answer:
        shapes = {info.shape for info in call.inputs[:2]}
        if call["reduction"] == NONE:
            return pointwise()(call)
        if len(shapes) > 1:
            return None
        dims = names(len(call.inputs[0].shape))
        shape = call.inputs[0].shape
        further = [
            term(broadcast(info.shape, shape, dims), "~" if name == "weight" else "")
            for name, info in [*tensor_arguments(call)][2:]
        ]
        text = rule([term(dims), term(dims), *further], ["()"])
        if call["reduction"] == SUM or not dims:
            return OpRule(text)
        return OpRule(text, (Implementation(f"mean:{function}", frozenset(dims)),))

    return entry


def cosine_similarity(call: Call) -> Answer:
    """The dim of the vectors stays whole."""
    shapes = {info.shape for info in call.inputs}
    if len(shapes) > 1:
        return None
    dims = names(len(call.inputs[0].shape))
    gone = call["dim"] % len(dims)
    kept = [name for i, name in enumerate(dims) if i != gone]
    dims[gone] = WHOLE
    return rule([term(dims)] * 2, [term(kept)])


RULES: dict[torch._ops.OpOverload, Entry] = {
    aten.cross_entropy_loss.default: cross_entropy,
    aten.nll_loss.default: nll,
    aten.nll_loss_nd.default: nll,
    aten.mse_loss.default: distance("mse_loss"),
    aten.l1_loss.default: distance("l1_loss"),
    aten.smooth_l1_loss.default: distance("smooth_l1_loss"),
    aten.huber_loss.default: distance("huber_loss"),
    aten.kl_div.default: distance("kl_div"),
    aten.binary_cross_entropy.default: distance("binary_cross_entropy"),
    aten.binary_cross_entropy_with_logits.default: distance("binary_cross_entropy_with_logits"),
    aten.cosine_similarity.default: cosine_similarity,
}
