"""A row's strategy in autopar's words: a mesh, a preset with storage, a precision, recomputation, a schedule.

dp · tp (· pp)     axes of the mesh, a pipeline outermost, as nanotron and Megatron number their ranks
ZeRO               where a preset of tensor parallelism decides calls, parameters are stored over dp
accumulation       what several micro-batches do, two do: a step of more has more of the same
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.ir.program.precision import NAMED, Precision
from autopar.ir.sharding.annotation import Annotation
from autopar.ir.sharding.mesh import Mesh
from benchmarks.publications.rows import Row, Shape

PROFILES = {
    "a100": "a100",
    "a100_40gb": "a100-40gb",
    "a100_80gb": "a100",
    "a100-80gb": "a100",
    "h100_80gb": "h100",
    "h100-80gb": "h100",
    "h100": "h100",
    "b200": "b200",
    "gb200": "gb200",
}
"""Device as the sources call it → profile."""
MEGATRON = ("megatron", "korthikanti", "zero bubble", "megatron golden", "megatron-deepspeed")
"""Frameworks that are Megatron-LM, as its papers used it: messages that overlap with compute came later."""
DATA = ("data_parallel", "zero1", "zero2", "zero3")
PRECISIONS = {
    **NAMED,
    "bf16-pure": Precision(torch.float32, torch.bfloat16, torch.bfloat16),  # FSDP's, gradients summed in bfloat16
}


class Unexpressed(Exception):
    """Why a row has no plan of autopar's that is its strategy."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """All that decides a row's plan but the number of layers and the hardware's numbers; hashable, a key of caches."""

    shape: Shape
    sequence: int
    batch: int
    """Sequences of one micro-batch, of all replicas."""
    axes: tuple[tuple[str, int], ...]
    """Axes of a stage's mesh with their sizes."""
    strategy: str
    storage: int
    """The stage of ZeRO that is given together with the strategy; 0: none."""
    precision: str
    recompute: str
    several: bool
    """True if a step has several micro-batches."""
    pipeline: int
    schedule: str
    chunks: int
    accumulation: int
    """Micro-batches of a step on a pipeline; without one 1 or 2."""
    waits: bool = False
    """True if ranks wait for their messages, as Megatron's do with interleaved stages."""
    conventions: str = "autopar"
    """Name of autopar's memory conventions, which define what counts as memory."""

    @property
    def annotations(self) -> tuple[Annotation, ...]:
        return (Annotation("*", storage=("dp",), regather=self.storage == 3),) if self.storage else ()

    @property
    def gathered(self) -> bool:
        """True if each layer gathers its weights, forward and backward."""
        return self.storage == 3 or self.strategy == "zero3"

    def mesh(self, hardware: str) -> Mesh:
        return Mesh({**({"pp": self.pipeline} if self.pipeline > 1 else {}), **dict(self.axes)}, hardware)


def pinned(row: Row) -> Pinned:
    """The strategy of a row; Unexpressed where autopar has none that is it."""
    refuse_what_is_not_expressed(row)
    zero = row.zero if row.dp > 1 else 0
    if row.tp > 1:
        strategy, storage = ("megatron_regather" if row.sequence_parallel else "megatron"), zero
    else:
        strategy, storage = DATA[zero], 0
    axes = (("dp", row.dp), *((("tp", row.tp),) if row.tp > 1 else ()))
    on_pipeline = row.pp > 1
    return Pinned(
        row.shape,
        row.sequence,
        row.micro_batch * row.dp,
        axes,
        strategy,
        storage,
        row.precision,
        row.recompute,
        row.accumulation > 1,
        row.pp,
        row.schedule if on_pipeline else "",
        row.chunks if on_pipeline else 1,
        row.accumulation if on_pipeline else min(row.accumulation, 2),
        on_pipeline and row.schedule == "interleaved_1f1b" and row.framework in MEGATRON,
        row.conventions,
    )


def refuse_what_is_not_expressed(row: Row) -> None:
    """Raise Unexpressed for what needs no plan to be seen."""
    if row.unexpressed:
        raise Unexpressed(row.unexpressed)
    if row.device not in PROFILES:
        raise Unexpressed(f"no profile of the device {row.device}")
    if row.precision not in PRECISIONS:
        raise Unexpressed(f"no precision that is {row.precision}")
    if row.cp > 1 and (row.tp > 1 or row.pp > 1):
        raise Unexpressed("no preset for context parallelism beside tensor parallelism or a pipeline")
    if row.cp > 1:
        raise Unexpressed("context parallelism of these models is not pinned by the benchmark")
    if row.shape.heads % row.tp:
        raise Unexpressed("heads of attention that do not divide over tp")
    if row.pp > 1 and row.pp * row.chunks > row.shape.layers + 2:
        raise Unexpressed("more stages than layers")


def cuts(row: Row) -> tuple[int, ...]:
    """Return the layers of each stage, as the framework of a row assigns them."""
    stages = row.pp * row.chunks
    if row.stage_layers:
        return row.stage_layers
    if row.framework == "nanotron":
        counts = by_cost(row.shape, stages)
        if 0 in counts[:-1]:
            raise Unexpressed("a stage between others, or the first, that has no layer")
        return counts
    if row.framework == "zero bubble":
        return less_at_the_ends(row.shape.layers, stages)
    if row.shape.layers % stages:
        raise Unexpressed("layers that do not divide over stages")
    return (row.shape.layers // stages,) * stages


def less_at_the_ends(layers: int, stages: int) -> tuple[int, ...]:
    """Equal layers with one less on the first and the last stage (Qi et al., "Zero Bubble", ICLR 2024, section 5)."""
    if (layers + 2) % stages:
        raise Unexpressed("layers that do not divide over stages")
    each = (layers + 2) // stages
    return (each - 1, *(each,) * (stages - 2), each - 1)


def by_cost(shape: Shape, stages: int) -> tuple[int, ...]:
    """Equal costs: a layer's matrices, and the head's (nanotron, trainer.py, `_init_model_instance`).

    A rank has blocks until their costs reach its share of them; the embedding counts nothing.
    """
    blocks = [shape.layer_parameters] * shape.layers
    whole = sum(blocks) + shape.vocabulary * shape.hidden
    ends: Sequence[float] = [whole * (rank + 1) / stages for rank in range(stages)]
    counts, rank, until = [0] * stages, 0, 0
    for cost in blocks:
        counts[rank] += 1
        until += cost
        if until >= ends[rank] and rank < stages - 1:
            rank += 1
    return tuple(counts)


def starts(counts: Sequence[int]) -> tuple[int, ...]:
    """The first layer of each stage, of which there are so many layers each."""
    return tuple(sum(counts[:stage]) for stage in range(len(counts)))
