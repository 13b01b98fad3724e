"""Blocks, the units between which a pipeline may be cut: runs of calls in the order of the graph, a layer each.

A call belongs to the layer whose number its module path begins with ("model.layers.3"), or, where the path has no
number, to the first module below those that hold numbered ones ("model.norm", "lm_head"). A run without parameters of
its own (a lone add, the loss) goes to the block before it. Where that gives too few blocks they become the modules
that make the calls, and then single calls.

Calls that depend on no parameter (masks, positions, rotary tables) belong to no block: every stage that needs one
computes it again. Random calls, and whatever has to do with a buffer that the forward changes, happen once.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.errors import PipelineError
from autopar.ir.program.calls import module_of
from autopar.ir.program.effects import changed_buffers, independent_of
from autopar.ir.program.paths import layer_of
from autopar.ir.program.program import Program

Run = tuple[str, list[fx.Node]]
Call = tuple[fx.Node, ...]
"""A call and its getitems."""


@dataclass(frozen=True, slots=True)
class Block:
    """A run of calls (with their getitems) in the order of the graph; names are unique in a program."""

    name: str
    nodes: tuple[fx.Node, ...]


def blocks_of(program: Program, at_least: int = 1) -> tuple[Block, ...]:
    """Return the blocks of a program, as coarse as `at_least` of them allow.

    Raises PipelineError where even single calls are fewer.
    """
    shared = shared_calls(program)
    calls = [_with_getitems(node) for node in program.graph.nodes if is_call(node) and node not in shared]
    parameters = set(program.parameters.values())
    found: list[Run] = []
    for label in (_layers(calls), module_of, None):
        if label is None:
            found = [(module_of(call[0]) or call[0].name, [*call]) for call in calls]
        else:
            found = _with_parameters(_runs(calls, label), parameters)
        found = _whole(found, _held_together(program))
        if len(found) >= max(at_least, 1):
            return _named(found)
    raise PipelineError(
        f"found {at_least} pipeline stages for {len(found)} calls that can stand on different stages; every stage "
        f"needs at least one. Use at most {max(len(found), 1)} stages: a smaller pipeline axis, or fewer stages per "
        "rank."
    )


def shared_calls(program: Program) -> frozenset[fx.Node]:
    """Return the calls that any stage may compute for itself: from inputs, constants and constant buffers, drawing
    nothing.
    """
    return independent_of(program.graph, changed_buffers(program).union(program.parameters.values()))


def is_call(node: fx.Node) -> bool:
    """Return whether a node is a call other than `getitem`."""
    return node.op == "call_function" and node.target is not operator.getitem


def _held_together(program: Program) -> list[set[fx.Node]]:
    """Return, for every changed buffer, the calls that must share one stage: its readers and its new value."""
    placeholders = program.placeholders()
    values = dict(zip(program.mutations, program.output[len(program.output) - len(program.mutations) :], strict=True))
    names = {placeholder: name for name, placeholder in program.buffers.items()}
    groups: list[set[fx.Node]] = []
    for placeholder in sorted(changed_buffers(program)):
        group = {user for user in placeholders[placeholder].users if user.op == "call_function"}
        value = values.get(names.get(placeholder, ""))
        groups.append(group | ({value} if isinstance(value, fx.Node) else set()))
    return groups


def _with_getitems(call: fx.Node) -> Call:
    return call, *(user for user in call.users if user.target is operator.getitem)


def _layers(calls: Sequence[Call]) -> Callable[[fx.Node], str]:
    """Return the labels at the coarsest: a call's numbered module, or the first module below those that hold numbered
    ones.
    """
    paths = list(dict.fromkeys(module_of(call[0]) for call in calls))
    numbered = [prefix for prefix in map(layer_of, paths) if prefix]
    inner = [prefix.rpartition(".")[0] for prefix in numbered] or [_common([path for path in paths if path])]
    around = {".".join(parts[:end]) for parts in (path.split(".") for path in inner) for end in range(len(parts) + 1)}
    labels: dict[str, str] = {}
    for path in paths:
        parts = path.split(".")
        outside = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        labels[path] = layer_of(path) or next((each for each in outside if each not in around), path)
    return lambda node: labels[module_of(node)]


def _common(paths: Sequence[str]) -> str:
    """Return the innermost module that all of the paths begin with."""
    parts = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(each[0] for each in itertools.takewhile(lambda each: len(set(each)) == 1, parts))


def _runs(calls: Sequence[Call], label: Callable[[fx.Node], str]) -> list[Run]:
    runs: list[Run] = []
    for call in calls:
        if runs and runs[-1][0] == label(call[0]):
            runs[-1][1].extend(call)
        else:
            runs.append((label(call[0]), [*call]))
    return runs


def _with_parameters(runs: Sequence[Run], parameters: set[str]) -> list[Run]:
    """Join runs without parameters to the previous run (at the start, to the next), then equal neighbours."""
    joined: list[Run] = []
    before: list[fx.Node] = []
    for label, nodes in runs:
        if any(each.name in parameters for node in nodes for each in node.all_input_nodes):
            if joined and joined[-1][0] == label:
                joined[-1][1].extend(nodes)
            else:
                joined.append((label, [*before, *nodes]))
                before = []
        elif joined:
            joined[-1][1].extend(nodes)
        else:
            before.extend(nodes)
    return joined or ([(runs[0][0], before)] if before else [])


def _whole(runs: Sequence[Run], groups: Sequence[set[fx.Node]]) -> list[Run]:
    """Join runs until no two of them hold calls of one group."""
    spans = []
    for group in groups:
        places = [place for place, (_, nodes) in enumerate(runs) if not group.isdisjoint(nodes)]
        if places:
            spans.append((places[0], places[-1]))
    joined: list[Run] = []
    for place, (label, nodes) in enumerate(runs):
        if any(first < place <= last for first, last in spans):
            joined[-1][1].extend(nodes)
        else:
            joined.append((label, list(nodes)))
    return joined


def _named(runs: Sequence[Run]) -> tuple[Block, ...]:
    seen: dict[str, int] = {}
    blocks: list[Block] = []
    for label, nodes in runs:
        seen[label] = seen.get(label, 0) + 1
        blocks.append(Block(label if seen[label] == 1 else f"{label}#{seen[label]}", tuple(nodes)))
    return tuple(blocks)
