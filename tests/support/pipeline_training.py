"""Training of one family by `train_step`, and alone by gradient accumulation over the same micro-batches.

A micro-batch is a batch of the family; a step's batch is as many of them as the schedules need. What is compared on
every rank: the loss of every step, the gradients after the first, and the parameters and buffers after the last, of all
that the rank holds; together the ranks hold everything.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import parity
from tests.support.families import FAMILIES, HIDDEN, SEED
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, STEPS, Training, distance, traced_once, whole
from tests.support.ranks import Ranks, mesh

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

MESHES: Mapping[str, Mapping[str, int]] = {
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "pp2xtp2": {"pp": 2, "tp": 2},
    "pp2xdp2": {"pp": 2, "dp": 2},
    "pp2xdp2xtp2": {"pp": 2, "dp": 2, "tp": 2},
}
JOINED: Mapping[str, Mapping[str, int]] = {
    "pp2xcp2xtp2": {"pp": 2, "cp": 2, "tp": 2},
    "pp2xdp2xep2": {"pp": 2, "dp": 2, "ep": 2},
}
"""Meshes of presets that are joined."""
WITHOUT_PIPELINE: Mapping[str, Mapping[str, int]] = {
    "one": {"dp": 1},
    "dp2": {"dp": 2},
    "dp4": {"dp": 4},
    "dp2xtp2": {"dp": 2, "tp": 2},
}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")


@dataclass(frozen=True, slots=True)
class PipelineCase:
    """One way to train a family: the mesh by name, the schedule where it has a pipeline, and options of `compile`."""

    family: str
    mesh: str
    schedule: str = "1f1b"
    annotations: tuple[tuple[str, dict[str, Any]], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    steps: int = STEPS
    frozen: tuple[str, ...] = ()
    """Patterns in parameter names whose parameters are frozen."""
    dropout: float = 0.0

    @property
    def axes(self) -> Mapping[str, int]:
        return {**MESHES, **JOINED, **WITHOUT_PIPELINE}[self.mesh]

    @property
    def microbatches(self) -> int:
        """Two for every rank of the pipeline: every schedule takes so many."""
        return 2 * self.axes.get("pp", 2)

    @property
    def world_size(self) -> int:
        return math.prod(self.axes.values())

    @property
    def graph(self) -> tuple[Any, ...]:
        """Settings on which the captured graph depends."""
        return self.family, self.dtype, self.frozen, self.dropout

    def __str__(self) -> str:
        return f"{self.family}-{self.mesh}-{self.schedule}"


class WithLoss(nn.Module):
    """A model that leaves its loss to the caller, and that loss: train_step takes models that return theirs."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self._loss(self.model(x))


class RemainingProblem(nn.Module):
    """A linear layer plus its input, so that the inputs of a tower of them still matter at its top."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.dropout(nn.functional.gelu(self.layer(x_BD)))


def _tower(dropout: float) -> nn.Module:
    """Enough layers for one with parameters on each of eight stages."""
    return WithLoss(nn.Sequential(*(RemainingProblem(dropout) for _ in range(12))), FAMILIES["mlp"].loss)


def build(case: PipelineCase) -> nn.Module:
    """The model of a case, equal on every call, with its loss; "mlp" is deeper than the family of that name."""
    if case.family != "mlp":
        return parity.build(parity.Case(case.family, (1,), dtype=case.dtype, frozen=case.frozen, dropout=case.dropout))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = _tower(case.dropout).to(case.dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in case.frozen))
    return model


def loss_of(case: PipelineCase, output: Any) -> Tensor:
    """The loss among what the model of a case returns."""
    return output if case.family == "mlp" else parity.MODELS[case.family].loss(output)


def microbatches_of(case: PipelineCase, step: int) -> list[Inputs]:
    """The micro-batches of a step, floats in the case's dtype."""
    alone = parity.Case(case.family, (1,), dtype=case.dtype, micro_steps=case.microbatches)
    return [parity.inputs(alone, step, micro) for micro in range(case.microbatches)]


def batch_of(microbatches: Sequence[Inputs]) -> Inputs:
    """The batch that splits into these micro-batches."""
    args = tuple(torch.cat(parts) for parts in zip(*(args for args, _ in microbatches), strict=True))
    names = microbatches[0][1]
    return args, {name: torch.cat([kwargs[name] for _, kwargs in microbatches]) for name in names}


def accumulated(case: PipelineCase, model: nn.Module, step: int) -> float:
    """One step of gradient accumulation on one process; the mean loss."""
    total = 0.0
    for args, kwargs in microbatches_of(case, step):
        loss = loss_of(case, model(*args, **kwargs)) / case.microbatches
        loss.backward()
        total += loss.item()
    return total


def train(case: PipelineCase, model: nn.Module, forward_backward: Callable[[int], float]) -> Training:
    """Train a model; `forward_backward` takes the number of a step, leaves gradients and gives the loss."""
    # A larger eps than usual: gradients that are zero up to rounding must not become whole steps.
    # One group, as an optimizer refuses an empty list: the stages of a rank may be frozen as a whole.
    learning = {"params": [p for p in model.parameters() if p.requires_grad]}
    optimizer = torch.optim.AdamW([learning], lr=1e-3, eps=1e-4)
    found = Training([], {}, {}, {}, {}, {})
    for step in range(case.steps):
        optimizer.zero_grad()
        found.losses.append(forward_backward(step))
        if step == 0:
            found.gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}
        optimizer.step()
    found.parameters = {name: whole(p) for name, p in model.named_parameters()}  # type: ignore[misc]
    found.buffers = {name: whole(b) for name, b in model.named_buffers()}  # type: ignore[misc]
    return found


@functools.lru_cache(maxsize=8)
def _train_alone(
    family: str, dtype: torch.dtype, frozen: tuple[str, ...], dropout: float, mesh: str, steps: int
) -> Training:
    case = PipelineCase(family, mesh, dtype=dtype, frozen=frozen, dropout=dropout, steps=steps)
    model = build(case)
    return train(case, model, lambda step: accumulated(case, model, step))


def train_alone(case: PipelineCase) -> Training:
    """Train on one process; the same for all cases that differ only in how they are split and scheduled."""
    same_microbatches = next(name for name, axes in MESHES.items() if axes["pp"] == case.axes.get("pp", 2))
    return _train_alone(*case.graph, same_microbatches, case.steps)


def compiled(case: PipelineCase, model: nn.Module | None = None) -> Any:
    """The case's model on the mesh of this process group (runs on every rank)."""
    import autopar

    model = build(case) if model is None else model
    for pattern, keywords in case.annotations:
        autopar.annotate(model, pattern, **keywords)
    args, kwargs = batch_of(microbatches_of(case, 0))
    options: dict[str, Any] = {"hardware": SLOW_DEVICES, "microbatches": case.microbatches}
    if "pp" in case.axes:
        options["schedule"] = case.schedule
    on = mesh(tuple(case.axes.values()), tuple(case.axes))
    with traced_once(case.graph):
        return autopar.compile(model, on, kwargs or args, **by_flag(**{**options, **case.options}))


def parallel(case: PipelineCase) -> Training:
    """Train the case on the ranks of this process group (runs on every rank)."""
    model = compiled(case)

    def forward_backward(step: int) -> float:
        args, kwargs = batch_of(microbatches_of(case, step))
        return float(model.train_step(*args, **kwargs))

    return train(case, model, forward_backward)


def check(ranks: Ranks, case: PipelineCase, rtol: float = 1e-4, atol: float = 1e-5, floor: float = 0.05) -> None:
    """Train the case on real ranks and hold every rank against one process; see `parity.compare`."""
    expected = train_alone(case)
    found = ranks.run(parallel, case, world_size=case.world_size, timeout=180)
    for training in found:
        parity.compare(training, stage_bytes_of(training, expected), rtol, atol, floor)
    hold_all(found, expected)
    if "pp" in case.axes:
        assert any(each.parameters.keys() != expected.parameters.keys() for each in found), "nothing was cut"


def check_rounding(ranks: Ranks, case: PipelineCase) -> None:
    """Train a case of low precision on real ranks: no further from float32 than twice what one process is."""
    precise = train_alone(replace(case, dtype=torch.float32))
    alone = train_alone(case)
    for training in ranks.run(parallel, case, world_size=case.world_size, timeout=180):
        measure = distance(stage_bytes_of(training, alone), stage_bytes_of(training, precise))
        for kind, far in distance(training, stage_bytes_of(training, precise)).items():
            # The few losses of one process may be nearer to float32's than rounding lets one expect, by chance.
            known = max(measure[kind], torch.finfo(case.dtype).eps ** 2)
            assert far <= 2 * known, f"{kind}: {far:.3g} from float32, one process {measure[kind]:.3g}"


def stage_bytes_of(found: Training, expected: Training) -> Training:
    """Restrict the results of one process to the tensors that a rank has."""

    def of(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
        return {name: theirs[name] for name in ours}

    return Training(
        expected.losses,
        of(found.gradients, expected.gradients),
        of(found.parameters, expected.parameters),
        of(found.buffers, expected.buffers),
        {},
        {},
    )


def hold_all(found: Sequence[Training], expected: Training) -> None:
    """Check that the ranks together hold everything that one process has."""
    for kind in ("gradients", "parameters", "buffers"):
        together = set().union(*(getattr(each, kind) for each in found))
        theirs = getattr(expected, kind).keys()
        assert together == theirs, f"{kind}: {together ^ theirs}"
