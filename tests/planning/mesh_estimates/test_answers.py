"""Answers of `mesh="auto"` on four or eight devices: each runs as the search plans it, and trains as one process does.

A case is a candidate (mesh and micro-batches) within a memory limit that asks its plan for something: parameters that
are gathered again, segments that are computed again, a schedule. What the plan must have is checked, so that no case
loses its subject. Compared are losses, all gradients of the first step, and parameters after several steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compiler.offline import subject_of
from autopar.compiler.offline_planner import OfflinePlanner
from autopar.compiler.plan_cache import PlanCache
from autopar.costs.plans.plan import Plan
from autopar.models.catalogue import built_in, num_values
from autopar.planning.mesh_estimates.estimates import Candidate, Estimates
from autopar.planning.mesh_search.search import Turn
from autopar.planning.options.groups import Memory, Pipeline, Search
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, Training, compare, whole
from tests.support.pipeline_training import hold_all, stage_bytes_of
from tests.support.ranks import Ranks, mesh

BATCH, SEQUENCE, STEPS = 16, 32, 3


@dataclass(frozen=True, slots=True)
class Case:
    """A candidate, the other options of the search, and what its plan must have."""

    model: str
    layers: int
    axes: Mapping[str, int]
    microbatches: int
    memory: int
    needed: frozenset[str]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_devices(self) -> int:
        return math.prod(self.axes.values())

    def __str__(self) -> str:
        axes = "x".join(f"{name}{size}" for name, size in self.axes.items())
        return f"{self.model}-{axes}-{self.microbatches}-{'-'.join(sorted(self.needed))}"


def case(model: str, layers: int, mesh: str, count: int, memory: int, *needed: str, **options: Any) -> Case:
    axes = {each.rstrip("0123456789"): int(each.lstrip("abcdefghijklmnopqrstuvwxyz")) for each in mesh.split()}
    return Case(model, layers, axes, count, memory, frozenset(needed), options)


SMALL = case("tiny-moe", 2, "pp2 dp2", 2, 22_000_000, "dp: expert", "gathered again")
"""Experts in a pipeline within a limit, as the last of `CASES`, with half of its layers and ranks."""
CASES = (
    case("tiny-llama", 5, "dp8", 1, 16_000_000, "gathered again"),
    case("tiny-llama", 5, "dp8", 4, 14_000_000, "gathered again"),
    case("tiny-llama", 5, "dp2 tp4", 1, 22_000_000, "tp: sequence"),
    case("tiny-llama", 8, "pp2 dp4", 4, 30_000_000, "zbv"),
    case("tiny-llama", 8, "pp2 dp2 tp2", 4, 14_000_000, "zbv", "full", schedule="zbv"),
    case(
        *("tiny-llama", 8, "pp2 dp2 tp2", 8, 20_000_000, "interleaved_zero_bubble"),
        schedule="interleaved_zero_bubble",
        stages_per_rank=3,
    ),
    case("tiny-llama", 5, "pp4 dp2", 8, 12_000_000, "1f1b", schedule="1f1b"),
    case("tiny-gpt2", 6, "pp4 dp2", 8, 20_000_000, "interleaved_zero_bubble"),
    case("tiny-moe", 5, "dp4 tp2", 1, 60_000_000, "dp: expert"),
    case("tiny-moe", 5, "pp2 dp4", 4, 24_000_000, "dp: expert"),
)
"""Data parallelism with parameters in parts, in one piece and in micro-batches; sequence parallelism; every schedule
that is recommended; recomputation; tied tables on two stages (gpt2); experts."""


def planned(requested: Case) -> Plan | PipelinePlan:
    """Return the plan of a candidate, as the search makes it."""
    settings = Settings(Memory(requested.memory), Search(time_limit=1000, max_axes=2))
    request = PlanRequest(hardware=SLOW_DEVICES, settings=settings, pipeline=Pipeline("pp", **requested.options))
    inputs = built_in(requested.model, BATCH, SEQUENCE, requested.layers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject, exact = subject_of(OfflinePlanner(*inputs, request, PlanCache()), "auto", requested.num_devices)
        on = next(each for each in subject.meshes if each.axes == requested.axes)
        estimate = Estimates(subject, float("inf")).estimate(Candidate(on, requested.microbatches))
        assert estimate is not None, "no plan of the candidate is known to fit"
        return exact(estimate, Turn(200)).plan


def features(plan: Plan | PipelinePlan) -> set[str]:
    """Return what a plan has: schedule, modes of recomputation, roles of axes, and weights that are gathered again."""
    plans = [stage.plan for stage in plan.stages] if isinstance(plan, PipelinePlan) else [plan]
    found = {plan.schedule.name} if isinstance(plan, PipelinePlan) else set[str]()
    for each in plans:
        found |= set(each.recompute.values())
        for row in each.rows:
            if row.kind == "call":
                found |= {f"{axis}: {role}" for axis, role in zip(each.mesh.names, row.roles, strict=True)}
            elif row.kind == "parameter" and "S(" in each.choices[row.name] and "saved" not in each.choices[row.name]:
                found.add("gathered again")
    return found


def model_and_batches(requested: Case) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model, _ = built_in(requested.model, BATCH, SEQUENCE, requested.layers, device="cpu")
    generator, num_tokens = torch.Generator().manual_seed(1), num_values(requested.model)
    draws = [torch.randint(0, num_tokens, (BATCH, SEQUENCE + 1), generator=generator) for _ in range(STEPS)]
    return model, [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in draws]


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]], in_turns: bool) -> Training:
    """Train; `in_turns` by `train_step`, which splits a batch into micro-batches."""
    learning = {"params": list(model.parameters())}
    optimizer = torch.optim.AdamW([learning], lr=1e-3, eps=1e-4)  # rounding must not become whole steps
    found = Training([], {}, {}, {}, {}, {})
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        if in_turns:
            in_step: Any = model.train_step
            loss = in_step(*batch)
        else:
            loss = model(*batch)
            loss.backward()
        value = whole(loss)
        assert value is not None
        found.losses.append(float(value))
        if step == 0:
            found.gradients = {name: whole(each.grad) for name, each in model.named_parameters()}
        optimizer.step()
    found.parameters = {name: whole(each) for name, each in model.named_parameters()}  # type: ignore[misc]
    return found


def train_on_ranks(requested: Case, text: str) -> Training:
    """Train by a plan on the ranks of this process group (runs on every rank)."""
    plan = (PipelinePlan if "pp" in requested.axes else Plan).from_json(text)
    model, batches = model_and_batches(requested)
    on = mesh(tuple(requested.axes.values()), tuple(requested.axes))
    in_turns = requested.microbatches > 1
    count: dict[str, Any] = {"microbatches": requested.microbatches} if in_turns and "pp" not in requested.axes else {}
    compiled = autopar.compile(model, on, batches[0], plan=plan, hardware=SLOW_DEVICES, **by_flag(**count))
    return train(compiled, batches, in_turns or "pp" in requested.axes)


@pytest.mark.slow
@pytest.mark.parametrize("requested", [SMALL, *CASES], ids=str)
def test_an_answer_trains_as_one_process(ranks: Ranks, requested: Case) -> None:
    plan = planned(requested)
    assert requested.needed <= features(plan), f"the plan has {sorted(features(plan))}"
    model, batches = model_and_batches(requested)
    expected = train(model, batches, in_turns=False)
    found = ranks.run(train_on_ranks, requested, plan.to_json(), world_size=requested.num_devices, timeout=300)
    for each in found:
        compare(each, stage_bytes_of(each, expected), rtol=1e-4, atol=1e-5, floor=0.05)
    hold_all(found, expected)
