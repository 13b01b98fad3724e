"""Why a plan chose a strategy: its cost in parts, the best plan without it, and what other roles would take.

The runner-up forbids the chosen strategy of one decision and plans everything again: p* = min over plans with another
strategy there. Its difference to the plan is the least cost of giving up the strategy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autopar.console.progress import progress, stages
from autopar.console.units import format_bytes
from autopar.costs.hardware.collectives import rearranging_seconds, transfer_seconds
from autopar.costs.memory.peak import memory_use
from autopar.costs.plans.decision_rows import Moved
from autopar.costs.plans.difference import Amount
from autopar.costs.plans.explanation import Alternative, Explanation, Reshard, RunnerUp
from autopar.costs.plans.plan import Plan
from autopar.costs.space.narrowed import Pins
from autopar.costs.space.space import Decision, Space, TensorEdge
from autopar.errors import InfeasibleError
from autopar.ir.program.calls import module_of
from autopar.planning.annotations.matching import Catalog, operation_of
from autopar.planning.formulation import Formulation
from autopar.planning.planner import bounds_near, draft_of, formulations_of, replan, solved_by
from autopar.planning.settings import PlanContext, context_of
from autopar.solver.tolerances import without_warnings
from autopar.views.inspection.breakdown import parting, places
from autopar.views.inspection.compare import choice_words, difference, layout_words
from autopar.views.inspection.names import decision_named

NO_PLAN = "without this strategy there is no plan: "


def explain(plan: Plan, name: str, alternatives: bool = True) -> Explanation[Plan]:
    """Explain the decision that a name means (see `names`).

    `alternatives` adds what every other role on every axis would take. Raises InputError for a name that means none.
    """
    context = context_of(plan, "explain")
    if not context.space.limited:  # else the whole is too large
        context = context.widened()  # it names what pins exclude
    plan, space = replace(plan, context=context), context.space
    number = decision_named(space, name)
    decision, row = space.decisions[number], plan.rows[number]
    strategy = decision.candidates.strategies[context.choices[number]]
    running = context.memory_model.second_forward.running(number, context.choices, plan.recompute)
    with stages("explain", 2) as step:
        step("runner-up")
        runner_up, reason = _runner_up(plan, context, number)
        step("without the limit")
        without_limit = _without_limit(context, number)
    allowed = _allowed(context, number)
    is_parameter = decision.kind == "parameter"
    share = space.share(space.rows.get(number), context.choices)
    return Explanation(
        name=label(space, number),
        decision=decision.name,
        operation=row.operation,
        strategy=choice_words(plan, row),
        inputs=tuple(
            (_tensor(space, space.inbound[number, position]), layout_words(str(layout), space.mesh.names))
            for position, layout in enumerate(strategy.inputs)
            if (number, position) in space.inbound
        ),
        outputs=tuple(layout_words(str(layout), space.mesh.names) for layout in strategy.outputs),
        num_strategies=len(allowed),
        num_allowed=int(allowed.sum()),
        pinned_by=_annotations_about(context, number),
        forward_seconds=row.forward_seconds,
        backward_seconds=row.backward_seconds,
        recompute_seconds=row.recompute_seconds,
        mode=plan.recompute.get(context.memory_model.lifetimes.segment[number], "none"),
        optimizer_seconds=_own_seconds(decision, context.choices[number]) if is_parameter else 0.0,
        own=tuple(
            Moved(t.collective, t.axis, t.num_bytes, wait * share, t.backward)
            for t, wait in zip(running.transfers, running.waits, strict=True)
        ),
        reshards=(*_inbound(context, number), *_outbound(context, number)),
        saved_bytes=row.saved_bytes,
        stored_bytes=row.stored_bytes,
        seconds=plan.seconds,
        runner_up=runner_up,
        reason=reason,
        without_limit=without_limit,
        alternatives=tuple(_alternatives(plan, context, number, runner_up and runner_up.plan, reason))
        if alternatives
        else (),
    )


def _own_seconds(decision: Decision, choice: int) -> float:
    """Return the seconds of an optimizer's step without its collectives."""
    return float(decision.candidates.seconds[choice]) - sum(decision.candidates.strategies[choice].waits)


def label(space: Space, number: int) -> str:
    """Return a decision as people know it: the path of its parameter or module, or its name in the graph."""
    decision = space.decisions[number]
    parameters = space.program.parameter_names
    if decision.kind == "parameter":
        return parameters[decision.node.name]
    return module_of(decision.node) or decision.name if decision.kind == "call" else decision.name


# Costs.


def _tensor(space: Space, edge: TensorEdge) -> str:
    while space.decisions[edge.source].kind == "shared_reshard":
        edge = space.inbound[edge.source, 0]
    source = space.decisions[edge.source]
    if source.kind != "call":
        return label(space, edge.source)
    return f"{operation_of(source)} of {module_of(source.node) or 'the model'}"


def _inbound(context: PlanContext, number: int) -> Iterator[Reshard]:
    """Yield the reshards of a decision's inputs; those before a shared reshard serve all of its consumers."""
    space = context.space
    for position in range(len(space.decisions[number].candidates.strategies[context.choices[number]].inputs)):
        edge = space.inbound.get((number, position))
        consumers = 1
        while edge is not None:
            yield from _reshard(context, edge, True, consumers)
            if space.decisions[edge.source].kind != "shared_reshard":
                break
            consumers = len(_consumers(space, edge.source))
            edge = space.inbound[edge.source, 0]


def _outbound(context: PlanContext, number: int) -> Iterator[Reshard]:
    """Yield the reshards between a call and the consumers of its outputs."""
    space = context.space
    for edge in space.edges:
        if edge.source == number:
            target = space.decisions[edge.target]
            yield from _reshard(
                context, edge, False, len(_consumers(space, edge.target)) if target.kind == "shared_reshard" else 1
            )
            if target.kind == "shared_reshard":
                yield from _outbound(context, edge.target)


def _consumers(space: Space, shared_reshard: int) -> set[int]:
    """Return the calls behind a shared reshard, also through further ones."""
    found: set[int] = set()
    for edge in space.edges:
        if edge.source == shared_reshard:
            inner = space.decisions[edge.target].kind == "shared_reshard"
            found |= _consumers(space, edge.target) if inner else {edge.target}
    return found


def _reshard(context: PlanContext, edge: TensorEdge, inbound: bool, num_consumers: int) -> Iterator[Reshard]:
    space = context.space
    path, share = space.path(edge, context.choices), space.share(space.rows_on(edge), context.choices)
    if path.moves:
        moved = tuple(
            Moved(
                t.collective,
                t.axis,
                t.num_bytes,
                transfer_seconds(t, space.mesh, space.hardware, message) * share,
                t.backward,
            )
            for t, message in zip(path.transfers, path.messages, strict=True)
        )
        before = layout_words(str(path.moves[0].before), space.mesh.names)
        after = layout_words(str(path.moves[-1].after), space.mesh.names)
        alone = [t for t, message in zip(path.transfers, path.messages, strict=True) if message is None]
        copied = sum(rearranging_seconds(t, space.hardware) for t in alone) * share
        seconds = path.seconds * share
        yield Reshard(_tensor(space, edge), before, after, seconds, moved, inbound, num_consumers, copied)


# Alternatives.


def _allowed(context: PlanContext, number: int) -> np.ndarray:
    """Return the strategies of a decision that the pins leave."""
    every = np.ones(len(context.space.decisions[number].candidates.strategies), dtype=bool)
    return context.pins.get(number, every) & np.isfinite(context.space.decisions[number].candidates.seconds)


def _restricted(context: PlanContext, number: int, mask: np.ndarray) -> Pins:
    """Return the pins of a plan in which the decision keeps to a mask too."""
    return {**context.pins, number: _allowed(context, number) & mask}


def _runner_up(plan: Plan, context: PlanContext, number: int) -> tuple[RunnerUp[Plan] | None, str]:
    decision = context.space.decisions[number]
    others = np.arange(len(decision.candidates.strategies)) != context.choices[number]
    if not others.any():
        return None, "there is no other strategy" + (
            f" ({decision.candidates.reason})" if decision.candidates.reason else ""
        )
    if not (_allowed(context, number) & others).any():
        pinned = " and ".join(_annotations_about(context, number)) or "the mode or the layout in which it is stored"
        return None, f"pinned by {pinned}, which leaves this strategy alone"
    try:
        with without_warnings():
            second = replan(context, _restricted(context, number, others))
    except InfeasibleError as error:
        return None, f"{NO_PLAN}{error}"
    parts = parting(plan, second)
    found = RunnerUp(
        strategy=choice_words(second, second.rows[number]),
        plan=second,
        step=Amount(plan.seconds, second.seconds),
        memory=Amount(plan.peak_bytes, second.peak_bytes),
        parts=parts,
        places={part: where for part in parts if (where := places(plan, second, part))},
        difference=difference(plan, second),
    )
    return found, ""


def _without_limit(context: PlanContext, number: int) -> tuple[str, float] | None:
    """Return the strategy that is best without the memory limit, with that plan's seconds, where it is another one."""
    if context.settings.limit is None:
        return None
    with without_warnings():
        free = replan(context, context.pins, context.settings.limited(None))
    if context_of(free).choices[number] == context.choices[number]:
        return None
    return choice_words(free, free.rows[number]), free.seconds


def _annotations_about(context: PlanContext, number: int) -> tuple[str, ...]:
    catalog = Catalog(context.space)
    found = ((annotation, catalog.find(annotation)) for annotation in context.annotations)
    return tuple(
        str(annotation)
        for annotation, each in found
        if each and number in (*each.calls, *each.outputs, *each.parameters)
    )


def _alternatives(
    plan: Plan, context: PlanContext, number: int, second: Plan | None, reason: str
) -> Iterator[Alternative]:
    """Yield what the plan would take if the decision had another role on an axis, for each axis and role.

    `second` is the best plan with another strategy; None if there is none, for a `reason`. Under a memory limit a
    search per role would take several times as long as the plan: roles that `second` does not have get a lower bound.
    """
    decision, names = context.space.decisions[number], context.space.mesh.names
    requested = [
        (axis, role)
        for axis in range(len(names))
        for role in _roles(decision, axis)
        if role != decision.role(context.choices[number], axis)
    ]
    formulations = formulations_of(context.memory_model, context.settings)
    for axis, role in progress(requested, "alternatives"):
        count = len(decision.candidates.strategies)
        mask = np.array([decision.role(strategy, axis) == role for strategy in range(count)])
        blank = Alternative(names[axis], role, None)
        if not (_allowed(context, number) & mask).any():
            yield replace(blank, reason="ruled out by annotations")
        elif second is None:
            yield replace(blank, reason=_brief(reason.removeprefix(NO_PLAN)))
        elif mask[context_of(second).choices[number]]:
            yield replace(blank, seconds=second.seconds, peak_bytes=second.peak_bytes)
        else:
            yield _alternative(plan, formulations, _restricted(context, number, mask), second, blank)


def _alternative(
    plan: Plan, formulations: Sequence[Formulation], pins: Pins, second: Plan, blank: Alternative
) -> Alternative:
    """Return the alternative with what the best plan under pins takes, which is no better than `second`."""
    context = context_of(plan)
    limit = context.settings.tensor_limit
    try:
        with without_warnings():
            free = draft_of(solved_by(formulations, pins, context.settings.limited(None)))
        peak_bytes = memory_use(free.context.memory_model, free.answer.choices, free.answer.modes)[0]
        if limit is None or peak_bytes <= limit:
            return replace(blank, seconds=free.answer.seconds + context.host_seconds, peak_bytes=peak_bytes)
        bounds = bounds_near(plan, formulations[-1], pins, limit)
    except InfeasibleError as error:
        return replace(blank, reason=_brief(str(error)))
    if bounds.num_bytes > limit:
        least = f"every plan with this role takes at least {context.settings.reserved.both(bounds.num_bytes)}"
        specified = format_bytes(context.settings.limit or 0)
        return replace(blank, reason=f"the memory limit is {specified}, and {least}")
    least_seconds = max(bounds.seconds, free.answer.bound) + context.host_seconds
    return replace(blank, seconds=max(least_seconds, second.bound), is_bound=True)


def _brief(reason: str) -> str:
    return reason.partition(";")[0].partition(". ")[0]


def _roles(decision: Decision, axis: int) -> tuple[str, ...]:
    """Return the distinct roles that a decision offers on an axis, in the order of its candidates."""
    return tuple(dict.fromkeys(decision.role(number, axis) for number in range(len(decision.candidates.strategies))))
