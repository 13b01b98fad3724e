"""Constants, such as tables of rotary embeddings, count once: for all layers, and for all micro-batches of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

import autopar
from autopar import Memory, Pipeline
from autopar.models.catalogue import LanguageModel
from tests.support.measured_bytes import filled, peak_of_step, saved_and_planned
from tests.support.ranks import Ranks, mesh

POSITIONS, HEAD = 1024, 64


def _model(layers: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A narrow model, whose tables are larger than its activations."""
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD,
    )
    with torch.device("meta"):
        return LanguageModel(config), (torch.zeros(4, POSITIONS, dtype=torch.int64),) * 2


def _saved(strategy: str, mode: Any, layers: int) -> tuple[int, int]:
    """Bytes that a forward leaves for its backward on this rank, weights excluded, and those of the plan."""
    model, inputs = _model(layers)
    on = mesh((2,), ("cp" if strategy == "gather_kv" else "dp",))
    compiled: Any = autopar.compile(model, on, inputs, strategy=strategy, memory=Memory(recompute=mode))
    return saved_and_planned(compiled, tuple(torch.randint(0, 16, each.shape) for each in inputs))


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("strategy", ["zero3", "gather_kv"])
def test_layers_share_the_tables_that_they_save(ranks: Ranks, strategy: str, mode: str) -> None:
    for found, predicted in ranks.run(_saved, strategy, mode, 3):
        assert predicted == pytest.approx(found, rel=0.02)


def _peak(schedule: str, mode: Any, axes: dict[str, int], strategy: str | None, count: int) -> tuple[int, int]:
    """Bytes at the highest moment of the second step on this rank, and those of the plan."""
    model, inputs = _model(4)
    on = mesh(tuple(axes.values()), tuple(axes))
    options: dict[str, Any] = {"pipeline": Pipeline(schedule=schedule)} if "pp" in axes else {}
    compiled: Any = autopar.compile(
        model, on, inputs, strategy=strategy, microbatches=count, memory=Memory(recompute=mode), **options
    )
    filled(compiled)
    batch = tuple(torch.zeros(each.shape, dtype=torch.int64) for each in inputs)
    found = peak_of_step(compiled, batch, in_one_call=True)
    plan = compiled.plan
    return found, plan.rank_bytes(on.get_local_rank("pp")) if "pp" in axes else plan.peak_bytes


@pytest.mark.parametrize(
    ("schedule", "mode", "axes", "strategy"),
    [
        ("1f1b", "full", {"pp": 2}, None),
        ("gpipe", "full", {"pp": 2}, None),
        ("1f1b", "full", {"pp": 2, "cp": 2}, "gather_kv"),
        ("", "full", {"cp": 2}, "gather_kv"),
        ("", "selective", {"dp": 2}, "zero3"),
    ],
)
def test_micro_batches_share_tables(
    ranks: Ranks, schedule: str, mode: str, axes: dict[str, int], strategy: str | None
) -> None:
    world = torch.Size(axes.values()).numel()
    for found, predicted in ranks.run(_peak, schedule, mode, axes, strategy, 2, world_size=world):
        assert predicted == pytest.approx(found, rel=0.1)
