"""Answers to problems with a memory limit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.costs.memory.moments import MemoryRow
from autopar.costs.memory.peak import memory_use
from autopar.costs.space.narrowed import Pins
from autopar.ir.program.recompute_segments import MODES
from autopar.planning.formulation import Formulation
from autopar.solver.problem import Edge, Problem
from autopar.solver.tolerances import ROUNDING

WEIGHTS = 1000  # parts into which prices or weights of moments are divided: rows take whole numbers


@dataclass(frozen=True, slots=True)
class Answer:
    """Choices per decision and segment, what they take, and the proof of how good they are."""

    choices: tuple[int, ...]
    modes: Mapping[str, str]
    seconds: float
    bound: float
    solver: str
    multiplier: float
    problem: Problem
    """The problem on which the bound is proven with the multiplier."""
    row: MemoryRow | None = None
    """The moments that it was limited at."""

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


def choices_and_modes(
    point: tuple[int, ...], formulation: Formulation, modes: Iterable[str] | None
) -> tuple[tuple[int, ...], dict[str, str]]:
    """Return the choices of decisions, and the modes of segments, from the choices of a problem's nodes."""
    count = len(formulation.space.decisions)
    return point[:count], {name: MODES[c] for name, c in zip(modes or (), point[count:], strict=True)}


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

    def seconds(node: int) -> float:  # seconds of the node and its edges
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
    peak, *_ = memory_use(formulation.memory, answer.choices, new_modes)
    return replace(answer, modes=new_modes) if peak <= limit else answer


def row_of(prices: Mapping[int, float]) -> MemoryRow:
    """Return the sum of moments with weights like their prices."""
    whole = sum(prices.values())
    parts = ((place, round(WEIGHTS * price / whole)) for place, price in prices.items() if whole > 0)
    return MemoryRow(tuple(sorted((place, part) for place, part in parts if part)))
