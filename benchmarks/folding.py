"""Published mappings of mixtures of experts, predicted: MoE Parallel Folding (arXiv:2504.14960), Tables 3 and 4.

Each row is a model on H100s, trained in one of five ways, and its measured share of the peak FLOP/s (MFU). The same
mapping is given to autopar as a mesh, a preset and annotations, and its step predicted from the meta device with the
`h100` profile; compared are steps, and the order of the methods for a model on so many GPUs.

    method        attention                                 experts
    FSDP          columns and rows over tp, ZeRO-3 over dp   columns and rows over tp, ZeRO-3 over dp
    FSDP + EP     the same                                  over ep, a part of dp, and in columns and rows over tp;
                                                            ZeRO-3 over the rest of dp
    TP + EP + DP  columns and rows over tp, ZeRO-2 over dp   as FSDP + EP, ZeRO-2
    MCore         TP + EP + DP, in pp stages                 as TP + EP + DP
    Folding       the same                                  whole experts, over tp and a part of dp together

Experts have gate and up as two matrices here: transformers pack them into one, whose pieces tp would exchange.

What the rows leave open is assumed for all alike: a micro-batch is one sequence per data-parallel rank; stages have
equal numbers of layers, one stage per rank, by 1F1B; bf16 weights and gradients with fp32 copies; nothing is computed
again in the backward, whether that fits into memory or not; two experts for a token of Llama3-8x70B. FSDP gathers
weights and reduces gradients with every micro-batch, so its step is that of one micro-batch, as often as there are any.
Rows of experts are taken as balanced: the paper drops what is beyond a capacity factor of 1.

Left out: gradients of micro-batches that add up whole with sharded optimizer state (Megatron's ZeRO-1); the rows
reduce them in each. What autopar cannot say: sequence parallelism of norms around experts (all-reduces instead of its
pairs of all-gathers and reduce-scatters; on their way to experts that tp divides, features of tokens are divided
instead of positions), and an overlap of all-to-alls with computing.

Stages of two depths are planned, and the step at the model's depth lies on the line through both: layers are equal.

    python -m benchmarks.folding                 all rows: half an hour of two cores
    python -m benchmarks.folding --tables 3      Table 3 alone
    python -m benchmarks.folding --tables 3 --models qwen2-57b --depths 2 7     whole stages of 7 layers

target: the predicted order of the methods is the measured one for every model, and no step is predicted longer than
measured.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import autopar
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import LanguageModel
from autopar.planning.pipeline.plan import PipelinePlan
from benchmarks.frameworks import Experts

SEQUENCE = 4096
PEAK_FLOPS_PER_S = 989.5e12  # bf16, the denominator of the paper's MFU
DEPTHS = (1, 2)
FSDP, FSDP_EP, TP_EP_DP, MCORE, FOLDING = "FSDP", "FSDP + EP", "TP + EP + DP", "MCore", "Folding"
ZERO3 = (FSDP, FSDP_EP)


@dataclass(frozen=True, slots=True)
class Published:
    """A row: degrees of attention's tensor, pipeline and data parallelism, of expert parallelism, and its MFU."""

    table: int
    model: str
    method: str
    num_gpus: int
    tp: int
    pp: int
    dp: int
    ep: int
    mfu: float

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return {3: 256, 4: 1024}[self.table]


ROWS = tuple(
    Published(*row)
    for row in (
        (3, "qwen2-57b", FSDP, 64, 2, 1, 32, 1, 0.099),
        (3, "qwen2-57b", FOLDING, 64, 2, 4, 8, 4, 0.390),
        (3, "mixtral-g8t8", FSDP, 128, 8, 1, 16, 1, 0.022),
        (3, "mixtral-g8t8", FSDP_EP, 128, 4, 1, 32, 8, 0.090),
        (3, "mixtral-g8t8", MCORE, 128, 2, 8, 8, 8, 0.171),
        (3, "llama3-8x70b", MCORE, 256, 8, 8, 4, 4, 0.388),
        (4, "qwen2-57b", FSDP_EP, 64, 1, 1, 64, 8, 0.263),
        (4, "qwen2-57b", TP_EP_DP, 64, 4, 1, 16, 4, 0.224),
        (4, "qwen2-57b", TP_EP_DP, 128, 4, 1, 32, 4, 0.209),
        (4, "qwen2-57b", MCORE, 128, 2, 4, 16, 4, 0.360),
        (4, "qwen2-57b", FOLDING, 128, 2, 4, 16, 4, 0.397),
        (4, "qwen2-57b", MCORE, 256, 2, 4, 32, 4, 0.348),
        (4, "qwen2-57b", FOLDING, 256, 2, 4, 32, 4, 0.381),
        (4, "qwen2-57b", TP_EP_DP, 512, 4, 1, 128, 4, 0.197),
        (4, "qwen2-57b", MCORE, 1024, 2, 4, 128, 4, 0.298),
        (4, "mixtral-8x22b", FSDP_EP, 128, 2, 1, 64, 8, 0.239),
        (4, "mixtral-8x22b", MCORE, 128, 2, 8, 8, 4, 0.494),
        (4, "mixtral-8x22b", FOLDING, 128, 2, 8, 8, 8, 0.522),
        (4, "mixtral-8x22b", TP_EP_DP, 256, 4, 1, 64, 8, 0.391),
        (4, "mixtral-8x22b", MCORE, 256, 2, 8, 16, 4, 0.480),
        (4, "mixtral-8x22b", TP_EP_DP, 512, 4, 1, 128, 8, 0.360),
        (4, "mixtral-8x22b", FSDP_EP, 1024, 2, 1, 512, 8, 0.238),
        (4, "mixtral-g8t8", MCORE, 128, 2, 8, 8, 8, 0.198),
        (4, "mixtral-g8t8", FOLDING, 128, 4, 8, 4, 8, 0.300),
        (4, "mixtral-g8t8", FSDP_EP, 256, 4, 1, 64, 8, 0.085),
        (4, "mixtral-g8t8", TP_EP_DP, 256, 8, 1, 32, 8, 0.085),
        (4, "mixtral-g8t8", FOLDING, 256, 4, 8, 8, 8, 0.293),
        (4, "mixtral-g8t8", TP_EP_DP, 512, 8, 1, 64, 8, 0.085),
        (4, "mixtral-g8t8", FSDP_EP, 1024, 4, 1, 256, 8, 0.086),
        (4, "mixtral-g8t8", FOLDING, 1024, 4, 8, 32, 8, 0.255),
    )
)
"""Rows of Table 3 (the best mapping of each method) and of Table 4 (strong scaling of these); they have more."""


def _mixtral(hidden: int, layers: int, heads: int, features: int, experts: int, top_k: int, vocabulary: int) -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        intermediate_size=features,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
        vocab_size=vocabulary,
        sliding_window=None,
    )


def _qwen2() -> Any:
    from transformers import Qwen2MoeConfig

    return Qwen2MoeConfig(
        hidden_size=3584,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480,
        num_experts=64,
        num_experts_per_tok=8,
        vocab_size=151936,
    )


MODELS: Mapping[str, Callable[[], Any]] = {
    "qwen2-57b": _qwen2,
    "mixtral-8x22b": lambda: _mixtral(6144, 56, 48, 16384, 8, 2, 32768),
    "mixtral-g8t8": lambda: _mixtral(6144, 56, 48, 2048, 64, 8, 32768),
    "llama3-8x70b": lambda: _mixtral(8192, 80, 64, 28672, 8, 2, 128256),  # the table does not say of how many experts
}


@dataclass(frozen=True, slots=True)
class Specified:
    """Mesh axes and preset that express a published row in autopar."""

    axes: dict[str, int]
    strategy: str


def mapping(row: Published) -> Specified:
    """Mesh and preset of a row; axes of size 1 are left out, but for the pipeline where it counts the micro-batches."""
    if row.method == FSDP:
        return Specified({"dp": row.dp, "tp": row.tp}, "fsdp_megatron")
    inner = row.ep // row.tp if row.method == FOLDING else row.ep
    axes = {"pp": row.pp, "dp": row.dp // inner, "ep": inner, "tp": row.tp}
    counts = "" if row.method in ZERO3 else "pp"
    axes = {name: size for name, size in axes.items() if size > 1 or name == counts}
    if row.method == FOLDING:
        return Specified(axes, "expert_folded")
    if "tp" not in axes:
        return Specified(axes, "expert_data")
    return Specified(axes, "expert_data_model" if "dp" in axes else "expert_model")


def annotate(model: nn.Module, row: Published, axes: Mapping[str, int]) -> None:
    """Say what the preset does not.

    Parameters lie in parts over the data-parallel ranks that have the same ones: ZeRO-3 for FSDP, else ZeRO-2. Rows
    travel in parts over the ranks that divide an expert's features.
    """
    again = row.method in ZERO3
    everywhere = tuple(axis for axis in ("dp", "ep") if axis in axes)
    if "dp" in axes:
        autopar.annotate(model, "*.experts.*_proj", storage="dp", regather=again)
    for matrix in ("self_attn.*_proj.weight", "shared_expert.*_proj.weight", "embed_tokens.weight", "lm_head.weight"):
        autopar.annotate(model, f"*.{matrix}", storage=everywhere, regather=again)
    if row.method != FOLDING and "tp" in axes:
        autopar.annotate(model, "experts.dispatch", tp="factor:d")


def language_model(config: Any, num_layers: int) -> LanguageModel:
    """The model at a depth, in bf16 on the meta device."""
    config.num_hidden_layers = num_layers
    with torch.device("meta"):
        model: Any = LanguageModel(config)
        for layer in model.decoder.model.layers:
            layer.mlp.experts = Experts(*layer.mlp.experts.down_proj.shape)
        return model.to(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted step time, peak memory and planning time of a row."""

    seconds: float
    peak_bytes: float
    planning_seconds: float


def predicted(row: Published, depths: tuple[int, int]) -> Predicted:
    """Step and peak memory at the model's depth, on the line through stages of two depths."""
    start = time.perf_counter()
    layers = MODELS[row.model]().num_hidden_layers / row.pp
    far = (layers - depths[0]) / (depths[1] - depths[0])
    (seconds, peak), (seconds_deeper, peak_deeper) = (planned(row, each) for each in depths)
    return Predicted(
        seconds + far * (seconds_deeper - seconds), peak + far * (peak_deeper - peak), time.perf_counter() - start
    )


def planned(row: Published, layers: int) -> tuple[float, int]:
    """Seconds of a step, and bytes of the fullest device, of a row whose stages have so many layers each."""
    specified = mapping(row)
    model = language_model(MODELS[row.model](), layers * row.pp)
    if row.method != FSDP:
        annotate(model, row, specified.axes)
    count = row.batch // row.dp
    batch = row.dp if row.method in ZERO3 else row.batch
    ids = torch.zeros(batch, SEQUENCE, dtype=torch.int64, device="meta")
    stages = [f"decoder.model.layers.{layers * stage}" for stage in range(1, row.pp)]
    pipeline: dict[str, Any] = {
        "microbatches": count,
        "pipeline": autopar.Pipeline(schedule="1f1b", split_points=stages),
    }
    plan = autopar.plan(
        model,
        Mesh(specified.axes, hardware="h100"),
        (ids, ids),
        strategy=specified.strategy,
        optimizer=autopar.Optimizer(master_copies=True),
        memory=autopar.Memory(recompute="none"),
        **{} if row.method in ZERO3 else pipeline,
    )
    if isinstance(plan, PipelinePlan):
        return plan.seconds, max(stage.plan.peak_bytes for stage in plan.stages)
    return count * plan.seconds, plan.peak_bytes


def flops_per_token(name: str) -> float:
    """Return the FLOPs of forward and backward per token, counted as Megatron does.

    The count is 6 per weight that a token uses, plus attention over all positions.
    """
    config = MODELS[name]()
    layers, heads, hidden = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
    width = heads * (getattr(config, "head_dim", None) or hidden // heads)
    decoder: Any = language_model(config, 1).decoder
    experts: int = getattr(config, "num_local_experts", None) or config.num_experts
    share = config.num_experts_per_tok / experts
    named = decoder.model.layers[0].named_parameters()
    used = sum(p.numel() * (share if ".experts." in name else 1) for name, p in named if p.ndim > 1)
    return 6 * (layers * used + decoder.lm_head.weight.numel()) + 12 * layers * SEQUENCE * width


@dataclass(frozen=True, slots=True)
class Line:
    """A row and its prediction; seconds of a step."""

    row: Published
    predicted: Predicted
    measured_seconds: float

    @property
    def ratio(self) -> float:
        return self.predicted.seconds / self.measured_seconds


def line(row: Published, depths: tuple[int, int]) -> Line:
    """Predict a row; its measured step follows from its MFU."""
    flops = flops_per_token(row.model) * row.batch * SEQUENCE
    return Line(row, predicted(row, depths), flops / (row.num_gpus * PEAK_FLOPS_PER_S * row.mfu))


def table(lines: Sequence[Line]) -> str:
    """A line per row, with its mesh and preset."""
    found = [
        (
            f"{each.row.table}",
            each.row.model,
            f"{each.row.num_gpus}",
            each.row.method,
            " ".join(f"{axis}{size}" for axis, size in mapping(each.row).axes.items()),
            mapping(each.row).strategy,
            f"{each.predicted.seconds:.2f}",
            f"{each.measured_seconds:.2f}",
            f"{each.ratio:.2f}",
            f"{each.row.mfu / each.ratio:.1%}",
            f"{each.row.mfu:.1%}",
            f"{each.predicted.peak_bytes / 1e9:.0f}",
        )
        for each in lines
    ]
    headers = ("table", "model", "GPUs", "method", "mesh", "preset")
    headers += ("predicted s", "measured s", "ratio", "MFU predicted", "measured", "peak GB")
    return tabulate(found, headers, disable_numparse=True)


def orders(lines: Sequence[Line]) -> str:
    """Methods by their steps, predicted and measured, where a table has several for a model on so many GPUs."""
    found, pairs, alike = [], 0, 0
    key = lambda each: (each.row.table, each.row.model, each.row.num_gpus)  # noqa: E731
    for (number, model, gpus), group in itertools.groupby(sorted(lines, key=key), key):
        members = list(group)
        if len(members) < 2:
            continue
        ours = sorted(members, key=lambda each: each.predicted.seconds)
        theirs = sorted(members, key=lambda each: each.measured_seconds)
        names = [" < ".join(each.row.method for each in order) for order in (ours, theirs)]
        found.append((f"{number}", model, f"{gpus}", *names, "yes" if ours == theirs else "no"))
        for one, other in itertools.combinations(members, 2):
            if one.measured_seconds != other.measured_seconds:
                pairs += 1
                faster = one.predicted.seconds < other.predicted.seconds
                alike += faster == (one.measured_seconds < other.measured_seconds)
    headers = ("table", "model", "GPUs", "predicted order of steps", "measured", "the same")
    return f"{tabulate(found, headers, disable_numparse=True)}\n\n{alike} of {pairs} pairs in the measured order"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, nargs="*", default=[3, 4])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--depths", type=int, nargs=2, default=DEPTHS, help="layers per stage that are planned")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="autopar")
    lines = []
    for row in ROWS:
        if row.table in given.tables and row.model in given.models:
            lines.append(line(row, tuple(given.depths)))
            print(f"{row.model} {row.method} {row.num_gpus}: {lines[-1].ratio:.2f}", file=sys.stderr, flush=True)
    print(f"date {datetime.date.today()}, torch {torch.__version__}, profile h100, depths {given.depths}")
    print(f"planned in {sum(each.predicted.planning_seconds for each in lines):.0f} s\n")
    print(f"{table(lines)}\n\n{orders(lines)}")


if __name__ == "__main__":
    main()
