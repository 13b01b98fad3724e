"""Graph nodes that a traced tensor is computed from."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot


def cone(tensor: Tensor) -> Iterator[fx.Node]:
    """Return the nodes of the graph being traced that a tensor is computed from; none of a tensor that is not
    traced.
    """
    node = node_of(tensor)
    return iter(()) if node is None else cone_of(node)


def cone_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node and the nodes that it is computed from."""
    left, seen = [node], set()
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield node
            left += node.all_input_nodes


def comes_from_inputs(tensor: Tensor) -> bool:
    """Return whether a tensor depends on a placeholder of the graph being traced; True outside of tracing."""
    return get_proxy_mode() is None or any(node.op == "placeholder" for node in cone(tensor))


def depends_on_call(tensor: Tensor, root: nn.Module) -> bool:
    """Return whether a traced tensor may differ between calls: it comes from inputs, parameters or random numbers."""
    buffers = {node_of(buffer) for buffer in root.buffers()}
    return any(
        (node.op == "placeholder" and node not in buffers)
        or (isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags)
        for node in cone(tensor)
    )


def comes_from(tensor: Tensor, constant: object) -> bool:
    """Return whether a traced tensor is computed from this very tensor, which is no input, parameter or buffer."""
    named = [node for node in cone(tensor) if node.op == "get_attr"]
    return any(getattr(_root(), str(node.target), None) is constant for node in named)


def _root() -> nn.Module | None:
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.root


def node_of(tensor: Tensor) -> fx.Node | None:
    """Return the node of a tensor in the graph being traced; None of one that is not traced."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node  # type: ignore[union-attr]
