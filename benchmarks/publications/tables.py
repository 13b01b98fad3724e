"""Reads the tables into rows. A table is known by its columns."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path

from autopar.errors import InputError
from benchmarks.publications.megatron import bloom_row, golden_row
from benchmarks.publications.papers import paper_row
from benchmarks.publications.rows import GIB, Row, Shape

Cells = Mapping[str, str]
VOCABULARY = 51200
"""Vocabulary of GPT-2 as Megatron pads it, for tables that state none."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


def read_table(path: str | Path) -> tuple[Row, ...]:
    """The rows of a table; InputError where its columns are those of none that is known."""
    with Path(path).open(newline="") as file:
        cells = list(csv.DictReader(file))
    columns = set(cells[0]) if cells else set()
    for needed, read in _READERS:
        if needed <= columns:
            return tuple(map(read, cells))
    known = "; ".join(", ".join(sorted(needed)) for needed, _ in _READERS)
    raise InputError(f"{path} has the columns {', '.join(sorted(columns)) or 'none'}; give a table with {known}.")


def nanotron_row(cells: Cells) -> Row:
    """A run of nanotron; what a run that failed leaves blank is as in the runs of the same model that did not."""
    heads = int(cells["heads"])
    tied = cells["tied"] == "True" if cells["tied"] else int(cells["layers"]) < 32
    shape = Shape(
        "llama",
        int(cells["layers"]),
        int(cells["hidden"]),
        heads,
        int(cells["kv_heads"] or heads),
        int(cells["ffn"] or _FFN[cells["hidden"]]),
        int(cells["vocabulary"]),
        tied,
    )
    accumulation, pp = int(cells["accumulation"]), int(cells["pp"])
    return Row(
        source="nanotron",
        label=cells["run"],
        framework="nanotron",
        shape=shape,
        sequence=int(cells["sequence"]),
        micro_batch=int(cells["micro_batch"]),
        accumulation=accumulation,
        device="h100_80gb",
        dp=int(cells["dp"]),
        tp=int(cells["tp"]),
        pp=pp,
        # With fewer micro-batches than stages 1F1B is all forwards, then all backwards.
        schedule="1f1b" if accumulation >= pp else "gpipe",
        zero=int(cells["zero_stage"]),
        sequence_parallel=True,
        seconds=_number(cells["step_seconds"]),
        allocated_bytes=_gib(cells["allocated_GB"]),
        reserved_bytes=_gib(cells["reserved_GB"]),
        out_of_memory=cells["status"] == "OOM",
        bandwidths={
            f"{where}{name}": 1e9 * float(cells[f"{where}{name}_GBps"])
            for where in ("", "intra_")
            for name in COLLECTIVES
            if cells.get(f"{where}{name}_GBps")
        },
    )


_FFN = {"2048": 8192, "3072": 8192, "4096": 14336, "8192": 28672, "16384": 53248}


def vtrain_row(cells: Cells) -> Row:
    """An iteration of Megatron-DeepSpeed, whose attention writes out its scores."""
    dp, gpus, pp = int(cells["dp"]), int(cells["gpus"]), int(cells["pp"])
    shape = Shape(
        "gpt",
        int(cells["layers"]),
        int(cells["hidden"]),
        int(cells["heads"]),
        int(cells["heads"]),
        int(cells["ffn"]),
        VOCABULARY,
        tied=True,
        flash=False,
        dropout=0.1,
    )
    accumulation = int(cells["global_batch"]) // (int(cells["micro_batch"]) * dp)
    return Row(
        source="vtrain one node" if gpus <= 8 else "vtrain several nodes",
        label=f"{cells['params_B']}B dp{dp} tp{cells['tp']} pp{pp} {cells['micro_batch']} of {cells['global_batch']}",
        framework="megatron",
        shape=shape,
        sequence=int(cells["seq"]),
        micro_batch=int(cells["micro_batch"]),
        accumulation=accumulation,
        device=cells["gpu_type"].lower(),
        dp=dp,
        tp=int(cells["tp"]),
        pp=pp,
        schedule="1f1b" if accumulation >= pp else "gpipe",
        recompute=cells["recompute"],
        precision="fp16-mixed",
        seconds=_number(cells["step_seconds"]),
    )


_READERS: tuple[tuple[frozenset[str], Callable[[Cells], Row]], ...] = (
    (frozenset(("run", "zero_stage", "accumulation", "reserved_GB")), nanotron_row),
    (frozenset(("golden", "static_bytes", "peak_bytes", "vpp", "distributed_optimizer")), golden_row),
    (frozenset(("line", "stage_layers", "memory_GB", "zero", "step_seconds")), bloom_row),
    (frozenset(("source", "table", "gpu_type", "notes", "vpp")), paper_row),
    (frozenset(("params_B", "gpu_type", "recompute", "step_seconds")), vtrain_row),
)


def _number(text: str) -> float | None:
    return float(text) if text else None


def _gib(text: str) -> float | None:
    return float(text) * GIB if text else None
