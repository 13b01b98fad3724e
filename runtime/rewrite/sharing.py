"""One call in the place of several products in chunks that take the same input, which is gathered once for all of them.

A plan has all products that share an input run so, or none (`space.Space.reshard_seconds`). They run where the first of
them is computed, and what is made of weights alone for the others comes before.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

from torch import fx

from autopar.runtime.implementations.products.chunked import SHARED

IS_SHARED = "moves its input together with others"
"""Key in a node's meta that marks a product whose input is gathered together with that of others."""


def share_gathers(graph: fx.Graph) -> None:
    """Make one call of products that move an input together."""
    groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.meta.get(IS_SHARED):
            groups[node.args[0]].append(node)
    for products in groups.values():
        _share(graph, products)


def _share(graph: fx.Graph, products: list[fx.Node]) -> None:
    first, x = products[0], products[0].args[0]
    assert len({str(sorted(each.kwargs["axes"].items())) for each in products}) == 1, f"{products} part ways"  # type: ignore[union-attr]
    product_of_several, num_operands = SHARED[first.target]
    operands: list[Any] = []
    for each in products:
        operands += [*each.args[1:], *[None] * (1 + num_operands - len(each.args))]
    _move_before(first, [each for each in operands if isinstance(each, fx.Node)])
    with graph.inserting_before(first):
        together = graph.call_function(product_of_several, (x, *operands), dict(first.kwargs))
        together.meta = {**first.meta, "layout": None}
        for number, each in enumerate(products):
            part = graph.call_function(operator.getitem, (together, number))
            part.meta = dict(each.meta)
            each.replace_all_uses_with(part)
    for each in products:
        graph.erase_node(each)


def _move_before(first: fx.Node, operands: list[fx.Node]) -> None:
    """Have operands, and what they are made of, computed before a node that they do not depend on."""
    behind: set[fx.Node] = set()
    node = first.next
    while node.op != "root":
        behind.add(node)
        node = node.next
    needed: set[fx.Node] = set()
    waiting = [each for each in operands if each in behind]
    while waiting:
        node = waiting.pop()
        assert node is not first, f"a weight depends on {first}"
        needed.add(node)
        waiting += [each for each in node.all_input_nodes if each in behind and each not in needed]
    for node in [each for each in first.graph.nodes if each in needed]:
        first.prepend(node)
