"""What a plan says of its experts: that what rows cost is expected, how many they take at most, and which experts no
axis can divide.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import fx

from autopar.cost.operations import flops
from autopar.program.calls import module_of
from autopar.program.operators.capacity import WITHIN_CAPACITY, capacity, slots_of_sample
from autopar.program.operators.experts import DISPATCH, OTHER_GROUPED_PRODUCTS
from autopar.program.program import info_of
from autopar.sharding.rule import factors_of
from autopar.space.space import Decision, Space

EXPERTS = "x"
BALANCED = (
    "expected: each device has an equal share of the rows of its experts. What routing makes of that changes seconds "
    "and memory of experts on expert axes, but no result."
)


def notes_on_experts(space: Space, choices: Sequence[int]) -> tuple[str, ...]:
    """A line where rows are divided by expert: their number follows from the data. One for each capacity."""
    split = any(
        decision.node.target is DISPATCH and _splits_experts(decision, choice)
        for decision, choice in zip(space.decisions, choices, strict=True)
        if decision.kind == "call"
    )
    limits = dict.fromkeys(_limit(each.node) for each in space.decisions if each.node.target is WITHIN_CAPACITY)
    return (*((BALANCED,) if split else ()), *limits)


def _limit(node: fx.Node) -> str:
    index, num_experts, capacity_factor = node.args
    assert isinstance(index, fx.Node) and isinstance(num_experts, int) and isinstance(capacity_factor, float)
    num_slots = slots_of_sample(info_of(index).shape)
    return (
        f"each of {num_experts} experts takes at most {capacity(num_slots, num_experts, capacity_factor)} of the "
        f"{num_slots} rows of each sample (capacity_factor={capacity_factor:g}); further ones are dropped."
    )


def _splits_experts(decision: Decision, choice: int) -> bool:
    return any(EXPERTS in factors_of(made) for made in decision.menu.strategies[choice].choices)


def warn_of_unknown_experts(space: Space) -> None:
    """Warn of grouped products whose rows every device has: the block that they belong to was not found."""
    if space.mesh.num_devices == 1:
        return
    total, unknown, places = 0, 0, dict[str, None]()
    for decision in space.decisions:
        menu = decision.menu
        if menu.call is None or menu.op is None or menu.bound is None:
            continue
        work = flops(menu.call, menu.op, menu.bound)
        total += work
        if str(decision.node.target) in OTHER_GROUPED_PRODUCTS:  # else the block around it was found
            unknown += work
            places[module_of(decision.node) or "the forward"] = None
    if unknown:
        named = ", ".join(list(places)[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
        warnings.warn(
            f"the experts in {named} ({unknown / total:.0%} of the FLOPs) are written in a form that autopar does not "
            "know: all of their rows stay on every device, and only the features of their matrices can be split. "
            "docs/experts.md lists the forms that are known.",
            stacklevel=2,
        )
