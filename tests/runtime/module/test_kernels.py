"""A step launches about as many kernels as that of PyTorch's own tools: what `benchmarks.step_operations` counts."""

from __future__ import annotations

import pytest

from benchmarks.step_counts import Phases, counted
from benchmarks.step_operations import CASES, MIXED, TENSOR, Build, Setting
from benchmarks.transformer_model import Size
from tests.support.simulation.fake_mesh import fake_mesh

MOST = 1.1  # times the kernels of the peer; a forward also counts the targets of all ranks, and divides by them
RANKS = 8


@pytest.mark.parametrize(
    ("name", "precision"),
    [("hsdp", None), ("fsdp_megatron", MIXED), ("megatron_sequence", None), ("expert_data", None)],
    ids=str,
)
def test_a_step_has_the_kernels_of_its_peer(name: str, precision: str | None) -> None:
    case = next(case for case in CASES if case.name == name)
    setting = Setting(RANKS, precision, "none", Size(2, 512, TENSOR, 1024, RANKS, 8))

    def phases(build: Build) -> Phases:
        with fake_mesh(case.axes(RANKS)) as mesh:
            return counted(build(setting, mesh))[0]

    ours, theirs = phases(case.ours), phases(case.theirs)
    assert ours["forward"].kernels <= MOST * theirs["forward"].kernels
    assert ours["backward"].kernels <= MOST * theirs["backward"].kernels
