"""Replicated computation: how much of it a plan leaves whole on every device of an axis, and a warning about it.

Only products, convolutions, attention, and calls without a rule count. Nothing can split a call without a rule. Its
work is unknown, and assumed to be products of its rows with its weights, as in recurrent nets. The warning is given if
most of the computation is replicated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.costs.plans.decision_rows import KeptWhole, PlanRow, advice_on_rules
from autopar.costs.pricing.operations import flops
from autopar.costs.space.space import Decision, Space
from autopar.errors import warn_user
from autopar.ir.program.calls import module_of
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.mesh import Mesh
from autopar.ir.sharding.operation import is_product
from autopar.strategies.roles import RoledCall, RoledProgram
from autopar.strategies.ruled import NO_RULE

ALLOWED = 0.5
"""Share of the FLOPs that may be replicated over an axis without a word."""
MEANT = ("fully_replicated",)
"""Presets that split nothing on purpose."""
SHOWN = 3
OTHER_PRESET = (
    "use another preset, leave strategy out to let the planner decide, or give what has no rule one by "
    "autopar.register_rule"
)
OTHER_INPUTS = (
    "give a batch and a length that the axis divides, as the first inputs had, for example with drop_last=True"
)
UNUSED = 0.99
"""Share of the FLOPs that an axis leaves whole if it is used for nothing."""
WORTH_A_RULE = 0.01
"""Share of the FLOPs, or of the seconds, from which an operation without a rule is worth a warning."""
WITHOUT_RULE = ", which has no rule"

Planned = tuple[Space, Sequence[int]]
"""A space, and the number of the chosen strategy per decision."""


def warn_of_replicated_work(strategy: str | None, planned: Iterable[Planned], stored: bool = False) -> bool:
    """Warn if a preset leaves most FLOPs of a plan, or of all stages of a pipeline, replicated over an axis.

    Return whether it does.

    If parameters are `stored` already, the preset suited earlier inputs, and the sizes of these are the reason.
    """
    if strategy is None or strategy in MEANT:
        return False
    work: Counter[str] = Counter()
    whole: dict[str, Counter[str]] = {}
    for space, choices in planned:
        for name, places in _replicated(space, choices, work).items():
            whole.setdefault(name, Counter()).update(places)
    total = work.total()
    found = [(axis, places) for axis, places in whole.items() if places.total() > ALLOWED * total]
    for axis, places in found:
        named = ", ".join(place for place, _ in places.most_common(SHOWN))
        more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
        warn_user(
            f"strategy={strategy!r} leaves {places.total() / total:.0%} of the FLOPs replicated over {axis}: "
            f"{named}{more}. Each of its devices computes them whole; {OTHER_INPUTS if stored else OTHER_PRESET}."
        )
    return bool(found)


@dataclass(frozen=True, slots=True)
class UnusedAxis:
    """A mesh axis over which a plan repeats all of the computation."""

    axis: str
    size: int
    reason: str

    def __str__(self) -> str:
        return f"axis {self.axis} splits nothing: its {self.size} devices repeat the same work, as {self.reason}"


def unused_axes(space: Space, choices: Sequence[int]) -> tuple[UnusedAxis, ...]:
    """Return the axes of more than one device on which a plan splits next to none of the work, and why."""
    work: Counter[str] = Counter()
    whole, samples = _replicated(space, choices, work), RoledProgram.of(space.program).samples
    total = work.total()
    found = []
    for axis, places in whole.items():
        if not total or places.total() < UNUSED * total:
            continue
        size = space.mesh.size(axis)
        unruled = [place for place, _ in places.most_common() if place.endswith(WITHOUT_RULE)]
        if unruled:
            reason = f"{', '.join(unruled[:SHOWN])}. Give the operation one by autopar.register_rule, or use one device"
        elif samples % size:
            wanted = -(-samples // size) * size
            reason = f"the batch of {samples} does not divide into {size}. Use a batch of {wanted}, or fewer devices"
        else:
            reason = "splitting costs more than it saves. Use fewer devices, or a larger batch"
        found.append(UnusedAxis(axis, size, reason))
    return tuple(found)


def warn_of_unused_axes(space: Space, choices: Sequence[int]) -> bool:
    """Warn of axes that a plan uses for nothing, and return whether there are any."""
    found = unused_axes(space, choices)
    for each in found:
        warn_user(f"mesh {space.mesh}: {each}.")
    return bool(found)


def kept_whole(space: Space, choices: Sequence[int], rows: Sequence[PlanRow]) -> tuple[KeptWhole, ...]:
    """Return the operations that no rule fits with their shares of the step; `rows` are those of the decisions."""
    graph = RoledProgram.of(space.program)
    groups: dict[tuple[str, str], list[int]] = {}
    work: Counter[int] = Counter()
    for number, decision in enumerate(space.decisions):
        call = graph.calls.get(decision.name) if decision.kind == "call" else None
        if call is None:
            continue
        work[number] = _flops(graph, call)
        if decision.candidates.reason:
            groups.setdefault((_registered_as(call), decision.candidates.reason), []).append(number)
    seconds, total = sum(row.seconds for row in rows), work.total()
    found = []
    for (operation, reason), numbers in groups.items():
        first, own = rows[numbers[0]], sum(rows[number].seconds for number in numbers)
        computed = sum(work[number] for number in numbers)
        infos = [info for number in numbers for info in _tensors(space.decisions[number])]
        found.append(
            KeptWhole(
                operation,
                reason,
                len(numbers),
                first.name,
                first.module,
                own,
                own / seconds if seconds else 0.0,
                sum(info.num_elements * info.dtype.itemsize for info in infos),
                computed / total if computed else None,
            )
        )
    return tuple(sorted(found, key=lambda each: -each.seconds))


def _tensors(decision: Decision) -> tuple[TensorInfo, ...]:
    call = decision.candidates.call
    assert call is not None
    return *call.inputs, *call.outputs


def _registered_as(call: RoledCall) -> str:
    """Return the name by which `autopar.register_rule` finds an operation."""
    target = call.call.target
    return target.name() if isinstance(target, torch._ops.OpOverload) else str(target)


def warn_of_kept_whole(mesh: Mesh, found: Sequence[KeptWhole]) -> None:
    """Warn of operations without a rule that take a share of the step worth a rule."""
    large = [each for each in found if max(each.seconds_share, each.flops_share or 0.0) >= WORTH_A_RULE]
    for each in large if mesh.num_devices > 1 else ():
        where = f" in {each.module}" if each.module else ""
        calls = f" ({each.calls} calls)" if each.calls > 1 else ""
        flops = "an unknown share" if each.flops_share is None else f"{each.flops_share:.0%}"
        why = "has no rule" if each.reason == NO_RULE else f"has a rule that does not fit ({each.reason})"
        warn_user(
            f"{each.operation}{where}{calls} {why}: each of {mesh.num_devices} devices computes it whole, {flops} of "
            f"the FLOPs and {each.seconds_share:.0%} of the step's seconds. {advice_on_rules(each.operation)}."
        )


def _replicated(space: Space, choices: Sequence[int], work: Counter[str]) -> Mapping[str, Counter[str]]:
    """Return the axis → operation and place → FLOPs that are whole on the axis; all FLOPs are added to `work`."""
    graph = RoledProgram.of(space.program)
    axes = [(number, axis) for number, axis in enumerate(space.mesh.names) if space.mesh.sizes[number] > 1]
    found: dict[str, Counter[str]] = {axis: Counter() for _, axis in axes}
    for decision, choice in zip(space.decisions, choices, strict=True):
        call = graph.calls.get(decision.name) if decision.kind == "call" else None
        if call is None or not call.learned or call.weight_only:
            continue
        count = _flops(graph, call)
        work[decision.name] += count
        for number, axis in axes:
            if count and decision.role(choice, number) == "replicated":
                found[axis][_place(decision)] += count
    return found


def _flops(graph: RoledProgram, call: RoledCall) -> int:
    """Return the forward FLOPs of a call that is a main one or has no rule; 0 for others."""
    if not call.ruled.reason:
        counts = call.op.flops is not None or is_product(call.op, call.bound)
        return flops(call.call, call.op, call.bound) if counts else 0
    infos = list(zip(call.inputs, call.call.inputs, strict=True))
    weights = sum(i.num_elements for value, i in infos if graph.is_weight(value) and len(i.shape) > 1)
    rows = max((math.prod(i.shape[:-1]) for value, i in infos if not graph.is_weight(value)), default=0)
    return 2 * rows * weights


def _place(decision: Decision) -> str:
    """Return an operation with its module, and why it cannot be split."""
    assert decision.candidates.call is not None
    module = module_of(decision.node)
    where = f" in {module}" if module else ""
    return f"{decision.candidates.call.name}{where}{WITHOUT_RULE if decision.candidates.reason else ''}"
