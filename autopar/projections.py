"""Matrix products in the form that shards: batch and sequence apart, and one product per piece of a packed weight."""

from __future__ import annotations

from autopar.draft import Draft


def flat_projections_to_batched(draft: Draft) -> None:
    """x.view(-1, k) → addmm → view becomes matmul and add on x itself, so that batch and sequence stay apart."""


def packed_projections_to_separate(draft: Draft) -> None:
    """A product whose output is only split along its last dim becomes one product per piece of its weight."""
