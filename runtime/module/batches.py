"""A batch in micro-batches, and the loss among a model's outputs.

A micro-batch is a part along dim 0 of every input tensor that has the batch's size there, which is that of the first
input tensor with dims; what has another size is given to every micro-batch as it is. Every rank takes a part of its
part of a DTensor: nothing moves, and all micro-batches together are the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.errors import InputError
from autopar.ir.program.program import Program, TensorInfo
from autopar.runtime.module.inputs import Arguments


def split_batch(arguments: Arguments, num_microbatches: int) -> list[Arguments]:
    """Return the micro-batches of a batch, in order; InputError where it does not divide."""
    if num_microbatches == 1:
        return [arguments]
    leaves, spec = pytree.tree_flatten(arguments)
    batch = batch_size(arguments)
    parts = [_parts(leaf, batch, num_microbatches) for leaf in leaves]
    return [pytree.tree_unflatten([part[i] for part in parts], spec) for i in range(num_microbatches)]


def batch_size(arguments: Arguments) -> int:
    """Return the number of samples of a batch; raise InputError if no input tensor has dims."""
    tensors = (leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.ndim)
    first = next(tensors, None)
    if first is None:
        raise InputError("no input is a tensor with dims, so there is no batch to split into micro-batches or parts.")
    return first.shape[0]


def _parts(leaf: Any, batch: int, count: int) -> list[Any]:
    if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0 or leaf.shape[0] != batch:
        return [leaf] * count
    local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
    if local.shape[0] % count:
        here = "" if local is leaf else f", of which this rank holds {local.shape[0]}"
        raise InputError(
            f"a batch of {batch} samples{here} does not divide into {count} micro-batches of equal size; "
            "give a batch that does, or compile with another number of microbatches."
        )
    pieces = list(local.chunk(count))
    if not isinstance(leaf, DTensor):
        return pieces
    return [DTensor.from_local(piece, leaf.device_mesh, leaf.placements, run_check=False) for piece in pieces]


def loss_position(program: Program) -> int:
    """Return the position of the loss in the user's outputs: the only one, the one called "loss", or the first.

    Raises InputError if that is not a scalar with a gradient.
    """
    numbered = pytree.tree_unflatten(list(range(program.num_outputs)), program.out_spec)
    found = numbered["loss"] if isinstance(numbered, Mapping) and "loss" in numbered else numbered
    position = next(iter(pytree.tree_leaves(found)), None)
    value = program.output[program.num_sent + position] if position is not None else None
    info = value.meta["tensor"] if isinstance(value, torch.fx.Node) else None
    if not isinstance(info, TensorInfo) or info.shape or not info.requires_grad:
        raise InputError(
            f"train_step needs a model that returns its loss, a number with a gradient; found {info or value}. "
            'Compute the loss in forward and return it: alone, first, or called "loss".'
        )
    assert position is not None
    return position
