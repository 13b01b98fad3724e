"""Bytes that a forward leaves for its backward on a rank, compared with those of its plan."""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.runtime.recompute.test_recompute import watched


def saved_and_planned(compiled: Any, values: tuple[Tensor, ...]) -> tuple[int, int]:
    """Bytes that a forward leaves for its backward on this rank, weights excluded, and those of the plan.

    The model is on the meta device; its values become ones.
    """
    compiled.to_empty(device="cpu")
    for tensor in (*compiled.parameters(), *compiled.buffers()):
        nn.init.ones_(tensor)
    with watched() as storages:
        loss = compiled(*values)
    gc.collect()
    stored = (*compiled.parameters(), *compiled.buffers(), *values)
    known = {(each.to_local() if isinstance(each, DTensor) else each).untyped_storage()._cdata for each in stored}
    alive = [storage for ref in storages.values() if (storage := ref()) is not None and storage._cdata not in known]
    assert loss.requires_grad
    return sum(each.nbytes() for each in alive), sum(row.saved_bytes for row in compiled.plan.rows)
