"""Moments of a step, and where each part of a device's memory is resident: the one statement of both.

A moment is what happens on account of one call, in a phase of the step (`microbatches`):

    forward      the call runs forward
    gathering    weights arrive that are gathered again: before the backward of the last call of a layer that takes
                 such weights; in a program without gradients, before the forward of its first call that takes weights
    computing    the call runs backward
    reducing     the layer's gradients are reduced: behind the backward of its first call that takes a weight
    updating     the optimizer steps on a matrix whose first call this is: behind its backward
    end          gradients of several micro-batches are reduced
    step         the optimizer works on more than it updates

Each part has a place, that of the call that first uses it. `Presence` says at which moments it is resident: a scope for
each kind of moment. Rows of the problem (`resident_parts`), the peak of a plan (`peak`) and its formulas all ask it.

The optimizer's step works in place and is below the end of the backward, but for what Muon and GaLore work on. In the
backward a step leaves gradients of the layer that runs there, and of no other.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.costs.memory.lifetimes import LATE, Lifetimes
from autopar.costs.memory.microbatches import Microbatches, Phase
from autopar.costs.memory.tensor_bytes import Modes
from autopar.costs.plans.decision_rows import ACTIVATIONS, RECEIVED
from autopar.costs.pricing.optimizer import Optimizer
from autopar.costs.space.space import ExpertRows

COMPUTING, GATHERING, REDUCING, UPDATING, FORWARD, END, STEP = range(7)
KINDS = range(FORWARD + 1)
"""Kinds of moments that every call may have; the end and the step have one moment each, at the first place."""
BACKWARD = (COMPUTING, GATHERING, REDUCING, UPDATING)
BEHIND = (REDUCING, UPDATING)  # when the call itself has run


GRADIENTS, OF_GATHERED, IN_WORK = "gradients", "gathered weights", "working set"
"""Names in `Plan.memory` of bytes of several roles."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a step: on account of the call at which place, in which of its phases, and what happens."""

    place: int
    phase: Phase
    kind: int


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The bytes at moments of a step (see `Presence.moment`), added up with whole weights."""

    weights: tuple[tuple[int, int], ...]

    @property
    def total(self) -> int:
        """Number of times that the memory limit counts in the limit of the row."""
        return sum(weight for _, weight in self.weights)


@dataclass(frozen=True, slots=True)
class PricedMemory:
    """Moments of a step, and what a byte at them is worth in seconds."""

    row: MemoryRow
    price: float

    def of_the_same_calls(self, own: Presence, other: Presence) -> PricedMemory | None:
        """Return the same in a model of memory whose calls have the same names; of others, where the backward begins.

        None where the two run their micro-batches otherwise.
        """
        names, others = own.lifetimes.names, other.lifetimes.names
        if own.microbatches != other.microbatches or not others:
            return None
        places = {name: place for place, name in enumerate(others)}
        weights: dict[int, int] = defaultdict(int)
        for moment, weight in self.row.weights:
            kind, place = divmod(moment, len(names))
            same = places.get(names[place])
            weights[len(places) - 1 if same is None else kind * len(places) + same] += weight
        return PricedMemory(MemoryRow(tuple(sorted(weights.items()))), self.price)


def kind_in(phase: Phase, kind: int) -> int:
    """Return the kind of a phase's moments: this one, unless the phase is an end of the step."""
    return kind if not phase.end else STEP if phase.steps else END


class Scope(enum.Enum):
    """Range of bytes among moments of a kind, by the place p of the call that uses them first."""

    ALWAYS = "everywhere"
    HERE = "at p"
    ONWARD = "from p on"
    MEANWHILE = "behind p, while rows that the call at p sends are on their way"
    UNTIL = "before p: its backward has run; behind the backward of p at p, too"
    ALL_LAYER = "in the layer of p"
    LAYER_BEFORE = "in the layer of p, before p"
    LAYER_UNTIL = "in the layer of p, as UNTIL"
    LAYER_TO = "in the layer of p, up to p"
    AHEAD = "in the layers that come before that of p, as many as weights are fetched ahead"
    WHOLE = "from p on, or from behind its backward, while the segment of p is there as a whole"
    SAVED = "behind that"
    OFFLOADING = "as WHOLE, and while the segment next to it is there"
    OFFLOADED = "behind that, of what is not on the host"


def _at(kinds: Iterable[int], scope: Scope = Scope.ALWAYS) -> dict[int, Scope]:
    return dict.fromkeys(kinds, scope)


ALWAYS, RUNNING = _at(range(STEP + 1)), _at(KINDS)


class Role(enum.Enum):
    """Purpose of bytes, in the order in which tables name them.

    With it go their name in `Plan.memory`, and their scope at each kind of moment, unless `Presence` states another.
    """

    STORED = "parameters, optimizer state, buffers and inputs", "", ALWAYS
    MOVED = "a weight as it was moved, or a constant, once a step", "moved weights", RUNNING | {END: Scope.ALWAYS}
    SENT = "a tensor that goes to the next stage, until the next one goes there", "sent tensors", ALWAYS
    RECEIVED = "a buffer for a tensor from the previous stage", RECEIVED, ALWAYS
    RETURNED = "a buffer for a gradient from the next stage", "received gradients", ALWAYS
    GRADIENT = "a gradient as it is stored, or as micro-batches add to it", GRADIENTS, {}
    ARRIVED = "a gradient that one backward has reduced, to be added to those before it", GRADIENTS, {}
    FRESH = "a gradient that one backward has made, to be added to those before it", GRADIENTS, {COMPUTING: Scope.HERE}
    REDUCED = "a gradient as it is stored, next to the sum that it is made of", GRADIENTS, {END: Scope.ALWAYS}
    STEPPED = "a gradient as it is stored, while the optimizer steps", GRADIENTS, {STEP: Scope.ALWAYS}
    UNREDUCED = "a gradient, between its call's backward and the layer's", GRADIENTS, _at(BACKWARD, Scope.LAYER_BEFORE)
    SENT_OFF = "a gradient in the message that reduces it", GRADIENTS, {REDUCING: Scope.LAYER_TO}
    LAST_MADE = "a gradient of the layer's last backward, as it is reduced", GRADIENTS, {REDUCING: Scope.HERE}
    SAVED = "a tensor saved for the backward, as its segment's mode says", "", _at(KINDS, Scope.SAVED)
    WHOLE = "such a tensor while its segment runs again", "", _at(KINDS, Scope.WHOLE)
    OFFLOADED = "a tensor that an offloading segment saves on the device", "", _at(KINDS, Scope.OFFLOADED)
    OFFLOADING = "what is saved of an offloading segment until it has left", "", _at(KINDS, Scope.OFFLOADING)
    WAITING = "a tensor that another micro-batch saves for its backward", "", ALWAYS
    ALIVE = (
        "a tensor of a program without gradients, until its last use",
        ACTIVATIONS,
        _at((FORWARD, GATHERING), Scope.ONWARD),
    )
    GATHERED = "a gathered weight in the forward", OF_GATHERED, {FORWARD: Scope.ALL_LAYER}
    GATHERED_AGAIN = "a gathered weight in the backward", OF_GATHERED, _at((COMPUTING, GATHERING), Scope.ALL_LAYER)
    COPIED = "a gathered weight in the message that it is copied out of", OF_GATHERED, {GATHERING: Scope.ALL_LAYER}
    ON_WAY = "a weight that is fetched ahead in the forward", OF_GATHERED, {FORWARD: Scope.AHEAD}
    ON_WAY_AGAIN = "a weight that is fetched ahead in the backward", OF_GATHERED, _at(BACKWARD, Scope.AHEAD)
    TRAVELLING = "rows of experts on their way, sent or arriving", IN_WORK, _at(KINDS, Scope.MEANWHILE)
    WORKING = "what a backward works on", IN_WORK, {COMPUTING: Scope.HERE}
    WORKING_FORWARD = "what a forward works on that makes its gradients", IN_WORK, {FORWARD: Scope.HERE}
    HANDED_ON = "gradients that a backward leaves for the calls before it", IN_WORK, _at(BEHIND, Scope.HERE)
    UPDATING = "what the optimizer's step works on", IN_WORK, {UPDATING: Scope.HERE, STEP: Scope.ALWAYS}

    def __init__(self, purpose: str, label: str, scopes: Mapping[int, Scope]) -> None:
        self.purpose, self.label, self.scopes = purpose, label, scopes


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Bytes of a decision or an edge that are resident at the same moments."""

    role: Role
    name: str
    """Name of the bytes in `Plan.memory`."""
    used: int
    """Place of the call that first uses them."""
    modes: Modes
    """Bytes by the strategies at the ends: one array, or one per mode of a segment."""
    ends: tuple[int, ...]
    of: int = 0
    """The decision whose segment says the mode, where that matters."""
    until: int = LATE
    """Place from which on they are gone."""
    rows: ExpertRows | None = None
    """Expert rows of which this part adds the bytes beyond an equal share; None to add the bytes themselves.

    If set, the bytes are those of an equal share of these rows.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The scope of bytes as an interval for each place of use, in an order of the places of moments."""

    rank: np.ndarray
    """Position of each place in the order."""
    first: np.ndarray
    end: np.ndarray

    def covers(self, place: int, used: int) -> bool:
        """Return whether bytes of a place of use are resident at a place; the last is of what no call uses."""
        return bool(self.first[used] <= self.rank[place] < self.end[used])

    def spread(self, num_bytes: np.ndarray) -> np.ndarray:
        """Return the bytes at each place, given those by place of use."""
        end = np.maximum(self.first, self.end)
        found = np.zeros(1 + max(self.rank.max(initial=0), end.max(initial=0)), dtype=np.int64)
        np.add.at(found, self.first, num_bytes)
        np.subtract.at(found, end, num_bytes)
        return np.cumsum(found)[self.rank]


class Presence:
    """Presence of bytes at the moments of a step, by their role and the place of the call that first uses them."""

    def __init__(
        self,
        lifetimes: Lifetimes,
        microbatches: Microbatches,
        optimizer: Optimizer,
        stepping: Collection[int],
        prefetch: int,
    ) -> None:
        """`stepping` are the parameters whose steps work on more than they update."""
        self.lifetimes, self.microbatches, self.prefetch = lifetimes, microbatches, prefetch
        self.is_alone = not (lifetimes.space.program.learns or microbatches.several)
        """True if the program has a forward alone."""
        self.frees_gradients = optimizer.frees_gradients and not microbatches.several
        """True if gradients are freed in the backward; gradients of several micro-batches stay until the end."""
        self.count, self._stepping = len(lifetimes.calls), stepping
        """Number of calls."""
        self._scopes = [self._scopes_of(is_first) for is_first in (False, True)]
        self._spans: dict[object, Span] = {}
        self._phases = microbatches.phases

    def moment(self, number: int) -> Moment:
        """Return the moment of that number: places, over phases, over kinds."""
        number, place = divmod(number, self.count)
        kind, number = divmod(number, len(self._phases))
        return Moment(place, self._phases[number], kind_in(self._phases[number], kind))

    def _scopes_of(self, is_first: bool) -> dict[Role, Mapping[int, Scope]]:
        """Return by role the scope at each kind of moment, in a first backward or a later one."""
        run = dict.fromkeys(BACKWARD, Scope.LAYER_UNTIL if self.frees_gradients else Scope.UNTIL)
        found: dict[Role, Mapping[int, Scope]] = {role: role.scopes for role in Role}
        found[Role.GRADIENT] = (run if is_first or self.frees_gradients else RUNNING) | {END: Scope.ALWAYS}
        found[Role.ARRIVED] = {} if is_first else run
        if self.microbatches.stashes:
            found[Role.MOVED] = ALWAYS
        return found

    def times(self, role: Role, phase: Phase) -> int:
        """Return for how many micro-batches bytes of one are resident in a phase."""
        if role is Role.WAITING:
            return phase.others
        if role is Role.SENT:
            return self.microbatches.sent(phase)
        if role in (Role.RECEIVED, Role.RETURNED):
            return self.microbatches.received(phase)[role is Role.RETURNED]
        return 1

    def scope(self, role: Role, kind: int, phase: Phase) -> Scope | None:
        """Return where bytes are resident at moments of a kind in a phase; None for nowhere."""
        return self._scopes[phase.first][role].get(kind)

    def is_resident(self, part: Part, at: Moment) -> bool:
        """Return whether a part is resident at a moment."""
        scope = self.scope(part.role, at.kind, at.phase)
        if scope is None or at.place >= part.until:
            return False
        return self.span(scope, at.kind).covers(at.place, min(part.used, self.count))

    @cached_property
    def moments(self) -> np.ndarray:
        """Mask of the places that have a moment, by kind and place."""
        found = np.zeros((len(KINDS), self.count), dtype=bool)
        found[FORWARD] = True
        if self.is_alone:
            found[GATHERING, list(self.lifetimes.first_weight.values())] = True
            return found
        found[COMPUTING] = True
        found[GATHERING, list(self.lifetimes.last_gather.values())] = True
        found[REDUCING, list(self.lifetimes.first_reduction.values())] = True
        for number in () if self.microbatches.works else self._stepping:
            found[UPDATING, self.lifetimes.position[number] : self.lifetimes.position[number] + 1] = True
        return found

    def span(self, scope: Scope, kind: int) -> Span:
        """Return a scope as intervals at moments of a kind."""
        key = scope, kind
        if key not in self._spans:
            self._spans[key] = self._span(scope, kind)
        return self._spans[key]

    def _span(self, scope: Scope, kind: int) -> Span:
        count, behind = self.count, kind in BEHIND
        places, used = np.arange(count), np.arange(count + 1)
        nothing, end = np.zeros(count + 1, dtype=np.intp), np.full(count + 1, count)
        if scope is Scope.ALWAYS:
            return Span(np.zeros(max(count, 1), dtype=np.intp), nothing, nothing + 1)
        if scope is Scope.AHEAD:
            return self._ahead(kind)
        if scope is Scope.HERE:
            return Span(places, used, np.minimum(used + 1, count))
        if scope is Scope.ONWARD:
            return Span(places, used, end)
        if scope is Scope.MEANWHILE:
            return Span(places, used + 1, self.lifetimes.arrivals)
        if scope is Scope.UNTIL:
            return Span(places, nothing, np.minimum(used + behind, count))
        if scope in (Scope.SAVED, Scope.WHOLE, Scope.OFFLOADED, Scope.OFFLOADING):
            turn = self._saved_from(kind, scope in (Scope.OFFLOADED, Scope.OFFLOADING))
            first = np.minimum(used + behind, count)
            return Span(places, turn, end) if scope in (Scope.SAVED, Scope.OFFLOADED) else Span(places, first, turn)
        rank, first, last = self.lifetimes.places_by_layer
        more = {Scope.LAYER_BEFORE: 0, Scope.LAYER_UNTIL: int(behind), Scope.LAYER_TO: 1}
        until = last if scope is Scope.ALL_LAYER else rank + more[scope]
        return Span(rank, np.append(first, 0), np.append(until, 0))

    def _saved_from(self, kind: int, offloads: bool) -> np.ndarray:
        """Return, by place of use, the place from which on only what the mode saves is resident.

        A segment that runs again has all of its own. What it sends to the host stays while it runs, and while the calls
        next to it do.
        """
        ends = self.lifetimes.segment_ends
        waits = kind in (FORWARD, GATHERING)
        turn = ends[ends[:-1]] if offloads else np.arange(self.count) if waits else ends[:-1]
        return np.append(turn, self.count)

    def _ahead(self, kind: int) -> Span:
        """Return where weights are on their way, by layers in the order in which they run first.

        A layer fewer is fetched while a layer's weights arrive, before the next fetch starts.
        """
        forward, depth = kind == FORWARD or self.is_alone, max(0, self.prefetch - (kind == GATHERING))
        reached, numbers = self.lifetimes.reached(forward)
        first = np.maximum(numbers - depth, 0) if forward else numbers + 1
        end = numbers if forward else np.minimum(numbers + depth + 1, len(self.lifetimes.first_weight))
        is_none = (numbers < 0) | (depth == 0)
        return Span(reached, np.append(np.where(is_none, 0, first), 0), np.append(np.where(is_none, 0, end), 0))
