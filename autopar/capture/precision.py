"""The casts of a precision at the borders of a graph: of parameters and inputs to the dtype of compute, and of outputs.

A model is traced as it computes, with parameters and inputs in the dtype of compute, as FSDP2 gives them to it. Then
what enters gets back the dtype in which it is stored or given, and a cast behind it, one for all its uses: a weight's
is moved before it, in the dtype of compute, as those of autocast are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.normalize import propagate
from autopar.capture.numbers.marked import Number
from autopar.capture.passes.autocast import Autocast
from autopar.capture.passes.traced_graph import TracedGraph, aten, value_of
from autopar.errors import InputError
from autopar.ir.program.precision import AS_IT_IS, Precision


def check_no_autocast(precision: Precision, autocast: Autocast | None) -> None:
    """Raise InputError where a model is called, or compiled, with a precision inside of an autocast region."""
    if precision != AS_IT_IS and autocast is not None:
        region = f"autocast({autocast.device!r}, {autocast.dtype})"
        raise InputError(
            f"the model has a precision of its own ({precision}), and this is inside of {region}, which would cast "
            "once more; leave one of them out."
        )


def in_compute_dtype(leaf: Any, precision: Precision) -> Any:
    """Return a leaf as the forward sees it: if it is cast, a meta tensor of the compute dtype in its place."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, Number) or precision.computes(leaf.dtype) == leaf.dtype:
        return leaf
    dtype = precision.computes(leaf.dtype)
    seen = torch.empty_strided(leaf.shape, leaf.stride(), dtype=dtype, device="meta")
    return seen.requires_grad_(leaf.requires_grad)


def cast_at_borders(
    draft: TracedGraph,
    stored: Mapping[str, torch.dtype],
    leaves: Sequence[Any],
    precision: Precision,
    num_outputs: int,
) -> None:
    """Let parameters enter as they are stored, inputs as they are given, and outputs leave as requested."""
    if precision == AS_IT_IS:
        return
    places = {node: place for place, node in enumerate(draft.graph.nodes)}
    for node in draft.placeholders():
        source = node.meta["source"]
        dtype = stored.get(source.name) if source.kind == "parameter" else None
        dtype = leaves[source.index].dtype if source.kind == "input" else dtype
        if dtype is not None and dtype != value_of(node).dtype:
            _cast_behind(draft, node, dtype, min(node.users, key=places.__getitem__, default=None))
    output = draft.graph.output_node()
    values: Any = output.args[0]
    requested = precision.outputs
    for value in dict.fromkeys(values[:num_outputs]) if requested is not None else ():
        if isinstance(value, fx.Node) and value_of(value).is_floating_point() and value_of(value).dtype != requested:
            with draft.graph.inserting_before(output):
                cast = draft.call(aten.to.dtype, value, requested)
            values = (*(cast if each is value else each for each in values[:num_outputs]), *values[num_outputs:])
    output.args = (values,)
    propagate(draft)


def _cast_behind(draft: TracedGraph, node: fx.Node, entering: torch.dtype, first_use: fx.Node | None) -> None:
    """Let a tensor enter in another dtype, and cast it for its users, if there are any, before the first of them."""
    used = value_of(node)
    with draft.mode:
        node.meta["val"] = used.detach().to(entering).requires_grad_(used.requires_grad)
    if first_use is None:
        return
    module = first_use.meta["module"] if first_use.op == "call_function" else ""
    with draft.graph.inserting_before(first_use):
        cast = draft.call(aten.to.dtype, node, used.dtype, module=module)
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
