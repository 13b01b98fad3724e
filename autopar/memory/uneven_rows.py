"""What the busiest device holds beside its share of the rows of experts, by how many times its share comes to it.

    beside = excess · bytes of a share, rounded up        excess = min(imbalance, ranks that rows are divided over) - 1

Rows that follow from routing depend on where their counts lie (`space.expert_rows`), so that arrays here have a dim
more in front: the strategies of the decision on these counts.
"""

from __future__ import annotations

import numpy as np

from autopar.memory.tensor_bytes import Bytes, Modes, TensorBytes
from autopar.space.space import ExpertRows


def excess(tensors: TensorBytes, rows: ExpertRows) -> np.ndarray:
    """Rows beside a share, in shares, by strategy of the decision on their counts."""
    space = tensors.space
    menu = space.decisions[rows.counts].menu

    def make() -> np.ndarray:
        choices = range(len(menu.strategies))
        return np.array([space.excess_at(rows, choice, space.imbalance) for choice in choices])

    return tensors.cached(("excess", id(menu), rows.position), make)


def beside(tensors: TensorBytes, rows: ExpertRows, modes: Modes) -> Modes:
    """Bytes beside those of a share, which are an array of `tensors` for each mode."""
    shares = excess(tensors, rows)
    return tuple(
        tensors.cached(("beside", id(shares), id(array)), lambda a=array: _outer(shares, a)) for array in modes
    )


def _outer(shares: np.ndarray, array: Bytes) -> Bytes:
    return np.ceil(np.multiply.outer(shares, array)).astype(np.int64)
