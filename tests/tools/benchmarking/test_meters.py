"""Meters of what a step moves and holds: bytes by collective, and the peak of live tensors."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.tools.benchmarking.meters import CollectiveCounter, LiveBytes, peak_bytes
from tests.support.ranks import Ranks

MEBIBYTE = 1 << 20
SMALL = 64  # bytes: scalars that operations make


def _counted() -> dict[str, dict[tuple[str, str], int]]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    group, alone = mesh.get_group("dp"), mesh.get_group("tp")
    x = torch.ones(6)
    with CollectiveCounter({group.group_name: "dp"}) as counter:
        dist.all_reduce(x, group=group)
        dist.all_gather_into_tensor(torch.empty(12), x, group=group)
        dist.reduce_scatter_tensor(torch.empty(3), x, group=group)
        dist.all_to_all_single(torch.empty(6), x, group=group)
        dist.broadcast(x, 0, group=group)
        dist.all_reduce(x, group=alone)
        functional = torch.ops._c10d_functional
        for moved in (
            functional.all_gather_into_tensor(x, 2, group.group_name),
            functional.reduce_scatter_tensor(x, "sum", 2, group.group_name),
        ):
            functional.wait_tensor(moved)
    return {"num_bytes": dict(counter.traffic.num_bytes), "calls": dict(counter.traffic.calls)}


def test_collectives_are_counted_by_the_bytes_of_the_whole_tensor(ranks: Ranks) -> None:
    (found, _) = ranks.run(_counted)
    calls = {"all_reduce": 1, "all_gather": 2, "reduce_scatter": 2, "all_to_all": 1, "broadcast": 1}
    assert found["calls"] == {(name, "dp"): count for name, count in calls.items()}
    sizes = {"all_reduce": 24, "all_gather": 96, "reduce_scatter": 48, "all_to_all": 24, "broadcast": 24}
    assert found["num_bytes"] == {(name, "dp"): num_bytes for name, num_bytes in sizes.items()}


def test_the_peak_is_what_is_held_and_what_a_step_allocates_at_once() -> None:
    weight = torch.zeros(MEBIBYTE)  # 4 MiB
    gradients = {"weight": torch.zeros(MEBIBYTE)}

    def step() -> None:
        torch.ones(2 * MEBIBYTE)
        first = torch.ones(MEBIBYTE)
        gradients["weight"] = first + 1

    found = peak_bytes(step, gradients.clear, lambda: [weight, *gradients.values(), weight[:5]])
    assert 0 <= found - 12 * MEBIBYTE <= SMALL


def test_what_another_thread_frees_a_moment_late_is_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [torch.zeros(MEBIBYTE)]
    live = LiveBytes(sent)
    live.look()
    monkeypatch.setattr(time, "sleep", lambda seconds: sent.clear())
    with live:
        torch.ones(10)
    assert live.highest == 4 * MEBIBYTE


def test_gradients_that_live_on_in_a_bucket_are_held() -> None:
    bucket = torch.zeros(MEBIBYTE)
    gradients = {"weight": bucket[:10]}
    found = peak_bytes(lambda: torch.ones(5), gradients.clear, lambda: list(gradients.values()))
    assert 20 <= found - 4 * MEBIBYTE <= SMALL
