"""Lower bound on the bytes that any plan stores: parameters and optimizer state, sharded as far as possible."""

from __future__ import annotations

import numpy as np

from autopar.costs.memory.model import MemoryModel


def least_stored(memory: MemoryModel) -> int:
    """Return the least bytes that parameters, master copies, states of the optimizer and resident gradients take on a
    device.
    """
    total = 0
    for number, decision in enumerate(memory.space.decisions):
        if decision.kind == "parameter":
            arrays = list(memory.stored(number).values())
            gradients = None if memory.presence.frees_gradients else memory.tensors.gradients(number)
            total += int(np.sum(arrays + ([] if gradients is None else [gradients]), axis=0).min())
    return total
