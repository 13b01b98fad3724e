"""The parts of flex attention in a graph that is captured, until one call stands in their place.

    flex_scores(query, key, scale) -> scores            [B, H, S, T], in float32 at least
    flex_values(scores, mask, value, raw) -> (y, lse)   y = softmax(scores where mask, else -inf) @ value

`scores` of flex_values are computed of `raw` ones, those of flex_scores.

A query that sees no key gets zeros. Legend as in `kernels`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def scores_of(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return the scores, of which query heads share a head of keys in groups."""
    if q.shape[1] != k.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32)) * scale


def values_of(scores: Tensor, mask: Tensor | None, v: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result and the log-sum-exp of the scores."""
    if scores.shape[1] != v.shape[1]:
        v = v.repeat_interleave(scores.shape[1] // v.shape[1], 1)
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), -math.inf)
    return torch.ops.aten._safe_softmax.default(scores, -1).to(v.dtype) @ v, scores.logsumexp(-1)


for _schema, _function in (
    ("flex_scores(Tensor q, Tensor k, float scale) -> Tensor", scores_of),
    ("flex_values(Tensor scores, Tensor? mask, Tensor v, Tensor raw) -> (Tensor, Tensor)", values_of),
):
    _name = f"autopar::{_schema.partition('(')[0]}"
    torch.library.define(_name, _schema[_schema.index("(") :])
    torch.library.impl(_name, "CompositeImplicitAutograd", _function)

FLEX_SCORES: torch._ops.OpOverload = torch.ops.autopar.flex_scores.default
FLEX_VALUES: torch._ops.OpOverload = torch.ops.autopar.flex_values.default
