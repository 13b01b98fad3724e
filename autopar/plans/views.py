"""The one seam between plans and what shows or questions them: method of a plan → the function that answers.

A plan is a value and lies below all that is made of it. Its methods ask here, so that no file of this package imports
from above it; the module is imported when it is first asked. Every function takes the plan before the method's own
arguments.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

VIEWS: Mapping[str, str] = {
    "Plan.__str__": "autopar.report.table:plan_table",
    "Plan.to_html": "autopar.report.html:page",
    "Plan.to_trace": "autopar.report.trace:trace",
    "Plan.with_formulas": "autopar.formulas.formulas:with_formulas",
    "Plan.formula": "autopar.formulas.reprice:formula",
    "Plan.reprice": "autopar.formulas.reprice:reprice",
    "Plan.diff": "autopar.inspection.compare:difference",
    "Plan.explain": "autopar.inspection.explain:explain",
    "Plan.what_if": "autopar.inspection.what_if:what_if",
    "Plan.timeline": "autopar.inspection.timeline:timeline",
    "Plan.verify": "autopar.inspection.verify:verify",
    "Plan.beside": "autopar.arranging.compared:beside",
    "Plan.attach": "autopar.compiler.attach:attach",
    "Plan.tp_plan": "autopar.translation.hugging_face:tp_plan",
    "Plan.parallelize_plan": "autopar.translation.torch_styles:parallelize_plan",
    "Plan.torchtitan_args": "autopar.translation.torchtitan:torchtitan_args",
    "ParallelizePlan.apply": "autopar.translation.torch_styles:apply",
    "PipelinePlan.beside": "autopar.arranging.compared:beside",
    "PipelinePlan.__str__": "autopar.report.pipeline_table:pipeline_table",
    "PipelinePlan.to_html": "autopar.report.pipeline_html:page",
    "PipelinePlan.to_trace": "autopar.report.pipeline_trace:trace",
}
"""Class and method → module and function. What a method gives its file's text to, it writes itself."""


def view(method: str) -> Callable[..., Any]:
    """The function behind a method, as "Plan.explain"."""
    module, _, function = VIEWS[method].partition(":")
    return getattr(importlib.import_module(module), function)
