"""Any option of compile that differs between ranks is refused on every rank, by its name and both values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.compiler.arguments import defaults
from autopar.errors import PeerError
from autopar.ir.sharding.mesh import Mesh
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

X_BD = torch.ones(4, 8)
OPTIONS = {*defaults(), "plan", "run"}
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "mode": ("auto", "manual"),
    "strategy": (None, "zero3"),
    "memory": ("8GB", object()),  # wrong on one rank alone: the others must not wait for it
    "precision": (None, "bf16"),
    "optimizer": ("adamw", autopar.Optimizer("sgd")),
    "hardware": (SLOW_DEVICES, "h100"),
    "inputs": ("whole", ["dp"]),
    "outputs": ("dtensor", "full"),
    "microbatches": (1, 2),
    "pipeline": (None, autopar.Pipeline(schedule="1f1b")),
    "experts": (autopar.Experts(), autopar.Experts(imbalance=2.0)),
    "search": (autopar.Search(1.0, cache="here"), autopar.Search(2.0, cache="there")),
    "capture": (None, autopar.Capture(["model.py:12"])),
    "run": (autopar.Run(), autopar.Run(deterministic=True)),
    "training": (True, False),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))


def _messages(different: dict[str, tuple[Any, Any]], folder: Path) -> dict[str, str]:
    found = {}
    for name, values in different.items():
        with pytest.raises(PeerError) as error:
            autopar.compile(net(), mesh((2,), ("dp",)), (X_BD,), **{name: values[dist.get_rank()]})
        found[name] = str(error.value)
    plans = [
        autopar.plan(net(), Mesh({"dp": 2}), (X_BD,), strategy=strategy, hardware=SLOW_DEVICES)
        for strategy in ("data_parallel", "zero3")
    ]
    with pytest.raises(PeerError) as error:
        autopar.compile(net(), mesh((2,), ("dp",)), (X_BD,), plan=plans[dist.get_rank()], hardware=SLOW_DEVICES)
    found["plan"] = str(error.value)
    # Ranks that agree go on; each may plan for itself, and keep plans where it likes.
    own: dict[str, Any] = {"hardware": SLOW_DEVICES, "search": autopar.Search(cache=folder / str(dist.get_rank()))}
    module = autopar.compile(net(), mesh((2,), ("dp",)), (X_BD,), plan=plans[0], **own)
    assert module.plan.choices == plans[0].choices
    return found


def test_every_option_that_differs_is_refused_on_every_rank_by_name_and_values(ranks: Ranks, tmp_path: Path) -> None:
    here, there = ranks.run(_messages, DIFFERENT, tmp_path)
    assert here == there
    assert set(here) == OPTIONS, "an option of compile has no pair of different values here"
    for name, message in here.items():
        assert message.startswith(f"compile was given {name}=")
        assert f"on rank 0 and {name}=" in message
        assert f"on rank 1. Every rank needs the same options; give {name} the same" in message
    assert "run=Run() on rank 0 and run=Run(deterministic=True) on rank 1" in here["run"]
    assert "memory='8GB' on rank 0 and memory=<object> on rank 1" in here["memory"]
    assert "search=Search(time_limit=1.0) on rank 0 and search=Search(time_limit=2.0) on rank 1" in here["search"]
    assert "inputs='whole' on rank 0 and inputs=['dp'] on rank 1" in here["inputs"]
