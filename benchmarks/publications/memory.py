"""Memory of a framework and a device beyond the plan's, as stated assumptions, and a test whether a step fits.

allocated   what a plan predicts: tensors; nanotron has further ones that it keeps between steps, as its code says
peak        tensors at the fullest moment, with those that its code makes in addition to autopar's, and with those that
            wait for NCCL: reduce-scatters run on a stream of their own, and the allocator gets their inputs back when
            the device has come so far. This rule is inferred from the peaks, and seen in no code: if hosts are ahead of
            the device, the inputs of all forwards wait; if hosts check its collectives for longer than a layer
            computes, those of the last two do not
reserved    what the allocator has taken of the device: tensors, and the free space that their sizes leave between them,
            a factor that is the median of runs of other models (of those on a pipeline if the run is on one)
device      reserved, CUDA's context with the kernels of libraries, and the buffers of NCCL's communicators
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cache

from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Hardware
from benchmarks.publications.folds import by_model, folds
from benchmarks.publications.machines import variant_of
from benchmarks.publications.prediction import Outcome
from benchmarks.publications.rows import GIB, Row
from benchmarks.publications.strategies import PROFILES, cuts

MIB = 2**20
CAPACITY = {"h100_80gb": 81559 * MIB}
"""Bytes of a device, as nvidia-smi shows them of an H100 80GB HBM3; of the others no table says what ran out."""
CONTEXT_BYTES = 0.6 * GIB
"""assumed: CUDA's context, cuBLAS and kernels of one process on Hopper, as nvidia-smi shows of an idle one."""
NCCL_BYTES = 0.4 * GIB
"""assumed: of a communicator of 16 to 24 channels with buffers of 4 MB (NCCL_BUFFSIZE) and two peers each, twice."""
BUCKETS = 2
"""Bytes of a parameter where dp > 1: DistributedDataParallel's buckets of bfloat16 gradients."""
FLAT = 2
"""Bytes of a parameter with ZeRO-1: all that dp ranks have updated, gathered in one tensor, and a rank's own part."""
WHOLE = 2
"""Activations between blocks with the positions of all ranks, where tp > 1: nanotron's MemoryBuffer has one for what is
gathered before columns, and one for gradients before rows (nanotron, parallel/tensor_parallel/functional.py)."""
LIBRARY_BYTES = 0.07 * GIB
"""measured: what nanotron_h100.csv allocates between steps beyond what is stated here; cuBLAS has its workspaces."""
WAITING = 2
"""Such activations of each layer and micro-batch in flight: what its reduce-scatters take; the embedding has one."""
CAUGHT_UP = 2
"""measured: the last micro-batches in flight, of which nothing waits where hosts are not ahead: what runs of 1.3B and
3.6B parameters reserve with tp >= 8 on two, four and eight stages is 3% to 4% off with it in the median."""
COLLECTIVES = 4
"""Collectives of a layer's forward with tensor parallelism: two gathers and two reduce-scatters."""
GRADIENTS = 4
"""Bytes of a parameter: its gradient in float32, which nanotron keeps also where a step has one micro-batch."""
LOSS = 2
"""Bytes of a logit where tp > 1: nanotron's loss has them in bfloat16, in float32, and less their largest, of which the
plan's counts the last two."""


def framework_bytes(row: Row, parameters: float) -> float:
    """Return the bytes that nanotron holds in addition to a plan's, of a rank that uses so many parameters."""
    if row.framework != "nanotron":
        return 0.0
    buckets = BUCKETS * parameters if row.dp > 1 else 0.0
    return buckets + WHOLE * whole_bytes(row) + LIBRARY_BYTES


def flat_bytes(row: Row, parameters: float) -> float:
    """Bytes of the flat tensors of nanotron's ZeRO-1, which last from the optimizer to the next step."""
    flat = row.framework == "nanotron" and row.zero and row.dp > 1
    return FLAT * parameters * (1 + 1 / row.dp) if flat else 0.0


def further_bytes(row: Row, parameters: float) -> float:
    """Return the peak bytes that nanotron's first stage makes in addition to a plan's, and that wait for NCCL."""
    if row.framework != "nanotron":
        return 0.0
    layers = row.shape.layers if row.pp == 1 else cuts(row)[0]
    in_flight = min(row.pp, row.accumulation)
    waiting = in_flight if hosts_are_ahead(row) else max(0, in_flight - CAUGHT_UP)
    waiting *= (WAITING * layers + 1) * whole_bytes(row)
    # What attention gives lies by sample, and is copied to lie by position.
    copied = between_bytes(row) * in_flight if row.micro_batch > 1 else 0.0
    loss = LOSS * row.micro_batch * row.sequence * row.shape.vocabulary / row.tp if row.pp == 1 and row.tp > 1 else 0.0
    gradients = GRADIENTS * parameters if row.accumulation == 1 else 0.0
    return waiting + layers * copied + loss + gradients


def hosts_are_ahead(row: Row) -> bool:
    """Return True if a layer computes for longer, forward, than its host checks its collectives of tp ranks."""
    return layer_seconds(row) > COLLECTIVES * row.tp * _profile(row.device, variant_of(row)).collective_check_s


def layer_seconds(row: Row) -> float:
    """Seconds of the forward's products and causal attention in one layer, on one of tp ranks, by the profile."""
    profile, tokens = _profile(row.device, variant_of(row)), row.micro_batch * row.sequence
    flops = profile.flops_of("bfloat16") * profile.product_efficiency
    attention = 2 * tokens * row.sequence * row.shape.hidden / profile.attention_efficiency
    return (2 * tokens * row.shape.layer_parameters + attention) / flops / row.tp


@cache
def _profile(device: str, variant: str) -> Hardware:
    return load(PROFILES[device] + variant)


def between_bytes(row: Row) -> float:
    """Bytes in bfloat16 of a micro-batch between blocks, on one of tp ranks."""
    return row.micro_batch * row.sequence * row.shape.hidden * 2 / row.tp


def whole_bytes(row: Row) -> float:
    """Bytes in bfloat16 of a micro-batch between blocks, with the positions of all tp ranks; 0 where they have none."""
    return row.tp * between_bytes(row) if row.tp > 1 else 0.0


def rank_parameters(row: Row) -> float:
    """Elements of the parameters of the first stage, which has the embedding and most layers, on one of tp ranks."""
    shape = row.shape
    if row.pp == 1:
        return shape.parameters / row.tp
    return (cuts(row)[0] * shape.layer_parameters + shape.vocabulary * shape.hidden) / row.tp


def allocated(outcome: Outcome) -> float:
    """Predicted bytes between steps."""
    assert outcome.predicted is not None, outcome.reason
    row, parameters = outcome.row, rank_parameters(outcome.row)
    found = outcome.predicted.standing_bytes
    return found + framework_bytes(row, parameters) + flat_bytes(row, parameters)


def at_the_peak(outcome: Outcome) -> float:
    """Predicted bytes of tensors at the fullest moment, and of those that wait."""
    assert outcome.predicted is not None, outcome.reason
    row, parameters = outcome.row, rank_parameters(outcome.row)
    found = outcome.predicted.peak_bytes
    return found + framework_bytes(row, parameters) + further_bytes(row, parameters)


def fragmentation(found: Sequence[Outcome]) -> float:
    """Return the median ratio of reserved bytes to predicted tensor bytes at the peak.

    Returns 1 if no run states its reserved bytes.
    """
    known = [each for each in found if each.predicted is not None and each.row.reserved_bytes]
    return statistics.median((each.row.reserved_bytes or 0) / at_the_peak(each) for each in known) if known else 1.0


def factors(found: Sequence[Outcome]) -> list[float]:
    """Return a fragmentation factor for each row, taken from the models of the other folds.

    Without other folds it is the factor of all rows. Rows with and without a pipeline are treated separately.
    """
    made = [1.0] * len(found)
    for on_pipeline in (False, True):
        numbers = [n for n, each in enumerate(found) if (each.row.pp > 1) == on_pipeline]
        for n, factor in zip(numbers, _of_others([found[n] for n in numbers]), strict=True):
            made[n] = factor
    return made


def _of_others(found: Sequence[Outcome]) -> list[float]:
    made = [fragmentation(found)] * len(found)
    for fold in folds([each.row for each in found], by_model):
        of_others = fragmentation([found[n] for n in fold.fitted])
        for each in fold.held_out:
            made[each] = of_others
    return made


def usable(row: Row) -> float:
    """Bytes of the device that the allocator may take."""
    return CAPACITY[row.device] - CONTEXT_BYTES - NCCL_BYTES


def runs_out(outcome: Outcome, factor: float = 1.0) -> bool:
    """Return whether the allocator would need more than the usable memory of the device.

    Returns False for a device of which no table says what ran out.
    """
    return outcome.row.device in CAPACITY and factor * at_the_peak(outcome) > usable(outcome.row)
