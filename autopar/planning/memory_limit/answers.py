"""Answers to problems with a memory limit, and what is known of them while the best is looked for."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import MemoryRow
from autopar.costs.memory.peak import memory_use
from autopar.costs.plans.decision_rows import MemoryUse
from autopar.ir.program.recompute_segments import MODES
from autopar.planning.formulation import Formulation, Pins
from autopar.planning.memory_limit.least_peak import Moments
from autopar.solver.bounds.prices import Mixture
from autopar.solver.problem import Edge, Problem

MAX_AT_ONCE = 3  # moments that one answer adds to the rows
OVER = 1e-3  # of the limit: what choices have to be over it on average at a moment, for a row to be worth it
PRICE_PARTS = 1000  # into which the prices of moments are divided
MIXED = 4  # times that what prices mix adds moments: then single layers are over it, one after the other
APART = 0.05  # of all moments lie between two that are added
ROUNDING = 1e-9  # of the seconds: a smaller gap counts as none


@dataclass(frozen=True, slots=True)
class Answer:
    """Choices per decision and segment, what they take, and the proof of how good they are."""

    choices: tuple[int, ...]
    modes: Mapping[str, str]
    seconds: float
    bound: float
    peak_bytes: int
    memory: MemoryUse
    fullest: int
    """Place of the call whose backward is the fullest moment."""
    solver: str
    multiplier: float
    problem: Problem
    """The problem on which the bound is proven with the multiplier."""
    row: MemoryRow | None = None
    """The moments that it was limited at."""
    smaller: tuple[tuple[int, ...], ...] = ()
    """Other choices, and modes, within that limit: of fewer bytes from one to the next, and of little more seconds."""

    @property
    def price(self) -> float:
        """Seconds per byte at one moment at which the bound is proven."""
        return 0.0 if self.row is None else self.multiplier * self.row.total


def share(answer: Answer) -> float:
    """Return the share of the step that could be saved at most; 0 for a step without time, or for rounding errors."""
    share = (answer.seconds - answer.bound) / answer.seconds if answer.seconds else 0.0
    return share if share > ROUNDING else 0.0


def choices_of_nodes(choices: Sequence[int], modes: Iterable[str]) -> tuple[int, ...]:
    """Return the choices of a problem's nodes: those of decisions, and the modes of segments."""
    return (*choices, *(MODES.index(mode) for mode in modes))


def in_each_mode(answer: Answer, modes: Mapping[str, str], among: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the choices of an answer, and the same with every segment in each of the `among` modes that it may have.

    `modes` say which these are, as of problems (`Formulation.problem`). So it shows what memory costs where nothing
    changes but what is computed again.
    """
    own = {name: answer.modes.get(name, MODES[0]) for name in modes}
    found = [own]
    for mode in among:
        found.append(
            {name: mode if mode in (specified or mode).split("|") else own[name] for name, specified in modes.items()}
        )
    return list(dict.fromkeys(choices_of_nodes(answer.choices, each.values()) for each in found))


def without_idle_modes(
    answer: Answer, formulation: Formulation, pins: Pins, modes: Mapping[str, str], limit: int
) -> Answer:
    """Return the answer with segments as they are that gain nothing by being computed again, or by leaving for the
    host.

    Among answers of the same seconds any may be found. `modes` say what a segment may be (`Formulation.problem`).
    """
    new_modes = dict(answer.modes)
    if all(mode == MODES[0] for mode in new_modes.values()):
        return answer
    problem = answer.problem
    if len(problem.nodes) < len(answer.choices) + len(new_modes):  # the bound is of the problem without segments
        problem = formulation.problem(pins, modes=modes)

    choices, edges = list(choices_of_nodes(answer.choices, new_modes.values())), defaultdict[int, list[Edge]](list)
    for edge in problem.edges:
        for end in set(edge.ends):
            edges[end].append(edge)
    same = math.ulp(answer.seconds)  # less makes no difference to the sum

    def seconds(node: int) -> float:  # of the node and its edges
        here = (float(edge.seconds[tuple(choices[end] for end in edge.ends)]) for edge in edges[node])
        return math.fsum((float(problem.nodes[node].seconds[choices[node]]), *here))

    for node, (name, mode) in enumerate(answer.modes.items(), start=len(answer.choices)):
        if mode != MODES[0] and MODES[0] in (modes.get(name) or MODES[0]).split("|"):
            before, chosen = seconds(node), choices[node]
            choices[node], new_modes[name] = MODES.index(MODES[0]), MODES[0]
            if seconds(node) - before > same:
                choices[node], new_modes[name] = chosen, mode
    if new_modes == answer.modes:
        return answer
    peak, use, place = memory_use(formulation.memory, answer.choices, new_modes)
    return replace(answer, modes=new_modes, peak_bytes=peak, memory=use, fullest=place) if peak <= limit else answer


def smaller_ones(answer: Answer, memory: MemoryModel) -> Iterator[Answer]:
    """Yield an answer and the smaller choices known with it, with their bytes by a model of memory."""
    count = len(memory.space.decisions)
    own = choices_of_nodes(answer.choices, answer.modes.values())
    for number, among in enumerate((own, *answer.smaller)):
        choices = among[:count]
        modes = {name: MODES[mode] for name, mode in zip(answer.modes, among[count:], strict=True)}
        peak, use, place = memory_use(memory, choices, modes)
        found = replace(
            answer,
            choices=choices,
            modes=modes,
            peak_bytes=peak,
            memory=use,
            fullest=place,
            smaller=answer.smaller[number:],
        )
        if number:
            seconds = answer.problem.cost_of(among)[0]
            found = replace(found, seconds=seconds, bound=min(answer.bound, seconds))
        yield found


def full(taken: np.ndarray, limit: int, most: int = MAX_AT_ONCE, apart_by: float = APART) -> set[int]:
    """Return the fullest moments of those that take more than the limit, `most` of them, and so far from each other."""
    found: set[int] = set()
    left = np.where(taken > limit, taken, -1)
    apart = max(1, int(apart_by * len(taken)))
    while len(found) < most and left.max() >= 0:
        place = int(left.argmax())
        found.add(place)
        left[max(place - apart, 0) : place + apart + 1] = -1
    return found


@dataclass(slots=True)
class Places:
    """The moments that have a row each, by their numbers, and how more are found."""

    numbers: set[int]
    limit: int
    taken: Callable[[tuple[int, ...]], np.ndarray]
    """Bytes at every moment, of choices of decisions and modes."""
    mixed: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)
    """Cache of bytes at every moment, by mixed choices; the remaining problem mixes the same choices again."""
    times_left: int = MIXED
    """Number of times that moments may still be added at which mixed choices exceed the limit on average."""

    def rows(self) -> tuple[list[int], tuple[MemoryRow, ...]]:
        """Return the numbers in order, and a row of each moment."""
        numbers = sorted(self.numbers)
        return numbers, tuple([MemoryRow(((number, 1),)) for number in numbers])

    def add(self, taken: np.ndarray) -> None:
        """Add moments at which so many bytes, by moment, are over the limit."""
        self.numbers.update(full(taken, self.limit))

    def add_mixed(self, mixture: Mixture) -> bool:
        """Add moments at which choices are over the limit on average, a few times; whether there are any.

        Answers found without a row there exceed the limit, too, or their price is wrong. Nothing is added where
        they are over it at a moment that has a row: then no prices are the best, and mostly nothing fits.
        """
        if not mixture or not self.times_left:
            return False
        most = round((1 + OVER) * self.limit)
        for choices, _ in mixture:
            if choices not in self.mixed:
                self.mixed[choices] = self.taken(choices)
        taken = np.array([weight * self.mixed[choices] for choices, weight in mixture]).sum(axis=0)
        more = set() if (taken[list(self.numbers)] > most).any() else full(taken, most)
        self.numbers.update(more)
        self.times_left -= bool(more)
        return bool(more)


def row_of(prices: Mapping[int, float]) -> MemoryRow:
    """Return the sum of moments with weights like their prices."""
    whole = sum(prices.values())
    parts = ((place, round(PRICE_PARTS * price / whole)) for place, price in prices.items() if whole > 0)
    return MemoryRow(tuple(sorted((place, part) for place, part in parts if part)))


class Found(Moments):
    """State of the search for the best answer within the limit."""

    def __init__(self, proof: Answer) -> None:
        super().__init__()
        self.first = self.proof = proof
        """The answer of the best bound."""
        self.fitting: list[Answer] = []
        """Answers within the limit at every moment."""
        self.near: list[tuple[int, ...]] = []
        """Choices, and modes, that prices near the best have led to, within the limit or not."""

    @property
    def best(self) -> Answer:
        """The fastest that fits, with the best bound."""
        best = min(self.fitting, key=lambda answer: answer.seconds)
        if best is self.proof:
            return best
        is_best = best.seconds - self.proof.bound <= ROUNDING * best.seconds
        return replace(
            best,
            bound=best.seconds if is_best else self.proof.bound,
            solver=f"{best.solver}, several moments",
            multiplier=self.proof.multiplier,
            problem=self.proof.problem,
            row=self.proof.row,
        )

    def is_proven(self, gap: float) -> bool:
        """Return whether a fitting answer is proven to be within a gap of the best."""
        return bool(self.fitting) and share(self.best) <= gap
