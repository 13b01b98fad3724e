"""Rows of a plan's tables: one per decision, and the live bytes at every moment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    pass


class Moved(NamedTuple):
    """One collective of a step: `num_bytes` in NCCL's convention, `seconds` as far as they are not hidden."""

    collective: str
    axis: str
    num_bytes: int
    seconds: float = 0.0
    backward: bool = False


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One decision as the table shows it."""

    name: str
    """Name of the node in the graph."""
    kind: str
    """One of "call", "parameter", "buffer", "input", "output", and "shared_reshard"."""
    module: str
    """Path of the module that makes the call, or of the parameter."""
    operation: str
    """Operation of a call; the kind of any other decision."""
    roles: tuple[str, ...]
    """Per mesh axis: "data", "column", … , "replicated", "partial", or the factor where it has no role."""
    layout: str
    """Layout of the (first) output."""
    seconds: float
    """Everything this decision costs in a step: compute, its own collectives, inbound reshards, recomputation."""
    transfers: tuple[Moved, ...]
    """Everything that this decision and its inbound reshards move in a step."""
    forward_seconds: float = 0.0
    """Compute of the forward alone."""
    backward_seconds: float = 0.0
    """Compute of the backward alone, without recomputation."""
    recompute_seconds: float = 0.0
    """Compute of the forward that is run again in the backward, or copies to the host and back that nothing hides."""
    saved_bytes: int = 0
    """Bytes per device saved from the forward to the backward on account of this decision."""
    stored_bytes: int = 0
    """Bytes per device that a parameter takes with its gradient, optimizer state and master copy."""
    segment: str = ""
    """The segment (layer) that the call is recomputed with, whatever its mode."""
    pinned: bool = field(default=False, compare=False)
    """True if an annotation of the user pins the decision."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Name what each mesh axis splits: a role, "dim 2" of the output, or "inner dim" if the output has none.

        >>> PlanRow("a", "call", "", "add", ("data", "h"), "S(0) S(2)", 0.0, ()).splits
        ('data', 'dim 2')
        """
        placements = self.layout.split()
        aligned = placements if len(placements) == len(self.roles) else self.roles
        return tuple(_words(role, placement) for role, placement in zip(self.roles, aligned, strict=True))


@dataclass(frozen=True, slots=True)
class KeptWhole:
    """An operation without a rule that fits, which every device computes whole, and its part of a step."""

    operation: str
    """The name that `autopar.register_rule` takes."""
    reason: str
    """Reason why no rule fits."""
    calls: int
    """Number of its calls."""
    first: str
    """The first of its calls."""
    module: str
    """Module of that call."""
    seconds: float
    """Seconds of all its calls in a step, forward and backward."""
    seconds_share: float
    """Share of the sum of costs."""
    num_bytes: int
    """Bytes of the inputs and outputs of all its calls."""
    flops_share: float | None = None
    """Share of the FLOPs of a forward; None if unknown: no weight among the inputs says how many there are."""


def advice_on_rules(operation: str) -> str:
    """Return the advice on an operation without a rule.

    >>> advice_on_rules("mylib::scaled")
    'Give it a rule by autopar.register_rule("mylib::scaled", …): docs/how-to/own-operations.md'
    """
    named = f'"{operation}"' if "::" in operation else operation.rpartition(".")[2]
    return f"Give it a rule by autopar.register_rule({named}, …): docs/how-to/own-operations.md"


def kept_whole_on_all(stages: Sequence[tuple[float, Sequence[KeptWhole]]]) -> tuple[KeptWhole, ...]:
    """Return the operations of all stages, given with the seconds of each, as those of one plan.

    Shares of the FLOPs are left out: a stage knows of its own alone.
    """
    whole = sum(seconds for seconds, _ in stages)
    groups: dict[tuple[str, str], list[KeptWhole]] = {}
    for each in (each for _, own in stages for each in own):
        groups.setdefault((each.operation, each.reason), []).append(each)
    found = []
    for parts in groups.values():
        seconds = sum(each.seconds for each in parts)
        found.append(
            replace(
                parts[0],
                calls=sum(each.calls for each in parts),
                seconds=seconds,
                seconds_share=seconds / whole if whole else 0.0,
                num_bytes=sum(each.num_bytes for each in parts),
                flops_share=None,
            )
        )
    return tuple(sorted(found, key=lambda each: -each.seconds))


@dataclass(frozen=True, slots=True)
class Instant:
    """Bytes per device that are alive while a row's forward or backward runs."""

    name: str
    backward: bool
    num_bytes: int


ROLES = {
    "data": "samples",
    "sequence": "positions",
    "column": "outputs of a product",
    "row": "the dim that a product sums over",
    "expert": "experts",
    "replicated": "nothing, every device has all",
    "partial": "nothing, devices hold parts of a sum",
}
"""Role of an axis → the thing it splits, in a few words."""
_SPLIT = re.compile(r"[SZ]\((\d+)\)")


def _words(role: str, placement: str) -> str:
    if role in ROLES:
        return role
    if role in ("R", "I", "-", ""):
        return "replicated" if role else ""
    if role.startswith("P"):
        return "partial"
    found = _SPLIT.search(role) or _SPLIT.search(placement)
    return f"dim {found.group(1)}" if found else "inner dim"


ACTIVATIONS = "activations"
KEPT_WEIGHTS = "gathered weights saved for the backward"
RECEIVED = "received inputs"
SAVED = (ACTIVATIONS, KEPT_WEIGHTS, RECEIVED)
"""The parts of memory that wait for a backward."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of a device at the peak, and its live bytes over a step."""

    parts: Mapping[str, int]
    """"parameters", "gradients", "optimizer", "activations", "gathered weights", … → bytes at the peak."""
    timeline: tuple[Instant, ...] = ()
    """The calls in the order they run, forward and then backward."""


def row_of(values: Mapping[str, Any]) -> PlanRow:
    transfers = tuple(Moved(*each) for each in values["transfers"])
    return PlanRow(**{**values, "roles": tuple(values["roles"]), "transfers": transfers})


_MAIN = re.compile(r"mm\b|_mm|linear|matmul|einsum|conv|attention|embedding|_norm\b|loss|softmax|lstm|gru|rnn")


def is_main(operation: str) -> bool:
    """Return whether an operation of this name is of interest to a reader: products, lookups, norms, losses."""
    return _MAIN.search(operation) is not None
