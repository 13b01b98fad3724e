"""Structure of stages and blocks: equal stages are planned once, and equal blocks cost the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx
from torch.fx.node import map_arg

from autopar.ir.program.program import Program
from autopar.planning.pipeline.planned_blocks import PlannedBlocks
from autopar.planning.pipeline.stages.blocks import shared_calls


def structure(planned: PlannedBlocks, program: Program) -> object:
    """Return all that the plan of a stage depends on, without the names of its nodes in the model."""
    described = _described(planned, tuple(program.graph.nodes), program.parameter_names, program.received)
    sent = [str(planned.boundary(v.name)) for v in program.output[: program.num_sent] if isinstance(v, fx.Node)]
    return described, tuple(sent), program.num_outputs


def kinds(planned: PlannedBlocks) -> list[int]:
    """Return a number per block, the same for blocks that are equal but for the names of their nodes."""
    program = planned.request.program
    parameters, inputs = program.parameter_names, program.placeholders()
    shared = shared_calls(program)
    numbers: dict[object, int] = {}
    found = []
    for block in planned.blocks:
        taken = dict.fromkeys(each for call in block.nodes for each in call.all_input_nodes if each not in block.nodes)
        received = [each.name for each in taken if each.name not in inputs and each not in shared]
        kind = _described(planned, (*taken, *block.nodes), parameters, received, len(taken))
        found.append(numbers.setdefault(kind, len(numbers)))
    return found


def _described(
    planned: PlannedBlocks,
    nodes: Sequence[fx.Node],
    parameters: Mapping[str, str],
    received: Collection[str],
    outside: int = 0,
) -> tuple[object, ...]:
    """Return the nodes in their order, numbered; those `outside`, the first ones, without what makes them."""
    whole, pins = planned.whole.space, planned.pins
    stored = planned.request.storage
    number = {node: i for i, node in enumerate(nodes)}
    described: list[object] = []
    for node, place in number.items():
        there = whole.index.get(node.name, -1)
        pinned = pins[there].tobytes() if there in pins and not pins[there].all() else b""
        kept = str(stored.get(parameters.get(node.name, ""), ""))
        layout = str(planned.boundary(node.name)) if node.name in received else ""
        made = ("", "", "") if place < outside else _made(node, number)
        described.append((made, repr(node.meta.get("tensor")), pinned, kept, layout, node.name in parameters))
    return tuple(described)


def _made(node: fx.Node, number: dict[fx.Node, int]) -> tuple[str, str, str]:
    """Return the operation, target and arguments of a node, with other nodes by number."""
    args = str(map_arg((node.args, dict(node.kwargs)), lambda n: f"%{number[n]}"))
    return node.op, str(node.target) if node.op == "call_function" else "", args
