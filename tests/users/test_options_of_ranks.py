"""Any option of compile that differs between ranks is refused on every rank, by its name and both values."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import PeerError
from autopar.ir.sharding.mesh import Mesh
from autopar.runtime.ranks.options import OF_EACH_RANK
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

X_BD = torch.ones(4, 8)
OPTIONS = [
    each.name for each in inspect.signature(autopar.compile).parameters.values() if each.kind is each.KEYWORD_ONLY
]
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "mode": ("auto", "manual"),
    "strategy": (None, "zero3"),
    "memory": ("8GB", "9GB"),
    "recompute": ("auto", "full"),
    "optimizer": ("adamw", autopar.Optimizer("sgd")),
    "master_copies": (False, True),
    "inputs": ("whole", ["dp"]),
    "outputs": ("dtensor", "full"),
    "hardware": (SLOW_DEVICES, "h100"),
    "solver": ("auto", "ilp"),
    "time_limit": (1.0, 2.0),
    "gap": (None, 0.1),
    "deterministic": (False, True),
    "seed": (0, 1),
    "check_inputs": (None, True),
    "microbatches": (1, 2),
    "pipeline": (None, "dp"),
    "schedule": (None, "1f1b"),
    "chunks": (None, 2),
    "stages": (None, ["1"]),
    "assume": (None, ["model.py:12"]),
    "static_argnames": (None, ["input"]),
    "capacity_factor": (None, 1.25),
    "loss_tiles": (None, "auto"),
    "mlp_tiles": (None, 2),
    "weight_tiles": (False, True),
    "imbalance": (1.0, 2.0),
    "precision": (None, "bf16"),
    "prefetch": ("auto", object()),  # wrong on one rank alone: the others must not wait for it
    "offload": ("none", "both"),
    "host_memory": (None, "1GB"),
    "memory_conventions": ("autopar", "tensors"),
    "buckets": (None, autopar.Buckets((64,))),
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
    own: dict[str, Any] = {"hardware": SLOW_DEVICES, "plan_cache": folder / str(dist.get_rank())}
    module = autopar.compile(net(), mesh((2,), ("dp",)), (X_BD,), plan=plans[0], **own)
    assert module.plan.choices == plans[0].choices
    return found


def test_every_option_that_differs_is_refused_on_every_rank_by_name_and_values(ranks: Ranks, tmp_path: Path) -> None:
    here, there = ranks.run(_messages, DIFFERENT, tmp_path)
    assert here == there
    assert set(here) == set(OPTIONS) - OF_EACH_RANK, "an option of compile has no pair of different values here"
    for name, message in here.items():
        assert message.startswith(f"compile was given {name}=")
        assert f"on rank 0 and {name}=" in message
        assert f"on rank 1. Every rank needs the same options; give {name} the same" in message
    assert "deterministic=False on rank 0 and deterministic=True on rank 1" in here["deterministic"]
    assert "prefetch='auto' on rank 0 and prefetch=<object> on rank 1" in here["prefetch"]
    assert "inputs='whole' on rank 0 and inputs=['dp'] on rank 1" in here["inputs"]


def test_options_of_each_rank_are_options() -> None:
    assert set(OPTIONS) >= OF_EACH_RANK
