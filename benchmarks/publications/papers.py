"""Reads rows of papers' tables, whose notes say in words what has no column."""

from __future__ import annotations

import re
from collections.abc import Mapping

from benchmarks.publications.rows import Row, Shape

Cells = Mapping[str, str]
FAMILIES = (
    ("2205.05198", "korthikanti"),
    ("2401.10241", "zero bubble"),
    ("2504.14960", "moe folding"),
    ("Megatron-Bridge", "megatron-bridge"),
    ("llm-foundry", "llm-foundry"),
    ("torchtitan", "torchtitan"),
    ("dgxc-benchmarking", "nemotron4"),
    ("pytorch/ao", "torchao"),
)
"""Pairs of a text that a source's name contains and the family of that source."""
SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved_1f1b", "ZB-1p": "interleaved_zero_bubble"}
VOCABULARY = 51200  # of GPT-2 as Megatron pads it, where a table says none
MIXED = {"bf16": "bf16-pure", "amp_bf16": "bf16-mixed", "fp16": "fp16-mixed", "BF16": "bf16-mixed"}
NO_SHAPE = Shape("llama", 1, 1, 1, 1, 1, 1)
"""Placeholder shape of rows that are listed only with the reason why they are left out."""
SHARDED = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}


def paper_row(cells: Cells) -> Row:
    """A row of a paper's table, with the reason where it says what autopar does not express."""
    family = next((name for key, name in FAMILIES if key in cells["source"]), cells["source"])
    notes, refused = cells["notes"], _refused(cells, family)
    dp, pp = int(cells["dp"]), int(cells["pp"])
    micro_batch = int(cells["micro_batch"] or 1)
    accumulation = max(1, int(cells["global_batch"]) // (micro_batch * dp))
    schedule, chunks = _schedule(cells, accumulation)
    shape = NO_SHAPE if refused else _shape(cells, family)
    sharding = re.search(r"FSDP (\w+)", notes)
    memory = float(cells["memory_GB"]) if cells["memory_GB"] else None
    return Row(
        source=family,
        label=f"{cells['model']} {cells['gpus']} {cells['gpu_type']} seq{cells['seq']} {notes.split(';')[0]}",
        framework=family,
        shape=shape,
        sequence=int(cells["seq"]),
        micro_batch=micro_batch,
        accumulation=accumulation,
        device=cells["gpu_type"].lower(),
        dp=dp,
        tp=int(cells["tp"]),
        pp=pp,
        cp=int(cells["cp"] or 1),
        ep=int(cells["ep"] or 1),
        schedule=schedule,
        chunks=chunks,
        zero=SHARDED.get(sharding[1], 0) if sharding else int("distributed optimizer" in notes),
        recompute=cells["recompute"].split(" ")[0] or "none",
        sequence_parallel=cells["sp"] == "yes",
        precision=MIXED.get(cells["precision"], cells["precision"]),
        seconds=float(cells["step_seconds"]) if cells["step_seconds"] else None,
        reserved_bytes=None if memory is None else memory * 1e9,
        unexpressed=refused,
    )


def _shape(cells: Cells, family: str) -> Shape:
    """The model of a row that is expressed."""
    megatron, hidden, heads = family in ("korthikanti", "zero bubble"), int(cells["hidden"]), int(cells["heads"])
    return Shape(
        "gpt" if megatron or family == "nemotron4" else "mpt" if family == "llm-foundry" else "llama",
        int(cells["layers"]),
        hidden,
        heads,
        int(cells["kv_heads"] or heads),
        int(cells["ffn"] or 4 * hidden),
        int(cells["vocab"] or VOCABULARY),
        tied=megatron or family == "llm-foundry",
        flash=not megatron,
        dropout=0.1 if megatron else 0.0,
        rotary=family == "nemotron4",
    )


def _refused(cells: Cells, family: str) -> str | None:
    """Return the reason why autopar or the benchmark's models cannot express a row; None if they can."""
    notes, precision = cells["notes"], cells["precision"].upper()
    if "FP8" in precision or "FP4" in precision or "FLOAT8" in precision:
        return "products in FP8 or FP4, for which profiles have no rate and the runtime no kernels"
    if re.search(r"experts|MLA", notes):
        return "experts or latent attention, whose models the benchmark does not build"
    if not cells["step_seconds"]:
        return "the source gives no seconds"
    if "LoRA" in cells["table"]:
        return "low-rank adapters, whose frozen weights have no gradients"
    if "activation CPU offload True" in notes:
        return "activations that are offloaded to the host"
    if "ZB-2p" in notes:
        return "the schedule ZB-2p, which PyTorch has not"
    if family == "megatron-bridge" and not cells["recompute"]:
        return "the source does not say what is computed again"
    return None


def _schedule(cells: Cells, accumulation: int) -> tuple[str, int]:
    """The schedule of a pipeline, and the stages of a rank."""
    pp, specified = int(cells["pp"]), re.search(r"schedule ([\w-]+)", cells["notes"])
    chunks = (int(cells["layers"]) + 2) // pp if cells["vpp"] == "one layer per chunk" else int(cells["vpp"] or 1)
    if specified and specified[1] in SCHEDULES:
        return SCHEDULES[specified[1]], chunks
    if chunks > 1:
        return "interleaved_1f1b", chunks
    return ("1f1b" if accumulation >= pp else "gpipe"), 1
