"""A per-rank graph for torch.compile, whose regions say what is computed or gathered again in the backward.

torch.compile does not see what autograd saves: its partitioner decides what a backward saves, and it honours
`torch.utils.checkpoint`, with a policy for every operation. So these become regions, each a module of its own:

    a segment that is computed again    its results that the mode saves (of products, of collectives), and those of
                                        random draws, are saved; all else runs again
    a gather, or a cast, of weights     everything runs again, from the parts that are stored
    that is done again

Calls keep their order, but for those of weights between the calls of a segment, which come before it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx import traceback
from torch.fx.node import Target, map_arg
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autopar.runtime.collectives.mesh_axes import Axis, current_axes, use_axes
from autopar.runtime.implementations.randomness import Randomness, randomness, use_randomness
from autopar.runtime.recompute.marks import role_of
from autopar.runtime.recompute.unmixed import unmixed

KEPT = "autopar_kept"
"""The annotation of calls in a region whose results are saved."""
NAMESPACE = "autopar_runtime"  # namespace of operators that are opaque to torch.compile


def in_regions(graph: fx.Graph) -> fx.GraphModule:
    """Return the graph with its regions as modules; its gathers each gather all of their weights again, or none."""
    return _Regions(unmixed(graph)).made()


class _Regions:
    """A graph that is written again, region by region."""

    def __init__(self, graph: fx.Graph) -> None:
        self.old, self.new = graph, fx.Graph()
        self.root = nn.Module()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.open: list[fx.Node] = []
        """The calls of the segment so far."""

    def made(self) -> fx.GraphModule:
        for node in self.old.nodes:
            role = role_of(node)
            if node.op == "output":
                self._close()
                self.new.output(map_arg(node.args[0], self.copies.__getitem__))
            elif role is not None and not role.weight:
                if self.open and role_of(self.open[-1]).segment != role.segment:  # type: ignore[union-attr]
                    self._close()
                self.open.append(node)
            else:
                if not set(self.open).isdisjoint(node.all_input_nodes):
                    self._close()
                again = role is not None or node.kwargs.get("regather")
                self.copies[node] = (
                    self._rerun_region(node) if again else self.new.node_copy(node, self.copies.__getitem__)
                )
        self.new.lint()
        return fx.GraphModule(self.root, self.new, "Regions")

    def _rerun_region(self, node: fx.Node) -> fx.Node:
        """Return a region of one call, all of which runs again."""
        args, kwargs = map_arg((node.args, dict(node.kwargs)), self.copies.__getitem__)
        new = self._module(FromWhatIsStored(node.target), node.name, args, kwargs)
        new.meta = dict(node.meta)
        return new

    def _close(self) -> None:
        """Write the open segment down as a region."""
        if not self.open:
            return
        inside = set(self.open)
        inputs = list(dict.fromkeys(x for node in self.open for x in node.all_input_nodes if x not in inside))
        outputs = [node for node in self.open if not inside.issuperset(node.users)]
        region, root = fx.Graph(), nn.Module()
        values = {node: region.placeholder(node.name) for node in inputs}
        for node in self.open:
            role = role_of(node)
            assert role is not None
            if role.saved:
                root.add_module(node.name, Kept(node.target))
                args, kwargs = map_arg((node.args, dict(node.kwargs)), values.__getitem__)
                values[node] = region.call_module(node.name, args, kwargs)
            else:
                values[node] = region.node_copy(node, values.__getitem__)
        region.output(tuple(values[node] for node in outputs))
        made = Recomputed(fx.GraphModule(root, region, "Segment"))
        result = self._module(made, self.open[0].name, tuple(self.copies[node] for node in inputs), {})
        for position, node in enumerate(outputs):
            self.copies[node] = self.new.call_function(operator.getitem, (result, position))
        self.open = []

    def _module(self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        self.root.add_module(f"region_{name}", module)
        return self.new.call_module(f"region_{name}", args, kwargs)


class Recomputed(nn.Module):
    """A segment that runs again in the backward, but for what it saves."""

    def __init__(self, segment: fx.GraphModule) -> None:
        super().__init__()
        self.segment = segment

    def forward(self, *inputs: Any) -> Any:
        return checkpoint(self.segment, *inputs, use_reentrant=False, context_fn=_contexts_of_segment)


class FromWhatIsStored(nn.Module):
    """A call on stored parameters that runs again in the backward, whoever asks."""

    def __init__(self, function: Target) -> None:
        super().__init__()
        self.function: Any = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(self.function, **kwargs), *args, use_reentrant=False, context_fn=_contexts_of_weights)


class Kept(nn.Module):
    """A call of a segment whose results are saved."""

    def __init__(self, function: Target) -> None:
        super().__init__()
        self.function: Any = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with traceback.annotate({KEPT: True}):
            return self.function(*args, **kwargs)


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = KEPT in traceback.current_meta.get("custom", ()) or _draws(operation)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE


def _draws(operation: Any) -> bool:
    """Return whether an operation of autopar draws by the running step, which in the backward may be another one."""
    return getattr(operation, "namespace", "") == NAMESPACE and torch.Tag.nondeterministic_seeded in operation.tags


def _contexts_of_segment() -> Any:
    first, again = create_selective_checkpoint_contexts(_policy)
    return first, again if torch.compiler.is_compiling() else _as_at_first(again)


@contextlib.contextmanager
def _surrounded(within: Any, axes: Mapping[str, Axis], random: Randomness) -> Iterator[None]:
    with use_axes(axes), use_randomness(random.seed, random.step, random.deterministic), within:
        yield


def _as_at_first(again: Any) -> Any:
    """Return what a segment runs in again if torch.compile has left it as it is: what it ran in at first."""
    return _surrounded(again, current_axes(), randomness())


class _Unnumbered(_CachingTorchDispatchMode):
    """The partitioner saves what crosses from one region into a later one, by their numbers: not weights."""

    ac_graph_id = property(lambda self: 1 << 62, lambda self, value: None)


def _contexts_of_weights() -> Any:
    _, again = create_selective_checkpoint_contexts(_policy_of_weights)
    first = _Unnumbered(_policy_of_weights, again.storage)
    return first, again if torch.compiler.is_compiling() else _as_at_first(again)


def _policy_of_weights(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE
