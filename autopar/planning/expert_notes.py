"""Notes of a plan on its experts: expected cost of rows, capacities, and experts that no axis can divide."""

from __future__ import annotations

from torch import fx

from autopar.console.units import format_bytes, format_seconds
from autopar.costs.memory.peak import memory_use
from autopar.costs.pricing.operations import flops
from autopar.costs.space.expert_rows import padded_share
from autopar.costs.space.space import Space
from autopar.errors import warn_user
from autopar.ir.program.calls import module_of
from autopar.ir.program.operators.capacity import WITHIN_CAPACITY, capacity, slots_of_sample
from autopar.ir.program.operators.expert_operators import OTHER_GROUPED_PRODUCTS
from autopar.ir.program.program import info_of
from autopar.planning.memory_limit.answers import Answer
from autopar.planning.settings import PlanContext
from autopar.planning.step_seconds import step_seconds_of

NO_RESULT = "What routing makes of that changes seconds and memory of experts on expert axes, but no result."
BALANCED = f"expected: each device has an equal share of the rows of its experts. {NO_RESULT}"
PADDED = (
    "each device has room for {:g} times its share of the rows of its experts, which is planned for (padded); more are "
    "an error."
)
HUNDREDTHS = 100  # steps per unit of imbalance: resolution of notes about the limit


def notes_on_experts(context: PlanContext, answer: Answer) -> tuple[str, ...]:
    """Return the notes on the number of rows that experts are expected to have, and on their capacities."""
    nodes = [decision.node for decision in context.space.decisions]
    limits = dict.fromkeys(_limit(node) for node in nodes if node.target is WITHIN_CAPACITY)
    return (*_expected(context, answer), *limits)


def _expected(context: PlanContext, answer: Answer) -> tuple[str, ...]:
    """Describe the expected balance of rows that are divided by expert.

    Under a memory limit, the notes also say how uneven the rows may be.
    """
    space, choices = context.space, answer.choices
    ranks = [space.ranks_by_expert(rows, choices[rows.counts]) for rows in space.rows.values()]
    most = max(ranks, default=1)
    if most == 1:
        return ()
    if (padded := padded_share(space)) is not None:
        return (PADDED.format(padded),)
    expected = BALANCED if space.imbalance == 1 else _cost_note(context, answer)
    limit = context.settings.tensor_limit
    return (expected,) if limit is None else (expected, *_limit_notes(context, answer, limit, most))


def _cost_note(context: PlanContext, answer: Answer) -> str:
    """Describe the expected cost with balanced routing, and with the requested imbalance."""
    memory, imbalance = context.memory_model, context.space.imbalance
    seconds = [step_seconds_of(memory, answer.choices, answer.modes, each).seconds for each in (1.0, imbalance)]
    peaks = [memory_use(memory, answer.choices, answer.modes, each)[0] for each in (1.0, imbalance)]
    return (
        f"expected: {format_seconds(seconds[0])} and {format_bytes(peaks[0])} where each device has an equal share of "
        f"the rows of its experts; {format_seconds(seconds[1])} and {format_bytes(peaks[1])} where the busiest has "
        f"{imbalance:g} times its share, which is planned for. {NO_RESULT}"
    )


def _limit(node: fx.Node) -> str:
    index, num_experts, capacity_factor = node.args
    assert isinstance(index, fx.Node) and isinstance(num_experts, int) and isinstance(capacity_factor, float)
    num_slots = slots_of_sample(info_of(index).shape)
    return (
        f"each of {num_experts} experts takes at most {capacity(num_slots, num_experts, capacity_factor)} of the "
        f"{num_slots} rows of each sample (capacity_factor={capacity_factor:g}); further ones are dropped."
    )


def _limit_notes(context: PlanContext, answer: Answer, limit: int, most: int) -> tuple[str, ...]:
    """Describe the largest imbalance of the busiest device that fits the limit; `most` is the largest possible."""

    def fits(hundredths: int) -> bool:
        found = memory_use(context.memory_model, answer.choices, answer.modes, hundredths / HUNDREDTHS)
        return found[0] <= limit

    if fits(most * HUNDREDTHS):
        return ("the memory limit holds for any routing.",)
    low, high = HUNDREDTHS, most * HUNDREDTHS  # fits, does not fit: the peak grows with the imbalance
    if not fits(low):
        return ()
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return (
        f"the memory limit holds up to an imbalance of {low / HUNDREDTHS:.2f}: where the busiest device has so many "
        "times its share of the rows of experts. Plan with Experts(imbalance=…) for more.",
    )


def warn_of_unknown_experts(space: Space) -> None:
    """Warn of grouped products whose rows every device has: the block that they belong to was not found."""
    if space.mesh.num_devices == 1:
        return
    total, unknown, places = 0, 0, dict[str, None]()
    for decision in space.decisions:
        candidates = decision.candidates
        if candidates.call is None or candidates.op is None or candidates.bound is None:
            continue
        work = flops(candidates.call, candidates.op, candidates.bound)
        total += work
        if str(decision.node.target) in OTHER_GROUPED_PRODUCTS:  # else the block around it was found
            unknown += work
            places[module_of(decision.node) or "the forward"] = None
    if unknown:
        named = ", ".join(list(places)[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
        warn_user(
            f"the experts in {named} ({unknown / total:.0%} of the FLOPs) are written in a form that autopar does not "
            "know: all of their rows stay on every device, and only the features of their matrices can be split. "
            "docs/how-to/experts.md lists the forms that are known.",
        )
