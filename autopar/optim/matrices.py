"""Which parameters an optimizer of matrices takes as such: what it is given by name, and what a plan counts for it.

Muon and GaLore are for the weights of hidden layers: a parameter of two dims in a numbered layer
("layers.0.mlp.up.weight"), not an embedding table, an output head, a bias or the scale of a norm, which AdamW updates
beside (Jordan 2024; Zhao et al. 2024). Patterns say it otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.program.paths import layer_of, matches


def is_matrix(name: str, shape: Sequence[int], patterns: Sequence[str] | None = None) -> bool:
    """Whether a parameter is one of the matrices: has two dims, and lies in a numbered layer or is what a pattern says.

    >>> is_matrix("model.layers.0.mlp.up_proj.weight", (256, 64)), is_matrix("model.embed_tokens.weight", (1000, 64))
    (True, False)
    >>> is_matrix("head.weight", (1000, 64), ("head.*", "*.mlp.*"))
    True
    """
    if len(shape) != 2:
        return False
    if patterns is None:
        return bool(layer_of(name))
    return any(matches(name, pattern, "") for pattern in patterns)


def is_projected(name: str, shape: Sequence[int], rank: int, patterns: Sequence[str] | None = None) -> bool:
    """Whether the gradients of a parameter are projected to `rank`: those of a matrix that is larger in both dims."""
    return is_matrix(name, shape, patterns) and min(shape) > rank
