"""Losses in tiles: trained on ranks as on one process without tiles, with the bytes that plans predict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager, eager
from torch.nn import functional as F

import autopar
from autopar.runtime.implementations import tiled_loss
from tests.support import pipeline_training
from tests.support.in_tiles import under_torch_compile
from tests.support.loss_alone import Reader, reading
from tests.support.measured_bytes import peak_of_step
from tests.support.parity import SLOW_DEVICES, Case, check, check_rounding
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.training import Steps, train_alike
from tests.support.slow_cases import slow_where

HEADS = {"llama_loss": "model.lm_head", "gpt2_loss": "model.lm_head", "bert_loss": "model.cls.predictions.decoder"}


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")


def tiled(family: str, dp: str, tp: str, **options: Any) -> Case:
    """A case on a mesh of 2 by 2 whose head is split along these roles."""
    specified = ((HEADS[family], {"dp": dp, "tp": tp}),)
    return Case(family, (2, 2), specified, options={"hardware": SLOW_DEVICES, "loss_tiles": 3, **options}, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        tiled("llama_loss", "data", "column", recompute="full"),
        tiled("gpt2_loss", "data", "sequence"),
        tiled("gpt2_loss", "sequence", "column"),  # 257 classes
        tiled("llama_loss", "column", "column", loss_tiles=1),
        tiled("bert_loss", "column", "data", loss_tiles="always"),
    ],
    ids=str,
)
def test_a_family_trains_as_on_one_process(ranks: Ranks, case: Case) -> None:
    check(ranks, case)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "mesh"), [("ring", (2,)), ("context_parallel", (2, 2))])
def test_positions_may_be_zigzag_by_zigzag(ranks: Ranks, strategy: str, mesh: tuple[int, ...]) -> None:
    options = {"hardware": SLOW_DEVICES, "strategy": strategy, "loss_tiles": 3}
    found, *_ = check(ranks, Case("llama_loss", mesh, options=options, steps=2))
    assert ("call", "dp" if len(mesh) == 1 else "tp", "sequence") in found.roles


@pytest.mark.slow
def test_one_in_bfloat16_rounds_no_worse_than_one_process(ranks: Ranks) -> None:
    case = Case("llama_loss", (2,), options={"strategy": "zero3", "loss_tiles": 4}, dtype=torch.bfloat16, steps=2)
    check_rounding(ranks, case)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("mesh", "schedule"), [("pp2xtp2", "gpipe"), ("pp2", "zbv"), ("dp2", "")])
def test_it_goes_with_micro_batches_and_pipelines(ranks: Ranks, mesh: str, schedule: str) -> None:
    case = pipeline_training.PipelineCase("llama_loss", mesh, schedule, options={"loss_tiles": 2}, steps=2)
    pipeline_training.check(ranks, case)


COMBINATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "auto": ({}, {"loss_tiles": "always"}, {}),
    "zero3": ({"tied": True}, {"strategy": "zero3"}, {}),
    "fsdp_megatron": ({"num_classes": 23, "bias": True}, {"strategy": "fsdp_megatron"}, {}),
    "megatron_sequence": ({"num_classes": 23, "tied": True}, {"strategy": "megatron_sequence"}, {}),
    "positions and classes": ({"loss": shifted}, {}, {"dp": "sequence", "tp": "column"}),
    "positions over both axes": ({"loss": summed}, {}, {"dp": "sequence", "tp": "sequence"}),
    "micro-batches": ({"tied": True}, {"microbatches": 2}, {"dp": "data", "tp": "column"}),
}
"""Arguments of the model, options of `compile`, and annotations of the head."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", slow_where(COMBINATIONS, "zero3", "fsdp_megatron", "micro-batches"))
def test_any_split_trains_and_evaluates_as_one_process(name: str) -> None:
    arguments, options, roles = COMBINATIONS[name]
    torch.manual_seed(0)
    model = Reader(**arguments).double()
    if roles:
        autopar.annotate(model, "head", **roles)
    batches = [reading(seed, num_classes=arguments.get("num_classes", 24)) for seed in range(3)]
    steps = Steps(batches, "adamw", num_microbatches=options.get("microbatches", 1), evaluated=True)
    plan = train_alike(model, steps, {"dp": 2, "tp": 2}, {"loss_tiles": 3, **options})
    assert plan.choices["linear_cross_entropy_default"].count("-") == 0


def test_a_rank_may_have_no_class_at_all() -> None:
    torch.manual_seed(0)
    model = Reader(num_classes=9, bias=True).double()  # in four parts of three, the last of which is padding
    steps = Steps([reading(seed, num_classes=9) for seed in range(2)])
    autopar.annotate(model, "head", tp="column")
    train_alike(model, steps, {"tp": 4}, {"loss_tiles": 3})


class Stacked(nn.Module):
    """A head that is one of the layers, which are computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 24))])

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers[0](x).flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_loss_in_a_layer_that_is_computed_again_is_not(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = Stacked().double(), []
    steps = Steps([{"x": torch.randn(4, 8, 8, dtype=torch.float64), "labels": reading()["labels"]}])
    run = tiled_loss.loss_in_tiles
    monkeypatch.setattr(tiled_loss, "loss_in_tiles", lambda *given: calls.append(given) or run(*given))
    plan = train_alike(model, steps, {"dp": 2}, {"loss_tiles": 2, "recompute": mode, "strategy": "data_parallel"})
    assert plan.recompute == {"layers.0": mode}
    assert len(calls) == 1


def _under_torch_compile(backend: Callable[..., Any]) -> tuple[int, float]:
    """Graphs that torch.compile makes of a model split by classes, and how far its step is from that without."""
    batch = reading()
    model = autopar.compile(
        Reader(), mesh((2,), ("tp",)), batch, strategy="megatron", memory=autopar.Memory(loss_tiles=3)
    )
    return under_torch_compile(model, batch, backend)


@pytest.mark.parametrize("backend", [eager, pytest.param(aot_eager, marks=pytest.mark.slow)])
def test_torch_compile_takes_it_whole(ranks: Ranks, backend: Callable[..., Any]) -> None:
    for num_graphs, apart in ranks.run(_under_torch_compile, backend, timeout=120):
        assert num_graphs == 1
        assert apart < 1e-6


def _peaks(strategy: str, dtype: torch.dtype, tiles: tuple[int | Literal["auto"], ...]) -> list[tuple[int, int]]:
    """Bytes at the highest moment of a step on this rank, and those of the plan, by the number of tiles."""
    batch, found = reading(batch=8, sequence=256, num_classes=4096), []
    for number in tiles:
        model = Reader(4096, 64).to(dtype)
        on = mesh((2,), ("dp",))
        compiled = autopar.compile(model, on, batch, strategy=strategy, memory=autopar.Memory(loss_tiles=number))
        found.append((peak_of_step(compiled, batch), compiled.plan.peak_bytes))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [
        ("data_parallel", torch.float32),
        pytest.param("megatron", torch.bfloat16, marks=pytest.mark.slow),
        ("zero3", torch.float32),
    ],
)
def test_ranks_hold_what_is_predicted_and_far_less_than_in_one_piece(
    ranks: Ranks, strategy: str, dtype: torch.dtype
) -> None:
    for (whole_peak, _), *tiled_peaks in ranks.run(_peaks, strategy, dtype, ("auto", 1, 8)):
        for found, predicted in tiled_peaks:
            assert predicted == pytest.approx(found, rel=0.05)
        assert tiled_peaks[1][0] < 0.5 * tiled_peaks[0][0] < 0.45 * whole_peak
