"""A token of generation compared with transformers' own tensor parallelism (`tp_plan`), on gloo ranks in one run.

A small Llama generates greedily by transformers' `generate`, split by its `tp_plan` with its default cache and with
its static one, and compiled by autopar under `megatron`, which must give the same tokens. They take turns. What a token
takes is the difference of two calls, one of many new tokens and one of a few, over the difference of their numbers;
medians of wall time and of a rank's processor time count.

    python -m benchmarks.decode                       2 and 4 ranks
    python -m benchmarks.decode --ranks 2 --hidden 1024

target: autopar over the faster of the other two at most 1.0.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import autopar
from autopar.runtime.ranks.launch import World, on_ranks

VOCABULARY, HEADS, KEY_HEADS = 4096, 8, 4
FEW = 4
"""New tokens of the shorter call."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run, passed to each rank."""

    folder: str
    num_ranks: int
    batch: int
    prompt: int
    tokens: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Token:
    """Wall and processor seconds of a token in each round, and the tokens."""

    wall: list[float]
    processor: list[float]
    made: Tensor


Generate = Callable[[Tensor, int], Tensor]


def contestants(options: Options) -> dict[str, Generate]:
    """Ways to generate, by name."""
    from transformers.distributed.configuration_utils import DistributedConfig

    mesh = init_device_mesh("cpu", (options.num_ranks,), mesh_dim_names=("tp",))
    config = DistributedConfig(tp_size=options.num_ranks)
    theirs = AutoModelForCausalLM.from_pretrained(options.folder, distributed_config=config).eval()
    whole = AutoModelForCausalLM.from_pretrained(options.folder).eval()
    ours: Any = autopar.compile(whole, mesh, training=False, strategy="megatron", hardware="cpu")

    def by(model: Any, **specified: Any) -> Generate:
        return lambda ids, new: model.generate(
            ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **specified
        )

    return {
        "tp_plan": by(theirs),
        "tp_plan, static cache": by(theirs, cache_implementation="static"),
        "autopar": by(ours),
    }


def measured(options: Options) -> dict[str, Token]:
    """Every way in its turn, on one rank."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (options.batch, options.prompt), generator=generator)
    ways = contestants(options)
    made = {name: generate(ids, options.tokens) for name, generate in ways.items()}
    found = {name: Token([], [], made[name]) for name in ways}
    for _ in range(options.rounds):
        for name, generate in ways.items():
            few, many = (_timed(generate, ids, new) for new in (FEW, options.tokens))
            for seconds, each in zip(
                (found[name].wall, found[name].processor), zip(few, many, strict=True), strict=True
            ):
                seconds.append((each[1] - each[0]) / (options.tokens - FEW))
    return found


def _timed(generate: Generate, ids: Tensor, new: int) -> tuple[float, float]:
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    generate(ids, new)
    return time.perf_counter() - wall, time.process_time() - processor


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=36)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args(arguments)
    h = given.hidden
    sizes: Any = {"hidden_size": h, "intermediate_size": 3 * h, "num_hidden_layers": given.layers}
    heads: Any = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads, eos_token_id=None, pad_token_id=0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        for num_ranks in given.ranks:
            options = Options(folder, num_ranks, given.batch, given.prompt, given.tokens, given.rounds)
            found = on_ranks(World(num_ranks), measured, (options,))
            best = [
                min(statistics.median(each) for each in (getattr(found[n], kind) for n in found if n != "autopar"))
                for kind in ("wall", "processor")
            ]
            for name, token in found.items():
                wall, processor = statistics.median(token.wall), statistics.median(token.processor)
                ratios = [f"{a / b:.2f}" for a, b in zip((wall, processor), best, strict=True)]
                same = "yes" if torch.equal(token.made, found["tp_plan"].made) else "no"
                rows.append(
                    [num_ranks, name, f"{wall * 1e3:.2f} ms", ratios[0], f"{processor * 1e3:.2f} ms", ratios[1], same]
                )
    heads_of_table = ["ranks", "by", "a token", "ratio", "processor", "ratio", "same tokens"]
    print(tabulate(rows, heads_of_table, disable_numparse=True))


if __name__ == "__main__":
    main()
