"""What no plan of a model takes less than: what is stored whatever is computed, in as many parts as it can be."""

from __future__ import annotations

import numpy as np

from autopar.memory.model import MemoryModel


def least_stored(memory: MemoryModel) -> int:
    """The least bytes that parameters, master copies, states of the optimizer and kept gradients take on a device."""
    total = 0
    for number, decision in enumerate(memory.space.decisions):
        if decision.kind == "parameter":
            arrays = list(memory.stored(number).values())
            gradients = None if memory.frees_gradients else memory.gradients(number)
            total += int(np.sum(arrays + ([] if gradients is None else [gradients]), axis=0).min())
    return total
