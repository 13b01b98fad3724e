"""Training recipes that experts publish, planned by autopar as a user would, compared with measurements.

A recipe (`recipes.csv`) is a model, a number of GPUs, the degree of every parallelism, micro-batches, recomputation and
precision. Each is planned offline on the meta device: a mesh, the joined presets that say the same, and the memory of
the device as the limit. Printed are whether the recipe is accepted, predicted and measured seconds and gigabytes, and
the seconds of a processor that planning took. A recipe that does not fit is planned again without a limit, so that its
price is known, too.

    python -m benchmarks.recipes                              all, each in a process of its own
    python -m benchmarks.recipes --only llama-8b-fsdp8 gpt-175b-full
    python -m benchmarks.recipes --list                       the recipes, unplanned
    python -m benchmarks.recipes --json recipes.json          what was found, as a list of objects

Seconds of a source that gives a share of the peak (MFU) are those of the program's own model FLOPs at that share.
Axes are, from the slowest, pp, dp, ep, cp, tp; `dp` of the table counts those of ep, as sources do.

target: every recipe that the device's memory held is accepted, and steps are within 15 % in the median.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import json
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import autopar
from autopar.console.units import parse_bytes
from autopar.costs.plans.plan import Plan
from autopar.errors import AutoparError, TimeLimitError
from autopar.models.catalogue import BUILT_IN, LanguageModel, built_in
from autopar.planning.options.groups import Recompute
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.simulated import simulated_seconds
from benchmarks.folding import MODELS as MAPPED
from benchmarks.frameworks import hardware_of, rotary_in_one_call, rows_once_per_device, with_kernels
from benchmarks.publications.strategies import PRECISIONS

TABLE = Path(__file__).with_name("recipes.csv")
UNEXPRESSED = {
    "fp8": "products in FP8: profiles have no rate for them, and the runtime no kernels",
    "mxfp8": "products in MXFP8: profiles have no rate for them, and the runtime no kernels",
}
"""Precision → why autopar cannot plan it."""
PEAK_FLOPS_PER_S = {"h100": 989.5e12, "a100": 312e12}  # bf16 and fp16 of datasheets, the denominator of sources' MFU
PER_DEVICE = "once per device"
ACCEPTED, REFUSED, NOT_EXPRESSED, NO_ANSWER = "accepted", "refused", "not expressed", "no answer"
INTEGERS = ("gpus", "sequence", "batch", "microbatches", "dp", "ep", "cp", "tp", "pp", "chunks")
FLOATS = ("seconds", "mfu", "gib")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One line of the table."""

    name: str
    model: str
    device: str
    """A shipped profile."""
    memory: str
    """Memory of a device, as a text such as "80GB"."""
    gpus: int
    sequence: int
    batch: int
    """Sequences of a step."""
    microbatches: int
    """Into which a step's batch is split."""
    dp: int
    ep: int
    """Devices that divide the experts, a part of `dp`; folded experts are divided over `tp`, too."""
    cp: int
    tp: int
    pp: int
    chunks: int
    """Stages of a rank (virtual pipeline)."""
    schedule: str
    strategy: str
    recompute: Recompute
    precision: str
    seconds: float | None
    """Measured, of a step."""
    mfu: float | None
    """Measured, where the source has no seconds."""
    gib: float | None
    """Measured peak of a device, in GiB."""
    source: str
    assumed: str
    """Assumptions about values that the source leaves open, and differences between the source and autopar."""
    dispatcher: str = ""
    """`PER_DEVICE`, or "" for rows that travel once per expert."""

    def __post_init__(self) -> None:
        if self.dp * self.cp * self.tp * self.pp != self.gpus or self.dp % self.ep:
            raise ValueError(
                f"{self.name}: dp {self.dp} × cp {self.cp} × tp {self.tp} × pp {self.pp} must be {self.gpus} GPUs, and "
                f"ep {self.ep} a part of dp."
            )

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the mesh with more than one device."""
        sizes = {"pp": self.pp, "dp": self.dp // self.ep, "ep": self.ep, "cp": self.cp, "tp": self.tp}
        return {axis: size for axis, size in sizes.items() if size > 1}

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `autopar.plan` besides the model, the mesh and the inputs."""
        requested: dict[str, Any] = {
            "strategy": self.strategy,
            "precision": PRECISIONS.get(self.precision, self.precision),
            "microbatches": self.microbatches,
        }
        return requested | ({"pipeline": autopar.Pipeline("pp", self.schedule, self.chunks)} if self.pp > 1 else {})


@dataclass(frozen=True, slots=True)
class Found:
    """Answer of autopar to a recipe."""

    name: str
    verdict: str
    reason: str = ""
    seconds: float | None = None
    """Predicted; of a refused recipe those without a limit of memory."""
    num_bytes: int | None = None
    measured_seconds: float | None = None
    measured_bytes: float | None = None
    planning_seconds: float = 0.0

    @property
    def ratio(self) -> float | None:
        """Predicted over measured seconds."""
        return self.seconds / self.measured_seconds if self.seconds and self.measured_seconds else None

    @property
    def memory_ratio(self) -> float | None:
        """Predicted over measured bytes."""
        return self.num_bytes / self.measured_bytes if self.num_bytes and self.measured_bytes else None


def recipes(names: Sequence[str] = ()) -> tuple[Recipe, ...]:
    """Return the recipes of the table, or those of some names; ValueError for a name that it has not."""
    with TABLE.open(newline="") as file:
        found = {cells["name"]: _recipe(cells) for cells in csv.DictReader(file)}
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ValueError(f"no recipe {', '.join(unknown)}; recipes are {', '.join(found)}.")
    return tuple(found[name] for name in names or found)


def _recipe(cells: Mapping[str, str]) -> Recipe:
    values: dict[str, Any] = dict(cells)
    values |= {name: int(cells[name]) for name in INTEGERS}
    values |= {name: float(cells[name]) if cells[name] else None for name in FLOATS}
    return Recipe(**values)


def _gpt(layers: int, hidden: int, heads: int, **sizes: Any) -> Any:
    """A GPT of Megatron-LM: learned positions, GELU, tied tables; OPT has queries, keys and values apart."""
    from transformers import OPTConfig

    usual = {"vocab_size": 51200, "dropout": 0.1, "attention_dropout": 0.1, "max_position_embeddings": 2048}
    return OPTConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_dim=4 * hidden,
        word_embed_proj_dim=hidden,
        activation_function="gelu",
        **(usual | sizes),
    )


def _mpt(layers: int, hidden: int, heads: int, positions: int) -> Any:
    """An MPT of llm-foundry: no biases, no dropout."""
    return _gpt(
        *(layers, hidden, heads),
        vocab_size=50368,
        dropout=0.0,
        attention_dropout=0.0,
        enable_bias=False,
        max_position_embeddings=positions,
    )


def _qwen3_moe(layers: int, hidden: int, heads: int, intermediate: int) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=128,  # pyright: ignore[reportCallIssue]
        moe_intermediate_size=intermediate,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        vocab_size=151936,
    )


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(num_hidden_layers=36, num_local_experts=128)  # the other sizes are those of its class


def _bloom() -> Any:
    from transformers import BloomConfig

    return BloomConfig(
        vocab_size=250880, hidden_size=14336, n_layer=70, n_head=112, hidden_dropout=0.0, attention_dropout=0.0
    )


CONFIGS: Mapping[str, Callable[[], Any]] = {
    "bloom-176b": _bloom,
    "gpt-22b": lambda: _gpt(48, 6144, 64),
    "gpt-175b": lambda: _gpt(96, 12288, 96),
    "gpt-530b": lambda: _gpt(105, 20480, 128),
    "gpt-1t": lambda: _gpt(128, 25600, 160),
    "mpt-7b": lambda: _mpt(32, 4096, 32, 32768),
    "mpt-70b": lambda: _mpt(80, 8192, 64, 2048),
    "mixtral-8x22b": MAPPED["mixtral-8x22b"],
    "qwen2-57b-a14b": MAPPED["qwen2-57b"],
    "qwen3-30b-a3b": lambda: _qwen3_moe(48, 2048, 32, 768),
    "qwen3-235b-a22b": lambda: _qwen3_moe(94, 4096, 64, 1536),
    "gpt-oss-120b": _gpt_oss,
}
"""Models that the catalogue has not → their configurations, from model cards and, of GPTs, from the papers' tables."""


def model_of(recipe: Recipe) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return the model of a recipe on the meta device, and a step's inputs."""
    if recipe.model in BUILT_IN:
        return built_in(recipe.model, recipe.batch, recipe.sequence)
    with torch.device("meta"):
        ids_BS = torch.zeros(recipe.batch, recipe.sequence, dtype=torch.int64)
        model = LanguageModel(CONFIGS[recipe.model]())
        with_kernels(model)
        return model, (ids_BS, ids_BS.clone())


def requested(recipe: Recipe, time_limit: float) -> Found:
    """Return what autopar answers to a recipe, within the device's memory, and without that where it is refused."""
    measured = recipe.gib * 2**30 if recipe.gib else None
    if recipe.precision in UNEXPRESSED:
        return Found(recipe.name, NOT_EXPRESSED, UNEXPRESSED[recipe.precision], None, None, recipe.seconds, measured)
    start, verdict, reason = time.process_time(), ACCEPTED, ""
    plan: Plan | PipelinePlan | None = None
    try:
        plan = planned(recipe, parse_bytes(recipe.memory), time_limit)
    except AutoparError as error:
        verdict = NO_ANSWER if isinstance(error, TimeLimitError) else REFUSED
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        try:
            plan = planned(recipe, None, time_limit)
        except AutoparError as further:
            if str(further) != str(error):
                reason += f" Without a limit: {' '.join(str(further).split())}"
    spent = time.process_time() - start
    if plan is None:
        return Found(recipe.name, verdict, reason, None, None, recipe.seconds, measured, spent)
    seconds = recipe.seconds
    if seconds is None and recipe.mfu is not None and plan.workload is not None:
        seconds = plan.workload.flops / (recipe.mfu * PEAK_FLOPS_PER_S[recipe.device.partition(":")[0]] * recipe.gpus)
    found = step_seconds(plan), plan.reserved_bytes
    return Found(recipe.name, verdict, reason, *found, seconds, measured, spent)


def step_seconds(plan: Plan | PipelinePlan) -> float:
    """Return the simulated seconds of a step; without a pipeline, once-a-step work is added to a micro-batch."""
    return plan.seconds if isinstance(plan, PipelinePlan) else simulated_seconds(plan)


def planned(recipe: Recipe, memory: int | None, time_limit: float) -> Plan | PipelinePlan:
    """Return the plan of a recipe, as its source has it, within so many bytes of a device."""
    mesh = autopar.Mesh(recipe.axes, hardware=recipe.device)
    specified = autopar.Memory(memory, recompute=recipe.recompute)
    return planned_on(recipe, mesh, memory=specified, search=autopar.Search(time_limit), **recipe.options)


def planned_on(recipe: Recipe, mesh: autopar.Mesh | str, **options: Any) -> Plan | PipelinePlan:
    """Return the plan of a recipe's model and batch, with the kernels and links of its source, on a mesh or "auto"."""
    model, inputs = model_of(recipe)
    fused = rotary_in_one_call(model.decoder) if isinstance(model, LanguageModel) else contextlib.nullcontext()
    exchange = rows_once_per_device() if recipe.dispatcher == PER_DEVICE else contextlib.nullcontext()
    with warnings.catch_warnings(), fused, exchange:
        warnings.simplefilter("ignore")  # what a strategy repeats, or leaves whole, the source's does, too
        plan: Any = autopar.plan  # whose overloads know a mesh or "auto", not either
        return plan(model, mesh, inputs, hardware=hardware_of(recipe.device, recipe.source), **options)


def apart(recipe: Recipe, time_limit: float, patience: int) -> Found:
    """The same in a process of its own, which is ended where it takes more than `patience` seconds of a processor."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.recipes", "--only", recipe.name, "--time-limit", str(time_limit)]
        ended = subprocess.run(
            [*command, "--here", "--json", str(file)],
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (patience, patience)),
        )
        if file.exists():
            return Found(**json.loads(file.read_text())[0])
        measured = recipe.gib * 2**30 if recipe.gib else None
        out_of_time = ended.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
        last = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
        reason = f"no plan in {patience} s of a processor" if out_of_time else last[0]
        return Found(recipe.name, NO_ANSWER, reason, None, None, recipe.seconds, measured, float(patience))


def line(recipe: Recipe, found: Found) -> str:
    """A recipe with what was found, in one line, and the reason in another."""
    mesh = " ".join(f"{axis}{size}" for axis, size in recipe.axes.items())
    parts = [f"{found.name} ({mesh}; {recipe.strategy}; {recipe.microbatches} micro-batches)", found.verdict]
    if found.seconds is not None:
        ratio = f" ({found.ratio:.2f})" if found.ratio else ""
        parts.append(f"{found.seconds:.2f} s of {found.measured_seconds or float('nan'):.2f} measured{ratio}")
    if found.num_bytes is not None:
        measured = f" of {found.measured_bytes / 1e9:.1f} measured" if found.measured_bytes else ""
        parts.append(f"{found.num_bytes / 1e9:.1f} GB{measured}")
    parts.append(f"planned in {found.planning_seconds:.0f} s")
    return "; ".join(parts) + (f"\n    {found.reason}" if found.reason else "")


def summary(found: Sequence[Found]) -> str:
    """Count recipes by verdict, with the errors of predictions and what cannot be requested."""
    lines = [f"{verdict}: {sum(each.verdict == verdict for each in found)}" for verdict in VERDICTS]
    accepted = [each for each in found if each.verdict == ACCEPTED]
    rows = []
    for name, ratios in (
        ("seconds, accepted", [each.ratio for each in accepted if each.ratio]),
        ("seconds, all that are priced", [each.ratio for each in found if each.ratio]),
        ("bytes, accepted", [each.memory_ratio for each in accepted if each.memory_ratio]),
        ("bytes, all that are priced", [each.memory_ratio for each in found if each.memory_ratio]),
    ):
        if ratios:
            error = statistics.fmean(abs(ratio - 1) for ratio in ratios)
            rows.append((name, len(ratios), f"{statistics.median(ratios):.2f}", f"{error:.1%}"))
    table = tabulate(rows, ("predicted / measured", "recipes", "median", "MAPE"), disable_numparse=True)
    longest = max(found, key=lambda each: each.planning_seconds)
    median = statistics.median(each.planning_seconds for each in found)
    planning = f"planning: median {median:.0f} s, longest {longest.planning_seconds:.0f} s ({longest.name})"
    unexpressed = [each.name for each in found if each.verdict == NOT_EXPRESSED]
    apart = [f"left out, in FP8 or MXFP8: {', '.join(unexpressed)}"] if unexpressed else []
    return "\n".join((", ".join(lines), table, planning, *apart))


VERDICTS = (ACCEPTED, REFUSED, NO_ANSWER, NOT_EXPRESSED)


def listed(given: Sequence[Recipe]) -> str:
    """The recipes as a table."""
    heads = ("recipe", "GPUs", "mesh", "strategy", "batch", "micro-batches", "measured", "source")
    rows = []
    for each in given:
        mesh = " ".join(f"{axis}{size}" for axis, size in each.axes.items())
        measured = f"{each.seconds} s" if each.seconds else f"MFU {each.mfu}"
        batch = f"{each.batch} × {each.sequence}"
        gpus = f"{each.gpus} {each.device}"
        rows.append((each.name, gpus, mesh, each.strategy, batch, each.microbatches, measured, each.source))
    return tabulate(rows, heads, disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what autopar answers to each recipe, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME", help="some recipes")
    parser.add_argument("--list", action="store_true", help="print the recipes and plan none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write what was found")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds of the solver for each plan")
    parser.add_argument("--patience", type=int, default=300, help="seconds of a processor that a recipe is given")
    parser.add_argument("--here", action="store_true", help="plan in this process, whatever it takes")
    given = parser.parse_args(arguments)
    try:
        wanted = recipes(given.only)
    except ValueError as error:
        parser.error(str(error))
    if given.list:
        print(listed(wanted))
        return
    print(f"date {datetime.date.today()}, torch {torch.__version__}, {len(wanted)} recipes\n", flush=True)
    found = []
    for recipe in wanted:
        each = requested(recipe, given.time_limit) if given.here else apart(recipe, given.time_limit, given.patience)
        found.append(each)
        print(line(recipe, each), flush=True)
        if given.json:
            given.json.write_text(json.dumps([asdict(one) for one in found], indent=1))
    print(f"\n{summary(found)}")


if __name__ == "__main__":
    main()
