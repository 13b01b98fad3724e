"""The space of one plan in symbols: each decision has its chosen strategy alone, and tensors have symbolic shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from autopar.costs.space.call_candidates import Candidates
from autopar.costs.space.space import Decision, Space
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.operation import Call
from autopar.strategies import rule_of
from autopar.views.formulas.local_sizes import LocalSizes
from autopar.views.formulas.symbolic_shapes import input_keys

Shapes = Sequence[tuple[int, ...]]


def symbolic_space(space: Space, choices: Sequence[int], sizes: LocalSizes) -> Space:
    """Return the space; decisions of equal candidates, choices and shapes share theirs."""
    known: dict[Hashable, Candidates] = {}

    def chosen(number: int, decision: Decision) -> Candidates:
        call, choice = decision.candidates.call, choices[number]
        if call is not None:
            results = ((decision.name, position) for position in range(len(call.outputs)))
            shapes = [sizes.shapes[key] for key in (*input_keys(space, decision), *results)]
        else:
            shapes = [passed_on(number, 0)]
        key = (id(decision.candidates), choice, *map(id, shapes))
        if key not in known:
            known[key] = _chosen(decision.candidates, choice, shapes)
        return known[key]

    def passed_on(number: int, output: int) -> tuple[int, ...]:
        """Return the shape of a tensor: a shared reshard passes on that of its source, and so does an output."""
        while (edge := space.inbound.get((number, 0))) is not None and space.decisions[number].kind != "call":
            number, output = edge.source, edge.source_output
        return sizes.shapes[space.decisions[number].node.name, output]

    decisions = [replace(each, candidates=chosen(number, each)) for number, each in enumerate(space.decisions)]
    shapes_on = [(edge, passed_on(edge.source, edge.source_output)) for edge in space.edges]
    edges = [replace(edge, tensor=replace(edge.tensor, shape=shape)) for edge, shape in shapes_on]
    return replace(space, decisions=decisions, edges=edges, inbound={edge.end: edge for edge in edges})


def _chosen(candidates: Candidates, choice: int, shapes: Shapes) -> Candidates:
    found, some = replace(candidates, strategies=(candidates.strategies[choice],)), slice(choice, choice + 1)
    found = replace(found, seconds=candidates.seconds[some], forward_seconds=candidates.forward_seconds[some])
    if candidates.call is None or candidates.bound is None:
        return found
    inputs, outputs = shapes[: len(candidates.call.inputs)], shapes[len(candidates.call.inputs) :]
    call = _call(candidates.call, inputs, outputs)
    op = candidates.op if candidates.reason else rule_of(call)  # it may state FLOPs by the shapes
    return replace(found, call=call, op=op, bound=candidates.bound.rule.bind(inputs, outputs))


def _call(call: Call, inputs: Shapes, outputs: Shapes) -> Call:
    """Return the call with these shapes, also among its arguments."""
    tensors = tuple(replace(info, shape=shape) for info, shape in zip(call.inputs, inputs, strict=True))
    left: dict[int, list[TensorInfo]] = defaultdict(list)
    for info, tensor in zip(call.inputs, tensors, strict=True):
        left[id(info)].append(tensor)

    def replaced(value: Any) -> Any:
        if isinstance(value, TensorInfo):
            return left[id(value)].pop(0)
        return type(value)(map(replaced, value)) if type(value) in (list, tuple) else value

    arguments = {name: replaced(value) for name, value in call.arguments.items()}
    results = tuple(replace(info, shape=shape) for info, shape in zip(call.outputs, outputs, strict=True))
    return Call(call.target, tensors, results, arguments)
