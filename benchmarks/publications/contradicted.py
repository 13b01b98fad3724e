"""Runs that other runs of the same table contradict, told by what was measured alone: no prediction is looked at.

A run whose stages have the same layers, cut over at least as many ranks of tp, in the same state of the cluster and on
as many GPUs or more, launches as many kernels a micro-batch and has no less to communicate besides its gradients. So
what one of its micro-batches took is enough for one of this run, times its share of work where that is more:

    most seconds = slots · max(1, share) · seconds' / slots' + gradients
    slots        micro-batches of a step, and those of an idle pipeline: accumulation + pp - 1
    share        work of a micro-batch on a rank, over that of the other run: (micro_batch / tp) / (micro_batch' / tp')
    gradients    float32 of a rank's parameters, twice, at the least bandwidth that the run's own collectives reached

Runs that take over `TIMES` that, by any other run, are contradicted. Of 650 runs of nanotron_h100.csv that ended 621
have another to be compared with; 12 take 2.4 times and more what is enough, and all others less than 1.6 times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from benchmarks.publications.machines import machine_name
from benchmarks.publications.rows import Row

TIMES = 2.0
GRADIENT_BYTES = 4 * 2  # of a parameter: float32, reduced and gathered


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A run, the run of the same table that contradicts it most, and the seconds that are enough by that."""

    row: Row
    by: Row
    enough: float


def contradicted(rows: Sequence[Row]) -> list[Contradiction]:
    """The runs of a table that take longer than others of it allow; of sources but nanotron no two are comparable."""
    grouped: dict[tuple[str, int, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.source == "nanotron" and row.seconds and row.bandwidths:
            grouped[row.model, row.pp, machine_name(row)].append(row)
    found = []
    for own in grouped.values():
        for row in own:
            others = [(enough(row, each), each) for each in own if is_above(each, row)]
            least, by = min(others, key=lambda each: each[0], default=(inf, row))
            if (row.seconds or 0.0) > TIMES * least:
                found.append(Contradiction(row, by, least))
    return found


def is_above(other: Row, row: Row) -> bool:
    """Return whether `other` bounds the time of `row` from above.

    It does if it is another run with at least as many tp ranks and devices.
    """
    return other is not row and other.tp >= row.tp and other.devices >= row.devices


def enough(row: Row, other: Row) -> float:
    """Seconds that are enough for a step, by what another run took."""
    assert other.seconds and row.pp == other.pp, f"{row.label} by {other.label}"
    share = (row.micro_batch / row.tp) / (other.micro_batch / other.tp)
    slots, others = (each.accumulation + each.pp - 1 for each in (row, other))
    return slots * max(1.0, share) * other.seconds / others + _gradient_seconds(row)


def _gradient_seconds(row: Row) -> float:
    if row.dp == 1:
        return 0.0
    return GRADIENT_BYTES * row.shape.parameters / (row.tp * row.pp) / min(row.bandwidths.values())
