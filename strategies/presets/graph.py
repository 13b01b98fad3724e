"""A program as presets see it: calls with their rules, and which dims hold samples, positions and features.

A dim's role flows from the inputs along the factors of the rules, as it does when the space of plans is laid out:
"data" for samples, "sequence" for positions, "column" for the outputs of a matrix product and what is made of them
(features, heads, classes). A dim that an operation needs whole (positions in causal attention) keeps its role here.
Nothing here depends on the names of modules.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.errors import RuleError
from autopar.program.program import Program, TensorInfo, tensor_inputs
from autopar.sharding.operation import Call
from autopar.sharding.rule import ROLE_OF_FACTOR, WHOLE, BoundRule, Rule, Term
from autopar.strategies import rule_of

aten = torch.ops.aten

Value = tuple[str, int]
"""A tensor: the node that makes it, and which of the node's outputs it is."""
Roles = tuple[str | None, ...]

ATTENTION = (aten.scaled_dot_product_attention.default,)
LOOKUPS = (aten.embedding.default,)
CLASS_LOSSES = (aten.cross_entropy_loss.default,)
CASTS = (aten.to.dtype, aten._to_copy.default)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One call of the program."""

    node: fx.Node
    call: Call
    bound: BoundRule
    inputs: tuple[Value, ...]
    roles: Mapping[str, str]
    """Role of each factor that has one."""
    dims: tuple[Roles, ...]
    """Roles of the dims of each input."""
    weight_only: bool
    """Made from parameters and constants alone: no sample has a part in it."""
    learned: bool
    """Depends on a parameter; the rest (masks, positions, labels) is computed whole on every device."""
    padded: frozenset[str] = frozenset()
    """Factors whose parts the call's implementation may pad although it leaves them out of its outputs."""

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def in_terms(self) -> tuple[Term, ...]:
        return self.bound.rule.inputs

    @property
    def out_terms(self) -> tuple[Term, ...]:
        return self.bound.rule.outputs

    def factor_of(self, role: str) -> str | None:
        """The first factor that can be split and has a role."""
        return next((f for f in self.bound.splittable if self.roles.get(f) == role), None)

    @property
    def is_lookup(self) -> bool:
        return self.call.target in LOOKUPS

    @property
    def is_attention(self) -> bool:
        """Attention as one call, or what works on scores: one dim of queries and one of keys."""
        scores = any(roles.count("sequence") > 1 for roles in self.dims)
        queries = sum(f in self.bound.splittable for f, role in self.roles.items() if role == "sequence") > 1
        return self.call.target in ATTENTION or scores or queries


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """The calls of a program in order, with the consumers of every tensor."""

    program: Program
    steps: Mapping[str, Step]
    users: Mapping[Value, tuple[tuple[Step, int], ...]]
    """Tensor → (call, position among its inputs) for every use."""
    infos: Mapping[Value, TensorInfo]
    parameters: frozenset[str]
    """Placeholders of parameters."""
    samples: int
    """Size of the batch: dim 0 of the inputs; 0 where no input has dims."""
    positions: int
    """Number of positions of a sample: dim 1 of token ids or embedded tokens; 0 where no input is of these."""

    @classmethod
    def of(cls, program: Program) -> Graph:
        return _Reader(program).read()

    @property
    def learned(self) -> Iterator[Step]:
        """The calls that a plan decides about."""
        return (step for step in self.steps.values() if step.learned)

    def is_activation(self, value: Value) -> bool:
        """Whether a tensor depends on a parameter and on an input."""
        step = self.steps.get(value[0])
        return step is not None and step.learned and not step.weight_only

    def is_weight(self, value: Value) -> bool:
        """Whether a tensor is a parameter or made from parameters alone."""
        step = self.steps.get(value[0])
        return value[0] in self.parameters or (step is not None and step.learned and step.weight_only)


class _Reader:
    """What is known of each tensor so far, in one pass over the nodes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.parameters = frozenset(program.parameters.values())
        self.dims: dict[Value, Roles] = {}
        self.infos: dict[Value, TensorInfo] = {}
        self.from_inputs: set[str] = set()
        self.learned = set(self.parameters)
        self.steps: dict[str, Step] = {}
        self.users: dict[Value, list[tuple[Step, int]]] = defaultdict(list)

    def read(self) -> Graph:
        samples = positions = 0
        for node in self.program.graph.nodes:
            if node.op == "placeholder" and isinstance(node.meta["tensor"], TensorInfo):
                info = node.meta["tensor"]
                self.infos[node.name, 0] = info
                given = node.name in self.program.inputs
                self.dims[node.name, 0] = _input_roles(info) if given else (None,) * len(info.shape)
                if given:
                    self.from_inputs.add(node.name)
                    samples = samples or (info.shape[0] if info.shape else 0)
                    positions = positions or (info.shape[1] if "sequence" in self.dims[node.name, 0] else 0)
            elif node.op == "call_function" and node.target is not operator.getitem:
                self._call(node)
        users = {value: tuple(found) for value, found in self.users.items()}
        return Graph(self.program, self.steps, users, self.infos, self.parameters, samples, positions)

    def _call(self, node: fx.Node) -> None:
        inputs = tuple(_source(argument) for argument in tensor_inputs(node))
        call = Call.of(node)
        bound, padded = _bound_rule(call)
        dims = tuple(self.dims[value] for value in inputs)
        roles = _factor_roles(bound, dims)
        if any(name in self.learned for name, _ in inputs):
            self.learned.add(node.name)
        if any(name in self.from_inputs for name, _ in inputs):
            self.from_inputs.add(node.name)
        weight_only, learned = node.name not in self.from_inputs, node.name in self.learned
        step = Step(node, call, bound, inputs, roles, dims, weight_only, learned, padded)
        self.steps[node.name] = step
        for position, value in enumerate(inputs):
            self.users[value].append((step, position))
        for position, (term, info) in enumerate(zip(bound.rule.outputs, call.outputs, strict=True)):
            self.infos[node.name, position] = info
            self.dims[node.name, position] = tuple(
                _kept_role(step, dim, size) if names[0] == WHOLE else roles.get(names[0])
                for dim, (names, size) in enumerate(zip(term.dims, info.shape, strict=True))
            )


def _source(node: fx.Node) -> Value:
    """The node that makes a tensor, looking through `getitem`, and which of its present outputs it is."""
    if node.op == "call_function" and node.target is operator.getitem:
        parent, position = node.args
        assert isinstance(parent, fx.Node) and isinstance(position, int)
        return parent.name, sum(info is not None for info in parent.meta["tensor"][:position])
    return node.name, 0


def _bound_rule(call: Call) -> tuple[BoundRule, frozenset[str]]:
    """The call's rule fitted to its shapes, every dim whole where there is none; and factors its function may pad."""
    op = rule_of(call)
    if op is not None:
        padded = op.implementation.padded if op.implementation else frozenset()
        try:
            bound = Rule.parse(op.rule).bind([i.shape for i in call.inputs], [o.shape for o in call.outputs])
            return bound, padded
        except RuleError:
            pass  # such a call runs replicated, and the plan's report says why
    whole = [Term(((WHOLE,),) * len(info.shape)) for info in (*call.inputs, *call.outputs)]
    return BoundRule(Rule(tuple(whole[: len(call.inputs)]), tuple(whole[len(call.inputs) :])), {}), frozenset()


def _factor_roles(bound: BoundRule, dims: tuple[Roles, ...]) -> dict[str, str]:
    """Roles of factors: by their name (o, k, x), else that of the first input dim they stand on."""
    found: dict[str, str] = {}
    for factor in bound.splittable:
        if factor in ROLE_OF_FACTOR:
            found[factor] = ROLE_OF_FACTOR[factor]
            continue
        on = ((term.dim_of(factor), roles) for term, roles in zip(bound.rule.inputs, dims, strict=True))
        role = next((roles[dim] for dim, roles in on if dim is not None and roles[dim]), None)
        if role:
            found[factor] = role
    return found


def _kept_role(step: Step, dim: int, size: int) -> str | None:
    """The role of an output's dim that must stay whole: that of the same dim of the first input, if it is as large."""
    if not step.inputs:
        return None
    shape, roles = step.call.inputs[0].shape, step.dims[0]
    same = len(shape) == len(step.call.outputs[0].shape) and shape[dim] == size
    return roles[dim] if same and step.in_terms[0].dims[dim][0] == WHOLE else None


def _input_roles(info: TensorInfo) -> Roles:
    """Dim 0 of an input is data; dim 1 of token ids (batch, sequence) and of embedded tokens is sequence."""
    rank = len(info.shape)
    tokens = (rank == 2 and not info.dtype.is_floating_point) or rank == 3
    return tuple("data" if dim == 0 else "sequence" if dim == 1 and tokens else None for dim in range(rank))
