"""A memory limit is one on the device: plans, pipelines, meshes, tables, files and errors count what is no tensor."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.costs.hardware.load import load
from autopar.costs.hardware.reserved import NOTHING, Reserved
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing.conventions import MemoryConventions
from autopar.errors import InfeasibleError, PipelineError
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.settings import context_of
from autopar.views.inspection.verify import check
from autopar.views.report.html import page
from tests.support.options import by_flag

INPUTS = (torch.zeros(64, 64),)
MESH = {"dp": 2, "tp": 2}
GPU = MemoryConventions(1.25, 10_000, 2_000, 4_000)
RESERVED = Reserved(1.25, 10_000, 6_000, 4_000)


class Layers(nn.Module):
    """Four numbered layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.layers(x_BD).square().mean()


def _planned(mesh: Any = MESH, **options: Any) -> Any:
    on: Any = mesh if isinstance(mesh, str) else autopar.Mesh(mesh)
    requested: dict[str, Any] = {"memory_conventions": GPU, **options}
    return autopar.plan(Layers(), on, INPUTS, **by_flag(**requested))


def test_a_limit_on_the_device_is_the_one_on_tensors_that_it_leaves() -> None:
    free = _planned()
    assert free.reserved == RESERVED and free.reserved_bytes == RESERVED.on_device(free.peak_bytes) > free.peak_bytes
    limit = int(0.8 * free.reserved_bytes)
    found = _planned(memory=limit)
    alone = _planned(memory=RESERVED.tensors_within(limit), memory_conventions="tensors")
    assert found.choices == alone.choices and found.recompute == alone.recompute != free.recompute
    assert found.memory_limit == limit >= found.reserved_bytes and alone.reserved == NOTHING
    assert found.verify().ok and found.attach(Layers(), INPUTS).verify().ok
    assert found.what_if("*", dp="data").reserved_bytes <= limit


def test_a_plan_over_the_limit_on_the_device_is_refused_though_its_tensors_are_within() -> None:
    found = _planned(memory=_planned().reserved_bytes)
    claimed = json.loads(found.to_json()) | {"memory_limit": found.reserved_bytes - 1}
    problems = check(Plan.from_json(json.dumps(claimed)), context_of(found)).problems
    assert found.peak_bytes < found.reserved_bytes - 1
    assert any(f"take {found.reserved_bytes} bytes per device" in each for each in problems)


@pytest.mark.parametrize("mesh", [MESH, {"pp": 2, "tp": 2}], ids=["whole", "pipeline"])
def test_tables_and_files_say_both_numbers_and_the_parts(mesh: dict[str, int]) -> None:
    specified: dict[str, Any] = {"microbatches": 2, "schedule": "1f1b"} if "pp" in mesh else {}
    plan = _planned(mesh, **specified)
    words = " ".join(str(plan).split())
    assert re.search(r"memory \S+ \wB \(\S+ \wB of tensors\) per device", words)
    parts = "CUDA context 10.00 kB, NCCL buffers 6.00 kB, cuBLAS workspaces 4.00 kB"
    assert re.search(rf"besides tensors: allocator \S+ \wB, {parts}", words)
    values = json.loads(plan.to_json())["reserved"]
    assert values == {
        "bytes": plan.reserved_bytes, "allocator_factor": 1.25, "context_bytes": 10_000, "communicator_bytes": 6_000,
        "workspace_bytes": 4_000,
    }  # fmt: skip
    assert type(plan).from_json(plan.to_json()).reserved == RESERVED
    if isinstance(plan, Plan):
        assert all(name in page(plan) for name in ("allocator", "CUDA context", "NCCL buffers", "cuBLAS workspaces"))


def test_nothing_besides_tensors_is_stated_of_a_host() -> None:
    plan = autopar.plan(Layers(), autopar.Mesh(MESH), INPUTS)
    assert plan.reserved == NOTHING and plan.reserved_bytes == plan.peak_bytes
    assert "tensors" not in str(plan)


def test_stages_share_what_tensors_may_take_of_a_device() -> None:
    specified: dict[str, Any] = {"microbatches": 2, "schedule": "1f1b"}
    limit = int(0.95 * _planned({"pp": 2}, **specified).reserved_bytes)
    found = _planned({"pp": 2}, memory=limit, **specified)
    assert isinstance(found, PipelinePlan) and found.memory_limit == limit
    assert found.reserved == Reserved(1.25, 10_000, 2_000, 4_000)
    assert all(found.reserved.on_device(found.rank_bytes(rank)) <= limit for rank in range(2))
    assert all(stage.plan.reserved == NOTHING for stage in found.stages)


def test_each_mesh_has_its_own_communicators() -> None:
    found = _planned("auto", devices=4, memory_conventions=GPU)
    assert found.reserved == GPU.reserved(load("cpu"), found.mesh)


def test_an_error_says_both_limits_and_both_needs() -> None:
    with pytest.raises(InfeasibleError) as refused:
        _planned(memory=60_000)
    text, least = str(refused.value), refused.value.least_bytes
    assert text.startswith("On the device the limit is 60.00 kB, which leaves 32.00 kB for tensors: allocator × 1.25, ")
    assert "of tensors, " in text and "the memory limit is 32.00 kB (32000 bytes) per device" in text
    assert least is not None and _planned(memory=least).reserved_bytes == least
    with pytest.raises(InfeasibleError):
        _planned(memory=least - 1)


def test_an_error_of_stages_says_both_limits() -> None:
    with pytest.raises(PipelineError, match=r"(?s)limit is 40\.00 kB, which leaves 16\.00 kB for tensors.*no cut into"):
        _planned({"pp": 2, "tp": 2}, memory=40_000, microbatches=2, schedule="1f1b")


@pytest.mark.slow
def test_explanations_say_both_numbers() -> None:
    limit = int(0.9 * _planned().reserved_bytes)
    words = str(_planned(memory=limit).explain("layers.1.0.weight"))
    assert re.search(r"memory +\S+ \wB \(\S+ \wB of tensors\)", words)


@pytest.mark.parametrize("mesh", [MESH, "auto"], ids=str)
def test_a_limit_below_what_is_no_tensor_is_refused(mesh: Any) -> None:
    specified = {"devices": 4} if mesh == "auto" else {}
    with pytest.raises(InfeasibleError, match=r"are no tensors: CUDA context 10\.00 kB"):
        _planned(mesh, memory=12_000, **specified)


def test_one_device_has_no_communicators_and_counts_the_rest() -> None:
    one = _planned().workload.one_device
    assert one.reserved_bytes == Reserved(1.25, 10_000, 0, 4_000).on_device(one.num_bytes) - one.num_bytes
    limited = _planned(memory=one.num_bytes + one.reserved_bytes - 1).workload.one_device
    assert one.fits and not limited.fits
