"""Choosing by prediction: in every cell (a model on so many GPUs) the run that is predicted fastest against the best.

Cells are those of nanotron and of BLOOM's tuning; other sources compare devices, networks and lengths of texts.

Regret is what the chosen run takes more than the fastest measured one, as a share of that. Runs are compared by the
seconds of a token, as their batches differ; among those chosen from are all that ran, and of those that ran out of
memory such as are predicted to fit, which is the worst choice there is. A run that ended at one time and ran out of
memory at another, in the same configuration, counts as one that ended.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.publications.megatron import BLOOM
from benchmarks.publications.prediction import Outcome

FEWEST_RUNS = 5
SOURCES = ("nanotron", BLOOM)


@dataclass(frozen=True, slots=True)
class Cell:
    """A model on so many GPUs: the runs that were compared, the chosen one, and the fastest."""

    model: str
    devices: int
    runs: int
    chosen: str
    fastest: str
    regret: float
    """Infinite where the chosen run ran out of memory."""
    by_chance: float
    """The mean regret of a run at random, of those that ran."""


def cells(found: Sequence[Outcome], runs_out: Callable[[Outcome], bool], least: int = FEWEST_RUNS) -> tuple[Cell, ...]:
    """The cells with at least so many successful runs; what is predicted to run out of memory is not chosen."""
    grouped: dict[tuple[str, int, int], list[Outcome]] = defaultdict(list)
    for each in found:
        row = each.row
        if row.source in SOURCES and each.predicted is not None and (row.seconds or row.out_of_memory):
            grouped[row.model, row.shape.heads, row.devices].append(each)
    made = []
    for (model, _, devices), own in sorted(grouped.items()):
        ran = [each for each in own if each.row.seconds]
        if len(ran) < least:
            continue
        ended = {(each.row.label, each.row.zero) for each in ran}
        own = [each for each in own if each.row.seconds or (each.row.label, each.row.zero) not in ended]
        fitting = [each for each in own if not runs_out(each)] or ran
        chosen, fastest = min(fitting, key=predicted_token), min(ran, key=measured_token)
        best = measured_token(fastest)
        regrets = [measured_token(each) / best - 1 for each in ran]
        made.append(
            Cell(
                model,
                devices,
                len(ran),
                chosen.row.label,
                fastest.row.label,
                measured_token(chosen) / best - 1,
                statistics.mean(regrets),
            )
        )
    return tuple(made)


def predicted_token(outcome: Outcome) -> float:
    """Predicted seconds of a token of the whole batch."""
    return outcome.seconds / (outcome.row.global_batch * outcome.row.sequence)


def measured_token(outcome: Outcome) -> float:
    """Measured seconds of a token; infinite where the run ran out of memory."""
    row = outcome.row
    return (row.seconds or math.inf) / (row.global_batch * row.sequence)


def share_within(made: Sequence[Cell], most: float) -> float:
    """The share of cells whose regret is no more."""
    return sum(each.regret <= most for each in made) / len(made)
