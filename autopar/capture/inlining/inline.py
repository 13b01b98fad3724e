"""One flat graph out of an exported one: regions without gradients and regions of autocast become explicit calls.

Inside a region without gradients, what requires a gradient is read through `detach`, so that neither values nor memory
are saved for a backward that does not exist. Where autocast is on, its casts become calls. Assertions are left out.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from autopar.capture.inlining.function_stand_ins import KEPT, KeptUse
from autopar.capture.inlining.gradients import GRADIENT, NEEDS_GRADIENT, GradientCall, needs_gradient
from autopar.capture.inlining.layers import LAYER, Body, joined
from autopar.capture.passes.autocast import Autocast, Casts
from autopar.capture.passes.refused_calls import check_call, has_derivative
from autopar.capture.passes.traced_graph import (
    Source,
    TracedGraph,
    aten,
    is_write,
    module_path,
    storages,
    written_arguments,
)
from autopar.errors import CaptureError
from autopar.ir.program.operators.set_data import SET_DATA

DROPPED = (
    aten._assert_tensor_metadata.default,
    aten._assert_async.msg,
    aten._assert_async.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)


@dataclass(frozen=True, slots=True)
class StandIns:
    """Meanings of the recorded operators of an exported graph, by the number that they are called with."""

    functions: Sequence[KeptUse] = ()
    """Arguments of KEPT."""
    gradients: Sequence[GradientCall] = ()
    """Arguments of GRADIENT."""
    bodies: Sequence[Body] = ()
    """Arguments of LAYER."""


@dataclass(frozen=True, slots=True)
class Region:
    """Gradient and autocast modes under which the calls in a part of the graph run."""

    grad: bool = True
    casts: Casts | None = None
    path: str = ""
    """Path of the module that the paths of the region's calls start from."""
    own: bool = False
    """True if each value in the region belongs to one call alone, as `TracedGraph.evaluate` explains."""


@dataclass(slots=True)
class Inliner:
    """Copies calls of the exported graph and its regions into the draft."""

    draft: TracedGraph
    stand_ins: StandIns = StandIns()
    written: frozenset[int] = frozenset()
    """Storages of the exported values that a call writes into."""
    device: str | None = None
    """The type of device that the program is for; None: any."""
    detached: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def copy(self, module: fx.GraphModule | Body, inputs: Sequence[Any], region: Region) -> tuple[Any, ...]:
        """Append the calls of `module`'s graph, and return its outputs."""
        values: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                assert isinstance(module, fx.GraphModule), "a body reads what it is given"
                values[node] = self._attribute(module, str(node.target))
            elif node.op == "call_function" and node.target not in DROPPED:
                args, kwargs = map_aggregate(
                    (node.args, node.kwargs), lambda x: values[x] if isinstance(x, fx.Node) else x
                )  # type: ignore[misc]
                values[node] = self._call(node, args, dict(kwargs), region)
        outputs = map_aggregate(
            module.graph.output_node().args[0], lambda x: values[x] if isinstance(x, fx.Node) else x
        )
        return tuple(outputs)  # type: ignore[arg-type]

    def _call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        target: Any = node.target
        if target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            enabled, body, *inputs = args
            return self.copy(body, inputs, replace(region, grad=enabled))
        if target is torch.ops.higher_order.wrap_with_autocast:
            device, dtype, enabled, _, body, *inputs = args
            # Traced tensors are on the CPU in place of the mesh's device; other devices' autocast does nothing.
            if self.device is not None and device not in (self.device, "cpu"):
                return self.copy(body, inputs, region)
            there = Autocast(self.device or device, dtype or torch.bfloat16)
            return self.copy(body, inputs, replace(region, casts=Casts(self.draft, there) if enabled else None))
        if target is operator.getitem and not isinstance(args[0], fx.Node):
            return args[0][args[1]]
        path = joined(region.path, module_path(node))
        if target is LAYER:
            number, *inputs = args
            shared = region.own or self._is_written(node, *node.all_input_nodes)
            return self.copy(self.stand_ins.bodies[number], inputs, replace(region, path=path, own=shared))
        if target is NEEDS_GRADIENT:
            return self.draft.call(needs_gradient, *args, module=path)
        if target is GRADIENT:
            number, *tensors = args
            return self.draft.call(self.stand_ins.gradients[number], *tensors, module=path)
        if target is KEPT:
            number, *tensors = args
            target, args = self.stand_ins.functions[number].call(tensors, region.casts and region.casts.region.dtype)
        if isinstance(target, torch._ops.HigherOrderOperator):
            raise CaptureError(
                f"the model uses the operator {target.name()} in {path or 'its forward'}, whose body "
                "cannot be captured as plain calls; use ordinary operations in its place."
            )
        check_call(target, args, kwargs, path)
        written = written_arguments(target, args, kwargs) if is_write(target) and not region.grad else ()
        itself = next((value for value in written if isinstance(value, fx.Node)), None)
        if not region.grad and itself is None and self._is_its_argument(target, args, kwargs):
            return args[0]
        if (not region.grad or not has_derivative(target)) and target is not SET_DATA:
            args, kwargs = map_aggregate((args, kwargs), self._without_gradient)  # type: ignore[misc]
        if region.casts is not None:
            args, kwargs = region.casts.applied(target, args, kwargs, path)
        own = region.own or self._is_written(node)
        call = self.draft.call(target, *args, module=path, own=own, **kwargs)
        # A write returns the tensor that it was given, which keeps the gradient that it has.
        return call if itself is None or isinstance(call.meta["val"], tuple) else itself

    def _is_its_argument(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call gives back its first argument, as casts to the same dtype and dropout in eval mode do.

        The tensor keeps its gradient then; `torch.export` has the call's result in its place from there on.
        """
        if not args or not isinstance(args[0], fx.Node) or not _requires_grad(value := args[0].meta["val"]):
            return False
        given: Any = map_aggregate((args, kwargs), lambda x: x.meta["val"] if isinstance(x, fx.Node) else x)
        with self.draft.mode:
            return target(*given[0], **given[1]) is value

    def _is_written(self, *nodes: fx.Node) -> bool:
        """Return whether any call writes into memory that one of the nodes' exported values occupies."""
        return any(not self.written.isdisjoint(storages(node.meta.get("val"))) for node in nodes)

    def _without_gradient(self, value: Any) -> Any:
        if not isinstance(value, fx.Node) or not _requires_grad(value.meta["val"]):
            return value
        if value not in self.detached:
            module = value.meta.get("module", "")
            # `own`: the memory of another tensor's detached value must not be taken for this one's.
            self.detached[value] = self.draft.call(aten.detach.default, value, module=module, own=True)
        return self.detached[value]

    def _attribute(self, module: fx.GraphModule, name: str) -> Any:
        found = operator.attrgetter(name)(module)
        if not isinstance(found, Tensor):
            return found
        return add_placeholder(self.draft, name.replace(".", "_"), found, Source("constant", value=found))


def inline(
    module: fx.GraphModule,
    sources: Mapping[str, Source],
    mode: FakeTensorMode,
    values: Mapping[str, Any],
    autocast: Autocast | None,
    stand_ins: StandIns = StandIns(),
    device: str | None = None,
) -> TracedGraph:
    """Return a draft of an exported graph.

    Args:
        sources: what each tensor placeholder stands for; equal sources become one placeholder.
        values: fake value of every tensor placeholder.
        autocast: the autocast region around the whole graph, if any.
        stand_ins: what the recorded operators of the graph stand for.
        device: the type of device that the program is for, whose autocast regions count; None: any.
    """
    draft = TracedGraph(fx.Graph(), mode)
    made: dict[tuple[str, str, int], fx.Node] = {}
    inputs: list[Any] = []
    for node in module.graph.find_nodes(op="placeholder"):
        source = sources.get(node.name)
        if source is None:
            inputs.append(node.meta["val"])
            continue
        key = (source.kind, source.name or node.name, source.index)
        if key not in made:
            made[key] = add_placeholder(draft, node.name, values[node.name], source)
        inputs.append(made[key])
    casts = None if autocast is None else Casts(draft, autocast)
    written = _storages_written(module, stand_ins.bodies)
    outputs = Inliner(draft, stand_ins, written, device).copy(module, inputs, Region(casts=casts))
    draft.graph.output(outputs)
    return draft


def add_placeholder(draft: TracedGraph, name: str, value: Tensor, source: Source) -> fx.Node:
    """Return a placeholder after the present ones."""
    present = draft.placeholders()
    with draft.graph.inserting_after(present[-1]) if present else draft.graph.inserting_before():
        node = draft.graph.placeholder(name)
    node.meta.update(val=_fake(value, draft.mode), module="", source=source)
    return node


def _fake(value: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return fake.requires_grad_(value.requires_grad)


def _storages_written(module: fx.GraphModule, bodies: Sequence[Body]) -> frozenset[int]:
    """Return the storages into which calls of a graph, its regions and bodies write, as they were exported."""
    graphs = [part.graph for part in (*module.modules(), *bodies) if isinstance(part, fx.GraphModule | Body)]
    writes = [node for graph in graphs for node in graph.nodes if is_write(node.target)]
    changed = (value for node in writes for value in written_arguments(node.target, node.args, node.kwargs))
    values = (value.meta.get("val") for value in pytree.tree_leaves(list(changed)) if isinstance(value, fx.Node))
    return frozenset(storage for value in values for storage in storages(value))


def _requires_grad(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(value))
