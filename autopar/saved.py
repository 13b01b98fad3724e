"""Which tensors a call keeps for its backward: asked of autograd itself, on tensors without memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autopar.program import TensorInfo, tensor_inputs


@dataclass(frozen=True, slots=True)
class Saved:
    """Positions of the tensor inputs (in the order of `tensor_inputs`) and outputs that the backward needs."""

    inputs: frozenset[int]
    outputs: frozenset[int]


def saved_by(node: fx.Node) -> Saved:
    """What the call keeps. A view of an input counts as the input; the answer is cached by value."""
    infos = tuple(argument.meta["tensor"] for argument in tensor_inputs(node))
    if not any(info.requires_grad for info in infos):
        return Saved(frozenset(), frozenset())
    placeholders = iter(range(len(infos)))

    def position(argument: fx.Node) -> Any:
        return _Position(next(placeholders)) if argument.meta.get("tensor") is not None else None

    arguments = map_arg((node.args, dict(node.kwargs)), position)
    return _saved(_Question(node.target, infos, arguments, repr(arguments)))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Position:
    """Where tensor input `number` stands among the arguments."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """A call without its node: hashed by its target, its tensors and the text of its arguments."""

    target: Callable[..., Any]
    infos: tuple[TensorInfo, ...]
    arguments: Any
    text: str

    def __hash__(self) -> int:
        return hash((self.target, self.infos, self.text))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Question) and (self.target, self.infos, self.text) == (
            other.target,
            other.infos,
            other.text,
        )


@functools.lru_cache(maxsize=8192)
def _saved(question: _Question) -> Saved:
    kept: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tensor.untyped_storage()._cdata)
        return tensor

    # enable_grad: planning may run under no_grad, the question is about training.
    with FakeTensorMode(), torch.enable_grad():
        tensors = [
            torch.empty(info.shape, dtype=info.dtype, requires_grad=info.requires_grad) for info in question.infos
        ]
        args, kwargs = pytree.tree_map(
            lambda leaf: tensors[leaf.number] if isinstance(leaf, _Position) else leaf, question.arguments
        )
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            results = question.target(*args, **kwargs)
        outputs = [results] if isinstance(results, torch.Tensor) else [x for x in results if x is not None]
        return Saved(_among(tensors, kept), _among(outputs, kept))


def _among(tensors: list[torch.Tensor], kept: set[int]) -> frozenset[int]:
    return frozenset(i for i, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata in kept)
