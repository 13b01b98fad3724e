"""Mistakes that a user can make with pipelines: every message, raised on every rank, so that nothing hangs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, InputError, PipelineError, PlanError
from tests.support.families import HIDDEN, MLP
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.pipeline_training import WithLoss
from tests.support.ranks import Ranks, mesh

LINE = ((2,), ("pp",))


def vectors(batch: int = 8) -> Tensor:
    return torch.ones(batch, HIDDEN)


def with_loss() -> nn.Module:
    return WithLoss(MLP(), torch.sum)


def compiled(model: nn.Module | None = None, on: Any = LINE, batch: int = 8, **options: Any) -> Any:
    """An MLP with its loss on two stages, or what the options say."""
    options = {"hardware": SLOW_DEVICES, "microbatches": 2, "schedule": "1f1b", **options}
    options = {name: value for name, value in options.items() if value is not None}
    return autopar.compile(model or with_loss(), mesh(*on), (vectors(batch),), **by_flag(**options))


def _indivisible_step() -> None:
    compiled().train_step(vectors(7))


def _indivisible_example() -> None:
    compiled(batch=7)


def _too_many_stages() -> None:
    compiled(nn.Linear(HIDDEN, HIDDEN))


def _no_loss() -> None:
    compiled(MLP()).train_step(vectors())


def _training_call() -> None:
    compiled()(vectors())


def _gradients_in_evaluation() -> None:
    # Without gradients, or in evaluation, a call is fine.
    model = compiled()
    with torch.no_grad():
        model(vectors())
    model.eval()
    assert not model(vectors()).requires_grad
    model.train()
    model(vectors())


def _without_pipeline(**specified: Any) -> None:
    compiled(on=((2,), ("dp",)), **{"schedule": None, **specified})


def _schedule_alone() -> None:
    _without_pipeline(schedule="1f1b")


def _stages_alone() -> None:
    _without_pipeline(split_points=["down"])


def _chunks_alone() -> None:
    _without_pipeline(stages_per_rank=2)


def _annotated_alone() -> None:
    model = with_loss()
    autopar.annotate(model, "model.down", stage=1)
    _without_pipeline(model=model)


def _unknown_axis() -> None:
    compiled(on=((2,), ("dp",)), pipeline="stages")


def _unknown_schedule() -> None:
    compiled(schedule="2f2b")


def _few_microbatches() -> None:
    compiled(microbatches=1)


def _chunks_of_1f1b() -> None:
    compiled(stages_per_rank=2)


def _deterministic() -> None:
    compiled(deterministic=True)


def _plan_without_stages() -> None:
    plan = compiled(on=((2,), ("dp",)), schedule=None).plan
    compiled(plan=plan)


def _plan_with_stages() -> None:
    compiled(on=((2,), ("dp",)), schedule=None, plan=compiled().plan)


def _plan_for_another_schedule() -> None:
    compiled(schedule="gpipe", plan=compiled().plan)


def _plan_for_another_mesh() -> None:
    plan = compiled(on=((2, 1), ("pp", "tp"))).plan
    compiled(plan=plan, schedule=None, microbatches=None)


def _plan_for_another_axis() -> None:
    on = ((2, 1), ("pp", "tp"))
    plan = compiled(on=on).plan
    compiled(on=on, plan=plan, pipeline="tp", schedule=None, microbatches=None)


def _plan_of_another_model() -> None:
    plan = compiled().plan
    deeper = WithLoss(nn.Sequential(MLP(), MLP()), torch.sum)
    compiled(deeper, plan=plan, schedule=None, microbatches=None)


def _parameters_too_early() -> None:
    autopar.compile(with_loss(), mesh(*LINE), hardware=SLOW_DEVICES).parameters().__next__()


ERRORS: dict[Callable[[], None], tuple[type[AutoparError], str]] = {
    _indivisible_step: (InputError, "a batch of 7 samples does not divide into 2 micro-batches of equal size; give"),
    _indivisible_example: (InputError, "a batch of 7 samples does not divide into 2 micro-batches of equal size; give"),
    _too_many_stages: (
        PipelineError,
        "found 2 pipeline stages for 1 calls that can stand on different stages; every stage needs at least one.",
    ),
    _no_loss: (
        InputError,
        "train_step needs a model that returns its loss, a number with a gradient; found float32[4, 32]. Compute",
    ),
    _training_call: (
        PipelineError,
        "a pipeline gives gradients in train_step alone: loss = model.train_step(inputs…). To evaluate, call "
        "model.eval() or use torch.no_grad().",
    ),
    _gradients_in_evaluation: (PipelineError, "a pipeline gives gradients in train_step alone"),
    _schedule_alone: (
        PipelineError,
        "Pipeline(schedule='1f1b') is given, but no axis of the mesh dp=2 is a pipeline; name one, as in "
        'Pipeline(axis="dp"), or '
        'call an axis "pp".',
    ),
    _stages_alone: (PipelineError, "Pipeline(split_points=('down',)) is given, but no axis of the mesh dp=2 is a"),
    _chunks_alone: (PipelineError, "Pipeline(stages_per_rank=2) is given, but no axis of the mesh dp=2 is a"),
    _annotated_alone: (
        PipelineError,
        'annotate(stage=…) (annotate("model.down", stage=1)) is given, but no axis of the mesh dp=2 is a pipeline;',
    ),
    _unknown_axis: (
        PipelineError,
        "pipeline=\"stages\" is no axis of the mesh, whose axes are 'dp'; name one of them.",
    ),
    _unknown_schedule: (InputError, "Pipeline(schedule='2f2b'); give one of 'gpipe', '1f1b'"),
    _few_microbatches: (
        PipelineError,
        '"1f1b" needs at least as many micro-batches as stages; found 1 micro-batches for 2 stages.',
    ),
    _chunks_of_1f1b: (PipelineError, '"1f1b" runs one stage per rank; found Pipeline(stages_per_rank=2). Use'),
    _deterministic: (
        PipelineError,
        "Run(deterministic=True) draws dropout masks in the order of one device, which the stages of a pipeline do not "
        "run in; leave it out.",
    ),
    _plan_without_stages: (
        PipelineError,
        "the mesh has a pipeline axis, and the plan is a Plan without stages; plan again with autopar.plan on this "
        "mesh.",
    ),
    _plan_with_stages: (PipelineError, "the plan is for the mesh pp=2, with a pipeline; this mesh is dp=2."),
    _plan_for_another_schedule: (
        PipelineError,
        "the plan is for schedule, microbatches and stages_per_rank ('1f1b', 2, 1); found ('gpipe', 2, None).",
    ),
    _plan_for_another_mesh: (
        PlanError,
        "the plan is for the mesh pp=2 × tp=1 with the pipeline pp, this mesh is pp=2 with the pipeline pp; plan "
        "again, or load the plan that was made for this mesh.",
    ),
    _plan_for_another_axis: (
        PlanError,
        "the plan is for the mesh pp=2 × tp=1 with the pipeline pp, this mesh is pp=2 × tp=1 with the pipeline tp;",
    ),
    _plan_of_another_model: (
        PlanError,
        "the plan is for a model with the blocks model.up, model.middle, model.down; this one has model.0, model.1. "
        "Plan again, or load the plan that was made for this model.",
    ),
    _parameters_too_early: (
        InputError,
        "the model was compiled without example_inputs, so it has no parameters and no plan yet; call train_step once",
    ),
}


def _refused(call: Callable[[], None]) -> str:
    kind, message = ERRORS[call]
    with pytest.raises(kind, match=re.escape(message)) as found:
        call()
    return str(found.value)


@pytest.mark.parametrize("call", ERRORS, ids=lambda call: call.__name__.strip("_"))
def test_a_mistake_is_told_on_every_rank(ranks: Ranks, call: Callable[[], None]) -> None:
    ranks.run(_refused, call)
