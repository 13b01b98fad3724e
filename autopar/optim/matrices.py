"""Selection, by name and shape, of the parameters that optimizers of matrices update; plans count by the same.

Muon and GaLore are for the weights of hidden layers: a parameter of two dims in a numbered layer
("layers.0.mlp.up.weight"). Embedding tables, output heads, biases and scales of norms are excluded; AdamW updates them
in the same step (Jordan 2024; Zhao et al. 2024). Patterns override this selection.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.program.paths import layer_of, matches


def is_matrix(name: str, shape: Sequence[int], patterns: Sequence[str] | None = None) -> bool:
    """Return whether a parameter has two dims and lies in a numbered layer; patterns, if given, replace the layer.

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
    """Return whether a parameter's gradients are projected to `rank`: it is a matrix larger than that in both dims."""
    return is_matrix(name, shape, patterns) and min(shape) > rank
