"""One call run whole and in parts, on the ranks of one mesh axis: whether placements give its values and gradients.

The ranks are played one after the other in this process, without torch.distributed.

    placement   inputs, output gradients           outputs, input gradients
    S(d)        chunks of dim d                    concatenated
    I           the same on every rank             the same on every rank
    R           value as I, gradient as P          value as I, gradient as P
    P           value random parts, gradient as I  value summed, gradient as I
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.layout import I, P, Placement, R
from autopar.ir.sharding.operation import Call, OpRule
from autopar.ir.sharding.rule import BoundRule, Choice, Rule
from autopar.tools.validation.sharded_values import local_shape, split, tolerance_of, value_fault

Placements = tuple[Placement, ...]


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
        """Return the rule fitted to the shapes of this call."""
        return Rule.parse(op.rule).bind([x.shape for x in self.inputs], [y.shape for y in self.outputs])

    def arguments(self, inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments with other tensors in the place of its inputs."""
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


def possible(whole: Whole, choice: Choice, num_ranks: int) -> bool:
    """Return whether every split dim divides evenly and no tensor that cannot be summed is partial."""
    placed = [*zip(choice.inputs, whole.inputs, strict=True), *zip(choice.outputs, whole.outputs, strict=True)]
    return all(
        placement in (I, R)
        or (placement is P and x.dtype != torch.bool)
        or (placement.is_split and x.shape[placement.dim] % num_ranks == 0)
        for placement, x in placed
    )


def fault_of(
    whole: Whole, inputs: Placements, outputs: Placements, num_ranks: int, shape_argument: int | None = None
) -> str:
    """Return a fault of these placements; "" if values and gradients are right."""
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
            found = run_with(whole, local, shape_argument, shape)
            if len(found) != len(whole.outputs):
                return f"rank {rank} has {len(found)} outputs instead of {len(whole.outputs)}"
            local_outputs.append(found)
            local_gradients.append(gradients_of(local, found, [parts[rank] for parts in cotangents]))
        except Exception as error:  # any error of the operation
            return f"rank {rank} raises {(str(error) or type(error).__name__).splitlines()[0]}"
    return joined_fault(whole, inputs, outputs, local_outputs, local_gradients)


def joined_fault(
    whole: Whole,
    inputs: Placements,
    outputs: Placements,
    local_outputs: Sequence[Sequence[Tensor]],
    local_gradients: Sequence[Sequence[Tensor | None]],
) -> str:
    """Return a fault of the ranks' outputs and gradients (rank first), joined by their placements; "" if none."""
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
    """Return a choice as text, for example `S(0), R -> S(0)`."""
    return f"{', '.join(map(repr, choice.inputs))} -> {', '.join(map(repr, choice.outputs))}"


def tensors_of(output: Any) -> tuple[Tensor, ...]:
    """Return the tensors among the outputs of a call, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))


def gradients_of(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return the gradient of every input that requires one (None: it requires none, or does not matter to the
    outputs).
    """
    pairs = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if g is not None and y.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs or not wanted:
        return (None,) * len(inputs)
    found = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return tuple(next(found) if x.requires_grad else None for x in inputs)


def run_with(
    whole: Whole, inputs: Sequence[Tensor], shape_argument: int | None = None, shape: tuple[int, ...] | None = None
) -> tuple[Tensor, ...]:
    args, kwargs = whole.arguments(inputs)
    if shape_argument is not None:
        args = (*args[:shape_argument], list(shape or ()), *args[shape_argument + 1 :])
    return tensors_of(whole.target(*args, **kwargs))


def _leaf(x: Tensor, requires_grad: bool) -> Tensor:
    """Return a copy without history, so that an operation that writes into its inputs spoils nothing."""
    return x.detach().clone().requires_grad_(requires_grad)


def _info(x: Tensor) -> TensorInfo:
    return TensorInfo(tuple(x.shape), x.dtype, x.requires_grad)
