"""Losses and MLPs in tiles on ranks: torch.compile takes them whole, and ranks hold the bytes that plans predict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager, eager

import autopar
from tests.support.gated_mlps import Gated, tokens
from tests.support.loss_alone import Reader, reading
from tests.support.measured_bytes import peak_of_step
from tests.support.parity import whole
from tests.support.ranks import Ranks, mesh

Kind = Literal["loss", "mlp"]


def compiled(kind: Kind, model: nn.Module, batch: dict[str, Tensor], axis: str, strategy: str, tiles: Any) -> Any:
    """Compile a model whose loss, or whose MLPs, are in so many tiles."""
    options: Any = {f"{kind}_tiles": tiles}
    return autopar.compile(model, mesh((2,), (axis,)), batch, strategy=strategy, memory=autopar.Memory(**options))


def under_torch_compile(kind: Kind, backend: Callable[..., Any]) -> tuple[int, float]:
    """Graphs that torch.compile makes of a model split by classes or hidden features, and how far its step is off."""
    alone, batch = (Reader(), reading()) if kind == "loss" else (Gated(), {"x": tokens()["x"].float()})
    model = compiled(kind, alone, batch, "tp", "megatron", 3)
    torch._dynamo.reset()
    graphs = []

    def counting(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return backend(graph, example_inputs)

    def step(called: Any) -> list[Tensor]:
        model.zero_grad()
        loss = called(**batch)
        loss.backward()
        return [whole(x) for x in (loss, *(parameter.grad for parameter in model.parameters()))]  # type: ignore[misc]

    pairs = zip(step(model), step(torch.compile(model, backend=counting)), strict=True)
    apart = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    torch._dynamo.reset()
    return len(graphs), apart


@pytest.mark.parametrize("backend", [eager, pytest.param(aot_eager, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["loss", "mlp"])
def test_torch_compile_takes_it_whole(ranks: Ranks, kind: Kind, backend: Callable[..., Any]) -> None:
    for num_graphs, apart in ranks.run(under_torch_compile, kind, backend, timeout=120):
        assert num_graphs == 1
        assert apart < 1e-6


def peaks(kind: Kind, strategy: str, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Bytes at the highest moment of a step on this rank, and those of the plan: untiled, in one piece, in 8 tiles."""
    if kind == "loss":
        batch = reading(batch=8, sequence=256, num_classes=4096)
    else:
        batch = {"x": tokens(batch=8, sequence=128, size=64)["x"].to(dtype)}
    found = []
    for tiles in ("auto" if kind == "loss" else "none", 1, 8):
        alone = Reader(4096, 64) if kind == "loss" else Gated(64, 512)
        model = compiled(kind, alone.to(dtype), batch, "dp", strategy, tiles)
        found.append((peak_of_step(model, batch), model.plan.peak_bytes))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy", "dtype", "share", "of_untiled"),
    [
        ("loss", "data_parallel", torch.float32, 0.5, 0.45),
        ("loss", "megatron", torch.bfloat16, 0.5, 0.45),
        ("loss", "zero3", torch.float32, 0.5, 0.45),
        ("mlp", "data_parallel", torch.float32, 0.7, 0.6),
        ("mlp", "megatron", torch.bfloat16, 0.7, 0.6),
        ("mlp", "zero3", torch.bfloat16, 0.7, 0.6),
    ],
)
def test_ranks_hold_what_is_predicted_and_far_less_than_in_one_piece(
    ranks: Ranks, kind: Kind, strategy: str, dtype: torch.dtype, share: float, of_untiled: float
) -> None:
    for (whole_peak, _), *tiled_peaks in ranks.run(peaks, kind, strategy, dtype):
        for found, predicted in tiled_peaks:
            assert predicted == pytest.approx(found, rel=0.05)
        assert tiled_peaks[1][0] < share * tiled_peaks[0][0] < of_untiled * whole_peak
