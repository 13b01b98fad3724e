"""Bytes on a rank: what a forward leaves for its backward, and the highest moment of a step."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.tools.benchmarking.meters import held_in_training, peak_bytes
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


def filled(compiled: Any) -> None:
    """Give values to a model that was planned on the meta device; rotary embeddings are in no state dict."""
    compiled.to_empty(device="cpu")
    for parameter in compiled.parameters():
        nn.init.normal_(parameter, std=0.02)
    for buffer in compiled.buffers():
        nn.init.ones_(buffer)


def peak_of_step(
    compiled: Any,
    inputs: Sequence[Tensor] | Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    in_one_call: bool = False,
) -> int:
    """Bytes at the highest moment of the second step on this rank; AdamW trains unless another optimizer is given.

    A model returns its loss, or what is squared and averaged to one; `in_one_call` trains by `train_step`.
    """
    optimizer = optimizer or torch.optim.AdamW(compiled.parameters())
    args, named = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})

    def step() -> None:
        if in_one_call:
            compiled.train_step(*args, **named)
        else:
            found = compiled(*args, **named)
            (found if found.ndim == 0 else found.square().mean()).backward()

    step()
    optimizer.step()
    return peak_bytes(
        step, optimizer.zero_grad, lambda: [*held_in_training(compiled, optimizer), *args, *named.values()]
    )
