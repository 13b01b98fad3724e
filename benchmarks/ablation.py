"""Measure what each heuristic of the solver and of the memory limit gives, on questions that nobody tuned it for.

Each question is a model on a mesh in one dtype within a share of the memory that its fastest plan takes. It is answered
by the whole search, and again without one heuristic after the other. The models are none of `plan_speed`, but as many
kinds: dense, with experts, encoder and decoder, vision, hybrid, U-Net, tiny.

    python -m benchmarks.ablation                          the grid, with everything on and each heuristic off
    python -m benchmarks.ablation --only labels contraction  some heuristics
    python -m benchmarks.ablation --cells 0 3              some cells of the grid
    python -m benchmarks.ablation --all-on                 the grid alone, each question on a line
    python -m benchmarks.ablation --all-on --random 16 --seed 7       cells drawn at random in place of the grid

seconds: processor seconds without the heuristic, by those with all (geometric mean of the questions).
gap: the same of optimality gaps, none taken to be below a ten-thousandth; steps: of the seconds of the plans.
A heuristic stays if the seconds or the gap are 1.1 or more without it, or if a question has no answer.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor, nn

from autopar.capture.export import trace
from autopar.capture.tiles.requested_tiles import Tiles
from autopar.costs.hardware.load import load
from autopar.costs.memory.peak import memory_use
from autopar.costs.space.build import build_space
from autopar.costs.space.space import Space
from autopar.errors import InfeasibleError, TimeLimitError
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import BuiltIn, EncoderDecoder, ImageClassifier, LanguageModel, inputs_of
from autopar.planning.memory_limit.memory_limit import best_within
from autopar.planning.options.groups import Memory, Search
from autopar.planning.planner import Statements
from autopar.planning.settings import Settings
from benchmarks.ablation_heuristics import HEURISTICS
from benchmarks.unet import unet

SHARES = (0.9, 0.7, 0.55)
TIME_LIMIT = 60.0
LEAST_GAP = 1e-4
ROOT = Path(__file__).parent.parent

MODELS: dict[str, BuiltIn] = {
    "qwen2-1.5b": BuiltIn(
        LanguageModel,
        "Qwen2Config",
        {  # config.json of Qwen2.5-1.5B
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-40b": BuiltIn(
        LanguageModel,
        "FalconConfig",
        {  # config.json of falcon-40b, with fewer layers
            "hidden_size": 8192,
            "num_hidden_layers": 12,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
            "vocab_size": 65024,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "olmoe-7b": BuiltIn(
        LanguageModel,
        "OlmoeConfig",
        {  # config.json of OLMoE-1B-7B, with fewer layers
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
    "bart-large": BuiltIn(
        EncoderDecoder,
        "BartConfig",
        {  # config.json of bart-large
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "decoder_start_token_id": 2,
        },
        ("encoder_layers", "decoder_layers"),
    ),
    "dinov2-large": BuiltIn(
        ImageClassifier,
        "Dinov2Config",
        {  # config.json of dinov2-large
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 224,
            "patch_size": 14,
            "num_labels": 1000,
        },
    ),
    "resnet-50": BuiltIn(
        ImageClassifier, "ResNetConfig", {"num_labels": 1000, "image_size": 224}, ()
    ),  # else the defaults
    "lfm2-1.2b": BuiltIn(
        LanguageModel,
        "Lfm2Config",
        {  # config.json of LFM2-1.2B: convolutions, and attention in some layers
            "vocab_size": 65536,
            "hidden_size": 2048,
            "intermediate_size": 12288,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        },
    ),
    "tiny-neox": BuiltIn(
        LanguageModel,
        "GPTNeoXConfig",
        {
            "vocab_size": 512,
            "hidden_size": 192,
            "intermediate_size": 768,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "max_position_embeddings": 512,
        },
    ),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A model on a mesh with a batch, in bfloat16 (compute) or float32: a question for each limit."""

    model: str
    mesh: tuple[int, ...]
    batch: int
    sequence: int
    dtype: str
    hardware: str = "h100"
    shares: tuple[float, ...] = SHARES
    """Limits, as shares of the memory of the fastest plan."""

    def __str__(self) -> str:
        return f"{self.model} {'×'.join(map(str, self.mesh))} {self.dtype}"


GRID = (
    Cell("qwen2-1.5b", (8,), 64, 2048, "float32"),
    Cell("qwen2-1.5b", (8, 4), 64, 2048, "bfloat16"),
    Cell("falcon-40b", (16, 8), 128, 2048, "float32"),
    Cell("falcon-40b", (4, 4, 8), 128, 2048, "bfloat16"),
    Cell("falcon-40b", (16, 8, 8), 1024, 2048, "float32"),
    Cell("olmoe-7b", (8, 8), 64, 2048, "bfloat16"),
    Cell("olmoe-7b", (2, 4), 32, 1024, "float32"),
    Cell("bart-large", (4, 8), 256, 512, "float32"),
    Cell("bart-large", (2, 2, 4), 256, 512, "bfloat16"),
    Cell("dinov2-large", (16, 4), 1024, 0, "bfloat16"),
    Cell("resnet-50", (8,), 512, 0, "float32"),
    Cell("lfm2-1.2b", (8, 8), 64, 2048, "float32"),
    Cell("unet", (4, 8), 128, 0, "bfloat16"),
    Cell("tiny-neox", (2, 2), 8, 64, "float32", "cpu"),
    Cell("tiny-neox", (2, 2, 2), 8, 64, "float32", "cpu"),
)
MESHES = (
    (4,),
    (8,),
    (16,),
    (2, 4),
    (4, 4),
    (8, 4),
    (4, 8),
    (8, 8),
    (16, 8),
    (32, 8),
    (128, 8),
    (2, 2, 4),
    (4, 2, 8),
    (16, 4, 8),
)
"""Meshes of random cells: 4 to 1,024 devices."""
AXES = {1: ("dp",), 2: ("dp", "tp"), 3: ("dp", "sp", "tp")}


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to one question without one heuristic ("": with all)."""

    cell: str
    share: float
    without: str
    cpu: float
    wall: float
    step: float | None = None
    gap: float | None = None
    failure: str = ""


def random_cells(count: int, seed: int) -> Iterator[Cell]:
    """Yield cells drawn at random: model, number of layers, mesh, batch, sequence, dtype, hardware and limits."""
    draw = random.Random(seed)
    for _ in range(count):
        model = draw.choice([*MODELS, "unet"])
        mesh, dtype = draw.choice(MESHES), draw.choice(("float32", "bfloat16"))
        is_image = model == "unet" or MODELS[model].wrapper is ImageClassifier
        is_tiny = model.startswith("tiny")
        sequence = 0 if is_image else draw.choice((64, 512) if is_tiny else (512, 1024, 2048))
        samples = draw.choice((8, 32, 64) if is_image else (1, 2, 4))
        hardware = "cpu" if is_tiny else draw.choice(("a100", "h100", "gb200"))
        shares = tuple(round(draw.uniform(0.5, 1.0), 2) for _ in SHARES)
        yield Cell(model, mesh, samples * math.prod(mesh), sequence, dtype, hardware, shares)


def model_of(cell: Cell) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the model of a cell and its inputs, on the meta device."""
    if cell.model == "unet":
        return unet(cell.batch)
    found = MODELS[cell.model]
    with torch.device("meta"):
        return found.wrapper(found.config(None)), inputs_of(found, cell.batch, cell.sequence)


def space_of(cell: Cell) -> Space:
    """Return the space of plans of a cell."""
    model, inputs = model_of(cell)
    with torch.autocast("cpu", torch.bfloat16, enabled=cell.dtype == "bfloat16"):
        program = trace(model, inputs, {}).program(Tiles())
    mesh = Mesh(dict(zip(AXES[len(cell.mesh)], cell.mesh, strict=True)), hardware=cell.hardware)
    return build_space(program, mesh, load(cell.hardware))


def answered(cell: Cell, space: Space, share: float, limit: int | None, without: str) -> Answered:
    """Return the answer to one question, from a formulation of its own."""
    settings = Settings(Memory(limit, conventions="tensors"), Search(time_limit=TIME_LIMIT))
    formulation = Statements(space).of(settings)[-1]
    cpu, wall = time.process_time(), time.perf_counter()
    found, failure = None, ""
    with HEURISTICS[without]() if without else ExitStack(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = best_within(formulation, {}, settings)
        except InfeasibleError:
            failure = "infeasible"
        except TimeLimitError:
            failure = "time limit"
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    own = str(cell), share, without, cpu, wall
    if found is None:
        return Answered(*own, failure=failure)
    gap = (found.seconds - found.bound) / found.seconds if found.seconds else 0.0
    assert limit is None or memory_use(formulation.memory, found.choices, found.modes)[0] <= limit
    return Answered(*own, found.seconds, gap)


def answers_of(cell: Cell, heuristics: Sequence[str]) -> Iterator[Answered]:
    """Yield the answers of a cell: without a limit, and within each with all heuristics and without each."""
    space = space_of(cell)
    formulation = Statements(space).of(Settings())[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        free = best_within(formulation, {}, Settings(search=Search(time_limit=TIME_LIMIT)))
    peak_bytes, *_ = memory_use(formulation.memory, free.choices, free.modes)
    for without in ("", *heuristics):
        yield answered(cell, space, 1.0, None, without)
    for share in cell.shares:
        for without in ("", *heuristics):
            yield answered(cell, space, share, int(share * peak_bytes), without)


def run(cells: Iterable[Cell], heuristics: Sequence[str]) -> list[Answered]:
    """Return all answers, each cell's from a process of its own."""
    found = []
    for cell in cells:
        request = json.dumps([asdict(cell), list(heuristics)])
        command = [sys.executable, "-m", "benchmarks.ablation", "--cell", request]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                found.append(Answered(**json.loads(line)))
                print(line, end="", file=sys.stderr, flush=True)
        if process.returncode:
            print(f"{cell}: status {process.returncode}", file=sys.stderr, flush=True)
    return found


def table(found: Sequence[Answered], heuristics: Sequence[str]) -> str:
    """Return a line per heuristic: the ratios without it to with all."""
    with_all = {(each.cell, each.share): each for each in found if not each.without}
    rows = []
    for name in heuristics:
        pairs = [(each, with_all[each.cell, each.share]) for each in found if each.without == name]
        both = [(off, on) for off, on in pairs if off.step is not None and on.step is not None]
        seconds = geometric(off.cpu / on.cpu for off, on in both)
        longest = max((off.cpu / on.cpu for off, on in both), default=math.nan)
        gap = geometric(max(off.gap or 0, LEAST_GAP) / max(on.gap or 0, LEAST_GAP) for off, on in both)
        step = geometric(off.step / on.step for off, on in both if off.step and on.step)
        slowest = max((off.step / on.step for off, on in both if off.step and on.step), default=math.nan)
        lost = sum(off.step is None and on.step is not None for off, on in pairs)
        rows.append((name, len(pairs), seconds, longest, gap, step, slowest, lost))
    headers = "without", "questions", "seconds", "at most", "gap", "step", "at most", "no answer"
    return tabulate(rows, headers, floatfmt=("", "", ".3f", ".2f", ".3f", ".5f", ".5f", ""))


def geometric(ratios: Iterable[float]) -> float:
    """Return the geometric mean of some ratios."""
    logarithms = [math.log(each) for each in ratios]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else math.nan


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(HEURISTICS), metavar="NAME", help=f"{', '.join(HEURISTICS)}")
    parser.add_argument("--cells", nargs="+", type=int, default=range(len(GRID)), metavar="N")
    parser.add_argument("--shares", nargs="+", type=float, metavar="X", help="limits in place of those of the cells")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="cells drawn at random in place of the grid")
    parser.add_argument("--seed", type=int, default=0, help="of the random cells")
    parser.add_argument("--all-on", action="store_true", help="leave no heuristic out")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.cell:
        cell, heuristics = json.loads(options.cell)
        for each in answers_of(Cell(**cell), heuristics):
            print(json.dumps(asdict(each)), flush=True)
        return
    heuristics = [] if options.all_on else options.only
    cells = list(random_cells(options.random, options.seed)) or [GRID[number] for number in options.cells]
    if options.shares:
        cells = [replace(cell, shares=tuple(options.shares)) for cell in cells]
    found = run(cells, heuristics)
    if options.all_on:
        rows = [(e.cell, e.share, e.wall, e.cpu, e.step, e.gap, e.failure) for e in found]
        print(tabulate(rows, ("question", "share", "wall s", "CPU s", "step", "gap", ""), floatfmt=".4g"))
    else:
        print(table(found, heuristics))


if __name__ == "__main__":
    main()
