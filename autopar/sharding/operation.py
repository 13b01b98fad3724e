"""One call of an operation as the rule tables see it, and what a table may answer.

A table in `strategies/` maps an ATen overload to a rule's text, to an `OpRule` where there is more to say, or to a
function of the `Call` that returns either (None: no rule fits, the call runs replicated).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.program.program import TensorInfo, tensor_inputs


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that an implementation runs itself, once over each mesh axis that splits `factor`.

    `num_bytes` follows NCCL's convention: the tensor of an all_reduce, the output of an all_gather, the input of a
    reduce_scatter or all_to_all. `backward` says in which pass it runs.
    """

    name: str
    factor: str
    num_bytes: int
    backward: bool = False


Traffic = Callable[["Call", Mapping[str, int]], tuple[Collective, ...]]
"""(call, local size of every factor) → the collectives of a strategy that splits the implementation's factors."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """A runtime function that replaces the ATen call where splitting needs more than resharding.

    It is called with the local arguments of the ATen call and the keywords
    `axes` (factor → names of the mesh axes that split it, outer first; only split factors) and
    `sizes` (factor → global size); a `random` one also with `key`, a number unique to the call.
    """

    function: str
    """`module:name` below `autopar.runtime`, for example "loss:cross_entropy"."""
    factors: frozenset[str] | None
    """Used when one of these factors is split; None: used always."""
    joined: frozenset[str] = frozenset()
    """Factors missing on the right whose partial results the function sums itself: the output is I, not P."""
    padded: frozenset[str] = frozenset()
    """Factors missing on the right whose padding the function leaves out of its results."""
    traffic: Traffic | None = None
    random: bool = False


@dataclass(frozen=True, slots=True)
class OpRule:
    """A rule's text with what the notation does not say."""

    rule: str
    implementation: Implementation | None = None
    shape_argument: int | None = None
    """Position of the argument that states the output's shape, to be made local (view, expand, zeros …)."""
    flops: int | None = None
    """Floating point operations of the whole forward call; None: derived from the rule (2 × product of factors)."""


@dataclass(frozen=True, slots=True)
class Call:
    """An ATen call: `inputs` are its tensor arguments in the order of `tensor_inputs`, `arguments` all by schema name.

    In `arguments` a tensor is a TensorInfo, and defaults are filled in.
    """

    target: Callable[..., Any]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    arguments: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

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


def is_view(call: Call) -> bool:
    """Whether the call returns an alias of its input and moves no data; a cast to another dtype does."""
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
    """Arguments by schema name with defaults; by position ("0", "1", …) for targets without a schema."""
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


MAIN_OPERATION = re.compile(r"mm\b|_mm|linear|matmul|einsum|conv|attention|embedding|_norm\b|loss|softmax|lstm|gru|rnn")
