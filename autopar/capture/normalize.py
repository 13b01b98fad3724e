"""Normalization of what `torch.export` records for the planner: fewer kinds of calls, none hidden or in place.

The order matters: in-place operations go first, while views still say whose memory they share; gradients come last,
when the graph is the one that will run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from autopar.capture.experts.capacity import limit_rows
from autopar.capture.experts.repeated import repeated_tokens
from autopar.capture.experts.rewrite_experts import sorted_experts
from autopar.capture.inlining.gradients import gradients
from autopar.capture.masks.documents import documents_by_position
from autopar.capture.masks.flex import flex_attention
from autopar.capture.masks.rewrite_masks import masks_by_position
from autopar.capture.masks.sinks import attention_with_sinks
from autopar.capture.masks.truths import masks_of_truth_values
from autopar.capture.passes.embedding_bags import pooled_bags
from autopar.capture.passes.functionalize import functionalize
from autopar.capture.passes.hooks import hooks_on_all_uses
from autopar.capture.passes.identities import drop_identities
from autopar.capture.passes.projections import flat_projections_to_batched, packed_projections_to_separate
from autopar.capture.passes.traced_graph import TracedGraph, aten, set_call, shape_of, value_of
from autopar.capture.passes.views import batch_and_heads_apart, split_before_permuting, state_sizes
from autopar.capture.rows.class_losses import joined_cross_entropies
from autopar.capture.rows.labels import ignored_positions
from autopar.capture.rows.samples import tokens_in_samples
from autopar.capture.tiles.mlp import tiled_mlps
from autopar.capture.tiles.requested_tiles import Tiles
from autopar.capture.tiles.tiled_losses import AUTO, tiled_losses
from autopar.errors import CaptureError
from autopar.ir.program.program import TensorInfo

Pass = Callable[[TracedGraph], None]


@unset_fake_temporarily()
def normalize(draft: TracedGraph, capacity_factor: float | None = None) -> None:
    """Rewrite the draft in place, one pass after the other; the last one where experts have a capacity.

    Results that passes compute from constants have values, also under a FakeTensorMode of the caller; the draft has its
    own.
    """
    for rewrite in PASSES:
        rewrite(draft)
    if capacity_factor is not None:
        limit_rows(draft, capacity_factor)
        propagate(draft)


def in_tiles(draft: TracedGraph, tiles: Tiles, training: bool) -> None:
    """Take losses and MLPs of a normalized draft in tiles, as requested."""
    if tiles.loss:
        tiled_losses(draft, tiles.loss, training)
        drop_dead_calls(draft)
        propagate(draft)
    if tiles.mlp and tiles.mlp != AUTO:
        tiled_mlps(draft, tiles.mlp, training)
        drop_dead_calls(draft)
        propagate(draft)


def single_broadcasts(draft: TracedGraph) -> None:
    """Replace broadcast_tensors by one expansion per tensor."""
    for node in draft.calls(aten.broadcast_tensors.default):
        tensors = node.args[0]
        assert isinstance(tensors, list | tuple)
        for piece in list(node.users):
            set_call(piece, aten.expand.default, tensors[piece.args[1]], list(shape_of(piece)))  # type: ignore[index]


def state_dtypes(draft: TracedGraph) -> None:
    """Rewrite all casts as to.dtype; other forms may name a device or another tensor as well."""
    for node in draft.calls(*CASTS):
        source = node.args[0]
        if not isinstance(source, fx.Node):  # a number that torch.vmap casts as it would a tensor
            set_call(node, aten.full.default, [], source, dtype=value_of(node).dtype)
        elif value_of(source).dtype != value_of(node).dtype:
            set_call(node, aten.to.dtype, source, value_of(node).dtype)


def real_signs(draft: TracedGraph) -> None:
    """Replace sgn of real numbers by sign: the gradient of sgn has no storage, and crashes as a DTensor."""
    for node in draft.calls(aten.sgn.default):
        if not value_of(node).is_complex():
            set_call(node, aten.sign.default, node.args[0])


def drop_dead_calls(draft: TracedGraph) -> None:
    """Drop calls that nothing reads; a batch_norm in training stays, for its running statistics."""
    for node in reversed(draft.calls()):
        keeps_statistics = node.target is aten.batch_norm.default and node.args[5]
        if not node.users and not keeps_statistics:
            draft.graph.erase_node(node)


def detach_dead_ends(draft: TracedGraph) -> None:
    """Detach what goes to calls from which no gradient comes back, as to scores of which only the order is read."""
    live = {node for node in draft.graph.output_node().all_input_nodes if _is_recorded_by_autograd(node)}
    for node in reversed(draft.calls()):
        if _is_recorded_by_autograd(node) and not live.isdisjoint(node.users):
            live.add(node)
    for node in draft.calls():
        if node in live or not _is_recorded_by_autograd(node) or node.target is operator.getitem:
            continue
        for source in node.all_input_nodes:
            maker = source.args[0] if source.target is operator.getitem else source
            if maker in live or (source.op == "placeholder" and _is_recorded_by_autograd(source)):
                with draft.graph.inserting_before(node):
                    detached = draft.call(aten.detach.default, source, module=node.meta["module"])
                node.replace_input_with(source, detached)


def _is_recorded_by_autograd(node: fx.Node) -> bool:
    found = node.meta["val"]
    return any(
        isinstance(x, Tensor) and x.requires_grad for x in (found if isinstance(found, list | tuple) else [found])
    )


def drop_unused_placeholders(draft: TracedGraph) -> None:
    """Drop placeholders that nothing reads; but parameters of a forward alone are stored all the same, and stay."""
    learns = any(map(_is_recorded_by_autograd, draft.placeholders()))
    for node in draft.placeholders():
        if not node.users and (learns or node.meta["source"].kind != "parameter"):
            draft.graph.erase_node(node)


def on_the_host(draft: TracedGraph) -> None:
    """Let every call that makes a tensor name the CPU; the runtime puts its own device in that place."""
    rehome(draft.graph, torch.device("cpu"))


def propagate(draft: TracedGraph) -> None:
    """Run the graph on fake tensors: shapes, dtypes and requires_grad are those of the graph that will run."""
    for node in draft.calls():
        node.meta["val"] = draft.evaluate(node.target, node.args, node.kwargs, node.meta["module"])  # type: ignore[arg-type]
    for node in draft.graph.nodes:
        if node.op != "output":
            node.meta["tensor"] = _info(node, node.meta["val"])


PASSES: tuple[Pass, ...] = (
    functionalize,
    hooks_on_all_uses,
    gradients,
    drop_dead_calls,
    single_broadcasts,
    pooled_bags,
    drop_identities,
    state_dtypes,
    real_signs,
    state_sizes,
    split_before_permuting,
    batch_and_heads_apart,
    flat_projections_to_batched,
    drop_dead_calls,
    sorted_experts,
    joined_cross_entropies,
    drop_dead_calls,
    tokens_in_samples,
    repeated_tokens,
    drop_dead_calls,
    ignored_positions,
    drop_dead_calls,
    packed_projections_to_separate,
    documents_by_position,
    flex_attention,
    drop_dead_calls,
    attention_with_sinks,
    masks_by_position,
    masks_of_truth_values,
    drop_dead_calls,
    drop_unused_placeholders,
    detach_dead_ends,
    propagate,  # the passes above change strides, which the passes below read
    drop_identities,
    state_sizes,
    on_the_host,
    propagate,
)


def rehome(graph: fx.Graph, device: torch.device) -> None:
    """Let every call that makes a tensor make it on `device`."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        makes = not any(isinstance(arg, fx.Node) for arg in node.args)
        accepts = any(argument.name == "device" for argument in node.target._schema.arguments)
        if node.kwargs.get("device") is not None or (makes and accepts):
            node.update_kwarg("device", device)
        if "pin_memory" in node.kwargs:
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "pin_memory"}


CASTS = (
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
)


def _info(node: fx.Node, value: object) -> TensorInfo | tuple[TensorInfo | None, ...] | None:
    if isinstance(value, Tensor):
        return TensorInfo(tuple(value.shape), value.dtype, value.requires_grad)
    if isinstance(value, tuple | list):
        return tuple(_info(node, each) for each in value)  # type: ignore[misc]
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise CaptureError(
            f"{node.target} in {node.meta['module'] or 'the forward'} turns a tensor's value into a number, on which "
            "the graph would depend; keep it a tensor, or give it to the model as an argument that is a plain number."
        )
    return None
