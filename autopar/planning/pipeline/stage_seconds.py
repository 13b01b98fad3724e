"""Seconds of a pipeline's stage, from its plan."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.costs.memory.model import MemoryModel
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing.operations import backward_shares
from autopar.costs.steps.sends import Send, overlapped_with_sends, reduced_overlapped
from autopar.costs.steps.step import last_microbatch_tasks, microbatch_tasks
from autopar.costs.timeline.values import Task
from autopar.errors import PlanError
from autopar.planning.pipeline.schedules.simulation import StageSeconds
from autopar.planning.settings import PlanContext, context_of
from autopar.planning.step_seconds import StepSeconds, reduction_seconds, step_seconds_of

NOTHING = Send()


def weight_seconds(memory: MemoryModel, choices: Sequence[int]) -> float:
    """Return the seconds of one micro-batch's backward in which calls compute the gradients of weights."""
    return sum(weight_seconds_by_decision(memory, choices))


def weight_seconds_by_decision(memory: MemoryModel, choices: Sequence[int]) -> list[float]:
    """Return the same for every decision, of what its backward does for each input (`costs.pricing.operations`)."""
    space = memory.space
    found = [0.0] * len(space.decisions)
    for number, (decision, choice) in enumerate(zip(space.decisions, choices, strict=True)):
        call, op = decision.candidates.call, decision.candidates.op
        if (
            call is None
            or op is None
            or memory.accumulation.once(number)
            or not any(each.requires_grad for each in call.outputs)
        ):
            continue
        edges = (space.inbound.get((number, position)) for position in range(len(call.inputs)))
        weights = sum(
            of_input
            for edge, of_input in zip(edges, backward_shares(call, op), strict=True)
            if edge is not None and edge.tensor.bucketed
        )
        share = space.share(space.rows.get(number), choices)
        found[number] = weights * share * float(decision.candidates.forward_seconds[choice])
    return found


def step_parts(plan: Plan) -> StepSeconds:
    """Return the seconds of one micro-batch's forward and backward, and once a step; PlanError for a plan that was
    loaded.
    """
    context = _context(plan)
    return step_seconds_of(context.memory_model, context.choices, plan.recompute)


def stage_seconds(
    plan: Plan, send_forward: Send = NOTHING, send_backward: Send = NOTHING, halves: bool = False
) -> StageSeconds:
    """Return the seconds of a stage's plan, with the transfers of its sends; raise PlanError for a loaded plan.

    Forward and backward are the timeline of a micro-batch, overlapped with its sends. The reductions of gradients come
    from the timeline of the last micro-batch, whose backward they overlap. Other work once per step is a sum. The
    backward of the calls with a weight counts for the gradients of weights; all else, recomputation and collectives
    too, counts for the gradients of inputs, which other stages wait for. `halves`: the schedule runs the two
    separately. In PipeDream, where each micro-batch updates the weights, reductions follow the backward.
    """
    context = _context(plan)
    memory, choices, share = context.memory_model, context.choices, context.space.hardware.communication_share
    each, last, once = microbatch_tasks(memory, choices, plan.recompute), (), step_parts(plan).once
    if not memory.microbatches.stashes:
        last = last_microbatch_tasks(memory, choices, plan.recompute)
        once = max(0.0, once - reduction_seconds(memory, choices))
    return timed(each, last, share, (send_forward, send_backward), weight_seconds(memory, choices), once, halves)


def timed(
    tasks: Sequence[Task],
    last: Sequence[Task],
    share: float,
    sends: tuple[Send, Send],
    of_weights: float,
    once: float,
    halves: bool,
) -> StageSeconds:
    """Return the seconds of a stage.

    Args:
        tasks: The tasks of a micro-batch.
        last: Tasks of the step's last micro-batch, with the reductions that overlap with its backward.
        share: The share of the device that a running collective takes.
        sends: Sends of the stage to the next and the previous one.
        of_weights: Seconds of a backward in which calls compute the gradients of weights.
        once: Seconds of what a step does once besides.
        halves: True if the schedule makes the gradients of weights apart.
    """
    each = overlapped_with_sends(tasks, share, *sends)
    weight = min(of_weights, each.backward)
    reduced = reduced_overlapped(last, share, *sends, weight / each.backward if halves and each.backward else None)
    return StageSeconds(
        *(each.forward, each.backward - weight, weight, each.send_forward, each.send_backward, once),
        last_backward=reduced.slowing,
        last_send=reduced.slowing_send,
        reducing=reduced.behind,
        reductions=reduced.alone,
    )


def _context(plan: Plan) -> PlanContext:
    if plan.context is None:
        raise PlanError(
            "the parts of a step need the model that the plan is for, and a plan that was loaded does not bring it "
            "along; plan the stage again, or read them from the pipeline's plan (`stage.seconds`)."
        )
    return context_of(plan)
