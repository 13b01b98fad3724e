"""Trainers of one model on one mesh: autopar's plan, its presets, and the peers, each from equal weights."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.api import entry
from autopar.costs.hardware.profile import Hardware
from autopar.costs.plans.plan import Plan
from autopar.errors import InputError
from autopar.runtime.module.compiled_module import ParallelModule
from autopar.strategies.presets import PRESETS
from autopar.tools.benchmarking import baselines, expert_peers
from autopar.tools.benchmarking.baselines import Baseline, Context
from autopar.tools.benchmarking.meters import held_in_training

AUTO = "auto"
Peer = Callable[[nn.Module, DeviceMesh, tuple[Tensor, ...]], Baseline]
EXPERT_PEERS: Mapping[str, Peer] = {
    "transformers-ep": expert_peers.transformers_ep,
    "transformers-ep-reduce": expert_peers.transformers_ep_reduce,
    "ep-by-hand": expert_peers.ep_by_hand,
}
PEERS: Mapping[str, Peer] = {
    "ddp": baselines.ddp,
    "fsdp2": baselines.fsdp2,
    "dtensor-tp": baselines.dtensor,
    "dtensor-tp+sp": baselines.dtensor_sequence,
    **EXPERT_PEERS,
}
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of autopar's plans: the hardware, the memory limit in bytes, and the measured profile."""

    hardware: Hardware
    memory: int | None = None
    profile: Mapping[str, Any] | None = None
    """Profile measured on this machine, if any; its compute rates are measured again before each model is planned."""


def strategy_names() -> tuple[str, ...]:
    """Return all names: autopar's plan, its presets, and the peers."""
    return (AUTO, *PRESETS, *PEERS)


def check_strategies(names: tuple[str, ...]) -> None:
    """Raise InputError for a name that no strategy has, or for none at all."""
    unknown = [name for name in names if name not in strategy_names()]
    if unknown or not names:
        found = f"no strategy {unknown[0]!r}" if unknown else "no strategies"
        raise InputError(f"{found}; there are {', '.join(strategy_names())}.")


class Trainer:
    """A model that trains on this rank, with its optimizer.

    AdamW is fused for all, as users at their best have it: it reads and writes each byte once, without temporaries.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[Tensor, ...],
        *,
        context: Context = contextlib.nullcontext,
        plan: Plan | None = None,
        program: str | None = None,
        setup_seconds: float = 0.0,
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.plan = plan
        self.program = program
        """Code that a rank runs and the layouts of its inputs, equal for equal programs; None for a peer."""
        self.setup_seconds = setup_seconds
        self._context = context
        # A peer may leave parameters plain that it does not split; a fused step takes the kinds in groups of their own.
        kinds: dict[type, list[Tensor]] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                kinds.setdefault(type(parameter.data), []).append(parameter)
        groups: list[dict[str, Any]] = [{"params": parameters} for parameters in kinds.values()]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)

    def step(self) -> Tensor:
        """Train on the batch; returns the loss, of this rank's part where it has a part. Gradients stay."""
        self.clear()
        with self._context():
            loss = self.model(*self.inputs)
            loss.backward()
        self.optimizer.step()
        return loss.detach()

    def stop_learning(self) -> None:
        """Have the steps that follow compute all that they did, and change no weight.

        A model that goes on to learn its one batch by heart has gradients that shrink to nothing, and with numbers
        below the normal ones a processor computes several times as long.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0

    def clear(self) -> None:
        """Let the gradients go."""
        self.optimizer.zero_grad()

    def held(self) -> list[Tensor]:
        """Return parameters, buffers, gradients and optimizer state."""
        return held_in_training(self.model, self.optimizer)


def contestant(name: str, model: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh, terms: Terms) -> Trainer:
    """Return the model, trained as the strategy of that name does, on its inputs of the global batch.

    Raises InapplicableError, or another AutoparError of `compile`, where the strategy does not apply.
    """
    start = time.perf_counter()
    if name in PEERS:
        peer = PEERS[name](model, mesh, inputs)
        seconds = time.perf_counter() - start
        return Trainer(peer.model, peer.inputs, context=peer.context, setup_seconds=seconds)
    compiled = entry.compile(
        model,
        mesh,
        inputs,
        strategy=None if name == AUTO else name,
        hardware=terms.hardware,
        memory=terms.memory,
    )
    assert isinstance(compiled, ParallelModule), "a contest has no pipelines"
    seconds = time.perf_counter() - start
    prepared = compiled.prepare(inputs, {})
    program = f"{prepared.graph.ahead.code}\n{sorted(prepared.local.layouts.items())}"
    return Trainer(compiled, inputs, plan=compiled.plan, program=program, setup_seconds=seconds)
