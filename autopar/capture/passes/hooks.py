"""A gradient hook acts on the whole gradient of its tensor: what reads the tensor reads it through the hook."""

from __future__ import annotations

from torch import fx

from autopar.capture.passes.traced_graph import TracedGraph
from autopar.ir.program.gradient_hooks import GRADIENT_HOOK


def hooks_on_all_uses(draft: TracedGraph) -> None:
    """Put every hook right behind the call that gives its tensor, before all that reads it; the first one runs first.

    In-place operations are gone, so that a tensor that is written later is another value.
    """
    outermost: dict[fx.Node, fx.Node] = {}
    for node in draft.calls(GRADIENT_HOOK):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        owner = next((owner for owner, hook in outermost.items() if source in (owner, hook)), source)
        if owner in outermost:
            first = next(user for user in owner.users if user.target is GRADIENT_HOOK)
            node.replace_input_with(source, owner)
            owner.append(node)
            first.replace_input_with(owner, node)
        else:
            outermost[owner] = node
            _anchor_of(owner).append(node)
            owner.replace_all_uses_with(node, lambda user, hook=node: user is not hook)


def _anchor_of(owner: fx.Node) -> fx.Node:
    """Return the node after which a call that reads `owner` may stand: `owner`, or the last placeholder."""
    if owner.op != "placeholder":
        return owner
    return [node for node in owner.graph.nodes if node.op == "placeholder"][-1]
