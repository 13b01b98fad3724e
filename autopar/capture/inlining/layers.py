"""Placeholder operator for a layer equal to an earlier one in an exported graph, until its calls are inlined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.capture.inlining.recorded import Recorded
from autopar.capture.passes.traced_graph import module_path

LAYER = Recorded("autopar_equal_layer")
"""Operator that stands for an equal layer; its arguments are the body's number and the tensors the body reads."""


@dataclass(frozen=True, slots=True)
class Body:
    """Traced calls of one layer, with what it reads as placeholders and module paths that start at the layer."""

    graph: fx.Graph

    @classmethod
    def of(cls, nodes: Sequence[fx.Node], read: Sequence[fx.Node], outputs: Sequence[fx.Node], path: str) -> Body:
        """Copy the nodes of the layer at `path` into a body whose placeholders are the outside nodes `read`."""
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        for node in read:
            copied[node] = graph.placeholder(node.name)
            copied[node].meta["val"] = node.meta.get("val")
        for node in nodes:
            copied[node] = graph.node_copy(node, copied.__getitem__)
            inside = path_within(node, path)
            assert inside is not None, "a body is made of what its layer calls"
            copied[node].meta = {"val": node.meta.get("val"), "nn_module_stack": {"": (inside, "")}}
        graph.output(tuple(copied[node] for node in outputs))
        return cls(graph)


def path_within(node: fx.Node, path: str) -> str | None:
    """Return the path of the module that made a call, from the module at `path` on; None where it is not inside of
    that.
    """
    found = module_path(node)
    if found == path:
        return ""
    return found.removeprefix(f"{path}.") if found.startswith(f"{path}.") else None


def joined(outer: str, inner: str) -> str:
    """Return a path from a module on, from where that one's own begins."""
    return f"{outer}.{inner}" if outer and inner else outer or inner
