"""Replanning under additional annotations, in the same space and without capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from autopar.console.progress import stages
from autopar.costs.plans.plan import Plan
from autopar.costs.space.narrowed import Pins
from autopar.errors import AnnotationError, PipelineError
from autopar.ir.sharding.annotation import Annotation
from autopar.planning.annotations.annotate import annotate, annotations_of
from autopar.planning.annotations.pins import pins_of
from autopar.planning.planner import replan
from autopar.planning.settings import context_of


def what_if(plan: Plan, spoken: Sequence[str | Annotation], options: Mapping[str, Any]) -> Plan:
    """Return the best plan that keeps to these annotations in addition to those it was made with.

    Raises AnnotationError for an annotation that matches nothing or contradicts another one, PipelineError for one that
    names a stage, which no plan without a pipeline has, and InfeasibleError where no plan keeps to all.
    """
    context, specified = context_of(plan, "what_if").widened(), annotations_from(spoken, options)
    for each in specified:
        if each.stage is not None:
            raise PipelineError(
                f"{each}: found stage {each.stage}, and what_if plans one piece of a model again without cutting it. "
                f'Say it of the model, autopar.annotate(model, "{each.pattern}", stage={each.stage}), and plan the '
                "pipeline again."
            )
    pins_of(specified, context.space, "semi_auto", {})  # each of them must match something, whatever the plan's mode
    together = (*context.annotations, *specified)
    pins = pins_of(together, context.space, context.mode, {})  # type: ignore[arg-type]  # the mode it was planned in
    # A manual plan's pins keep unannotated parts data parallel, which an annotation now may change.
    gives_way = context.keeps_whole or any(each.strategy for each in context.annotations)
    requested = pins if context.mode == "manual" else _intersection(context.pins, pins, gives_way)
    with stages("what_if", 1) as step:
        step("planning again")
        return replan(replace(context, annotations=together), requested)


def _intersection(one: Pins, other: Pins, gives_way: bool) -> Pins:
    """Return what both allow; if nothing, `one` may give way, as a preset and parameters that are kept whole do."""
    both = {number: one[number] & other[number] for number in one.keys() & other.keys()}
    if gives_way:
        both = {number: mask if mask.any() else other[number] for number, mask in both.items()}
    return {**one, **other, **both}


def annotations_from(specified: Sequence[str | Annotation], options: Mapping[str, Any]) -> tuple[Annotation, ...]:
    """Return the given annotations, or one made of a pattern and the options of `annotate`."""
    if specified and all(isinstance(each, Annotation) for each in specified) and not options:
        return tuple(each for each in specified if isinstance(each, Annotation))
    if len(specified) == 1 and isinstance(specified[0], str):
        return annotations_of(annotate(nn.Module(), specified[0], **options))
    raise AnnotationError(
        f"what_if({', '.join(map(repr, specified))}): give a pattern and an annotation of it, as in "
        'what_if("layers.*.mlp.down_proj", tp="row"), or one or several annotations and nothing else.'
    )
