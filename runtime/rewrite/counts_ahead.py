"""Counts of the rows of a mean, summed over ranks at the start of the forward, long before the loss needs them.

How many targets count depends on targets alone, and these, in most models, on inputs alone. So the sum overlaps with
the forward, and the loss does not wait for the slowest ranks: nothing computes between it and its backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection

from torch import fx

from autopar.ir.program.effects import is_random
from autopar.runtime.collectives.layout_moves import split, split_replicated
from autopar.runtime.implementations import loss
from autopar.runtime.recompute.marks import MARK

LOCAL = (split, split_replicated)
"""Moves that take a part of what a rank has."""


def count_ahead(graph: fx.Graph, weights: Collection[fx.Node]) -> None:
    """Have every mean over rows of several ranks count them as early as its targets are there.

    Targets that are made of `weights` stay where they are made.
    """
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in list(graph.nodes):
        if node.target not in loss.COUNTED:
            continue
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        given.apply_defaults()
        call, (classes, weighting) = given.arguments, loss.COUNTED[node.target]
        rows = {factor: names for factor, names in call["axes"].items() if factor != classes}
        if call["reduction"] != loss.MEAN or call.get(weighting) is not None or not rows:
            continue
        made = _made_of_inputs(call["target"], graph, weights)
        for each in made or ():
            first.prepend(each)
        with graph.inserting_before(node if made is None else first):
            count = graph.call_function(
                loss.start_count, (call["target"], call["ignore_index"]), {"axes": rows, "classes": classes}
            )
        count.meta = {"module": "", "layout": None}
        node.kwargs = {**node.kwargs, "divisor": count}


def _made_of_inputs(target: fx.Node, graph: fx.Graph, weights: Collection[fx.Node]) -> list[fx.Node] | None:
    """Return the calls that make targets, in order; None if they take weights, move something, draw numbers, or run
    again.
    """
    found, waiting = {target}, [target]
    while waiting:
        more = set(waiting.pop().all_input_nodes) - found
        found |= more
        waiting += more
    calls = [node for node in graph.nodes if node in found and node.op != "placeholder"]
    return calls if found.isdisjoint(weights) and all(map(_may_run_early, calls)) else None


def _may_run_early(node: fx.Node) -> bool:
    if MARK in node.meta or is_random(node):
        return False
    return node.target in LOCAL or not getattr(node.target, "__module__", "").startswith("autopar.")
