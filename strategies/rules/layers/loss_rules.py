"""Losses: sums over the batch become partial, means are divided by the whole count.

Cross-entropy of classes may be split along the batch n, along the classes v (vocabulary parallel: the function joins
the maxima and sums itself), or both. Its mean counts only targets that are not ignored: ranks join their counts, which
depend on targets alone, and each has its part of the mean.
The classes of class probabilities stay whole, as in all losses that compare vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autopar.ir.program.operators.row_cross_entropy import CROSS_ENTROPY
from autopar.ir.sharding.operation import Call, Collective, Implementation, LocalSizes, OpRule
from autopar.ir.sharding.rule import ANY_OF, WHOLE
from autopar.strategies.notation import (
    Answer,
    Entry,
    broadcast,
    dim_of,
    names,
    pointwise,
    rule,
    tensor_arguments,
    term,
    whole_at,
)

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""PyTorch's numbers for the argument `reduction`."""
CLASSES = frozenset({"v"})
COPIES_OF_PARTS = 3  # copies of its logits that `runtime.implementations.loss` has at once
FLOAT32_BYTES = 4
DIVISOR_BYTES = 8  # bytes of a mean's divisor: a number of rows, int64, or a sum of weights, float64


def cross_entropy(call: Call) -> Answer:
    """`self` (n, v, …) or (v), `target` (n, …) or () of classes, or probabilities in the shape of `self`."""
    logits, target = call["self"].shape, call["target"]
    if target.dtype.is_floating_point:
        return _of_probabilities(call)
    return _of_classes(call, ["v"] if len(logits) == 1 else ["n", "v", *names(len(logits) - 2)], "cross_entropy")


def cross_entropy_of_rows(call: Call) -> OpRule:
    """`self` (…, v), `target` (…)."""
    return _of_classes(call, [*names(len(call["target"].shape)), "v"], "cross_entropy_of_rows")


def _of_classes(call: Call, dims: list[str], function: str) -> OpRule:
    """Logits of these dims, of which "v" are the classes; what the function is called that joins parts."""
    kept = [name for name in dims if name != "v"]
    served = frozenset(dims) if call["reduction"] == MEAN else CLASSES
    in_parts = VocabularyParallelLoss(f"loss:{function}", served, dims=tuple(dims))
    return OpRule(_loss_text(call, dims, kept), (in_parts,), moved_bytes=with_probabilities)


@dataclass(frozen=True, slots=True)
class VocabularyParallelLoss(Implementation):
    """A cross-entropy of which each rank has some rows, some classes, or both."""

    joined: frozenset[str] = CLASSES
    padded: frozenset[str] = CLASSES
    ordered: frozenset[str] | None = CLASSES
    dims: tuple[str, ...] = ()
    """The dims of the logits."""

    def traffic(self, call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
        """Return, over classes, the maximum of every row, then sums, in fp32 or wider; over rows, a mean's divisor."""
        rows = [name for name in sizes if name != "v"]
        row_bytes = math.prod(sizes[name] for name in rows) * max(FLOAT32_BYTES, call["self"].dtype.itemsize)
        weighted, smoothed = call["weight"] is not None, call["label_smoothing"] > 0
        # Sum of exponentials and target logit; weight of the target, sum of the logits, sum of the weights.
        num_sums = 2 + weighted + smoothed + (weighted and smoothed)
        classes = (Collective("all_reduce", "v", row_bytes), Collective("all_reduce", "v", num_sums * row_bytes))
        return classes if call["reduction"] != MEAN else (*classes, divisor_over(rows, ahead=not weighted))

    def inference_bytes(self, call: Call, sizes: LocalSizes) -> int | None:
        """Return the bytes of all copies of the logits that are there at once if their classes are split."""
        if sizes["v"] == call["self"].shape[self.dims.index("v")]:
            return None
        wide = max(FLOAT32_BYTES, call["self"].dtype.itemsize)
        return COPIES_OF_PARTS * wide * math.prod(sizes[name] for name in self.dims)

    def backward_bytes(self, call: Call, sizes: LocalSizes) -> int:
        """Return the bytes of logits of half precision in float32; of wider ones those of PyTorch's probabilities.

        PyTorch's own loss runs, and saves them, if no axis splits the classes. Otherwise the gradient is made in the
        memory that the backward works on.
        """
        itemsize, elements = call["self"].dtype.itemsize, math.prod(sizes[name] for name in self.dims)
        if itemsize < FLOAT32_BYTES:
            return elements * FLOAT32_BYTES
        return elements * itemsize if sizes["v"] == call["self"].shape[self.dims.index("v")] else 0


def _of_probabilities(call: Call) -> OpRule:
    """Linear in the probabilities, unless they are smoothed, and in the weights: a mean counts samples alone."""
    ndim = len(call["self"].shape)
    dims = [WHOLE] if ndim == 1 else ["n", WHOLE, *names(ndim - 2)]
    free = [name for name in dims if name != WHOLE]
    weight = [term([WHOLE], "~")] if call["weight"] is not None else []
    smoothed = call["label_smoothing"] > 0
    terms = [term(dims), term(dims, "" if smoothed else "~"), *weight]
    text = rule(terms, [term(free if call["reduction"] == NONE else [])])
    means = _means("cross_entropy_loss", free, call)
    return OpRule(text, means, moved_bytes=with_probabilities)


def _means(function: str, free: list[str], call: Call) -> tuple[Implementation, ...]:
    """The implementation of a mean over the samples named `free`, each of which counts as one."""
    return (
        (Implementation(f"mean:{function}", frozenset(free), ordered=frozenset()),)
        if call["reduction"] == MEAN and free
        else ()
    )


def with_probabilities(inputs: int, outputs: int) -> int:
    """Probabilities as large as the logits are written for the backward."""
    return inputs + inputs + outputs


def _loss_text(call: Call, dims: list[str], kept: list[str], classes: str = "v", mark: str = "") -> str:
    # For a mean, the weights are also in the divisor.
    weight = [term([classes], "~" if call["reduction"] != MEAN else "")] if call["weight"] is not None else []
    output = kept if call["reduction"] == NONE else []
    return rule([term(dims, mark), term(kept), *weight], [term(output)])


def divisor_over(rows: Sequence[str], ahead: bool) -> Collective:
    """Return the sum of what a mean over rows of these factors divides by, over all ranks that split them."""
    return Collective("all_reduce", ANY_OF + " ".join(rows), DIVISOR_BYTES, ahead=ahead)


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
        return OpRule(text, _means(function, dims, call))

    return entry


def of_vectors(function: str) -> Callable[[Call], Answer]:
    """A loss of vectors, the last dim, each with a number or a vector of labels; `function` computes its mean."""

    def entry(call: Call) -> Answer:
        shape = call.inputs[0].shape
        free = names(len(shape) - 1)
        terms = []
        for name, info in tensor_arguments(call):
            if name == "weight":  # class weights; an unweighted mean counts samples
                terms.append(term([WHOLE], "~"))
            elif info.shape in (shape, shape[:-1]):
                terms.append(term([*free, WHOLE] if info.shape == shape else free))
            else:
                return None
        text = rule(terms, [term(free if call["reduction"] == NONE else [])])
        return OpRule(text, _means(function, free, call))

    return entry


def cosine_similarity(call: Call) -> Answer:
    """The dim of the vectors stays whole; both are broadcast."""
    shape = torch.broadcast_shapes(*(info.shape for info in call.inputs))
    if not shape:
        return None
    dims, gone = names(len(shape)), dim_of(call, ndim=len(shape))
    kept = [name for i, name in enumerate(dims) if i != gone]
    vectors = whole_at(dims, [gone])
    return rule([term(broadcast(info.shape, shape, vectors)) for info in call.inputs], [term(kept)])


RULES: dict[torch._ops.OpOverload, Entry] = {
    aten.cross_entropy_loss.default: cross_entropy,
    CROSS_ENTROPY: cross_entropy_of_rows,
    aten.nll_loss.default: nll,
    aten.nll_loss_nd.default: nll,
    aten.mse_loss.default: distance("mse_loss"),
    aten.l1_loss.default: distance("l1_loss"),
    aten.smooth_l1_loss.default: distance("smooth_l1_loss"),
    aten.huber_loss.default: distance("huber_loss"),
    aten.kl_div.default: distance("kl_div"),
    aten.binary_cross_entropy.default: distance("binary_cross_entropy"),
    aten.binary_cross_entropy_with_logits.default: distance("binary_cross_entropy_with_logits"),
    aten.hinge_embedding_loss.default: distance("hinge_embedding_loss"),
    aten.margin_ranking_loss.default: distance("margin_ranking_loss"),
    aten.poisson_nll_loss.default: distance("poisson_nll_loss"),
    aten.soft_margin_loss.default: distance("soft_margin_loss"),
    aten.cosine_embedding_loss.default: of_vectors("cosine_embedding_loss"),
    aten.multi_margin_loss.default: of_vectors("multi_margin_loss"),
    aten.multilabel_margin_loss.default: of_vectors("multilabel_margin_loss"),
    aten.triplet_margin_loss.default: of_vectors("triplet_margin_loss"),
    aten.cosine_similarity.default: cosine_similarity,
}
