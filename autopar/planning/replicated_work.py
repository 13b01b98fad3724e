"""How much of the computation a plan leaves whole on every device of a mesh axis, and a warning where that is most.

Only products, convolutions and attention count, and calls without a rule, which nothing can split: what such a call
does is not known, and taken for products of its rows with its weights, as in recurrent nets.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.operations import flops
from autopar.program.calls import module_of
from autopar.sharding.operation import is_product
from autopar.space.space import Decision, Space
from autopar.strategies.roles import RoledCall, RoledProgram
from autopar.warned import warn_user

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
WITHOUT_RULE = ", which has no rule"

Planned = tuple[Space, Sequence[int]]
"""A space, and the number of the chosen strategy per decision."""


def warn_of_replicated_work(strategy: str | None, planned: Iterable[Planned], stored: bool = False) -> None:
    """Warn if a preset leaves most FLOPs of a plan, or of all stages of a pipeline, replicated over an axis.

    If parameters are `stored` already, the preset suited earlier inputs, and the sizes of these are the reason.
    """
    if strategy is None or strategy in MEANT:
        return
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


def warn_of_unused_axes(space: Space, choices: Sequence[int]) -> None:
    """Warn of axes that a plan uses for nothing."""
    for each in unused_axes(space, choices):
        warn_user(f"mesh {space.mesh}: {each}.")


def _replicated(space: Space, choices: Sequence[int], work: Counter[str]) -> Mapping[str, Counter[str]]:
    """Axis → operation and place → FLOPs that are whole on the axis; all FLOPs are added to `work`."""
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
    """Of the forward, as far as the call is a main one."""
    if not call.ruled.reason:
        counts = call.op.flops is not None or is_product(call.op, call.bound)
        return flops(call.call, call.op, call.bound) if counts else 0
    infos = list(zip(call.inputs, call.call.inputs, strict=True))
    weights = sum(i.num_elements for value, i in infos if graph.is_weight(value) and len(i.shape) > 1)
    rows = max((math.prod(i.shape[:-1]) for value, i in infos if not graph.is_weight(value)), default=0)
    return 2 * rows * weights


def _place(decision: Decision) -> str:
    """An operation with its module, and why it cannot be split."""
    assert decision.menu.call is not None
    module = module_of(decision.node)
    where = f" in {module}" if module else ""
    return f"{decision.menu.call.name}{where}{WITHOUT_RULE if decision.menu.reason else ''}"
