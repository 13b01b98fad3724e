"""Every step runs the same operations, and none needs the host: the conditions for replaying it as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.costs.hardware.load import load
from autopar.runtime.step_graphs.operations import RecordedOperations
from benchmarks.transformer_model import Size, transformer
from tests.support.options import by_flag
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.fake_mesh import fake_mesh

SIZE = Size(1, 64, 4, 128, 16, 8)


def _batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(SIZE.vocabulary, (2, SIZE.batch, SIZE.sequence), generator=generator)
    return ids, labels


def _recorded(model: nn.Module, step: Callable[..., Any]) -> list[RecordedOperations]:
    """The operations of two steps on unlike values, gradients included, after steps that plan and allocate."""
    parameters = list(model.parameters())
    for seed in range(3):
        step(*_batch(seed))
    gradients = [each.grad for each in parameters]
    found = []
    for seed in (3, 4):
        for each in gradients:
            assert each is not None
            each.zero_()
        inputs = _batch(seed)
        with RecordedOperations() as operations:
            step(*inputs)
        found.append(operations)
    assert all(each.grad is gradient for each, gradient in zip(parameters, gradients, strict=True))
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", ["full", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("strategy", "axes"),
    [
        ("data_parallel", {"dp": 4}),
        ("zero3", {"dp": 4}),
        ("megatron", {"tp": 4}),
        ("fsdp_megatron", {"dp": 2, "tp": 2}),
        pytest.param("zero2", {"dp": 4}, marks=pytest.mark.slow),
        pytest.param("hsdp", {"dp": 2, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param("megatron_sequence", {"tp": 4}, marks=pytest.mark.slow),
    ],
)
def test_steps_run_the_same_operations_and_none_of_the_host(
    strategy: str, axes: dict[str, int], recompute: str
) -> None:
    options: dict[str, Any] = {"precision": "bf16-mixed", "recompute": recompute, "microbatches": 2}
    with fake_mesh(axes) as devices:
        model = autopar.compile(
            transformer(SIZE), devices, _batch(0), strategy=strategy, hardware=load("h100"), **by_flag(**options)
        )
        for step in (model.train_step, lambda *inputs: model(*inputs).backward()):
            one, other = _recorded(model, step)
            assert not one.of_host
            assert one.operations == other.operations
            assert len(one.operations) > 100


def _on_ranks() -> tuple[list[str], bool]:
    """Return what needs the host where ranks agree on calls, and whether two steps were the same."""
    model = autopar.compile(
        transformer(SIZE), mesh((2,), ("dp",)), _batch(0), strategy="zero3", memory=autopar.Memory(recompute="full")
    )
    one, other = _recorded(model, lambda *inputs: model(*inputs).backward())
    return one.of_host, one.operations == other.operations


def test_ranks_agree_on_calls_without_reading_tensors(ranks: Ranks) -> None:
    for of_host, same in ranks.run(_on_ranks):
        assert not of_host
        assert same


class Noisy(nn.Module):
    """A layer with dropout, whose draws have seeds of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(SIZE.vocabulary, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return (nn.functional.dropout(self.head(self.embedding(ids)), 0.5) * labels.unsqueeze(-1)).mean()


def test_dropout_is_seeded_by_the_host() -> None:
    with fake_mesh({"dp": 4}) as devices:
        model = autopar.compile(Noisy(), devices, _batch(0), strategy="data_parallel", hardware=load("h100"))
        one, _ = _recorded(model, lambda *inputs: model(*inputs).backward())
    assert any("dropout.py" in each for each in one.of_host)
