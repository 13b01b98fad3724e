"""How well predictions meet what was measured: errors, ranks, and out-of-memory told right."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.benchmarking.rank_correlation import spearman


@dataclass(frozen=True, slots=True)
class Errors:
    """Of pairs of predicted and measured numbers; shares of the measured one."""

    count: int
    mean: float
    """MAPE."""
    median: float
    """With its sign: below 0 where half of the predictions and more are too small."""
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
        """Of the runs of which the right thing was told."""
        return (self.fitting_told + self.failing_told) / (self.fitting + self.failing)


def confusion(fails: Sequence[bool], told: Sequence[bool]) -> Confusion:
    """What was told of runs that fail, and of those that do not."""
    pairs = list(zip(fails, told, strict=True))
    return Confusion(
        sum(not each for each in fails),
        sum(not a and not b for a, b in pairs),
        sum(fails),
        sum(a and b for a, b in pairs),
    )


def pairs_in_order(predicted: Sequence[float], measured: Sequence[float], apart: float = 0.0) -> tuple[int, int]:
    """Of all pairs of different measured numbers those that are predicted in the same order, and all.

    Numbers differ where the larger is more than a share `apart` above the smaller.
    """
    right = every = 0
    for one in range(len(measured)):
        for other in range(one):
            smaller, larger = sorted((measured[one], measured[other]))
            if larger > smaller * (1 + apart):
                every += 1
                right += (predicted[one] - predicted[other]) * (measured[one] - measured[other]) > 0
    return right, every
