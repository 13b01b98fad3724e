"""Groups made with one backend, one for each kind of device, or without a word."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from autopar.runtime.ranks.backends import backend_of, host_group
from tests.support.ranks import Ranks, mesh


@pytest.mark.parametrize(
    ("backend", "by_device"),
    [
        (None, {"cpu": "gloo", "cuda": "nccl" if torch.cuda.is_available() else ""}),
        ("cpu:gloo", {"cpu": "gloo", "cuda": ""}),
        ("gloo", {"cpu": "gloo"}),
        ("fake", {"cpu": "fake", "cuda": "fake"}),
    ],
)
def test_the_backend_of_a_device(backend: str | None, by_device: dict[str, str]) -> None:
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        assert {device: backend_of(group, device) for device in by_device} == by_device
    finally:
        dist.destroy_process_group()


def test_a_group_has_a_backend_for_each_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    group: Any = None
    assert backend_of(group, "cuda") == "nccl"
    assert backend_of(group, "cpu") == "gloo"


def _hosts(backends: str) -> tuple[bool, float]:
    group = mesh((2,), ("pp",)).get_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda _: backends)
        hosts = host_group(group)
    total = torch.ones(())
    dist.all_reduce(total, group=hosts)
    return hosts is group, total.item()


@pytest.mark.parametrize(("backends", "is_there"), [("cpu:gloo,cuda:nccl", True), ("cuda:nccl", False)])
def test_hosts_have_a_group_of_their_own_where_a_group_moves_no_tensors_of_theirs(
    ranks: Ranks, backends: str, is_there: bool
) -> None:
    assert ranks.run(_hosts, backends) == [(is_there, 2.0)] * 2
