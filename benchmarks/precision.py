"""Training in several dtypes, compared with torch's FSDP2 with the same policy and with float32, on gloo ranks.

A small Llama under `zero3`, and the same under `fully_shard` of its layers and of the root, take turns, step by step.
Losses are compared with one another and with those of one process in float32, gradients of the first step with its
gradients (root mean square over root mean square), as are those of float32 from another seed. float16 is scaled by a
constant, which both divide out again. Processor time is that of a rank's forward and backward, its median counts;
memory is what tensors of a rank hold at the highest moment of a step.

    python -m benchmarks.precision                        20 steps, two ranks
    python -m benchmarks.precision --steps 10 --hidden 256

target: losses within the spread of two seeds, gradients no further from float32 than FSDP2's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.ir.program.precision import NAMED
from autopar.runtime.ranks.launch import World, on_ranks
from autopar.tools.benchmarking.meters import held_in_training, peak_bytes

POLICIES = ("bf16-mixed", "fp16-mixed")
SCALES = {"fp16-mixed": 2.0**14}  # what the largest gradients leave room for
BATCH, SEQUENCE, CLASSES, LAYERS = 8, 64, 512, 4


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run, passed to each rank."""

    policies: tuple[str, ...]
    steps: int
    hidden: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class Run:
    """Losses by step, gradients of the first, processor seconds of a step, and bytes at the peak."""

    losses: list[float]
    gradients: dict[str, Tensor]
    seconds: float = 0.0
    peak: int = 0


def model_of(options: Options, seed: int = 0) -> nn.Module:
    """The model, equal for equal seeds."""
    torch.manual_seed(seed)
    h = options.hidden
    sizes: Any = {"hidden_size": h, "intermediate_size": 4 * h, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=CLASSES, num_hidden_layers=LAYERS, use_cache=False, **sizes)
    return LlamaForCausalLM(config)


def batch_of(step: int) -> dict[str, Tensor]:
    """Tokens of which each follows from the one before, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(CLASSES, (BATCH, 1), generator=generator)
    ids = (first + 7 * torch.arange(SEQUENCE)) % CLASSES
    return {"input_ids": ids, "labels": ids}


class Contestant:
    """A model with its optimizer; `part` takes of a batch what it is called with."""

    def __init__(self, model: Any, scale: float = 1.0, parts: int = 1) -> None:
        self.model, self.scale, self.parts = model, scale, parts
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.gradients: dict[str, Tensor] = {}

    def forward_backward(self, step: int) -> Tensor:
        rank = dist.get_rank() if self.parts > 1 else 0
        loss = self.model(**{name: x.chunk(self.parts)[rank] for name, x in batch_of(step).items()}).loss
        (loss * self.scale).backward()
        return loss.detach().float()

    def step(self, number: int) -> None:
        begun = time.process_time()
        loss = self.forward_backward(number)
        self.seconds.append(time.process_time() - begun)
        if self.parts > 1:
            dist.all_reduce(loss)
            loss = loss / self.parts
        self.losses.append(loss.item())
        for p in self.model.parameters():
            p.grad.div_(self.scale)
        if not self.gradients:
            named = self.model.named_parameters()
            self.gradients = {name: p.grad.detach().clone() for name, p in named}
        self.optimizer.step()
        self.optimizer.zero_grad()

    def found(self) -> Run:
        held = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in self.gradients.items()}
        self.gradients = {}
        self.forward_backward(0)
        self.optimizer.zero_grad()
        peak = peak_bytes(
            lambda: self.forward_backward(0),
            self.optimizer.zero_grad,
            lambda: held_in_training(self.model, self.optimizer),
        )
        return Run(self.losses, held, statistics.median(self.seconds[1:]), peak)


def fsdp2(options: Options, policy: str) -> Contestant:
    """FSDP2 with the policy, of every layer and of the root."""
    requested, model = NAMED[policy], model_of(options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    each: Any = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(requested.compute, requested.reduce)}
    layers: Any = model.get_submodule("model.layers")
    for layer in layers:
        fully_shard(layer, **each)
    return Contestant(fully_shard(model, **each), SCALES.get(policy, 1.0), dist.get_world_size())


def ours(options: Options, policy: str) -> Contestant:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = autopar.compile(model_of(options), mesh, batch_of(0), strategy="zero3", precision=policy)
    return Contestant(model, SCALES.get(policy, 1.0))


def measured(options: Options) -> dict[str, tuple[Run, Run]]:
    """autopar and FSDP2 by policy; runs on every rank."""
    found = {}
    for policy in options.policies:
        both = ours(options, policy), fsdp2(options, policy)
        for number in range(options.steps):
            for each in both:
                each.step(number)
        found[policy] = both[0].found(), both[1].found()
    return found


def in_float32(options: Options, seed: int = 0) -> Run:
    """One process without a policy."""
    alone = Contestant(model_of(options, seed))
    for number in range(options.steps):
        alone.step(number)
    return Run(alone.losses, alone.gradients)


def furthest(one: Run, other: Run) -> float:
    """The largest difference of losses."""
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def distance(found: Run, precise: Run) -> float:
    """Return the L2 distance of all gradients from the precise ones, relative to the norm of the precise ones."""
    pairs = [(found.gradients[name].float(), each) for name, each in precise.gradients.items()]
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    return (apart / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args(arguments)
    options = Options(tuple(given.policies), given.steps, given.hidden, given.ranks)
    precise = in_float32(options)
    spread = furthest(precise, in_float32(options, seed=1))
    rows = []
    for policy, both in on_ranks(World(options.num_ranks), measured, (options,)).items():
        for name, run in zip(("autopar", "FSDP2"), both, strict=True):
            apart = (
                f"{furthest(run, both[1]):.1e}",
                f"{furthest(run, precise):.4f}",
                f"{100 * distance(run, precise):.3f}%",
            )
            rows.append([policy, name, *apart, f"{run.seconds * 1e3:.0f} ms", f"{run.peak / 1e6:.2f} MB"])
    heads = ["policy", "by", "losses: FSDP2", "float32", "gradients: float32", "processor", "peak"]
    print(tabulate(rows, heads, disable_numparse=True))
    first, last = precise.losses[0], precise.losses[-1]
    print(f"\nlosses of two seeds in float32 are {spread:.4f} apart, from {first:.3f} to {last:.3f}")


if __name__ == "__main__":
    main()
