"""A plan as a `tp_plan` of Hugging Face's transformers: the styles of one mesh axis, by names of modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from autopar.costs.plans.answers import TensorParallelPlan
from autopar.costs.plans.plan import Plan
from autopar.ir.program.paths import starred
from autopar.planning.settings import context_of
from autopar.views.translation.axis_purposes import purposes, recomputed, stored_in_parts, tensor_axis, unexpressed
from autopar.views.translation.matrices import Matrix, matrices_on

STYLES: Mapping[tuple[str, str, bool], str] = {
    ("linear", "column", False): "colwise",
    ("linear", "column", True): "colwise_gather_output",
    ("linear", "row", False): "rowwise",
    ("linear", "row", True): "rowwise_split_input",
    ("embedding", "column", True): "embedding_colwise",
    ("embedding", "row", True): "embedding_rowwise",
}
"""(kind, role, whole outside) → style, by the names that transformers registers from 5.0 on."""
WHOLE, SUMMED = "replicate", "replicated_with_grad_allreduce"


def tp_plan(plan: Plan, axis: str | None = None) -> TensorParallelPlan:
    """Return a `tp_plan`; PlanError if several axes split matrices and none is requested, or if it was loaded."""
    context, axis = context_of(plan, "tp_plan"), tensor_axis(plan, axis)
    if axis is None:
        return TensorParallelPlan(None, {}, ("no axis splits matrices", *_notes_on_other_axes(plan, None)))
    found = matrices_on(context, axis, weights_in_chains=True)
    styles = {each.module: _style(each) for each in found.matrices}
    styles |= dict.fromkeys(sorted(found.own_weights), SUMMED)
    tied = tuple(f"{module}: shares its matrix or is called several times, and stays whole" for module in found.tied)
    lost = (*tied, *unexpressed(plan, axis, found.expressed), *_notes_on_other_axes(plan, axis), *recomputed(plan))
    return TensorParallelPlan(axis, folded_styles(styles), lost)


def _style(matrix: Matrix) -> str:
    return STYLES[matrix.kind, matrix.role, matrix.whole] if matrix.role else WHOLE


def _notes_on_other_axes(plan: Plan, axis: str | None) -> tuple[str, ...]:
    """Return one note on the purpose of each other axis, which a tp_plan does not express."""
    parts = stored_in_parts(plan)
    return tuple(
        f"{name}: divided by {purpose}, weights {'in parts' if name in parts else 'whole'}; a tp_plan is about one axis"
        for name, purpose in purposes(plan).items()
        if name != axis and plan.mesh.size(name) > 1
    )


def folded_styles(styles: Mapping[str, str]) -> dict[str, str]:
    """Join numbered modules of one style in a pattern with `*`; those of several styles stay apart."""
    groups: dict[str, set[str]] = defaultdict(set)
    for module, style in styles.items():
        groups[starred(module)].add(style)
    return {
        (starred(module) if len(groups[starred(module)]) == 1 else module): style for module, style in styles.items()
    }
