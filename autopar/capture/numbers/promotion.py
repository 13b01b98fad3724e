"""Tensors that stand for numbers are promoted as numbers: they never make a result wider.

PyTorch promotes a number to the dtype of the other tensors. A tensor without dims gives way to tensors with dims in
the same way, but not to others without dims, such as losses: before these it is cast to their dtype.
"""

from __future__ import annotations

from collections.abc import Collection

from autopar.capture.passes.identities import drop_identities
from autopar.capture.passes.traced_graph import TracedGraph, aten, value_of

COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)
"""Operators that take a number second; if the tensor comes first, it is rounded to 16 bits with these."""


def promoted_as_numbers(draft: TracedGraph, places: Collection[int]) -> None:
    """Cast what follows from the inputs at `places` alone where a number would be promoted otherwise.

    It comes second in a call, as a number does. The results of nodes must be evaluated again behind it.
    """
    sources = {node: node.meta["source"] for node in draft.placeholders()}
    numbers = {node for node, source in sources.items() if source.kind == "input" and source.index in places}
    for node in draft.calls():
        given = node.all_input_nodes
        if given and all(each in numbers for each in given):
            numbers.add(node)
            continue
        if node.target in COMMUTATIVE and len(node.args) == 2 and node.args[0] in numbers:
            node.args = node.args[::-1]
        for number in [each for each in given if each in numbers and value_of(each).is_floating_point()]:
            others = [value_of(each) for each in given if each not in numbers]
            wanted = {other.dtype for other in others if other.is_floating_point()}
            if any(other.ndim for other in others) or len(wanted) != 1 or value_of(number).dtype in wanted:
                continue
            with draft.graph.inserting_before(node):
                cast = draft.call(aten.to.dtype, number, wanted.pop(), module=node.meta["module"])
            node.replace_input_with(number, cast)
            numbers.add(cast)
        node.meta["val"] = draft.evaluate(node.target, node.args, node.kwargs, node.meta["module"])  # type: ignore[arg-type]
    drop_identities(draft)
