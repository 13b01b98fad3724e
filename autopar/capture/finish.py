"""Conversion of a fully rewritten graph to a Program: placeholders in order, values as plain descriptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autopar.capture.experts.shared_experts import shared_experts_meanwhile
from autopar.capture.passes.traced_graph import Source, TracedGraph
from autopar.errors import CaptureError
from autopar.ir.program.program import Program, TensorInfo, fault_of_form

ORDER = ("parameter", "buffer", "constant", "input")


@dataclass(frozen=True, slots=True)
class Form:
    """Call interface of a model, and facts about the model that its graph does not record."""

    tied: dict[str, str]
    """Further names of tied tensors."""
    leaves: Sequence[Any]
    """Example inputs, flat."""
    names: tuple[str, ...]
    """Readable, one for each leaf."""
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    num_outputs: int
    training: bool
    model: str = ""
    """The name of the model's class."""


def finished(draft: TracedGraph, form: Form) -> Program:
    """Return the Program of a graph, which has no other use then."""
    graph = _with_placeholders_in_order(draft.graph)
    named = [(node.meta.pop("source"), node.name) for node in graph.nodes if node.op == "placeholder"]
    by_leaf = {source.index: name for source, name in named if source.kind == "input"}
    constants = {name: _real(source, name) for source, name in named if source.kind == "constant"}
    program = Program(
        graph=graph,
        parameters={source.name: name for source, name in named if source.kind == "parameter"},
        tied=form.tied,
        buffers={source.name: name for source, name in named if source.kind == "buffer"},
        constants=constants,
        inputs=tuple(by_leaf.get(index) for index in range(len(form.leaves))),
        input_values=tuple(_described(leaf) for leaf in form.leaves),
        in_spec=form.in_spec,
        out_spec=form.out_spec,
        num_outputs=form.num_outputs,
        mutations=draft.mutations,
        training=form.training,
        input_names=form.names,
        model=form.model,
    )
    shared_experts_meanwhile(program)
    return program


def _with_placeholders_in_order(graph: fx.Graph) -> fx.Graph:
    """Return the same graph, fresh, with parameters first, then buffers, constants and inputs."""
    ordered = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    others = [node for node in graph.nodes if node.op != "placeholder"]
    placeholders.sort(key=lambda node: ORDER.index(node.meta["source"].kind))
    for node in (*placeholders, *others):
        if node.op == "output":
            ordered.output(map_arg(node.args[0], copies.__getitem__))
            continue
        copied = copies[node] = ordered.node_copy(node, copies.__getitem__)
        copied.meta = {key: node.meta[key] for key in ("tensor", "module", "source") if key in node.meta}
    ordered.lint()
    return ordered


def _real(source: Source, name: str) -> Tensor:
    value = source.value
    assert value is not None
    fault = fault_of_form(value)
    if fault:
        raise CaptureError(f"the forward reads a tensor ({source.name or name}) that {fault}.")
    if value.is_meta or isinstance(value, torch._subclasses.FakeTensor):
        raise CaptureError(
            f"the forward reads a tensor ({source.name or name}) whose value is not there: an attribute on the meta "
            "device (register it as a buffer, or build the model on a real one), or a parameter that a forward hook "
            "holds itself (let the hook read it from its module)."
        )
    return value.detach().cpu()


def _described(leaf: Any) -> object:
    return TensorInfo(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
