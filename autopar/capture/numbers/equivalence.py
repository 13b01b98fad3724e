"""Compare two programs of one model: one for a number, one for a tensor without dims in its place.

Both must have the same calls with the same shapes and dtypes. A call may differ in its overload, and may have the
tensor where the other has the number, if it takes both alike: it promotes them to one dtype and computes with as many
digits. Results that the forward computes from the number in Python are float64, and must be float64 in the tensor's
program, until it meets a tensor of fewer digits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from autopar.ir.program.program import Program, TensorInfo, info_of
from autopar.ir.program.python_state import PythonState, equal

aten = torch.ops.aten

MIRRORED: Mapping[object, object] = {
    aten.add: aten.add,
    aten.mul: aten.mul,
    aten.sub: aten.rsub,
    aten.eq: aten.eq,
    aten.ne: aten.ne,
    aten.lt: aten.gt,
    aten.gt: aten.lt,
    aten.le: aten.ge,
    aten.ge: aten.le,
}
"""Operators of two operands → those that give the same for the operands in the other order."""
TAKING_BOTH = frozenset((*MIRRORED, aten.rsub, aten.div, aten.where, aten.masked_fill, aten.pow))
"""Operators that compute with a tensor without dims, on the CPU, as with the number; `pow` from 32 bits on."""
AS_IN_PYTHON = frozenset(
    (aten.add, aten.sub, aten.rsub, aten.mul, aten.neg, aten.abs, aten.clamp, aten.div, aten.reciprocal)
)
"""Operators that give in float64 what Python gives, unless they divide by zero; clamp stands for min and max."""
ROUNDING = 1e-15
"""Relative rounding error allowed to a float64; tensors compute c / n as c * (1 / n)."""


def difference(number: Program, tensor: Program, values: Mapping[int, int | float], num_computed: int) -> str:
    """Return in what `tensor`, with tensors for some inputs, differs from `number`; "" if it serves all values.

    Args:
        values: the numbers that `number` was captured for, by their places among the inputs.
        num_computed: how many numbers forward computed of them in Python, for `number`.
    """
    return next(_Comparison(number, tensor, values).differences(num_computed), "")


class _Comparison:
    """Two programs, and what the tensors for numbers are worth in that of the tensors."""

    def __init__(self, number: Program, tensor: Program, values: Mapping[int, int | float]) -> None:
        self.number, self.tensor, self.replaced = number, tensor, values
        self.values: dict[fx.Node, Tensor] = {}
        """Nodes of the tensor's program that depend on the numbers alone, with their values."""
        self.pairs: dict[fx.Node, fx.Node] = {}
        """Nodes of `number` → those of `tensor` that are the same."""

    def differences(self, num_computed: int) -> Iterator[str]:
        constants = self.number.constants, self.tensor.constants
        if self._interface(self.number) != self._interface(self.tensor) or not _equal(*constants):
            yield "the model reads, assumes or returns something else"
            return
        if not _leave_the_same(self.number.python, self.tensor.python):
            yield "forward keeps it in an attribute"
        yield from self._evaluated(num_computed)
        ours = [node for node in self.number.graph.nodes if node.op != "output"]
        theirs = [node for node in self.tensor.graph.nodes if node.op != "output" and node not in self.values]
        for one, other in zip(ours, theirs, strict=False):
            yield from self._differences(one, other)
            self.pairs[one] = other
        if len(ours) != len(theirs):
            yield f"it takes {len(theirs)} operations in place of {len(ours)}"
        if not self._are_same_arguments(self.number.output, self.tensor.output):
            yield "the model returns it"

    def _interface(self, program: Program) -> tuple[Any, ...]:
        """Return what a program says of itself that numbers do not change."""
        inputs = tuple(
            None if place in self.replaced else each
            for place, each in enumerate(zip(program.inputs, program.input_values, strict=True))
        )
        return (
            (program.parameters, program.buffers, program.tied),
            (inputs, program.mutations, program.num_outputs, str(program.out_spec)),
            (program.training, program.assumed, program.reduced, program.accumulated, len(program.python.hooks)),
        )

    def _evaluated(self, num_computed: int) -> Iterator[str]:
        """Evaluate what follows from the numbers alone; yield what Python would not compute so."""
        placeholders = self.tensor.placeholders()
        for place, value in self.replaced.items():
            name = self.tensor.inputs[place]
            if name is not None:
                self.values[placeholders[name]] = torch.tensor(value, dtype=info_of(placeholders[name]).dtype)
        given = frozenset(self.values)
        calls = _calls_on(given, self.tensor)
        computed = [node for node in calls if not (_is_cast(node) and not any(user in calls for user in node.users))]
        for node in computed:
            if not _is_as_in_python(node, given):
                yield f"{_name(node)} of it is not what Python computes"
                return
        num_reciprocals = sum(_packet(node) == aten.reciprocal for node in computed)
        # c / n is a reciprocal of a tensor and a product, 1 / n the reciprocal alone.
        if not len(computed) - num_reciprocals <= num_computed <= len(computed):
            yield "forward computes something else of it if it is a tensor"
        for node in calls:
            args, kwargs = map_arg((node.args, node.kwargs), self.values.__getitem__)
            self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]

    def _differences(self, one: fx.Node, other: fx.Node) -> Iterator[str]:
        """Yield how a node differs from that of the other program in its place."""
        if one.op != other.op or (one.op == "placeholder" and one.name != other.name):
            yield f"{_name(other)} stands in place of {_name(one)}"
        elif one.op == "call_function":
            packet, args = self._form(other)
            if str(packet) != str(_packet(one)):
                yield f"{_name(other)} stands in place of {_name(one)}"
            elif not self._are_same_arguments((one.args, one.kwargs), (args, other.kwargs), one):
                yield f"{_name(one)} does not take a tensor in its place"
        if one.meta["tensor"] != other.meta["tensor"]:
            found, wanted = other.meta["tensor"], one.meta["tensor"]
            yield f"{_name(one)} gives {found} in place of {wanted}"

    def _form(self, node: fx.Node) -> tuple[object, tuple[Any, ...]]:
        """Return operator and arguments of a call, with what follows from the numbers as the second operand."""
        packet, args = _packet(node), node.args
        if packet in MIRRORED and len(args) == 2 and args[0] in self.values and isinstance(args[1], fx.Node):
            return MIRRORED[packet], (args[1], args[0])
        return packet, args

    def _are_same_arguments(self, one: Any, other: Any, call: fx.Node | None = None) -> bool:
        """Return whether two arguments are the same, or a number and a tensor that `call` takes alike."""
        if isinstance(one, list | tuple) and isinstance(other, list | tuple):
            return len(one) == len(other) and all(
                self._are_same_arguments(a, b, call) for a, b in zip(one, other, strict=True)
            )
        if isinstance(one, dict) and isinstance(other, dict):
            return one.keys() == other.keys() and all(
                self._are_same_arguments(one[name], other[name], call) for name in one
            )
        if isinstance(one, fx.Node):
            return self.pairs.get(one) is other
        if isinstance(other, fx.Node):
            if call is None or isinstance(one, bool) or not isinstance(one, int | float):
                return False
            return self._takes_both(call, one, other)
        return type(one) is type(other) and repr(one) == repr(other)

    def _takes_both(self, call: fx.Node, number: int | float, tensor: fx.Node) -> bool:
        """Return whether a call computes with a tensor what it computes with the number."""
        value = self.values.get(tensor)
        result = call.meta["tensor"]
        if value is None or _packet(call) not in TAKING_BOTH or not isinstance(result, TensorInfo):
            return False
        operands = [info_of(each) for each in call.all_input_nodes if info_of(each).dtype != torch.bool]
        promoted = {_computing_dtype(each, number) for each in operands} | {
            _computing_dtype(each, value) for each in operands
        }
        dtype = promoted.pop() if len(promoted) == 1 else None
        digits = {torch.int64: 8, torch.float64: 8, torch.float32: 4}.get(value.dtype, 0)
        if dtype is None or max(dtype.itemsize, 4) > digits:
            return False
        if _packet(call) == aten.pow and not (dtype.is_floating_point and dtype.itemsize >= torch.float32.itemsize):
            return False
        exact = torch.tensor(number, dtype=value.dtype).item()
        return math.isclose(exact, value.item(), rel_tol=ROUNDING)


def _leave_the_same(ours: PythonState, theirs: PythonState) -> bool:
    """Return whether two programs write the same to the same places of Python."""
    written = [place for place, _ in ours.written] == [place for place, _ in theirs.written]
    values = all(equal(one, other) for (_, one), (_, other) in zip(ours.written, theirs.written, strict=False))
    registered = ours.registered.modules == theirs.registered.modules
    return written and values and registered and ours.lost == theirs.lost


def _equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _calls_on(given: Collection[fx.Node], program: Program) -> dict[fx.Node, None]:
    found: dict[fx.Node, None] = {}
    for node in program.graph.nodes:
        sources = node.all_input_nodes
        if node.op == "call_function" and sources and all(each in given or each in found for each in sources):
            found[node] = None
    return found


def _is_cast(node: fx.Node) -> bool:
    return node.target is aten.to.dtype and node.args[1] in (torch.float32, torch.float64) and len(node.args) == 2


def _is_as_in_python(node: fx.Node, given: Collection[fx.Node]) -> bool:
    """Return whether a call on what follows from numbers gives what Python gives; it divides by `given` alone."""
    info = node.meta["tensor"]
    if _packet(node) not in AS_IN_PYTHON or node.kwargs or not isinstance(info, TensorInfo):
        return False
    divisor = node.args[0] if _packet(node) == aten.reciprocal else node.args[-1] if _packet(node) == aten.div else None
    return info.dtype == torch.float64 and (not isinstance(divisor, fx.Node) or divisor in given)


def _packet(node: fx.Node) -> object:
    return getattr(node.target, "overloadpacket", node.target)


def _name(node: fx.Node) -> str:
    return node.name if node.op == "placeholder" else str(_packet(node)).removeprefix("aten.")


def _computing_dtype(operand: TensorInfo, value: int | float | Tensor) -> torch.dtype:
    return torch.result_type(torch.empty(operand.shape, dtype=operand.dtype, device="meta"), value)
