"""Tensors that a call saves for its backward, found by running autograd on tensors without memory.

These are on the meta device. Fake tensors on the CPU, which take five times as long, serve in three cases: the result
depends on the device (which kernel an attention takes), the call would make tensors of its own, or it has no kernel for
the meta device.

Masks that dropout draws are not saved: they are drawn again in the backward. Attention with dropout saves what
PyTorch's would save without one, and a mask of truth values as it is.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autopar.errors import CaptureError
from autopar.ir.program.calls import source_of
from autopar.ir.program.effects import is_random
from autopar.ir.program.operators.row_cross_entropy import CROSS_ENTROPY
from autopar.ir.program.program import Program, TensorInfo, info_of, tensor_inputs

Strides = tuple[int, ...]

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
DROPOUT_AT = [each.name for each in ATTENTION._schema.arguments].index("dropout_p")
DEVICE_DECIDES = frozenset({ATTENTION})
"""Calls that save other tensors on another device: on the meta device attention saves its whole scores."""


LOSSES = frozenset({torch.ops.aten.cross_entropy_loss.default, CROSS_ENTROPY})
"""Calls whose first input are logits."""
DRAWN_AGAIN = frozenset({torch.ops.aten.dropout.default})
"""Calls that save a mask in PyTorch, and in autopar draw it again."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Positions of the tensor inputs (in the order of `tensor_inputs`) and outputs that the backward needs."""

    inputs: frozenset[int]
    outputs: frozenset[int]
    other_bytes: int = 0
    """Bytes of the whole call's tensors that are neither: the probabilities of a loss, the statistics of a norm."""
    aliases: frozenset[int] = frozenset()
    """Outputs that are views of an input."""
    strides: tuple[Strides, ...] = ()
    """Strides of each output."""
    others: tuple[tuple[tuple[int, ...], int], ...] = ()
    """Shape, and bytes per element, of each tensor of `other_bytes`."""


def saved_with(node: fx.Node, infos: tuple[TensorInfo, ...]) -> Saved:
    """Return what the call would save for other, contiguous inputs; RuntimeError if it does not accept them."""
    return _saved(_question(node, infos, (None,) * len(infos)))


def saved_in(program: Program) -> Mapping[fx.Node, Saved]:
    """Return what each call of a program saves, with its inputs laid out in memory as the calls before leave them.

    A view of an input counts as the input.
    """
    if "saved" not in program.facts:
        program.facts["saved"] = _saved_in(program)
    return program.facts["saved"]


def _saved_in(program: Program) -> dict[fx.Node, Saved]:
    found: dict[fx.Node, Saved] = {}
    strides: dict[fx.Node, Strides | None] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is operator.getitem:
            parent, output = source_of(node)
            strides[node] = found[parent].strides[output]
            continue
        inputs = tensor_inputs(node)
        infos = tuple(each.meta["tensor"] for each in inputs)
        question = _question(node, infos, tuple(_unless_contiguous(strides.get(n), n) for n in inputs))
        try:
            found[node] = _saved(question)
        except RuntimeError as error:
            text = str(error).strip().splitlines()[0]
            raise CaptureError(
                f"{node.target} in {node.meta['module'] or 'the forward'} does not take its tensors as they lie in "
                f"memory ({text}): autopar plans with contiguous parameters, buffers and inputs. Give it such ones, "
                "and transpose within forward (w.t())."
            ) from error
        if node.target is ATTENTION and is_random(node):
            masks = (i for i, info in enumerate(infos) if info.dtype is torch.bool)
            found[node] = replace(found[node], inputs=found[node].inputs.union(masks))
        if len(found[node].strides) == 1:
            strides[node] = found[node].strides[0]
    return found


def _unless_contiguous(strides: Strides | None, node: fx.Node) -> Strides | None:
    """Return None if the strides are contiguous: most nodes then share one cached answer."""
    sizes = node.meta["tensor"].shape[:0:-1]
    return None if strides == tuple(itertools.accumulate(sizes, operator.mul, initial=1))[::-1] else strides


def _question(node: fx.Node, infos: tuple[TensorInfo, ...], strides: tuple[Strides | None, ...]) -> _Question:
    placeholders = iter(range(len(infos)))

    def position(argument: fx.Node) -> Any:
        return _Position(next(placeholders)) if argument.meta.get("tensor") is not None else None

    args, kwargs = node.args, dict(node.kwargs)
    if node.target is ATTENTION:
        args = tuple(0.0 if i == DROPOUT_AT else each for i, each in enumerate(args))
        kwargs.update((name, 0.0) for name in kwargs if name == "dropout_p")
    arguments = map_arg((args, kwargs), position)
    return _Question(node.target, infos, strides, arguments, repr(arguments))  # type: ignore[arg-type]


def saved_otherwise(
    saved: Mapping[fx.Node, Saved], dropout_masks: bool, loss_in_place: bool
) -> Mapping[fx.Node, Saved]:
    """Return what calls save in a framework with other kernels.

    Args:
        saved: What each call saves here.
        dropout_masks: Dropout saves a byte per element, and does not draw again.
        loss_in_place: Cross-entropies make probabilities, and then the gradient, in the memory of their logits.
    """
    found = dict(saved)
    for node, each in saved.items():
        if dropout_masks and node.target in DRAWN_AGAIN and is_random(node):
            found[node] = replace(each, other_bytes=each.other_bytes + info_of(node).num_elements)
        if loss_in_place and node.target in LOSSES:
            found[node] = replace(each, inputs=each.inputs - {0}, other_bytes=0)
    return found


def backward_needs(value: fx.Node, saved: Mapping[fx.Node, Saved]) -> bool:
    """Return whether some call saves a node's value, or a view of it, for its backward."""
    for user in value.users:
        if user.op != "call_function" or user.target is operator.getitem:
            continue
        if any(argument is value and i in saved[user].inputs for i, argument in enumerate(tensor_inputs(user))):
            return True
        if saved[user].aliases and backward_needs(user, saved):
            return True
    return False


@dataclass(frozen=True, slots=True)
class _Position:
    """Stand-in for tensor input `number` among the arguments."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """A call without its node: hashed by its target, its tensors and the text of its arguments."""

    target: Callable[..., Any]
    infos: tuple[TensorInfo, ...]
    strides: tuple[Strides | None, ...]
    """Strides of each tensor; None if it is contiguous."""
    arguments: Any
    text: str

    @property
    def _value(self) -> tuple[object, ...]:
        return (self.target, self.infos, self.strides, self.text)

    def __hash__(self) -> int:
        return hash(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Question) and self._value == other._value


@functools.lru_cache(maxsize=8192)
def _saved(question: _Question) -> Saved:
    on_meta = bool(question.infos) and question.target not in DEVICE_DECIDES
    try:
        return _saved_on(question, on_meta)
    except NotImplementedError:
        if not on_meta:
            raise
        return _saved_on(question, False)


def _saved_on(question: _Question, on_meta: bool) -> Saved:
    kept: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor  # kept alive, so that no other gets its address
        return tensor

    device = torch.device("meta" if on_meta else "cpu")
    # enable_grad: planning may run under no_grad, the question is about training.
    with contextlib.nullcontext() if on_meta else FakeTensorMode(), torch.enable_grad():
        tensors = [
            _empty(info, strides, device).requires_grad_(info.requires_grad)
            for info, strides in zip(question.infos, question.strides, strict=True)
        ]

        def argument(leaf: Any) -> Any:
            if isinstance(leaf, _Position):
                return tensors[leaf.number]
            return device if isinstance(leaf, torch.device) else leaf

        args, kwargs = pytree.tree_map(argument, question.arguments)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            results = question.target(*args, **kwargs)
        outputs = [results] if isinstance(results, torch.Tensor) else [x for x in results if x is not None]
        entered = {tensor.untyped_storage()._cdata for tensor in tensors}
        aliases = frozenset(i for i, x in enumerate(outputs) if x.untyped_storage()._cdata in entered)
        known = {tensor.untyped_storage()._cdata for tensor in (*tensors, *outputs)}
        hidden = [] if question.target in DRAWN_AGAIN else [x for address, x in kept.items() if address not in known]
        other = sum(tensor.untyped_storage().nbytes() for tensor in hidden)
        others = tuple((tuple(map(int, tensor.shape)), tensor.element_size()) for tensor in hidden)
        strides = tuple(tuple(map(int, x.stride())) for x in outputs)
        entering, leaving = (_positions_among(each, kept) for each in (tensors, outputs))
        return Saved(entering, leaving, other, aliases, strides, others)


def _empty(info: TensorInfo, strides: Strides | None, device: torch.device) -> torch.Tensor:
    if strides is None:
        return torch.empty(info.shape, dtype=info.dtype, device=device)
    return torch.empty_strided(info.shape, strides, dtype=info.dtype, device=device)


def _positions_among(tensors: list[torch.Tensor], kept: Mapping[int, object]) -> frozenset[int]:
    return frozenset(i for i, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata in kept)
