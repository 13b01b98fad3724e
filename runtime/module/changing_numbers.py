"""A warning of numbers among the inputs that change, as graphs are made for their values."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from torch.utils import _pytree as pytree

from autopar.runtime.module.inputs import Arguments, name_of

Runs = TypeVar("Runs")
PLANNED = 3
"""Plans for different values of one number, after which it is warned of."""


def warning_of_numbers(
    prepare: Callable[[Arguments, bool, frozenset[str] | None], Runs],
) -> Callable[[Arguments, bool, frozenset[str] | None], Runs]:
    """Return `prepare` with a warning, once per argument, if it is called again and again for another number."""
    values: dict[str, set[int | float]] = defaultdict(set)

    def warned(arguments: Arguments, training: bool, frozen: frozenset[str] | None) -> Runs:
        for path, leaf in pytree.tree_flatten_with_path(arguments)[0]:
            if type(leaf) not in (int, float) or leaf in values[name_of(path)]:
                continue
            values[name_of(path)].add(leaf)
            if len(values[name_of(path)]) == PLANNED:
                seen = ", ".join(map(str, sorted(values[name_of(path)])))
                warnings.warn(
                    f"the model was captured and planned {PLANNED} times, as the number {name_of(path)} changed "
                    f"({seen}). Give it as a tensor, torch.tensor({leaf}), which one plan serves whatever its value is.",
                    stacklevel=4,
                )
        return prepare(arguments, training, frozen)

    return warned
