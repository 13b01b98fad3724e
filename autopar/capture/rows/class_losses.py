"""Cross-entropies that are written in two: nll_loss(log_softmax(x)) is what `cross_entropy` computes."""

from __future__ import annotations

from torch import fx

from autopar.capture.passes.traced_graph import TracedGraph, arguments, aten, set_call, shape_of, value_of

NEGATIVE_LOG_LIKELIHOODS = (aten.nll_loss.default, aten.nll_loss_nd.default)


def joined_cross_entropies(draft: TracedGraph) -> None:
    """Let a negative log-likelihood of logarithms of probabilities, which nothing else reads, take the logits."""
    for loss in draft.calls(*NEGATIVE_LOG_LIKELIHOODS):
        given = arguments(loss)
        logs = given["self"]
        if logs.target is aten.log_softmax.int and len(logs.users) == 1 and _along_classes(logs):
            rest = [given[name] for name in ("target", "weight", "reduction", "ignore_index")]
            set_call(loss, aten.cross_entropy_loss.default, logs.args[0], *rest, 0.0)


def _along_classes(logs: fx.Node) -> bool:
    """Return whether a log-softmax is over the dim of classes (dim 1, or the only one) and keeps the logits' dtype."""
    given, ndim = arguments(logs), len(shape_of(logs))
    return given["dim"] % ndim == min(1, ndim - 1) and value_of(logs).dtype == value_of(given["self"]).dtype
