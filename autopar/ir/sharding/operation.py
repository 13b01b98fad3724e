"""One call of an operation as the rule tables see it, and what a table may answer.

A table in `strategies/` maps an ATen overload to a rule's text, to an `OpRule` where there is more to say, or to a
function of the `Call` that returns either (None: no rule fits, the call runs replicated).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.ir.program.program import TensorInfo, tensor_inputs
from autopar.ir.sharding.rule import BoundRule, Choice, factors_of


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that an implementation runs itself, once over each mesh axis that splits `factor`.

    Where that is "+x", it runs once over all axes, joined, that split x together with another factor; where it is
    "&x y", once over all axes, joined, that split one of these.

    `num_bytes` follows NCCL's convention: the tensor of an all_reduce, the output of an all_gather, the input of a
    reduce_scatter or all_to_all. `backward` says in which pass it runs.
    """

    name: str
    factor: str
    num_bytes: int
    backward: bool = False
    ahead: bool = False
    """True if the runtime begins it ahead of the call, at the start of the forward, and the call waits for it."""
    unpadded: int | None = None
    """`num_bytes` without padding, if these are padded rows of experts: a space prices their padding itself."""


LocalSizes = Mapping[str, int]
"""The size on one device of every factor of a rule.

Under "+x" stands the number of parts of x that go with those of another factor; under "~s" how s is zigzag-sharded: 1
by all axes that split it, 2 by some of them.
"""
ZIGZAG = "~"
MovedBytes = Callable[[int, int], int]
"""(bytes of all inputs, bytes of all outputs) → bytes that a forward reads and writes, on one device."""
Efficiency = Literal["matmul", "attention", "masked attention"]
"""Kernel whose share of the peak FLOP/s is reached (see `costs.pricing.product_efficiency`)."""


def read_and_written(inputs: int, outputs: int) -> int:
    """Return the tensors that are read and written, each once."""
    return inputs + outputs


@dataclass(frozen=True, slots=True)
class Implementation:
    """A runtime function that replaces the ATen call where splitting needs more than resharding, and what it costs.

    The function is called with the local arguments of the ATen call and these keywords:

        axes        factor → names of the mesh axes that split it, outer first; only split factors
        sizes       factor → global size
        zigzag      the zigzag-sharded factors as in `axes`, if there are any and the signature has it
        op          the ATen call, if the signature has it
        key         a number unique to the call, if `random`
        keywords    its own

    Fields say what runs, and when it is offered. Methods say what one device needs for it, given the call and the local
    sizes. Those of this class say what the ATen call needs (`ATEN` is the ATen call itself); a subclass overrides those
    that differ. Sizes may be symbols (`views.formulas.symbols`), so that formulas follow from the same methods.

    A rule may have several implementations, which the candidate strategies of a call offer next to each other.
    """

    function: str = ""
    """`module:name` below `autopar.runtime.implementations`, for example "loss:cross_entropy"."""
    factors: frozenset[str] | None = None
    """Used when one of these factors is split; None: used always."""
    joined: frozenset[str] = frozenset()
    """Factors missing on the right whose partial results the function sums itself: the output is I, not P."""
    padded: frozenset[str] = frozenset()
    """Factors whose padding the function leaves out of its results."""
    ordered: frozenset[str] | None = None
    """Factors that no axis shards by zigzag, since the function must know which part a rank has; None: all of its."""
    random: bool = False
    name: str = ""
    """Name by which plans tell it from others of the same rule; the first of a rule needs none."""
    on_demand: bool = False
    """Offered only if its name is requested: by an annotation, a preset of that name, or a plan that has it."""
    choices: tuple[Choice, ...] = ()
    """Choices of a mesh axis that this implementation alone offers.

    An example is a factor that is gathered while another one is split in its place.

    One axis of a call makes such a choice. It is the innermost of those that split the choice's first factor; the
    function is told of zigzag sharding of that factor's parts alone. No dim is padded then.
    """
    stands_for_last: bool = False
    """True if a choice of its own also counts as one that splits its last factor: the layouts around are the same."""
    shared: frozenset[str] = frozenset()
    """Names of its choices that move the first input once for all calls that take it, if all of these make them."""
    efficiency: Efficiency | None = None
    """Kernel whose share of the peak it reaches; None: that of the rule."""
    in_halves: bool = False
    """True if its function has two halves, `start_…` and `end_…`: other calls run while what it moves travels.

    What travels are its last collective of the forward, and all of the backward.
    """
    saves_moved: bool = False
    """True if it saves what its collectives bring: with full recomputation they run again, whoever needs its result."""

    def __post_init__(self) -> None:
        assert self.name or not self.on_demand, f"{self.function} has no name to ask for it by"

    @property
    def told_apart(self) -> frozenset[str]:
        """Factors for which the function must know which part a rank has."""
        return (self.factors or frozenset()) if self.ordered is None else self.ordered

    @property
    def keywords(self) -> Mapping[str, int]:
        """Further keyword arguments of the function."""
        return {}

    @property
    def follower(self) -> Implementation:
        """The variant for calls after the first one that shares its input with them; it costs what these calls cost."""
        return self

    @property
    def regathering(self) -> Implementation | None:
        """The variant for segments that save results of products and gather again (selective), if there is one.

        It saves no gathered rows; its forward takes as long, and its choices are the same.
        """
        return None

    def traffic(self, call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
        """Return the collectives that the function runs itself."""
        return ()

    def hidden_share(self, call: Call, sizes: LocalSizes) -> float:
        """Return the share of its collectives' seconds that pass while it computes, as far as it computes as long."""
        return 0.0

    def flops(self, call: Call, sizes: LocalSizes) -> int | None:
        """Return the floating point operations of the forward; None: an equal part of the whole call's."""
        return None

    def note(self, call: Call, sizes: LocalSizes, where: str) -> str:
        """Return what a plan notes of the call in the module `where`; "" for nothing."""
        return ""

    def launches(self, call: Call, sizes: LocalSizes) -> int:
        """Return the number of operations that the forward starts."""
        return 1

    def moved_bytes(self, op: OpRule, call: Call, sizes: LocalSizes, inputs: int, outputs: int) -> int:
        """Return the bytes that the forward reads and writes, given those of its inputs and of its outputs."""
        return op.moved_bytes(inputs, outputs)

    def elementwise_bytes(self, op: OpRule, call: Call, sizes: LocalSizes) -> int:
        """Return the bytes that elementwise operations of the forward read and write, its matmuls excluded."""
        return op.elementwise_bytes(call, sizes) if op.elementwise_bytes else 0

    def forward_bytes(self, call: Call, sizes: LocalSizes) -> int | None:
        """Return the bytes that a forward works on in addition to what it saves; None if it makes no gradients."""
        return None

    def saved_bytes(self, call: Call, sizes: LocalSizes) -> int | None:
        """Return the bytes saved in addition to inputs and outputs; None: what autograd saves of the ATen call."""
        return None

    def inference_bytes(self, call: Call, sizes: LocalSizes) -> int | None:
        """Return the bytes that a forward works on in a program that does not train; None: as the ATen call does."""
        return None

    def unkept(self, call: Call, sizes: LocalSizes) -> frozenset[int]:
        """Return the positions of the inputs that are not saved for the backward, though the ATen call saves them."""
        return frozenset()

    def backward_bytes(self, call: Call, sizes: LocalSizes) -> int | None:
        """Return the bytes that the backward works on in addition to outputs and gradients; None: `saved_bytes`."""
        return None


ATEN = Implementation()
"""The ATen call itself."""


@dataclass(frozen=True, slots=True)
class OpRule:
    """A rule's text with what the notation does not say."""

    rule: str
    implementations: tuple[Implementation, ...] = ()
    shape_argument: int | None = None
    """Position of the argument that states the output's shape, to be made local (view, expand, zeros …)."""
    flops: int | None = None
    """Floating point operations of the whole forward call; None: derived from the rule (2 × product of factors)."""
    backward: float | None = None
    """The work of the whole backward over that of the forward; None: once for each input that needs a gradient."""
    moved_bytes: MovedBytes = read_and_written
    efficiency: Efficiency = "matmul"
    head_size: int = 0
    """Features of a head of fused attention; 0: none, or they do not matter."""
    elementwise_bytes: Callable[[Call, LocalSizes], int] | None = None
    """Bytes on one device that its forward reads and writes in elementwise operations, its matmuls excluded."""
    backward_bytes: Callable[[Call, LocalSizes], int] | None = None
    """Bytes on one device that its backward works on besides inputs, outputs, their gradients and saved tensors."""
    only_together: frozenset[str] = frozenset()
    """Factors that an axis splits only together with another one, as one of `choices` says."""
    choices: tuple[Choice, ...] = ()
    """Choices of a mesh axis that the notation cannot express; one named like a factor replaces that factor's own."""

    def __post_init__(self) -> None:
        names = [each.name for each in self.implementations]
        assert len(set(names)) == len(names), f"implementations of one rule need names of their own, found {names}"

    @property
    def padded(self) -> frozenset[str]:
        """Factors whose padding some implementation leaves out of its results."""
        return frozenset().union(*(each.padded for each in self.implementations))

    @property
    def served(self) -> frozenset[str]:
        """Factors that an implementation is needed for."""
        return frozenset().union(*(each.factors or () for each in self.implementations))

    def offering(self, requested: Collection[str]) -> OpRule:
        """Return the rule without implementations on demand, but for those of these names."""
        ways = tuple(each for each in self.implementations if not each.on_demand or each.name in requested)
        return self if ways == self.implementations else replace(self, implementations=ways)

    def following(self) -> OpRule:
        """Return the rule of a call before which another one moves the input that both take."""
        return replace(self, implementations=tuple(each.follower for each in self.implementations))

    def ways(self, choices: Collection[str]) -> tuple[Implementation, ...]:
        """Return the implementations that can run a call whose axes make these choices; one may be `ATEN`.

        A factor that some implementation serves needs one that serves it; if several such are split, one must serve
        all. A choice that only some implementation offers needs that one.
        """
        offering = [each for each in self.implementations if any(own.name in choices for own in each.choices)]
        needed = self.served.intersection(factor for name in choices for factor in factors_of(name))
        if offering:
            return tuple(each for each in offering if needed <= (each.factors or frozenset()))
        shared = (each for each in self.implementations if not each.choices)
        found = tuple(e for e in shared if e.factors is None or (needed and needed <= e.factors))
        return found or (() if needed else (ATEN,))


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """An ATen call: `inputs` are its tensor arguments in the order of `tensor_inputs`, `arguments` all by schema name.

    In `arguments` a tensor is a TensorInfo, and defaults are filled in. Equal calls have equal targets, tensors and
    texts of their arguments.
    """

    target: Callable[..., Any]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    arguments: Mapping[str, Any]
    _text: str = field(default="", init=False, repr=False)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __hash__(self) -> int:
        return hash((self.target, self.inputs, self.outputs, self.text))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Call)
            and self.target is other.target
            and self.inputs == other.inputs
            and self.outputs == other.outputs
            and self.text == other.text
        )

    @property
    def text(self) -> str:
        """The arguments as text, made once."""
        if not self._text:
            object.__setattr__(self, "_text", repr(sorted(self.arguments.items(), key=lambda item: item[0])))
        return self._text

    @property
    def name(self) -> str:
        """The operation's name without namespace and overload: "linear"."""
        target = self.target
        return target._schema.name.split("::")[-1] if isinstance(target, torch._ops.OpOverload) else str(target)

    @classmethod
    def of(cls, node: fx.Node) -> Call:
        """Read a call_function node of a Program."""
        found = node.meta["tensor"]
        outputs = found if isinstance(found, tuple) else (found,)
        inputs = tuple(_single(argument) for argument in tensor_inputs(node))
        return cls(
            node.target,  # type: ignore[arg-type]
            inputs,
            tuple(output for output in outputs if output is not None),
            _arguments(node),
        )


def is_contraction(bound: BoundRule) -> bool:
    """Return whether the rule multiplies two tensors and sums a factor away."""
    factors = [set(term.factors) for term in bound.rule.inputs if term.mark != "+"]
    kept = {factor for term in bound.rule.outputs for factor in term.factors}
    return any(left & right - kept for i, left in enumerate(factors) for right in factors[i + 1 :])


def is_product(op: OpRule, bound: BoundRule) -> bool:
    """Return whether a call multiplies and sums, as matmuls, convolutions and attention do; a lookup only reads."""
    return op.flops is not None or is_contraction(bound)


def largest_split_input(call: Call, bound: BoundRule | None) -> int:
    """Return the position of the largest input that the rule can split; of the largest of all, where it can split
    none.
    """
    terms = bound.rule.inputs if bound is not None else ()
    split = [position for position, term in enumerate(terms) if term.factors]
    return max(split or range(len(call.inputs)), key=lambda position: call.inputs[position].num_elements)


def is_view(call: Call) -> bool:
    """Return whether the call only returns an alias of its input; a cast to another dtype moves data."""
    if not isinstance(call.target, torch._ops.OpOverload) or not call.inputs:
        return False
    if any(output.dtype != call.inputs[0].dtype for output in call.outputs):
        return False
    return any(result.alias_info is not None for result in call.target._schema.returns)


def _single(node: fx.Node) -> TensorInfo:
    found = node.meta["tensor"]
    assert isinstance(found, TensorInfo), f"{node} is used as a tensor but has {found}"
    return found


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return arguments by schema name with defaults; by position ("0", "1", …) for targets without a schema."""
    args = map_arg(node.args, lambda n: n.meta.get("tensor"))
    kwargs = map_arg(dict(node.kwargs), lambda n: n.meta.get("tensor"))
    if not isinstance(node.target, torch._ops.OpOverload):
        return {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    named: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):
        if position < len(args):
            named[argument.name] = args[position]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            named[argument.name] = argument.default_value
    return named
