"""Result of `Plan.explain`: a decision's strategy, its cost, and the cost of the other strategies.

Values only; `explain` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from autopar.console.tables import fitted_table
from autopar.console.units import format_bytes, format_seconds, format_share
from autopar.costs.hardware.reserved import Reserved
from autopar.costs.plans.decision_rows import Moved, is_main
from autopar.costs.plans.difference import Amount, Change, Difference, Share, share_words, signed_bytes, signed_seconds

MAX_CHANGES = 8  # lines of a runner-up's table of choices
MAX_PLACES = 3  # positions listed per collective that differs from the runner-up
SHOWN_GAP = 5e-5  # a smaller one reads 0.00%


class _Proven(Protocol):
    @property
    def gap(self) -> float: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def reserved(self) -> Reserved: ...


P = TypeVar("P", bound=_Proven)
"""The plan: its file imports this one."""


@dataclass(frozen=True, slots=True)
class Reshard:
    """A tensor that changes its layout on the way to, or from, a decision."""

    tensor: str
    before: str
    after: str
    seconds: float
    """Forward and backward, as far as they are not hidden."""
    moved: tuple[Moved, ...]
    inbound: bool
    num_consumers: int
    """Number of operations that the moved tensor serves."""
    copied: float = 0.0
    """Seconds, of these, in which the device brings messages into order, before and behind them."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """The best plan in which the decision has another role on one axis; `seconds` is None if there is none."""

    axis: str
    role: str
    seconds: float | None
    peak_bytes: int = 0
    is_bound: bool = False
    """True if `seconds` is a lower bound, for a role that was not searched; its peak is not known then."""
    reason: str = ""
    """Why there is none."""


@dataclass(frozen=True, slots=True)
class RunnerUp(Generic[P]):
    """The best plan without the chosen strategy of the decision."""

    strategy: str
    plan: P
    step: Amount
    memory: Amount
    parts: Mapping[str, Share]
    """Part of a step ("compute", "all_reduce tp", …) → what it takes more than in the plan, largest first."""
    places: Mapping[str, tuple[tuple[str, Share], ...]]
    """Collective and axis → where it takes more or less, largest first."""
    difference: Difference


@dataclass(frozen=True, slots=True)
class Explanation(Generic[P]):
    """Why a decision is as it is: `str` gives it as text."""

    name: str
    decision: str
    operation: str
    strategy: str
    """Chosen strategy in words: "dp=data, tp=column"."""
    inputs: tuple[tuple[str, str], ...]
    """(tensor, layout) of each input."""
    outputs: tuple[str, ...]
    """Layouts."""
    num_strategies: int
    num_allowed: int
    """Number of strategies that annotations leave."""
    pinned_by: tuple[str, ...]
    """The annotations that say something about the decision."""
    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    mode: str
    """Recompute mode of the segment: tells whether `recompute_seconds` are of a second forward or host copies."""
    optimizer_seconds: float
    own: tuple[Moved, ...]
    """The collectives that the operation runs itself."""
    reshards: tuple[Reshard, ...]
    saved_bytes: int
    stored_bytes: int
    seconds: float
    """The step of the plan."""
    runner_up: RunnerUp[P] | None
    reason: str
    """Why there is no runner-up, "" where there is one."""
    without_limit: tuple[str, float] | None
    """Best strategy without the memory limit, and that plan's seconds, if memory decides; else None."""
    alternatives: tuple[Alternative, ...]

    @property
    def own_seconds(self) -> float:
        return sum(moved.seconds for moved in self.own)

    def reshard_seconds(self, inbound: bool) -> float:
        """Return the seconds of the reshards of its inputs, or of its outputs."""
        return sum(reshard.seconds for reshard in self.reshards if reshard.inbound == inbound)

    def __str__(self) -> str:
        sections = [self._head(), self._cost(), self._runner_up_text(), self._memory(), self._alternatives_text()]
        return "\n\n".join(section for section in sections if section)

    def _head(self) -> str:
        lines = [f"{self.name} ({self.operation}, in the graph {self.decision})", f"  chosen   {self.strategy}"]
        lines += [f"  input    {tensor}: {layout}" for tensor, layout in self.inputs]
        lines += [f"  output   {layout}" for layout in self.outputs]
        count = f"of {self.num_strategies} strategies"
        lines.append(f"  choice   {count}" + ("" if self.num_allowed == self.num_strategies else self._left_text()))
        return "\n".join(lines)

    def _left_text(self) -> str:
        by = f" by {' and '.join(self.pinned_by)}" if self.pinned_by else ""
        return f", {self.num_allowed} left{by}"

    def _cost(self) -> str:
        parts = (
            ("compute, forward", self.forward_seconds),
            ("compute, backward", self.backward_seconds),
            ("host copies" if self.mode == "offload" else "recomputation", self.recompute_seconds),
            ("optimizer step", self.optimizer_seconds),
        )
        table: list[list[Any]] = [[name, format_seconds(seconds), ""] for name, seconds in parts if seconds]
        if self.own:
            table.append(["own collectives", format_seconds(self.own_seconds), _moved(self.own)])
        for each in self.reshards:
            shared = f", for {each.num_consumers} operations" if each.num_consumers > 1 else ""
            where = "in " if each.inbound else "out"
            name = f"{where} {each.tensor}: {each.before} → {each.after}{shared}"
            hidden = each.moved and not any(moved.seconds for moved in each.moved)
            copies = f", of which copies take {format_seconds(each.copied)}" if each.copied else ""
            table.append([name, "hidden" if hidden else format_seconds(each.seconds), _moved(each.moved) + copies])
        held = ((self.saved_bytes, "saved for the backward"), (self.stored_bytes, "stored, with optimizer state"))
        lines = [f"{format_bytes(count)} per device {what}" for count, what in held if count]
        return "\n".join([_table(table, ["what it costs in a step", "time", "moved"]), *lines])

    def _runner_up_text(self) -> str:
        if self.runner_up is None:
            return f"no runner-up: {self.reason}"
        second = self.runner_up
        share = "" if second.step.is_equal else f" ({share_words(second.step)})"
        lines = [
            f"runner-up: {second.strategy}, everything else planned again",
            f"  step     {format_seconds(second.step.after)}, {signed_seconds(second.step.delta)}{share}",
            f"  memory   {second.plan.reserved.both(second.plan.peak_bytes)}, {signed_bytes(second.memory.delta)}",
        ]
        if second.plan.gap > SHOWN_GAP:
            lines.append(f"  gap      not proven best: at most {format_share(second.plan.gap)} of it could be saved")
        if signed_seconds(second.step.delta) == "0":
            lines.append("  equally fast: the choice between them is arbitrary")
        table = []
        for name, share in second.parts.items():
            if signed_seconds(share.seconds) == "0" and not share.num_bytes:
                continue
            table.append(
                [name, signed_seconds(share.seconds), signed_bytes(share.num_bytes) if share.num_bytes else ""]
            )
            for place, part in second.places.get(name, ())[:MAX_PLACES]:
                table.append([f"· {place}", signed_seconds(part.seconds), signed_bytes(part.num_bytes)])
        text = "\n".join(lines)
        if table:
            text += "\n\n" + _table(table, ["where it differs", "time", "moved"])
        changes = [
            [change.module or "(model)", change.operation, change.before, change.after, change.count]
            for change in sorted(second.difference.changes, key=_place)
        ]
        if changes:
            more = len(changes) - MAX_CHANGES
            shown = changes[:MAX_CHANGES] + ([[f"({more} more kinds)", "", "", "", ""]] if more > 0 else [])
            text += "\n\n" + _table(shown, ["what it changes", "operation", "plan", "runner-up", "calls"], 4)
        return text

    def _memory(self) -> str:
        if self.without_limit is None:
            return ""
        strategy, seconds = self.without_limit
        saved = signed_seconds(seconds - self.seconds)
        step = f"{format_seconds(seconds)} ({saved})"
        return f"memory decides: without the limit it would be {strategy}, and the step {step}"

    def _alternatives_text(self) -> str:
        if not self.alternatives:
            return ""
        rows = [[f"{each.axis}={each.role}", *self._taken(each)] for each in self.alternatives]
        table = _table(rows, ["with another role", "step", "memory, or why not"])
        is_bound = any(each.is_bound for each in self.alternatives)
        return f"{table}\n≥: no plan with that role takes less; what_if plans it" if is_bound else table

    def _taken(self, each: Alternative) -> tuple[str, str]:
        if each.seconds is None:
            return "-", each.reason
        step = signed_seconds(each.seconds - self.seconds)
        return (f"≥ {step}", "") if each.is_bound else (step, format_bytes(each.peak_bytes))


def _place(change: Change) -> int:
    """Return the sort key of a decision: large calls first, then parameter storage, then the rest."""
    return 0 if is_main(change.operation) else 1 if change.operation == "(parameter)" else 2


def _table(rows: Sequence[Sequence[Any]], headers: Sequence[str], num_left: int = 1) -> str:
    """Return a table whose first columns are words, and the last one too if there are three."""
    words = {*range(num_left), *([len(headers) - 1] if num_left == 1 else [])}
    return fitted_table(rows, headers, [number for number in range(len(headers)) if number not in words])


def _moved(transfers: Sequence[Moved]) -> str:
    return ", ".join(
        f"{each.collective} {each.axis} {format_bytes(each.num_bytes)}{' (backward)' if each.backward else ''}"
        for each in transfers
    )
