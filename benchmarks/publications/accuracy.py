"""Accuracy of predictions against measurements: errors, rank order, and correctly predicted out-of-memory runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.tools.benchmarking.rank_correlation import spearman


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of predicted numbers, as shares of the measured ones."""

    count: int
    mean: float
    """MAPE."""
    median: float
    """Signed median error; below 0 if more than half of the predictions are too small."""
    median_absolute: float
    spearman: float


def errors(predicted: Sequence[float], measured: Sequence[float]) -> Errors:
    """The errors of at least two pairs."""
    assert len(predicted) == len(measured) >= 2, f"{len(predicted)} and {len(measured)} numbers"
    off = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
    absolute = [abs(each) for each in off]
    return Errors(
        len(off),
        statistics.mean(absolute),
        statistics.median(off),
        statistics.median(absolute),
        spearman(list(predicted), list(measured)),
    )


@dataclass(frozen=True, slots=True)
class Confusion:
    """Runs that ran out of memory, or did not, and what was predicted of them."""

    fitting: int
    fitting_told: int
    failing: int
    failing_told: int

    @property
    def share(self) -> float:
        """Share of runs whose outcome (fits or runs out of memory) was predicted correctly."""
        return (self.fitting_told + self.failing_told) / (self.fitting + self.failing)


def confusion(fails: Sequence[bool], told: Sequence[bool]) -> Confusion:
    """Count the runs that fit and that fail, and the correct predictions of each."""
    pairs = list(zip(fails, told, strict=True))
    return Confusion(
        sum(not each for each in fails),
        sum(not a and not b for a, b in pairs),
        sum(fails),
        sum(a and b for a, b in pairs),
    )


def pairs_in_order(predicted: Sequence[float], measured: Sequence[float], apart: float = 0.0) -> tuple[int, int]:
    """Return the number of pairs that are predicted in the measured order, and the number of all pairs.

    A pair counts only if its larger measured number exceeds the smaller by more than a share `apart`.
    """
    right = every = 0
    for one in range(len(measured)):
        for other in range(one):
            smaller, larger = sorted((measured[one], measured[other]))
            if larger > smaller * (1 + apart):
                every += 1
                right += (predicted[one] - predicted[other]) * (measured[one] - measured[other]) > 0
    return right, every
