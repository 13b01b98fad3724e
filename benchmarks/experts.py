"""Mixture-of-Experts on gloo ranks: the solver's choice, compared with each pinned choice and with other tools.

The model is layers of a norm and transformers' own Qwen3-MoE block, in fp32. autopar trains it with the plan that the
solver takes, and with its experts pinned: tokens (t), experts (x), both with all-to-all (t+x), or the experts' features
by column and row (o/k). Peers are transformers' expert parallelism, by all_reduce (every rank has the whole batch) and
by all_to_all (every rank has its own samples), and the same dispatch written by hand as torchtitan does.

A step clears the gradients, and is forward, backward and AdamW (foreach). All contestants take turns, step by step, so
that what else the machine does weighs on all alike; a step takes as long as its slowest rank. Predictions are by a
profile that is measured first, on as many ranks (`autopar calibrate`), or by --hardware.

    python -m benchmarks.experts                          three token counts: some minutes
    python -m benchmarks.experts --tokens 512 --steps 20

target: the solver's choice is the best or within noise of it for every token count, and the predicted order is the
measured one.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import autopar
from autopar.costs.hardware.profile import Hardware
from autopar.ir.program.operators.expert_operators import DISPATCH, GROUPED_MM
from autopar.ir.sharding.mesh import Mesh
from autopar.planning import best_plan
from autopar.runtime.ranks.launch import World, on_ranks
from autopar.tools.benchmarking import expert_peers
from benchmarks.timed_training import TimedTraining, adamw, forward_and_backward, of_every_rank, profile_of

SEED, BATCH, WARM_UP = 20240613, 8, 2
SOLVER = "solver"
CHOICES: Mapping[str, Mapping[Any, frozenset[str]]] = {
    "t": {DISPATCH: frozenset({"a0"})},
    "x": {DISPATCH: frozenset({"x"})},
    "t+x": {DISPATCH: frozenset({"a0+x"})},
    "o/k": {DISPATCH: frozenset({"-"}), GROUPED_MM: frozenset({"o", "k"})},
}
"""Choices that each plan is pinned to: name → operator → its allowed choices on the axis."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run, passed to each rank."""

    tokens: tuple[int, ...]
    steps: int
    hidden: int
    expert_hidden: int
    num_experts: int
    top_k: int
    num_layers: int
    num_ranks: int
    hardware: Hardware


@dataclass(frozen=True, slots=True)
class Line:
    """A contestant at a token count: seconds of its steps, of the slowest rank; what was predicted, where it was."""

    name: str
    seconds: tuple[float, ...]
    predicted: float | None
    took: str
    """Choices that the plan takes for the experts; empty for the peers."""
    loss: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Block(nn.Module):
    """A norm and experts, with a residual connection."""

    def __init__(self, options: Options) -> None:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        super().__init__()
        config = Qwen3MoeConfig(
            hidden_size=options.hidden,
            moe_intermediate_size=options.expert_hidden,
            num_experts=options.num_experts,
            num_experts_per_tok=options.top_k,
            norm_topk_prob=True,
        )
        config._experts_implementation = "grouped_mm"
        self.norm, self.mlp = nn.LayerNorm(options.hidden), Qwen3MoeSparseMoeBlock(config)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] → the same."""
        return x + self.mlp(self.norm(x))


class Regression(nn.Module):
    """Layers with experts that return how far they are from a target."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(options) for _ in range(options.num_layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Samples and targets [batch, sequence, hidden] → mean squared error."""
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, target)


def model_of(options: Options) -> Regression:
    """The same weights on every call."""
    torch.manual_seed(SEED)
    model = Regression(options)
    for parameter in model.parameters():  # transformers leave those of experts as memory was
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    return model


def batch_of(options: Options, tokens: int) -> tuple[Tensor, Tensor]:
    """The global batch."""
    drawn = torch.Generator().manual_seed(SEED)
    x, target = torch.randn(2, BATCH, tokens // BATCH, options.hidden, generator=drawn)
    return x, target


class Trained(TimedTraining):
    """A contestant with its optimizer, and the seconds of its steps."""

    def __init__(self, parameters: Any, step: Callable[[], Tensor], plan: Any = None) -> None:
        super().__init__(adamw(parameters), step)
        self.plan = plan


def planned(options: Options, tokens: int, mesh: DeviceMesh, wanted: Mapping[Any, frozenset[str]]) -> Trained:
    """Compile the model with autopar, with the choices in `wanted` pinned, and return it ready to train."""
    inputs, pins_of = batch_of(options, tokens), best_plan.pins_of

    def pinned(specified: Any, space: Any, *given: Any) -> dict[int, np.ndarray]:
        pins = pins_of(specified, space, *given)
        for number, decision in enumerate(space.decisions):
            allowed = wanted.get(decision.node.target) if decision.kind == "call" else None
            if allowed is not None:
                strategies = decision.candidates.strategies
                pins[number] = np.array([strategy.choices[0] in allowed for strategy in strategies])
        return pins

    with mock.patch.object(best_plan, "pins_of", pinned):
        model = autopar.compile(
            model_of(options), mesh, inputs, hardware=options.hardware, memory=autopar.Memory(recompute="none")
        )
    return Trained(model.parameters(), partial(forward_and_backward, model, inputs), model.plan)


def shared_batch(options: Options, tokens: int, mesh: DeviceMesh) -> Trained:
    """transformers' expert parallelism by all_reduce: every rank has all tokens, and runs its own experts on them."""
    model, inputs = model_of(options), batch_of(options, tokens)
    expert_peers.sum_of_experts(_experts_of(model), mesh)
    return Trained(model.parameters(), partial(forward_and_backward, model, inputs))


def own_batch(options: Options, tokens: int, mesh: DeviceMesh) -> Trained:
    """transformers' expert parallelism by all_to_all, every rank with its own samples."""
    model = model_of(options)
    expert_peers.send_to_experts(_experts_of(model), mesh)
    return _on_own_samples(options, tokens, mesh, model)


def by_hand(options: Options, tokens: int, mesh: DeviceMesh) -> Trained:
    """Tokens are sent to their experts and home again as torchtitan does, every rank with its own samples."""
    model = model_of(options)
    expert_peers.dispatch_by_hand(_experts_of(model), mesh)
    return _on_own_samples(options, tokens, mesh, model)


def _experts_of(model: Regression) -> list[Any]:
    layers: list[Any] = list(model.layers)
    return [layer.mlp.experts for layer in layers]


def _on_own_samples(options: Options, tokens: int, mesh: DeviceMesh, model: Regression) -> Trained:
    """Training where a rank has its part of the batch; gradients of all but experts are summed in one all-reduce."""
    num_ranks = mesh.size()
    inputs = [each.chunk(num_ranks)[mesh.get_local_rank()] for each in batch_of(options, tokens)]
    everywhere = [each for name, each in model.named_parameters() if ".experts." not in name]

    def step() -> Tensor:
        loss = model(*inputs) / num_ranks
        loss.backward()
        gradients = [each.grad for each in everywhere if each.grad is not None]
        flat = torch.cat([loss.detach().view(1), *(each.flatten() for each in gradients)])
        dist.all_reduce(flat, group=mesh.get_group())
        total, *summed = flat.split([1, *(each.numel() for each in gradients)])
        for each, whole in zip(gradients, summed, strict=True):
            each.copy_(whole.view_as(each))
        return total.squeeze()

    return Trained(model.parameters(), step)


PEERS: Mapping[str, Callable[[Options, int, DeviceMesh], Trained]] = {
    "transformers, all_reduce": shared_batch,
    "transformers, all_to_all": own_batch,
    "by hand": by_hand,
}


def _measured(options: Options) -> dict[int, list[Line]]:
    """Every contestant at every token count, in turns (runs on every rank; the lines are the same on all)."""
    mesh, found = init_device_mesh("cpu", (options.num_ranks,), mesh_dim_names=("ep",)), {}
    for tokens in options.tokens:
        contestants = {SOLVER: planned(options, tokens, mesh, {})}
        contestants |= {name: planned(options, tokens, mesh, wanted) for name, wanted in CHOICES.items()}
        contestants |= {name: build(options, tokens, mesh) for name, build in PEERS.items()}
        order = list(contestants.values())
        for turn in range(WARM_UP + options.steps):
            for each in (*order[turn % len(order) :], *order[: turn % len(order)]):  # none always after the same one
                seconds = each.step()
                if turn >= WARM_UP:
                    each.seconds.append(seconds)
        found[tokens] = [_line(name, each) for name, each in contestants.items()]
    return found


def _line(name: str, trained: Trained) -> Line:
    seconds = tuple(max(clock for clock, _ in step) for step in zip(*of_every_rank(trained.seconds), strict=True))
    took = "" if trained.plan is None else _taken(trained.plan)
    return Line(name, seconds, None if trained.plan is None else trained.plan.seconds, took, trained.loss)


def _taken(plan: Any) -> str:
    """Return the plan's choices for dispatching tokens to experts and for the grouped products."""
    ends = [row.name for row in plan.rows if row.kind == "call" and row.name.startswith(("dispatch", "grouped_mm"))]
    return ", ".join(dict.fromkeys(plan.choices[name].split(" by ")[-1].strip() for name in ends))


def table(lines: Sequence[Line]) -> str:
    """Medians and least of a token count, as shares of the best of autopar's, with the predictions."""
    best = min(line.median for line in lines if line.predicted is not None)
    rows = [
        (
            line.name,
            line.took,
            f"{1e3 * line.median:.0f}",
            f"{1e3 * min(line.seconds):.0f}",
            f"{line.median / best:.2f}",
            "" if line.predicted is None else f"{1e3 * line.predicted:.0f}",
            f"{line.loss - lines[0].loss:+.0e}",
        )
        for line in lines
    ]
    headers = ("contestant", "takes", "median ms", "least ms", "of best", "predicted ms", "loss apart")
    return tabulate(rows, headers, disable_numparse=True)


def order(lines: Sequence[Line]) -> str:
    """Return a line that compares the predicted order of the pinned plans with the measured one."""
    pinned = [line for line in lines if line.name in CHOICES]
    predicted = np.argsort(np.argsort([line.predicted for line in pinned]))  # type: ignore[arg-type]
    measured = np.argsort(np.argsort([line.median for line in pinned]))
    pairs = list(itertools.combinations(pinned, 2))
    alike = sum((a.median < b.median) == (a.predicted < b.predicted) for a, b in pairs)  # type: ignore[operator]
    rank = float(np.corrcoef(predicted, measured)[0, 1])
    names = [" < ".join(pinned[i].name for i in np.argsort(each)) for each in (predicted, measured)]
    return f"predicted {names[0]}; measured {names[1]}; Spearman {rank:.2f}, {alike} of {len(pairs)} pairs alike"


def report(options: Options, found: Mapping[int, Sequence[Line]], load_before: float, load_after: float) -> str:
    """The tables, with what their numbers depend on."""
    facts = {
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores, CPU, {options.num_ranks} gloo "
        f"ranks of one thread; load {load_before:.1f} before, {load_after:.1f} after (these ranks included)",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "model": f"{options.num_layers} × (norm, Qwen3-MoE block): hidden {options.hidden}, experts of "
        f"{options.expert_hidden}, {options.num_experts} of them, {options.top_k} for a token; fp32",
        "a step": f"zero_grad, forward, backward and AdamW (foreach); {options.steps} in turns, slowest rank of each",
        "profile": options.hardware.name,
    }
    width = max(map(len, facts)) + 2
    parts = ["\n".join(f"{name:<{width}}{text}" for name, text in facts.items())]
    for tokens, lines in found.items():
        parts.append(f"{tokens} tokens\n{table(lines)}\n{order(lines)}")
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[256, 1024, 4096], help=f"multiples of {BATCH}")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--expert-hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hardware", help="name or path of a profile (calibrates this machine)")
    given = parser.parse_args(arguments)
    load_before, mesh = os.getloadavg()[0], Mesh({"ep": given.ranks})
    hardware = profile_of(given.hardware, mesh)
    sizes = (given.hidden, given.expert_hidden, given.experts, given.top_k, given.layers, given.ranks)
    options = Options(tuple(given.tokens), given.steps, *sizes, hardware)
    found: dict[int, list[Line]] = on_ranks(World(given.ranks), _measured, (options,))
    print(report(options, found, load_before, os.getloadavg()[0]))


if __name__ == "__main__":
    main()
