"""A limit on the rows that each expert takes of a sample, where the user asks for one: `Experts(capacity_factor=…)`.

    dispatch(x, index, E)  →  dispatch(x, within_capacity(index, E, capacity_factor), E, dropping)

It holds in every block of experts or not at all: what is in a form that is not known cannot be limited.
"""

from __future__ import annotations

import operator

from torch import fx

from autopar.capture.experts.forms import CASTS
from autopar.capture.passes.refused_calls import where
from autopar.capture.passes.traced_graph import TracedGraph, arguments, aten, shape_of
from autopar.capture.passes.views import VIEWS
from autopar.errors import CaptureError, InputError
from autopar.ir.program.operators.capacity import WITHIN_CAPACITY
from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH, OTHER_GROUPED_PRODUCTS

SLOT_DIMS = "slot_dims"
"""Key in a dispatch node's meta: the number of trailing index dims that are slots of one token."""
ROUTE = 3


def limit_rows(draft: TracedGraph, capacity_factor: float) -> None:
    """Let experts take no more rows of a sample than this share of what balanced routing gives them.

    Raises CaptureError if the model has no known kind of experts or other kinds as well, or if tokens lie in a plain
    list, which has no samples.
    """
    message = f"Experts(capacity_factor={capacity_factor:g}) limits the rows of sorted experts"
    unknown = [node for node in draft.calls() if str(node.target) in OTHER_GROUPED_PRODUCTS]
    if unknown:
        raise CaptureError(
            f"{message}, and those in {where(unknown[0].meta['module'])} are written in a form that autopar does not "
            "know. docs/how-to/experts.md lists the forms that are known; write them so, or leave capacity_factor out."
        )
    sent = draft.calls(DISPATCH)
    if not sent:
        raise CaptureError(
            f"{message}, and the model has none: dense dispatch (einsums over a capacity, every expert on all tokens) "
            "has "
            "what capacity the model itself gives it. Leave capacity_factor out."
        )
    for node in sent:
        x, index = node.args[:2]
        assert isinstance(x, fx.Node) and isinstance(index, fx.Node)
        if len(shape_of(index)) < 2 + max(node.meta[SLOT_DIMS], 2 if _has_a_row_for_each_slot(x) else 1):
            raise CaptureError(
                f"{message} sample by sample, and in {where(node.meta['module'])} tokens lie in one list, of shape "
                f"{list(shape_of(x))}, whose samples are not known. Give the module (samples, positions, "
                "features), of which it may make a list itself by view, reshape or flatten; one list as (1, tokens, "
                "features) is one sample."
            )
        _limit(draft, node, index, capacity_factor)


def pad_rows(draft: TracedGraph, padded: float) -> None:
    """Let ranks exchange and keep equally many rows, so many times a device's share; InputError if there are none."""
    ends = [node for node in draft.calls() if node.target in (DISPATCH, COMBINE)]
    if not ends:
        raise InputError(
            f"Experts(padded={padded:g}) pads the rows of sorted experts, and the model has none in a form that is "
            "known. docs/how-to/experts.md lists the forms; write them so, or leave padded out."
        )
    for node in ends:
        dropping = arguments(node).get("dropping", False)
        node.args = (*node.args[: 3 if node.target is DISPATCH else 5], dropping, padded)


def _has_a_row_for_each_slot(x: fx.Node) -> bool:
    """Return whether tokens are repeated along their last leading dim, once for each of their experts."""
    dim = len(shape_of(x)) - 2
    while dim >= 0 and x.target in (*CASTS, *VIEWS, aten.mul.Tensor) and isinstance(x.args[0], fx.Node):
        factors = [each for each in x.args[:2] if isinstance(each, fx.Node) and shape_of(each) == shape_of(x)]
        if not factors:
            return False
        x = factors[0]
    if x.target is aten.expand.default:
        (source,) = x.all_input_nodes
        return shape_of(source)[-2:-1] == (1,) and shape_of(x)[dim] > 1
    if x.target is aten.repeat.default:
        repeats = x.args[1]
        assert isinstance(repeats, list | tuple)
        return bool(repeats[dim] != 1)
    return x.target is aten.repeat_interleave.self_int and arguments(x)["dim"] in (dim, -2)


def _limit(draft: TracedGraph, sent: fx.Node, index: fx.Node, capacity_factor: float) -> None:
    x, _, num_experts = sent.args
    with draft.graph.inserting_before(sent):
        within = draft.call(WITHIN_CAPACITY, index, num_experts, float(capacity_factor), module=sent.meta["module"])
    sent.args = (x, within, num_experts, True)
    for route in sent.users:
        if route.target is operator.getitem and route.args[1] == ROUTE:
            for end in tuple(route.users):
                assert end.target is COMBINE, f"{end.target} reads where rows are"
                end.args = (*end.args[:5], True)
