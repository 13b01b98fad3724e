"""Shared experts run while rows of the routed ones travel: their calls follow the dispatch and the combine.

    dispatch, gate and up of the shared expert, the routed experts, combine, down of the shared expert, their sum

Models call a shared expert before or after the routed ones, with which it has nothing to do until their sum. So any
calls of a layer may move that neither depend on the dispatch nor lead to the combine. Those that take about half of
their weights run behind the dispatch, and the others behind the combine (`moe_shared_expert_overlap` of Megatron-Core).
Calls that draw random numbers keep their order, and so do the others of their layer that could have moved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from torch import fx

from autopar.ir.program.calls import module_of
from autopar.ir.program.effects import is_random, weights_of, weights_used
from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH
from autopar.ir.program.paths import layer_of
from autopar.ir.program.program import Program, info_of


def shared_experts_meanwhile(program: Program) -> None:
    """Reorder the graph of a program, so that shared experts run while rows of others travel."""
    dispatches = [node for node in program.graph.nodes if node.target is DISPATCH]
    if not dispatches:
        return
    layers: dict[str, list[fx.Node]] = defaultdict(list)
    for node in program.graph.nodes:
        if node.op == "call_function":
            layers[layer_of(module_of(node))].append(node)
    weights, behind = weights_of(program), dict[fx.Node, Sequence[fx.Node]]()
    for dispatch in dispatches:
        layer = layers[layer_of(module_of(dispatch))]
        for combine in (each for each in layer if each.target is COMBINE and _takes(each, dispatch)):
            behind |= _behind(dispatch, combine, layer, weights)
    _reorder(program.graph, behind)


def _takes(combine: fx.Node, dispatch: fx.Node) -> bool:
    """Return whether a combine takes the route that a dispatch gives."""
    return any(dispatch in each.all_input_nodes for each in combine.all_input_nodes)


def _behind(
    dispatch: fx.Node, combine: fx.Node, layer: Sequence[fx.Node], weights: Collection[fx.Node]
) -> dict[fx.Node, Sequence[fx.Node]]:
    """Return the calls of a layer that run behind the dispatch, and those that run behind the combine."""
    apart = _independent(dispatch, combine, layer)
    used = [sum(info_of(each).num_elements for each in weights_used(node, weights)) for node in apart]
    if not any(used) or any(map(is_random, apart)):
        return {}
    half = min(range(len(apart) + 1), key=lambda number: (abs(2 * sum(used[:number]) - sum(used)), -number))
    return {dispatch: apart[:half], combine: apart[half:]}


def _independent(dispatch: fx.Node, combine: fx.Node, layer: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the calls of a layer that others need together with what is made of the rows, and not for the rows."""
    after = {dispatch}
    for node in layer:
        if not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    needed = _made_of([each for node in after for each in node.all_input_nodes], layer)
    return [node for node in layer if node in needed - after - _made_of([combine], layer)]


def _made_of(nodes: Iterable[fx.Node], layer: Sequence[fx.Node]) -> set[fx.Node]:
    """Return nodes and all that they are made of within a layer."""
    inside, found, waiting = set(layer), set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node in inside and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _reorder(graph: fx.Graph, behind: dict[fx.Node, Sequence[fx.Node]]) -> None:
    """Move calls behind others; what these calls are made of precedes them."""
    moved = {node for nodes in behind.values() for node in nodes}
    nodes = list(graph.nodes)
    ordered: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        if node not in ordered:
            for each in node.all_input_nodes:
                visit(each)
            ordered[node] = None
            for each in behind.get(node, ()):
                visit(each)

    for node in nodes:
        if node not in moved:
            visit(node)
    last = nodes[0]
    for node in ordered:
        if node is not last:
            last.append(node)
        last = node
    graph.lint()
