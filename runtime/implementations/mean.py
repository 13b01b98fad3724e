"""Means of which each rank has a part: a local mean, divided by the number of parts, is a partial global mean.

Parts have equal sizes, so no count needs to be exchanged: none of these functions communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from autopar.runtime.collectives.mesh_axes import Axes, axes_of, num_parts_of

aten = torch.ops.aten


def mean_over_parts(x: Tensor, axes: Sequence[str]) -> Tensor:
    """Return the local mean `x` as a partial value of the mean over all ranks of `axes`. Moves nothing."""
    num_parts = num_parts_of(axes_of(axes))
    return x / num_parts if num_parts > 1 else x


def mean(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    axes: Axes,
    sizes: Mapping[str, int],
) -> Tensor:
    """Compute `aten.mean.dim` or `aten.mean.default`; the factors of `sizes` are the dims of `x` in order.

    The result is partial over the axes that split an averaged dim. Moves nothing.
    """
    named = [dim] if isinstance(dim, int) else list(dim or range(x.ndim))
    factors = list(sizes)
    gone = {factors[d % x.ndim] for d in named}
    local = torch.mean(x, named, keepdim, dtype=dtype) if x.ndim else torch.mean(x, dtype=dtype)
    return mean_over_parts(local, [name for factor in gone for name in axes.get(factor, ())])


def _mean_of_all(name: str) -> Callable[..., Tensor]:
    """Return the ATen loss of that name, reduced by its mean over every dim. Moves nothing."""
    op = getattr(aten, name).default

    def loss(*args: object, axes: Axes, sizes: Mapping[str, int], **kwargs: object) -> Tensor:
        del sizes
        return mean_over_parts(op(*args, **kwargs), [name for names in axes.values() for name in names])

    loss.__name__ = loss.__qualname__ = name  # printed graphs show it
    return loss


cosine_embedding_loss = _mean_of_all("cosine_embedding_loss")
cross_entropy_loss = _mean_of_all("cross_entropy_loss")
hinge_embedding_loss = _mean_of_all("hinge_embedding_loss")
margin_ranking_loss = _mean_of_all("margin_ranking_loss")
mse_loss = _mean_of_all("mse_loss")
l1_loss = _mean_of_all("l1_loss")
smooth_l1_loss = _mean_of_all("smooth_l1_loss")
huber_loss = _mean_of_all("huber_loss")
multi_margin_loss = _mean_of_all("multi_margin_loss")
multilabel_margin_loss = _mean_of_all("multilabel_margin_loss")
poisson_nll_loss = _mean_of_all("poisson_nll_loss")
soft_margin_loss = _mean_of_all("soft_margin_loss")
triplet_margin_loss = _mean_of_all("triplet_margin_loss")
kl_div = _mean_of_all("kl_div")
binary_cross_entropy = _mean_of_all("binary_cross_entropy")
binary_cross_entropy_with_logits = _mean_of_all("binary_cross_entropy_with_logits")
