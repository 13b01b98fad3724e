"""Roles: which dims of every tensor of a program hold samples, positions and features, and what they make of factors.

A dim's role flows from the inputs along the factors of the rules: "data" for samples, "sequence" for positions,
"column" for the outputs of a matrix product and what is made of them (features, heads, classes). A dim that an
operation needs whole (positions in causal attention) keeps its role behind it. A product of activations with a batch of
matrices, as `ecd,edf->ecf` by einsum, matmul or bmm, is one by experts. Nothing here depends on the names of modules.
The presets find their places by these roles, and the space of plans is laid out with them.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.errors import RuleError
from autopar.ir.program.calls import is_call, module_of, source_of
from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK
from autopar.ir.program.operators.attention.cached import CACHED_ATTENTION
from autopar.ir.program.operators.embedding_bags import EMBEDDING_BAGS
from autopar.ir.program.operators.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from autopar.ir.program.operators.row_cross_entropy import CROSS_ENTROPY
from autopar.ir.program.program import Program, TensorInfo, tensor_inputs
from autopar.ir.sharding.operation import Call, OpRule, is_product
from autopar.ir.sharding.rule import ROLE_OF_FACTOR, WHOLE, BoundRule, Term
from autopar.strategies.ruled import RuledCall, ruled

aten = torch.ops.aten

Value = tuple[str, int]
"""A tensor: the node that makes it, and which of the node's outputs it is."""
Roles = tuple[str | None, ...]
"""The role of each dim of a tensor: "data", "sequence", "column", "row", "expert" or None."""

EXPERT = "expert"
ATTENTION = (aten.scaled_dot_product_attention.default, ATTENTION_BY_MASK)
LOOKUPS = (aten.embedding.default, EMBEDDING_BAGS)
CLASS_LOSSES = (aten.cross_entropy_loss.default, CROSS_ENTROPY, LINEAR_CROSS_ENTROPY)


@dataclass(frozen=True, slots=True, eq=False)
class RoledCall:
    """One call of the program."""

    node: fx.Node
    ruled: RuledCall
    inputs: tuple[Value, ...]
    roles: Mapping[str, str]
    """Role of each factor that has one."""
    dims: tuple[Roles, ...]
    """Roles of the dims of each input."""
    weight_only: bool
    """Made from parameters and constants alone: no sample has a part in it."""
    learned: bool
    """Depends on a parameter; the rest (masks, positions, labels) is computed whole on every device."""

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def call(self) -> Call:
        return self.ruled.call

    @property
    def op(self) -> OpRule:
        return self.ruled.op

    @property
    def bound(self) -> BoundRule:
        return self.ruled.bound

    @property
    def in_terms(self) -> tuple[Term, ...]:
        return self.bound.rule.inputs

    @property
    def out_terms(self) -> tuple[Term, ...]:
        return self.bound.rule.outputs

    def factor_of(self, role: str) -> str | None:
        """Return the first factor that can be split and has a role."""
        return next((f for f in self.ruled.splittable if self.roles.get(f) == role), None)

    def fitting(self, factor: str, parts: int) -> str | None:
        """Return the factor, or where it does not divide into so many parts what it is the outermost of; None:
        neither.
        """
        names = (factor, *(name for name, members in self.bound.rule.products if members[0] == factor))
        return next((name for name in names if self.bound.sizes[name] % parts == 0), None)

    @property
    def is_lookup(self) -> bool:
        return self.call.target in LOOKUPS

    @property
    def is_attention(self) -> bool:
        """Attention as one call, or what works on scores: one dim of queries and one of keys."""
        scores = any(roles.count("sequence") > 1 for roles in self.dims)
        queries = sum(f in self.bound.splittable for f, role in self.roles.items() if role == "sequence") > 1
        return self.call.target in (*ATTENTION, CACHED_ATTENTION) or scores or queries


@dataclass(frozen=True, slots=True, eq=False)
class RoledProgram:
    """The calls of a program in order, with the consumers of every tensor and the roles of its dims."""

    program: Program
    calls: Mapping[str, RoledCall]
    users: Mapping[Value, tuple[tuple[RoledCall, int], ...]]
    """Tensor → (call, position among its inputs) for every use."""
    infos: Mapping[Value, TensorInfo]
    dims: Mapping[Value, Roles]
    parameters: frozenset[str]
    """Placeholders of parameters."""
    sent: frozenset[Value]
    """Values that the next stage receives."""
    samples: int
    """Size of the batch: dim 0 of the inputs; 0 where no input has dims."""
    positions: int
    """Number of positions of a sample: dim 1 of token ids or embedded tokens; 0 where no input is of these."""

    @classmethod
    def of(cls, program: Program) -> RoledProgram:
        """Return the roles of a program's calls and tensors, found in one pass and cached."""
        if "roles" not in program.facts:
            program.facts["roles"] = _Reader(program).read()
        return program.facts["roles"]

    @property
    def learned(self) -> Iterator[RoledCall]:
        """The calls that a plan decides about."""
        return (call for call in self.calls.values() if call.learned)

    @property
    def products(self) -> frozenset[fx.Node]:
        """The calls that multiply and sum: matmuls, convolutions and attention."""
        return frozenset(call.node for call in self.calls.values() if is_product(call.op, call.bound))

    def is_activation(self, value: Value) -> bool:
        """Return whether a tensor depends on both a parameter and an input."""
        call = self.calls.get(value[0])
        return call is not None and call.learned and not call.weight_only

    def is_weight(self, value: Value) -> bool:
        """Return whether a tensor is a parameter or made from parameters alone."""
        call = self.calls.get(value[0])
        return value[0] in self.parameters or (call is not None and call.learned and call.weight_only)

    def summed(self, call: RoledCall) -> tuple[int, ...]:
        """Return the positions of activations that have later uses, to whose gradients those of this one are added.

        A later use may be on a later stage, which sends a gradient back: sums of stages are those of the whole, and one
        more for an output of the user's that stages hand on.
        """
        if not any(output.requires_grad for output in call.call.outputs):
            return ()
        return tuple(
            position
            for position, (value, info) in enumerate(zip(call.inputs, call.call.inputs, strict=True))
            if info.requires_grad and self._is_summed(value) and self._last_use(value) != (call, position)
        )

    def _is_summed(self, value: Value) -> bool:
        return self.is_activation(value) or value[0] in self.program.received

    def _last_use(self, value: Value) -> tuple[RoledCall, int] | None:
        """Return the last call, and its input, that takes a value and has a gradient; None: a later stage does."""
        if value in self.sent:
            return None
        uses = (
            (user, position)
            for user, position in reversed(self.users[value])
            if any(output.requires_grad for output in user.call.outputs)
        )
        return next(uses, None)


class _Reader:
    """Reader of a program in one pass over its nodes, with the facts found so far about each tensor."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.parameters = frozenset(program.parameters.values())
        self.dims: dict[Value, Roles] = {}
        self.infos: dict[Value, TensorInfo] = {}
        self.given = {*program.inputs, *program.received}
        self.from_inputs: set[str | None] = set(self.given)
        """Names of nodes whose value depends on a sample."""
        self.learned = {*self.parameters, *program.received}
        """Names of nodes whose value depends on a parameter, on this stage or an earlier one."""
        self.calls: dict[str, RoledCall] = {}
        self.users: dict[Value, list[tuple[RoledCall, int]]] = defaultdict(list)

    def read(self) -> RoledProgram:
        samples = positions = 0
        for node in self.program.graph.nodes:
            if node.op == "placeholder" and isinstance(node.meta["tensor"], TensorInfo):
                info = node.meta["tensor"]
                self.infos[node.name, 0] = info
                given = node.name in self.given
                self.dims[node.name, 0] = _input_roles(info) if given else (None,) * len(info.shape)
                if given:
                    samples = samples or (info.shape[0] if info.shape else 0)
                    positions = positions or (info.shape[1] if "sequence" in self.dims[node.name, 0] else 0)
            elif is_call(node):
                self._call(node)
        users = {value: tuple(found) for value, found in self.users.items()}
        outputs = self.program.output[: self.program.num_sent]
        sources = (source_of(each) for each in outputs if isinstance(each, fx.Node))
        sent = frozenset((source.name, position) for source, position in sources)
        return RoledProgram(
            self.program, self.calls, users, self.infos, self.dims, self.parameters, sent, samples, positions
        )

    def _call(self, node: fx.Node) -> None:
        inputs = tuple((source.name, position) for source, position in map(source_of, tensor_inputs(node)))
        found = _ruled(node)
        dims = tuple([self.dims[value] for value in inputs])
        for known in (self.learned, self.from_inputs):
            if any(name in known for name, _ in inputs):
                known.add(node.name)
        weight_only, learned = node.name not in self.from_inputs, node.name in self.learned
        weights = tuple([name in self.learned and name not in self.from_inputs for name, _ in inputs])
        call = RoledCall(node, found, inputs, _factor_roles(found, dims, weights), dims, weight_only, learned)
        self.calls[node.name] = call
        for position, value in enumerate(inputs):
            self.users[value].append((call, position))
        output_roles = _output_roles(found, dims, weights)
        for position, (roles, info) in enumerate(zip(output_roles, found.call.outputs, strict=True)):
            self.infos[node.name, position] = info
            self.dims[node.name, position] = roles


def _ruled(node: fx.Node) -> RuledCall:
    """Return the call of a node with its rule; RuleError with its place where a user's rule does not fit."""
    try:
        return ruled(Call.of(node))
    except RuleError as error:
        raise RuleError(
            f"{node.name} in {module_of(node) or 'the forward'}: the rule registered for {node.target} does not fit: "
            f"{error} Tensor inputs are {', '.join(map(str, Call.of(node).inputs))}, outputs "
            f"{', '.join(map(str, Call.of(node).outputs))}; correct it with autopar.register_rule(…, override=True)."
        ) from error


@functools.lru_cache(maxsize=8192)
def _factor_roles(found: RuledCall, dims: tuple[Roles, ...], weights: tuple[bool, ...]) -> Mapping[str, str]:
    """Return the roles of factors: by their name (o, k, x), those of a product by experts, else of the input dims they
    stand on.

    The first of these counts, and before it an expert: gates, whose experts are columns of the router, meet rows.
    """
    by_experts = _product_by_experts(found, weights)
    roles: dict[str, str] = {}
    outermost = {name: members[0] for name, members in found.bound.rule.products}
    for factor in found.splittable:
        named = ROLE_OF_FACTOR.get(factor) if not by_experts else by_experts.get(factor)
        on, stands = zip(found.bound.rule.inputs, dims, strict=True), outermost.get(factor, factor)
        held = [each[dim] for term, each in on if (dim := term.dim_of(stands)) is not None and each[dim]]
        role = named or (EXPERT if EXPERT in held else next(iter(held), None))
        if role:
            roles[factor] = role
    return roles


def _product_by_experts(found: RuledCall, weights: tuple[bool, ...]) -> Mapping[str, str]:
    """Return the roles in a product of activations with a matrix per expert (E, in, out); empty for all other calls.

    The experts, dim 0 of the weight, are a batch that both have; of the other dims one is summed, one is put out.
    """
    inputs, outputs = found.bound.rule.inputs, found.bound.rule.outputs
    if len(outputs) != 1 or all(weights):
        return {}
    given = {f for term, is_weight in zip(inputs, weights, strict=True) if not is_weight for f in term.factors}
    kept = set(outputs[0].factors)
    for term, is_weight in zip(inputs, weights, strict=True):
        if is_weight and len(term.dims) == len(term.factors) == 3:
            expert, *features = term.factors
            summed = [factor for factor in features if factor in given - kept]
            made = [factor for factor in features if factor in kept - given]
            if expert in given & kept and len(summed) == len(made) == 1:
                return {expert: EXPERT, summed[0]: "row", made[0]: "column"}
    return {}


@functools.lru_cache(maxsize=8192)
def _output_roles(found: RuledCall, dims: tuple[Roles, ...], weights: tuple[bool, ...]) -> tuple[Roles, ...]:
    roles = _factor_roles(found, dims, weights)
    return tuple(
        tuple(
            _kept_role(found, dims, dim, size) if names[0] == WHOLE else roles.get(names[0])
            for dim, (names, size) in enumerate(zip(term.dims, info.shape, strict=True))
        )
        for term, info in zip(found.bound.rule.outputs, found.call.outputs, strict=True)
    )


def _kept_role(found: RuledCall, dims: tuple[Roles, ...], dim: int, size: int) -> str | None:
    """Return the role of an output's dim that must stay whole: that of the same dim of the first input, if it is as
    large.
    """
    if not dims:
        return None
    shape = found.call.inputs[0].shape
    same = len(shape) == len(found.call.outputs[0].shape) and shape[dim] == size
    return dims[0][dim] if same and found.bound.rule.inputs[0].dims[dim][0] == WHOLE else None


def _input_roles(info: TensorInfo) -> Roles:
    """Return the roles of an input's dims: dim 0 is data; dim 1 of token ids and embedded tokens is sequence."""
    rank = len(info.shape)
    tokens = (rank == 2 and not info.dtype.is_floating_point) or rank == 3
    return tuple("data" if dim == 0 else "sequence" if dim == 1 and tokens else None for dim in range(rank))
