"""Kinds of a step's calls: the arguments in buffers of their own, what tells kinds apart, and the graph of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.errors import InputError
from autopar.runtime.implementations.randomness import StepDraws
from autopar.runtime.step_graphs.operations import Operation
from autopar.runtime.step_graphs.refusals import WITHOUT


@dataclass(slots=True)
class Graph:
    """A captured step."""

    replay: Callable[[], None]
    result: Any
    gradients: list[Tensor | None]
    steps: int
    """Steps that the random state counts."""
    numbers: list[tuple[str, Any]]
    """Numbers of optimizers that are no tensors."""


@dataclass(slots=True)
class Kind:
    """A kind of call: its arguments in buffers of its own, and what has been found out about its steps."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    """Local tensors of the arguments."""
    runs: int = 0
    restarts: int = 0
    """Times that it ran anew from the first run on, because the model would have run otherwise."""
    called: Sequence[Any] = ()
    operations: list[Operation] = field(default_factory=list)
    draws: StepDraws = field(default_factory=StepDraws)
    graph: Graph | None = None

    @classmethod
    def of(cls, leaves: Sequence[Any], spec: Any) -> Kind:
        """Return the kind of a call, with buffers for its arguments."""
        inputs = [torch.empty_like(_local(each)) for each in leaves if isinstance(each, Tensor)]
        buffers = iter(inputs)
        held = [_like(each, next(buffers)) if isinstance(each, Tensor) else each for each in leaves]
        args, kwargs = pytree.tree_unflatten(held, spec)
        return cls(args, kwargs, inputs)

    def give(self, leaves: Sequence[Any]) -> None:
        """Copy arguments into the buffers."""
        if self.inputs:
            given = [_local(each) for each in leaves if isinstance(each, Tensor)]
            torch._foreach_copy_(self.inputs, given)  # pyright: ignore[reportPrivateImportUsage]


def description(leaf: Any) -> Any:
    """Return what a graph fixes of an argument; InputError for one that cannot be compared."""
    if isinstance(leaf, DTensor):
        return leaf.placements, *description(leaf.to_local())
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device
    try:
        hash(leaf)
    except TypeError:
        raise InputError(
            f"a step that is a CUDA graph takes tensors and values that can be compared, found a {type(leaf).__name__}"
            f"; give tensors, numbers or words, or {WITHOUT}"
        ) from None
    return type(leaf), leaf


def bytes_of(arguments: Any) -> int:
    """Return the bytes of the tensors of a call on this rank."""
    return sum(_local(each).nbytes for each in pytree.tree_leaves(arguments) if isinstance(each, Tensor))


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def address(x: Tensor) -> int:
    """Return where the values of a tensor lie on this rank."""
    return (x._local_tensor if isinstance(x, DTensor) else x).data_ptr()


def _like(x: Tensor, local: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return local
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def detached(result: Any) -> Any:
    """Return the result of a step with tensors outside of autograd."""
    return pytree.tree_map_only(Tensor, Tensor.detach, result)
