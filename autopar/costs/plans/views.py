"""The one seam between plans and what shows or questions them: method of a plan → the function that answers.

A plan is a value and lies below all that is made of it. Its methods look views up here, so that no file of this package
imports from above it; a view's module is imported on first use. Every function takes the plan before the method's own
arguments.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

VIEWS: Mapping[str, str] = {
    "Plan.__str__": "autopar.views.report.table:plan_table",
    "Plan.to_html": "autopar.views.report.html:page",
    "Plan.to_trace": "autopar.views.report.trace:trace",
    "Plan.with_formulas": "autopar.views.formulas.formulas:with_formulas",
    "Plan.formula": "autopar.views.formulas.reprice:formula",
    "Plan.reprice": "autopar.views.formulas.reprice:reprice",
    "Plan.diff": "autopar.views.inspection.compare:difference",
    "Plan.explain": "autopar.views.inspection.explain:explain",
    "Plan.what_if": "autopar.views.inspection.what_if:what_if",
    "Plan.timeline": "autopar.views.inspection.timeline:timeline",
    "Plan.verify": "autopar.views.inspection.verify:verify",
    "Plan.compared_with": "autopar.planning.mesh_estimates.compared:compared_with",
    "Plan.attach": "autopar.compiler.attach:attach",
    "Plan.tp_plan": "autopar.views.translation.hugging_face:tp_plan",
    "Plan.parallelize_plan": "autopar.views.translation.torch_styles:parallelize_plan",
    "Plan.torchtitan_args": "autopar.views.translation.torchtitan:torchtitan_args",
    "ParallelizePlan.apply": "autopar.views.translation.torch_styles:apply",
    "PipelinePlan.compared_with": "autopar.planning.mesh_estimates.compared:compared_with",
    "PipelinePlan.__str__": "autopar.views.report.pipeline_table:pipeline_table",
    "PipelinePlan.to_html": "autopar.views.report.pipeline_html:page",
    "PipelinePlan.to_trace": "autopar.views.report.pipeline_trace:trace",
}
"""Class and method → module and function. What a method gives its file's text to, it writes itself."""


def view(method: str) -> Callable[..., Any]:
    """Return the function behind a method, as "Plan.explain"."""
    module, _, function = VIEWS[method].partition(":")
    return getattr(importlib.import_module(module), function)
