"""Reads Megatron-LM's golden values and the log of BLOOM's tuning by Megatron-DeepSpeed, and what these allocate.

golden    bytes that PyTorch's allocator counts on the last rank, between steps and at the peak, in functional tests of
          a GPT of 12 layers: a row is planned by autopar's conventions of memory, and by Megatron's
BLOOM     seconds of an iteration and GB by nvidia-smi, which count CUDA's context and NCCL's buffers, too
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.costs.hardware.load import load
from autopar.costs.pricing.conventions import MIB, MemoryConventions
from autopar.ir.sharding.mesh import Mesh
from benchmarks.publications.prediction import Outcome
from benchmarks.publications.rows import Row, Shape
from benchmarks.publications.strategies import PRECISIONS, PROFILES, cuts

Cells = Mapping[str, str]
GOLDEN, BLOOM = "megatron golden", "bloom"
TOKENS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Tokenizer → its tokens, before they are padded."""
LARGE = 2048
"""Width from which a model's steps are not bound by launches."""
HALF_BYTES = 2
ENGINE_WORKSPACES = {"a100": 4 * MIB, "h100": 32 * MIB, "h200": 32 * MIB, "b200": 32 * MIB, "gb200": 32 * MIB}
"""Profile → the workspace of Transformer Engine's products."""
NO_SHAPE = Shape("gpt", 1, 1, 1, 1, 1, 1)
"""Placeholder shape of rows that are listed only with the reason why they are left out."""
DENSE = ("gpt",)
"""Families whose models the benchmark builds."""


def golden_row(cells: Cells) -> Row:
    """Read a run of Megatron-LM's functional tests, by autopar's conventions of memory."""
    refused = _refused(cells)
    dp, pp, chunks, micro_batch = (int(cells[name] or 1) for name in ("dp", "pp", "vpp", "micro_batch"))
    accumulation = max(1, int(cells["global_batch"]) // (micro_batch * dp))
    interleaved = "interleaved_1f1b" if chunks > 1 else "1f1b"
    return Row(
        source=GOLDEN,
        label=f"{cells['case']} {cells['golden']}",
        framework=GOLDEN,
        shape=NO_SHAPE if refused else _shape(cells),
        sequence=int(cells["sequence"] or 1),
        micro_batch=micro_batch,
        accumulation=accumulation,
        device=cells["gpu_type"].lower(),
        dp=dp,
        tp=int(cells["tp"] or 1),
        pp=pp,
        cp=int(cells["cp"] or 1),
        ep=int(cells["ep"] or 1),
        schedule=interleaved if accumulation >= pp else "gpipe",
        chunks=chunks,
        zero=1 if cells["distributed_optimizer"] == "1" else 0,
        recompute=cells["recompute"] or "none",
        sequence_parallel=cells["sequence_parallel"] == "1" and cells["tp"] != "1",
        precision=f"{cells['precision']}-mixed",
        seconds=_number(cells["iteration_seconds"]) if int(cells["hidden"]) >= LARGE else None,
        is_local=cells["implementation"] == "local",
        allocated_bytes=_number(cells["static_bytes"]),
        peak_bytes=_number(cells["peak_bytes"]),
        unexpressed=refused,
        stage_layers=() if refused else _stage_layers(cells),
    )


def _refused(cells: Cells) -> str | None:
    """Return what a run has that autopar, or the benchmark's models, have not."""
    if cells["family"] not in DENSE or int(cells["experts"] or 0):
        return f"a model of the family {cells['family']}, which the benchmark does not build"
    for column, nothing, why in (
        ("multi_latent", "0", "latent attention, whose models the benchmark does not build"),
        ("mtp_layers", "0", "layers that predict several tokens, which the benchmark does not build"),
        ("attention_variant", "", "another attention, which the benchmark does not build"),
        ("fsdp", "", "Megatron-FSDP, whose buckets the benchmark does not know"),
        ("optimizer_instances", "1", "an optimizer that is divided over a part of the replicas"),
    ):
        if cells[column] not in (nothing, ""):
            return why
    if "defer_embedding_wgrad" in cells["case"]:
        return "gradients of the embedding that wait for the end of the step"
    if (cells["gated"] == "1") != (cells["norm"] == "RMSNorm"):
        return f"{cells['norm']} beside an MLP that is {'' if cells['gated'] == '1' else 'not '}gated"
    if cells["position"] not in ("learned", "rope"):
        return f"positions that are {cells['position'] or 'not said'}"
    if cells["kv_channels"] and int(cells["kv_channels"]) * int(cells["heads"]) != int(cells["hidden"]):
        return "heads that are not as large together as the model is wide"
    if cells["test_type"] == "frozen-resume":
        return "frozen parameters, which the source does not name"
    if cells["optimizer"] != "adam":
        return f"the optimizer {cells['optimizer']}"
    if f"{cells['precision']}-mixed" not in PRECISIONS:
        return f"products in {cells['precision']}"
    if not cells["vocabulary"] and cells["tokenizer"] not in TOKENS:
        return f"the tokenizer {cells['tokenizer']}, of which no table says how many tokens it has"
    if cells["cuda_graphs"] not in ("", "0", "none"):
        return "CUDA graphs, which have memory pools of their own"
    return None


def _shape(cells: Cells) -> Shape:
    heads = int(cells["heads"])
    llama = cells["gated"] == "1"
    return Shape(
        "llama" if llama else "gpt",
        int(cells["layers"]),
        int(cells["hidden"]),
        heads,
        int(cells["kv_heads"] or heads),
        int(cells["ffn"]),
        padded(cells),
        tied=cells["tied"] == "1",
        flash=is_fused(cells),
        dropout=float(cells["hidden_dropout"]),
        rotary=cells["position"] == "rope" and not llama,
        qk_norm=cells["qk_layernorm"] == "1",
    )


def padded(cells: Cells) -> int:
    """Return the rows of the embedding: tokens up to a multiple of the divisor on each of tp ranks."""
    multiple = int(cells["vocab_divisor"] or 128) * int(cells["tp"] or 1)
    return -(-int(cells["vocabulary"] or TOKENS[cells["tokenizer"]]) // multiple) * multiple


def is_fused(cells: Cells) -> bool:
    """Return whether attention is one kernel.

    "auto" is that with Transformer Engine, but not in older containers, whose cuDNN has no deterministic backward: told
    by the names of their golden values, and by runs of fewer steps than those of today.
    """
    backend = cells["attention_backend"]
    if cells["implementation"] == "local" or backend == "unfused":
        return False
    older = "dracooci" in cells["golden"] or (cells["steps"] and int(cells["steps"]) < 49)
    return backend != "auto" or cells["environment"] == "dev" or not older


def _stage_layers(cells: Cells) -> tuple[int, ...]:
    """Return the layers of each stage; nothing if they are equal."""
    stages, layers, uneven = int(cells["pp"] or 1) * int(cells["vpp"] or 1), int(cells["layers"]), cells["uneven"]
    first, last = (re.search(rf"decoder-{each}-pipeline-num-layers=(\d+)", uneven) for each in ("first", "last"))
    if first and last and stages > 2:
        ends = int(first[1]), int(last[1])
        return (ends[0], *((layers - sum(ends)) // (stages - 2),) * (stages - 2), ends[1])
    less = [f"account-for-{each}-in-pipeline-split=True" in uneven for each in ("embedding", "loss")]
    if any(less):
        each = (layers + sum(less)) // stages
        return (each - less[0], *(each,) * (stages - 2), each - less[1])
    return ()


def bloom_row(cells: Cells) -> Row:
    """Read an iteration of BLOOM's tuning; its iterations were run with full recomputation."""
    heads, pp, accumulation = int(cells["heads"]), int(cells["pp"]), int(cells["accumulation"])
    shape = Shape(
        *("gpt", int(cells["layers"]), int(cells["hidden"]), heads, heads, int(cells["ffn"])),
        _of_ranks(int(cells["vocabulary"]), int(cells["tp"])),
        tied=True,
        flash=False,
    )
    layers = tuple(map(int, cells["stage_layers"].split()))
    memory = _number(cells["memory_GB"])
    return Row(
        source=BLOOM,
        label=f"line {cells['line']} dp{cells['dp']} tp{cells['tp']} pp{pp} {cells['micro_batch']} {cells['layers']}x"
        f"{cells['hidden']} of {heads} heads",
        framework="megatron-deepspeed",
        shape=shape,
        sequence=int(cells["sequence"]),
        micro_batch=int(cells["micro_batch"]),
        accumulation=accumulation,
        device=cells["gpu_type"].lower(),
        dp=int(cells["dp"]),
        tp=int(cells["tp"]),
        pp=pp,
        schedule="1f1b" if accumulation >= pp else "gpipe",
        zero=int(cells["zero"]),
        recompute=cells["recompute"],
        precision=f"{cells['precision']}-mixed",
        seconds=_number(cells["step_seconds"]),
        device_bytes=None if memory is None else memory * 1e9,
        out_of_memory=cells["status"] == "OOM",
        conventions="deepspeed",
        stage_layers=layers if pp > 1 and len(layers) == pp else (),
    )


def _of_ranks(tokens: int, tp: int, divisor: int = 128) -> int:
    return -(-tokens // (divisor * tp)) * divisor * tp


def by_both_conventions(rows: Sequence[Row]) -> list[Row]:
    """Return rows with each of the golden ones once more, by Megatron's conventions of memory."""
    golden = [row for row in rows if row.source == GOLDEN]
    return [*rows, *(replace(row, conventions="megatron", seconds=None) for row in golden)]


def parameters_of(row: Row, rank: int) -> float:
    """Return the elements of the matrices of a rank of the pipeline, on one of tp ranks."""
    shape, stages = row.shape, cuts(row) if row.pp > 1 else (row.shape.layers,)
    layers = sum(stages[rank :: row.pp])
    is_first, is_last = rank == 0, rank == row.pp - 1
    tables = is_first + is_last if row.pp > 1 or not shape.tied else 1
    return (layers * shape.layer_parameters + tables * shape.vocabulary * shape.hidden) / row.tp


def gradient_bytes(row: Row, rank: int) -> float:
    """Return the bytes of a rank's gradients beyond the four per parameter of a plan: in fp16 they are two."""
    return (2 - 4) * parameters_of(row, rank) if row.precision == "fp16-mixed" else 0.0


def copied_bytes(row: Row, rank: int) -> float:
    """Return the bytes of the float32 copies of fp16 gradients that Megatron's optimizer has from its step to the next.

    A rank has copies of the gradients whose parameters it updates.
    """
    return 4 * parameters_of(row, rank) / (row.dp if row.zero else 1) if row.precision == "fp16-mixed" else 0.0


def module_bytes(row: Row) -> int:
    """Return the bytes that Megatron's modules hold for all layers.

    Its own attention multiplies into a buffer of scores that lasts (core/transformer/dot_product_attention.py);
    Transformer Engine has a cuBLAS workspace (pytorch/module/base.py).
    """
    if row.is_local:
        return HALF_BYTES * row.micro_batch * (row.shape.heads // row.tp) * row.sequence**2
    return ENGINE_WORKSPACES[load(PROFILES[row.device]).name.partition("-")[0]]


def device_bytes(outcome: Outcome) -> float:
    """Predicted bytes of the fullest device, as nvidia-smi shows them: what is reserved and what CUDA and NCCL take."""
    assert outcome.predicted is not None, outcome.reason
    row = outcome.row
    of_ranks = enumerate(outcome.predicted.ranks)
    tensors = round(max(each.peak + gradient_bytes(row, rank) for rank, each in of_ranks))
    mesh = Mesh({"pp": row.pp, "dp": row.dp, "tp": row.tp})
    return MemoryConventions.of(row.conventions).reserved(load(PROFILES[row.device]), mesh).on_device(tensors)


def runs_out(outcome: Outcome) -> bool:
    """Return whether a device of BLOOM's cluster would need more memory than it has."""
    return device_bytes(outcome) > load(PROFILES[outcome.row.device]).memory_bytes


class MegatronBytes(NamedTuple):
    """Bytes of tensors between steps and at the peak, and of workspaces, which the allocator counts in both."""

    standing: float
    peak: float
    workspaces: int


def allocated_bytes(outcome: Outcome) -> MegatronBytes:
    """Predicted bytes of the last rank between steps and at the peak, which PyTorch's allocator counts."""
    assert outcome.predicted is not None, outcome.reason
    rank, row = outcome.predicted.ranks[-1], outcome.row
    profile = load(PROFILES[row.device])
    specified = MemoryConventions.of(row.conventions).workspace_bytes
    workspaces = profile.workspace_bytes if specified is None else specified
    if row.conventions == "autopar":
        return MegatronBytes(rank.standing, rank.peak, workspaces)
    last = row.pp - 1
    more = gradient_bytes(row, last) + module_bytes(row)
    standing = rank.standing - rank.inputs + more + copied_bytes(row, last)
    return MegatronBytes(standing, rank.peak + more, workspaces)


def _number(text: str) -> float | None:
    return float(text) if text else None
