"""Ground truth for rules: run a call whole and in parts, and see which placements give the same values and gradients.

One mesh axis of `num_ranks` ranks, played one after the other in this process, without torch.distributed. A rule is
wrong where one of its choices gives other values or gradients than the call run whole; it lacks what passes the same
test but is none of its choices (the idea of `strategy_validation` in torch's DTensor).

    placement   inputs, output gradients           outputs, input gradients
    S(d)        chunks of dim d                    concatenated
    I           the same on every rank             the same on every rank
    R           value as I, gradient as P          value as I, gradient as P
    P           value random parts, gradient as I  value summed, gradient as I
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.program.program import TensorInfo
from autopar.sharding.layout import I, P, Placement, R
from autopar.sharding.operation import Call, Implementation, OpRule
from autopar.sharding.rule import BoundRule, Choice, Rule
from tests.support.parts import local_shape, split, splits_of, tolerance_of, value_fault

Placements = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Choices of a rule that are wrong, and right placements it lacks; each a line that names the call."""

    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([*(f"wrong    {line}" for line in self.wrong), *(f"missing  {line}" for line in self.missing)])


@dataclass(frozen=True, slots=True)
class Whole:
    """A call with real arguments, run whole: what every choice is compared with.

    `cotangents` are the gradients of the outputs (None: the output has none), `gradients` those of the inputs.
    """

    target: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    cotangents: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Whole:
        """Run `target` on copies of its arguments; tensors that require a gradient get one."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        leaves = tuple(_leaf(leaf, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        inputs = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        call_args, call_kwargs = pytree.tree_unflatten(leaves, spec)
        outputs = tensors_of(target(*call_args, **call_kwargs))
        cotangents = tuple(torch.randn_like(y) if y.requires_grad else None for y in outputs)
        gradients = gradients_of(inputs, outputs, cotangents)
        return cls(target, leaves, spec, inputs, tuple(y.detach() for y in outputs), cotangents, gradients)

    @property
    def call(self) -> Call:
        """The call as the rule tables see it."""
        graph = fx.Graph()
        nodes = [graph.placeholder(f"x{i}") if isinstance(leaf, Tensor) else leaf for i, leaf in enumerate(self.leaves)]
        for node, leaf in zip(nodes, self.leaves, strict=True):
            if isinstance(node, fx.Node):
                node.meta["tensor"] = _info(leaf)
        args, kwargs = pytree.tree_unflatten(nodes, self.spec)
        node = graph.call_function(self.target, args, kwargs)
        infos = tuple(
            TensorInfo(tuple(y.shape), y.dtype, cotangent is not None)
            for y, cotangent in zip(self.outputs, self.cotangents, strict=True)
        )
        node.meta["tensor"] = infos if len(infos) != 1 else infos[0]
        return Call.of(node)

    def bind(self, op: OpRule) -> BoundRule:
        """The rule fitted to the shapes of this call."""
        return Rule.parse(op.rule).bind([x.shape for x in self.inputs], [y.shape for y in self.outputs])

    def arguments(self, inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments with other tensors in the place of its inputs."""
        tensors = iter(inputs)
        leaves = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def __str__(self) -> str:
        leaves = [_info(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten([_Shown(leaf) for leaf in leaves], self.spec)
        words = [*map(str, args), *(f"{name}={value}" for name, value in kwargs.items())]
        return f"{self.target}({', '.join(words)})"


class _Shown(str):
    """A string without quotes, also inside lists."""

    __repr__ = str.__str__  # pyright: ignore[reportAssignmentType]


def check(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    op_rule: OpRule,
    k: int = 2,
    allowed: Collection[str] = (),
) -> Report:
    """Compare the choices of `op_rule` with everything that is right on one mesh axis of `k` ranks.

    Choices that an implementation carries out are taken for right here; `validate_implementations` checks them.
    What the rule lacks on purpose is named in `allowed`, as `show` prints it, with `*` for anything.
    """
    whole = Whole.of(target, args, kwargs)
    bound = whole.bind(op_rule)
    report = Report()
    implementation = only_implementation(op_rule)
    choices = bound.choices(implementation.joined if implementation else frozenset())
    for choice in choices:
        if implemented(op_rule, choice) or not possible(whole, choice, k):
            continue
        fault = fault_of(whole, choice.inputs, choice.outputs, k, op_rule.shape_argument)
        if fault:
            report.wrong.append(f'{whole}: "{op_rule.rule}", {choice.name}: {show(choice)}: {fault}')
    if implementation and implementation.random:
        return report
    for found in right_choices(whole, k, op_rule.shape_argument):
        on_purpose = any(fnmatchcase(show(found), pattern) for pattern in allowed)
        if not on_purpose and not any(covers(choice, found, whole) for choice in choices):
            report.missing.append(f'{whole}: "{op_rule.rule}" lacks {show(found)}')
    return report


def only_implementation(op: OpRule) -> Implementation | None:
    """The implementation of a rule that has one at most; those of a rule with several are validated one by one."""
    assert len(op.implementations) <= 1, f"{op} has several; take them apart with replace"
    return op.implementations[0] if op.implementations else None


def implemented(op: OpRule, choice: Choice) -> bool:
    """Whether the choice runs by the rule's implementation instead of the ATen call."""
    implementation = only_implementation(op)
    if implementation is None:
        return False
    return implementation.factors is None or choice.factor in implementation.factors


def possible(whole: Whole, choice: Choice, num_ranks: int) -> bool:
    """Whether every split dim divides and nothing is partial that cannot be summed."""
    placed = [*zip(choice.inputs, whole.inputs, strict=True), *zip(choice.outputs, whole.outputs, strict=True)]
    return all(
        placement in (I, R)
        or (placement is P and x.dtype != torch.bool)
        or (placement.is_split and x.shape[placement.dim] % num_ranks == 0)
        for placement, x in placed
    )


def covers(choice: Choice, found: Choice, whole: Whole) -> bool:
    """Whether `choice` is `found`, I and R being the same where no gradient tells them apart."""
    placed = zip((*choice.inputs, *choice.outputs), (*found.inputs, *found.outputs), strict=True)
    gradients = (*whole.gradients, *whole.cotangents)
    return all(
        ours is theirs or ({ours, theirs} == {I, R} and (gradient is None or not gradient.any()))
        for (ours, theirs), gradient in zip(placed, gradients, strict=True)
    )


def right_choices(whole: Whole, num_ranks: int, shape_argument: int | None = None) -> list[Choice]:
    """Every choice that gives the right values and gradients, but for those that keep all tensors replicated.

    The inputs' placements are enumerated (R and I as one), the outputs' and the gradients' follow from the values.
    """
    found = []
    for inputs in itertools.product(*(_options(x, num_ranks) for x in whole.inputs)):
        for outputs in _outputs(whole, inputs, num_ranks, shape_argument):
            if any(p is not R for p in inputs) or any(p is not I for p in outputs):
                found.extend(_with_gradients(whole, inputs, outputs, num_ranks, shape_argument))
    return found


def _outputs(whole: Whole, inputs: Placements, num_ranks: int, shape_argument: int | None) -> list[Placements]:
    """The placements that the values of the outputs have; all that are possible where the arguments depend on them."""
    if shape_argument is not None:
        y = whole.outputs[0]
        return [(placement,) for placement in (I, *_partial(y), *splits_of(y, num_ranks))]
    local = _run_ranks(whole, inputs, num_ranks)
    if local is None:
        return []
    tolerance = tolerance_of((*whole.inputs, *whole.outputs))
    seen = [_seen(list(parts), y, tolerance) for parts, y in zip(zip(*local, strict=True), whole.outputs, strict=True)]
    return list(itertools.product(*seen))


def _with_gradients(
    whole: Whole, inputs: Placements, outputs: Placements, num_ranks: int, shape_argument: int | None
) -> list[Choice]:
    """The choices with these values (R stands for I or R) whose gradients are right, with I and R told apart."""
    found = []
    for whole_output in (I, R) if I in outputs else (I,):
        asked = tuple(whole_output if p is I else p for p in outputs)
        for whole_input in (R, I) if R in inputs else (R,):
            given = tuple(whole_input if p is R else p for p in inputs)
            if not fault_of(whole, given, asked, num_ranks, shape_argument):
                found.append(Choice("?", given, asked))
                break
    return found


def _options(x: Tensor, num_ranks: int) -> Placements:
    return (R, *splits_of(x, num_ranks), *((P,) if x.is_floating_point() else ()))


def _seen(parts: list[Tensor], y: Tensor, tolerance: float) -> list[Placement]:
    """The placements as which the parts are the right value."""
    options = (I, *splits_of(y, len(parts)), *_partial(y))
    return [placement for placement in options if not value_fault(parts, placement, y, tolerance)]


def _partial(y: Tensor) -> Placements:
    """P, if `y` can be summed."""
    return () if y.dtype == torch.bool else (P,)


def fault_of(
    whole: Whole, inputs: Placements, outputs: Placements, num_ranks: int, shape_argument: int | None = None
) -> str:
    """What is wrong with these placements; empty if values and gradients are right."""
    given = [split(x, placement, num_ranks) for x, placement in zip(whole.inputs, inputs, strict=True)]
    shape = local_shape(whole.outputs[0], outputs[0], num_ranks) if shape_argument is not None else None
    cotangents = [
        [None] * num_ranks if g is None else split(g, placement.transposed, num_ranks)
        for g, placement in zip(whole.cotangents, outputs, strict=True)
    ]
    local_outputs, local_gradients = [], []
    for rank in range(num_ranks):
        local = [_leaf(parts[rank], x.requires_grad) for parts, x in zip(given, whole.inputs, strict=True)]
        try:
            found = _run(whole, local, shape_argument, shape)
            if len(found) != len(whole.outputs):
                return f"rank {rank} has {len(found)} outputs instead of {len(whole.outputs)}"
            local_outputs.append(found)
            local_gradients.append(gradients_of(local, found, [parts[rank] for parts in cotangents]))
        except (RuntimeError, ValueError, IndexError) as error:
            return f"rank {rank} raises {str(error).splitlines()[0]}"
    return joined_fault(whole, inputs, outputs, local_outputs, local_gradients)


def joined_fault(
    whole: Whole,
    inputs: Placements,
    outputs: Placements,
    local_outputs: Sequence[Sequence[Tensor]],
    local_gradients: Sequence[Sequence[Tensor | None]],
) -> str:
    """What is wrong with the outputs and gradients of the ranks (rank first), joined by their placements."""
    tolerance = tolerance_of((*whole.inputs, *whole.outputs))
    for i, (y, placement) in enumerate(zip(whole.outputs, outputs, strict=True)):
        fault = value_fault([found[i] for found in local_outputs], placement, y, tolerance)
        if fault:
            return f"output {i} {fault}"
    for i, (g, placement) in enumerate(zip(whole.gradients, inputs, strict=True)):
        if g is None:
            continue
        parts = [torch.zeros_like(whole.inputs[i]) if each[i] is None else each[i] for each in local_gradients]
        fault = value_fault([part for part in parts if part is not None], placement.transposed, g, tolerance)
        if fault:
            return f"the gradient of input {i} {fault}"
    return ""


def show(choice: Choice) -> str:
    """For example `S(0), R -> S(0)`."""
    return f"{', '.join(map(repr, choice.inputs))} -> {', '.join(map(repr, choice.outputs))}"


def tensors_of(output: Any) -> tuple[Tensor, ...]:
    """The tensors among the outputs of a call, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))


def gradients_of(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradient of every input that requires one (None: it requires none, or does not matter to the outputs)."""
    pairs = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if g is not None and y.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs or not wanted:
        return (None,) * len(inputs)
    found = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return tuple(next(found) if x.requires_grad else None for x in inputs)


def _run_ranks(whole: Whole, inputs: Placements, num_ranks: int) -> list[tuple[Tensor, ...]] | None:
    """Each rank's outputs, without gradients; None where the call refuses such inputs or has more or fewer outputs."""
    given = [split(x, placement, num_ranks) for x, placement in zip(whole.inputs, inputs, strict=True)]
    found = []
    for rank in range(num_ranks):
        try:
            with torch.no_grad():
                found.append(_run(whole, [parts[rank].clone() for parts in given]))
        except (RuntimeError, ValueError, IndexError):
            return None
        if len(found[-1]) != len(whole.outputs):
            return None
    return found


def _run(
    whole: Whole, inputs: Sequence[Tensor], shape_argument: int | None = None, shape: tuple[int, ...] | None = None
) -> tuple[Tensor, ...]:
    args, kwargs = whole.arguments(inputs)
    if shape_argument is not None:
        args = (*args[:shape_argument], list(shape or ()), *args[shape_argument + 1 :])
    return tensors_of(whole.target(*args, **kwargs))


def _leaf(x: Tensor, requires_grad: bool) -> Tensor:
    """A copy without history, so that an operation that writes into its inputs spoils nothing."""
    return x.detach().clone().requires_grad_(requires_grad)


def _info(x: Tensor) -> TensorInfo:
    return TensorInfo(tuple(x.shape), x.dtype, x.requires_grad)
