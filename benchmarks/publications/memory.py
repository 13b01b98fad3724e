"""What a framework and a device hold beside what a plan counts, as stated assumptions, and whether a step fits.

allocated   what a plan predicts: tensors; nanotron has further ones that it keeps with every parameter
reserved    what the allocator has taken of the device: tensors, and what their sizes leave free between them, a factor
            that is the median of runs of other models
device      reserved, CUDA's context with the kernels of libraries, and the buffers of NCCL's communicators
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.publications.folds import by_model, folds
from benchmarks.publications.prediction import Outcome
from benchmarks.publications.rows import GIB, Row
from benchmarks.publications.strategies import cuts

MIB = 2**20
CAPACITY = {"h100_80gb": 81559 * MIB}
"""Bytes of a device, as nvidia-smi shows them of an H100 80GB HBM3; of the others no table says what ran out."""
CONTEXT_BYTES = 0.6 * GIB
"""assumed: CUDA's context, cuBLAS and kernels of one process on Hopper, as nvidia-smi shows of an idle one."""
NCCL_BYTES = 0.4 * GIB
"""assumed: of a communicator of 16 to 24 channels with buffers of 4 MB (NCCL_BUFFSIZE) and two peers each, twice."""
DDP_BYTES = 2
"""Of a parameter: buckets of bfloat16 gradients that DistributedDataParallel keeps where dp > 1."""
ZERO_BYTES = 2
"""Of a parameter with ZeRO-1: measured: what nanotron_h100.csv allocates between steps beyond that, mean of pp = 1."""


def framework_bytes(row: Row, parameters: float) -> float:
    """Bytes that the framework keeps beside what a plan counts, of a rank that uses so many parameters."""
    if row.framework != "nanotron" or row.dp == 1:
        return 0.0
    return parameters * (DDP_BYTES + (ZERO_BYTES if row.zero else 0))


def rank_parameters(row: Row) -> float:
    """Elements of the parameters of the first stage, which has the embedding and most layers, on one of tp ranks."""
    shape = row.shape
    if row.pp == 1:
        return shape.parameters / row.tp
    return (cuts(row)[0] * shape.layer_parameters + shape.vocabulary * shape.hidden) / row.tp


def allocated(outcome: Outcome) -> float:
    """Predicted bytes between steps."""
    assert outcome.predicted is not None, outcome.reason
    return outcome.predicted.standing_bytes + framework_bytes(outcome.row, rank_parameters(outcome.row))


def at_the_peak(outcome: Outcome) -> float:
    """Predicted bytes of tensors at the fullest moment."""
    assert outcome.predicted is not None, outcome.reason
    return outcome.predicted.peak_bytes + framework_bytes(outcome.row, rank_parameters(outcome.row))


def fragmentation(found: Sequence[Outcome]) -> float:
    """How many times its tensors at the peak an allocator takes: the median of runs; 1 where none says what it took."""
    known = [each for each in found if each.predicted is not None and each.row.reserved_bytes]
    return statistics.median((each.row.reserved_bytes or 0) / at_the_peak(each) for each in known) if known else 1.0


def factors(found: Sequence[Outcome]) -> list[float]:
    """For each row the fragmentation of the models of other folds, where there are several, else that of all."""
    rows = [each.row for each in found]
    made = [fragmentation(found)] * len(rows)
    for fold in folds(rows, by_model):
        of_others = fragmentation([found[n] for n in fold.fitted])
        for each in fold.held_out:
            made[each] = of_others
    return made


def usable(row: Row) -> float:
    """Bytes of the device that the allocator may take."""
    return CAPACITY[row.device] - CONTEXT_BYTES - NCCL_BYTES


def runs_out(outcome: Outcome, factor: float = 1.0) -> bool:
    """Whether the allocator would need more than there is; False for a device of which no table says what ran out."""
    return outcome.row.device in CAPACITY and factor * at_the_peak(outcome) > usable(outcome.row)
