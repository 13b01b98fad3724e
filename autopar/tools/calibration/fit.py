"""Fit of a link's coefficients to measured message times: one line, or the lower of two.

    seconds = base latency + steps · step latency + bytes sent · seconds per byte

A least-squares fit in relative error, so that a message of a kilobyte counts as much as one of a megabyte, and with no
coefficient below zero. Three refinements are made if they explain the times clearly better:

- Collectives share the latencies and differ in the seconds per byte (gloo scatters more slowly than it gathers). The
  efficiency of each is its share of the best one's bandwidth.
- Collectives differ in the latency, too (gloo's all-to-all sends to all at once). Each has the latency of the fit,
  times a factor of its own.
- Libraries carry small messages differently from large ones (NCCL's protocols). One line for the messages up to a size
  and one for those above it become two protocols, the first with its share of the second's bandwidth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.costs.hardware.profile import Protocol

WORTH = 0.8  # a second protocol, the best of many cuts, must lower the error to this share,
WORTH_OWN = 0.9  # lines per collective, without any choice, to this one,
WORTH_LEAST = 0.01  # and both by this much: a percent
FEWEST = 3  # samples that a line of its own needs


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured collective: its steps, the bytes that each device's port sent, its seconds."""

    steps: int
    num_bytes: float
    seconds: float
    collective: str = "all_reduce"


@dataclass(frozen=True, slots=True)
class Line:
    """The three coefficients, none below 0."""

    base_s: float
    step_s: float
    seconds_per_byte: float

    def latency(self, sample: Sample) -> float:
        """Return the seconds of a sample that its bytes do not take."""
        return self.base_s + sample.steps * self.step_s

    def seconds(self, sample: Sample, slowdown: float = 1.0) -> float:
        """Predict the seconds of a sample whose latency is `slowdown` times that of the line."""
        return self.latency(sample) * slowdown + sample.num_bytes * self.seconds_per_byte


@dataclass(frozen=True, slots=True)
class Fit:
    """The lines of one or two protocols, the one for small messages first; the least of them is the prediction."""

    lines: tuple[Line, ...]
    error: float
    """Root mean square of the relative errors."""
    efficiencies: Mapping[str, float]
    """Collective → share of the bandwidth; 1 for one that is not listed."""
    latencies: Mapping[str, float] = field(default_factory=dict)
    """Collective → its latency, in times that of the lines; 1 for one that is not listed."""

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth of the best line."""
        return 1 / min(line.seconds_per_byte for line in self.lines)

    def protocols(self, names: Sequence[str]) -> tuple[Protocol, ...]:
        """Return the lines as ring protocols of a link of `bytes_per_s`, one for each name; a single line takes them
        all.
        """
        lines = self.lines if len(self.lines) == len(names) else self.lines * len(names)
        return tuple(
            Protocol(name, "ring", line.base_s, line.step_s, min(1.0, 1 / (line.seconds_per_byte * self.bytes_per_s)))
            for name, line in zip(names, lines, strict=True)
        )

    def seconds(self, sample: Sample) -> float:
        """Predict the seconds of a sample by the faster line, given its collective's efficiency and latency factor."""
        scaled = _at_full_efficiency(sample, self.efficiencies)
        return min(line.seconds(scaled, self.latencies.get(sample.collective, 1.0)) for line in self.lines)


def fit(samples: Sequence[Sample]) -> Fit:
    """Return the best fit of at least two samples of different sizes, refined where that is worth it."""
    sizes = {sample.num_bytes for sample in samples}
    assert len(sizes) >= 2, f"a line through messages of {sorted(sizes)} bytes says nothing of bandwidth"
    plain = _refined(_fit_by_parts(samples, (samples,), {}), samples)
    if len({sample.collective for sample in samples}) == 1:
        return plain
    efficiencies = _efficiencies(samples)
    apart = _refined(_fit_by_parts(samples, (samples,), efficiencies), samples)
    found = apart if _is_worth(apart, plain, WORTH_OWN) else plain
    each = _with_latencies(samples, plain)
    return each if _is_worth(each, found, WORTH_OWN) else found


def relative_error(predict: Callable[[Sample], float], samples: Sequence[Sample]) -> float:
    """Return the root mean square of (predicted - measured) / measured."""
    return math.sqrt(sum((predict(s) / s.seconds - 1) ** 2 for s in samples) / len(samples))


def _refined(single: Fit, samples: Sequence[Sample]) -> Fit:
    """Return the best pair of lines, for messages up to a size and above it, or the single one where no pair is worth
    it.
    """
    best = single
    for size in sorted({sample.num_bytes for sample in samples})[:-1]:
        small = [sample for sample in samples if sample.num_bytes <= size]
        large = [sample for sample in samples if sample.num_bytes > size]
        if min(len(small), len(large)) < FEWEST or len({sample.num_bytes for sample in large}) < 2:
            continue
        found = _fit_by_parts(samples, (small, large), single.efficiencies)
        if found.error < best.error and _is_worth(found, single, WORTH):
            best = found
    return best


def _is_worth(refined: Fit, plain: Fit, share: float) -> bool:
    return refined.error < share * plain.error and plain.error - refined.error > WORTH_LEAST


def _fit_by_parts(
    samples: Sequence[Sample], parts: Sequence[Sequence[Sample]], efficiencies: Mapping[str, float]
) -> Fit:
    """Return a fit with a line through each part, and its error over all samples."""
    lines = tuple(_line([_at_full_efficiency(sample, efficiencies) for sample in part]) for part in parts)
    found = Fit(lines, 0.0, efficiencies)
    return replace(found, error=relative_error(found.seconds, samples))


def _at_full_efficiency(sample: Sample, efficiencies: Mapping[str, float]) -> Sample:
    """Return the sample with the bytes that would take as long at full efficiency."""
    return replace(sample, num_bytes=sample.num_bytes / efficiencies.get(sample.collective, 1.0))


def _line(samples: Sequence[Sample]) -> Line:
    base, step, per_byte = _coefficients(samples, [[sample.num_bytes for sample in samples]])
    return Line(base, step, per_byte)


def _efficiencies(samples: Sequence[Sample]) -> dict[str, float]:
    """Share of the best one's bandwidth by collective, from one fit with a slope for each."""
    names = sorted({sample.collective for sample in samples})
    slopes = _coefficients(samples, [[s.num_bytes * (s.collective == name) for s in samples] for name in names])[2:]
    return {name: min(slopes) / slope for name, slope in zip(names, slopes, strict=True)}


def _with_latencies(samples: Sequence[Sample], plain: Fit) -> Fit:
    """Return the fit of one line with a latency and a bandwidth for each collective, in two steps.

    The line of all says how latencies grow with the steps; then each collective has the least squares, in relative
    error, of two unknowns: times that latency, and seconds per byte. The plain fit where one of them is not positive.
    """
    line = _line(samples)
    found: dict[str, tuple[float, float]] = {}
    for name in sorted({sample.collective for sample in samples}):
        own = [sample for sample in samples if sample.collective == name]
        columns = np.array(
            [(line.latency(s) / s.seconds, s.num_bytes * line.seconds_per_byte / s.seconds) for s in own]
        )
        times, slope = np.linalg.lstsq(columns, np.ones(len(own)), rcond=None)[0]
        if not (times > 0 and slope > 0):
            return plain
        found[name] = (float(times), float(slope) * line.seconds_per_byte)
    fastest = min(slope for _, slope in found.values())
    efficiencies = {name: fastest / slope for name, (_, slope) in found.items()}
    latencies = {name: times for name, (times, _) in found.items()}
    made = Fit((replace(line, seconds_per_byte=fastest),), 0.0, efficiencies, latencies)
    return replace(made, error=relative_error(made.seconds, samples))


def _coefficients(samples: Sequence[Sample], num_bytes: Sequence[Sequence[float]]) -> list[float]:
    """Return base latency, step latency and a slope for each column of bytes: non-negative least squares in relative
    error.

    Of the subsets of latencies whose solution has nothing negative, the best. There are only four, and a larger one
    must be better by more than rounding: with one number of steps, base and step latency are the same column.
    """
    seconds = np.array([s.seconds for s in samples])
    rows = np.array([np.ones(len(samples)), [s.steps for s in samples], *num_bytes])
    columns = (rows / seconds).T
    # Without any latency the slopes are positive.
    best, least = np.zeros(len(rows)), math.inf
    for chosen in itertools.chain.from_iterable(itertools.combinations((0, 1), count) for count in range(3)):
        kept = [*chosen, *range(2, len(rows))]
        # Columns are scaled to length one: bytes and seconds differ by ten powers of ten.
        lengths = np.linalg.norm(columns[:, kept], axis=0)
        found = np.linalg.lstsq(columns[:, kept] / lengths, np.ones(len(samples)), rcond=None)[0] / lengths
        error = float(np.sum((columns[:, kept] @ found - 1) ** 2))
        slopes = found[len(chosen) :]
        if np.all(found >= 0) and np.all(slopes > 0) and error < least * (1 - 1e-9) - 1e-24:
            best, least = np.zeros(len(rows)), error
            best[kept] = found
    return best.tolist()
