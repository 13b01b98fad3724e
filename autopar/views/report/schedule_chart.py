"""The schedule of a pipeline as text: a line per rank, in which a column is a share of the step.

    rank 0  F0─F1─F2─F3─........B0────B1────B2────B3────O
    rank 1  ...F0─F1─F2─F3─B0────B1────B2────B3────.....O

F is a forward, B a backward, I the gradient of the input and W that of the weights, each with its micro-batch; O
is what a rank does once per step. Lower case marks stages of a rank beyond its first.
"""

from __future__ import annotations

from autopar.console.units import format_seconds
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.schedules.simulation import Slice

LEAST_COLUMNS = 20
ONCE, WAITING, RUNNING = "O", ".", "─"


def schedule_chart(plan: PipelinePlan, width: int) -> str:
    """Return the chart, at most `width` characters wide, with a legend."""
    ranks = range(plan.schedule.num_ranks)
    label = len(f"rank {ranks[-1]}  ")
    columns = max(LEAST_COLUMNS, width - label)
    lines = [f"{f'rank {rank}':<{label}}{_line(plan, rank, columns)}" for rank in ranks]
    kinds = "F forward, I gradient of the input, W of the weights" if plan.schedule.halves_backwards else "F forward"
    backward = ", B backward, O once per step, . waiting; numbers are micro-batches"
    chunks = ["lower case: later stages of the rank"] if plan.schedule.chunks > 1 else []
    head = f"{plan.schedule.name} on axis {plan.axis}: {plan.microbatches} micro-batches, bubble {plan.bubble:.1%}"
    scale = f"{format_seconds(plan.seconds)}, {format_seconds(plan.seconds / columns)} a column"
    return "\n".join([f"{head}, {scale}", *lines, kinds + backward, *chunks])


def _line(plan: PipelinePlan, rank: int, columns: int) -> str:
    """Return what a rank does in each column; a slice shorter than half a column may have none."""
    cells = [WAITING] * columns
    first = plan.schedule.stages_of(rank)[0]
    per_second = columns / plan.seconds if plan.seconds else 0.0
    for each in (slice_ for slice_ in plan.timeline.slices if slice_.rank == rank):
        start, end = round(each.start * per_second), round(each.end * per_second)
        cells[start:end] = _drawn(each, first, end - start)
    return "".join(cells)


def _drawn(drawn: Slice, first_stage: int, length: int) -> str:
    """Return a slice in `length` characters: its name if there is space, else its letter."""
    letter = ONCE if drawn.kind == "once" else drawn.kind
    letter = letter if drawn.stage == first_stage else letter.lower()
    name = letter if drawn.microbatch is None else f"{letter}{drawn.microbatch}"
    return (name if len(name) <= length else letter).ljust(length, RUNNING)[:length]
