"""Symbolic shapes: dims of a program's tensors that are, or are made of, the batch, sequence or hidden size.

Rules say which dims of a call are equal (a factor) and which are products (a group); operations say how whole dims
change. Sizes spread in both directions from the inputs (batch, sequence) and from the parameters of the repeated layers
(hidden). So positions and masks, whose sizes are arguments, follow the sequence, too. Sizes that do not follow stay
numbers. In a group (h d) that is the inner factor: more hidden units are more heads.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.costs.space.space import Decision, Space
from autopar.ir.program.calls import is_call, source_of
from autopar.ir.program.program import TensorInfo, tensor_inputs
from autopar.ir.sharding.operation import Call
from autopar.ir.sharding.rule import WHOLE, BoundRule
from autopar.views.formulas.equations import Equation, Equations
from autopar.views.formulas.repetition import Stack
from autopar.views.formulas.size_rules import SIZE_RULES
from autopar.views.formulas.symbols import BATCH, HIDDEN, SEQUENCE, Polynomial, Size

END = 2**31  # a slice that ends here takes all that is left
Key = tuple[str, int]
"""(node name, output position) of a tensor."""


@dataclass(frozen=True, slots=True)
class SymbolicShapes:
    """The shape of every tensor as sizes, the symbols with their values, and those that cannot vary with the reason.

    Equal shapes are one object.
    """

    shapes: Mapping[Key, tuple[int, ...]]
    symbols: Mapping[str, int]
    fixed: Mapping[str, str] = field(default_factory=dict)


def symbolic_shapes(space: Space, stacks: Sequence[Stack]) -> SymbolicShapes:
    """Find the shapes; a symbol that would contradict the model (a learned table of positions) stays a number."""
    parameters = space.program.parameters.items()
    layered = [placeholder for name, placeholder in parameters if any(stack.place(name) for stack in stacks)]
    seeds = _seeds(space, layered)
    fixed: dict[str, str] = {}
    while True:
        left = {name: value for name, value in seeds.items() if name not in fixed}
        found, conflicts = _Walk(space, layered, left).shapes()
        conflicts = {name: reason for name, reason in conflicts.items() if name in left}
        if not conflicts:
            return SymbolicShapes(found, left, fixed)
        fixed |= conflicts


def _seeds(space: Space, layered: Sequence[str]) -> dict[str, int]:
    """Return the symbols of dims and their values now; a size of one is broadcast wherever it meets others, and is
    none.
    """
    found: dict[str, int] = {}
    for decision in space.decisions:
        if decision.kind == "input":
            for role, size in _dims_with_roles(space, decision):
                if role:
                    found.setdefault(role, size)
    if layered:
        shapes = (space.decisions[space.index[placeholder]].node.meta["tensor"].shape for placeholder in layered)
        sizes = Counter(size for shape in shapes for size in shape)
        found[HIDDEN] = sizes.most_common(1)[0][0]
    return {name: size for name, size in found.items() if size > 1}


def _dims_with_roles(space: Space, decision: Decision) -> list[tuple[str, int]]:
    names = {"data": BATCH, "sequence": SEQUENCE}
    roles, shape = space.dim_roles[decision.node.name, 0], decision.node.meta["tensor"].shape
    return [(names.get(role or "", ""), size) for role, size in zip(roles, shape, strict=True)]


class _Walk:
    """One walk over the decisions that writes the equations of every call down."""

    def __init__(self, space: Space, layered: Sequence[str], symbols: Mapping[str, int]) -> None:
        self._space, self._layered = space, layered
        self._symbols = {name: Size.symbol(name, value) for name, value in symbols.items()}
        self._equations = Equations()
        self._dims: dict[Key, list[int]] = {}
        self._slices: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        """Dim that is sliced → (start, end, dim) of every slice."""

    def shapes(self) -> tuple[dict[Key, tuple[int, ...]], dict[str, str]]:
        """Return the shape of every tensor, and why some symbols cannot vary."""
        for decision in self._space.decisions:
            if decision.kind == "call":
                self._call(decision)
            elif decision.kind in ("input", "parameter", "buffer"):
                self._placeholder(decision)
        self._relate_slices()
        self._equations.settle()
        found = self._found()
        return found, {**self._equations.conflicts, **self._learned(found)}

    def _found(self) -> dict[Key, tuple[int, ...]]:
        """Return the shapes; equal ones are one object, so that what is computed of them can be kept by it."""
        sizes: dict[Polynomial, Size] = {}
        shapes: dict[tuple[int, ...], tuple[Size, ...]] = {}
        one_of = {root: sizes.setdefault(size.polynomial, size) for root, size in self._equations.known.items()}
        found: dict[Key, tuple[int, ...]] = {}
        for key, variables in self._dims.items():
            shape = tuple(one_of[self._equations.root(variable)] for variable in variables)
            found[key] = shapes.setdefault(tuple(map(id, shape)), shape)
        return found

    def _variables(self, key: Key, info: TensorInfo) -> list[int]:
        self._dims[key] = [self._equations.variable(size) for size in info.shape]
        return self._dims[key]

    def _placeholder(self, decision: Decision) -> None:
        name = decision.node.name
        variables = self._variables((name, 0), decision.node.meta["tensor"])
        hidden = self._symbols.get(HIDDEN)
        if decision.kind == "input":
            for variable, (symbol, size) in zip(variables, _dims_with_roles(self._space, decision), strict=True):
                if self._symbols.get(symbol) == size:
                    self._equations.learn(variable, self._symbols[symbol], name)
        elif name in self._layered and hidden is not None:
            # The rows of a table are entries, however many there are.
            for variable in variables[_is_table(decision.node) :]:
                if self._equations.numbers[variable] == hidden:
                    self._equations.learn(variable, hidden, name)

    def _call(self, decision: Decision) -> None:
        call, bound, name = decision.call, decision.candidates.bound, decision.name
        assert bound is not None, f"{name} has no rule"
        inputs = [self._dims[key] for key in input_keys(self._space, decision)]
        outputs = [self._variables((name, i), info) for i, info in enumerate(call.outputs)]
        self._factors(bound, [*inputs, *outputs], name)
        operation = call.name
        if operation == "slice" and call["step"] == 1:
            dim = call["dim"] % len(inputs[0])
            end = END if call["end"] is None else call["end"]
            self._slices[inputs[0][dim]].append((call["start"] or 0, end, outputs[0][dim]))
        special = SIZE_RULES.get(operation)
        if special is None:
            self._aligned(bound, [*inputs, *outputs], name)
        else:
            special(self._equations, call, inputs, outputs, name)

    def _factors(self, bound: BoundRule, tensors: Sequence[list[int]], where: str) -> None:
        """Equate the dims of one factor; a group is the product of its factors."""
        terms = zip((*bound.rule.inputs, *bound.rule.outputs), tensors, strict=True)
        dims = [each for term, variables in terms for each in zip(term.dims, variables, strict=True)]
        single = [(dim[0], variable) for dim, variable in dims if len(dim) == 1 and dim[0] not in (WHOLE, "1")]
        factors = self._equations.equate(single, where)
        for dim, whole in dims:
            if len(dim) > 1:
                for name in dim:
                    if name not in factors:
                        factors[name] = self._equations.variable(bound.sizes[name])
                self._equations.add(Equation(whole, tuple(factors[name] for name in dim), True, where=where))

    def _aligned(self, bound: BoundRule, tensors: Sequence[list[int]], where: str) -> None:
        """Equate whole dims of one size at the same position from the right."""
        terms = zip((*bound.rule.inputs, *bound.rule.outputs), tensors, strict=True)
        placed = (enumerate(zip(reversed(term.dims), reversed(some), strict=True)) for term, some in terms)
        whole = ((place, variable) for dims in placed for place, (dim, variable) in dims if dim[0] == WHOLE)
        self._equations.equate((((place, self._equations.numbers[each]), each) for place, each in whole), where)

    def _relate_slices(self) -> None:
        """Add up slices that tile a dim (packed queries, keys and values); other slices take what a margin leaves."""
        numbers = self._equations.numbers
        for whole, slices in self._slices.items():
            pieces = sorted({start: piece for start, _, piece in slices}.items())
            ends = [start + numbers[piece] for start, piece in pieces]
            if len(pieces) > 1 and [start for start, _ in pieces] == [0, *ends[:-1]] and ends[-1] == numbers[whole]:
                self._equations.add(Equation(whole, tuple(piece for _, piece in pieces), False, 0, "slices"))
                continue
            for start, end, piece in slices:
                if start >= 0 and (end < 0 or end >= numbers[whole]):
                    margin = numbers[whole] - numbers[piece]
                    self._equations.add(Equation(whole, (piece,), False, margin, "a slice"))

    def _learned(self, shapes: Mapping[Key, tuple[int, ...]]) -> dict[str, str]:
        """Return the inputs cannot change the size of a parameter."""
        found: dict[str, str] = {}
        for name, placeholder in self._space.program.parameters.items():
            for size in shapes[placeholder, 0]:
                polynomial = Size.of(size).polynomial
                for symbol in polynomial.symbols & {BATCH, SEQUENCE}:
                    found.setdefault(symbol, f"the parameter {name} has a dim of {size}, which is {polynomial}")
        return found


def _is_table(parameter: fx.Node) -> bool:
    return any(is_call(user) and Call.of(user).name == "embedding" for user in parameter.users)


def input_keys(space: Space, decision: Decision) -> list[Key]:
    """Return the tensors that a call takes, in the order of its inputs."""
    return [(source.name, position) for source, position in map(source_of, tensor_inputs(decision.node))]
