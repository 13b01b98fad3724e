"""The memory that a plan predicts, compared with what a step on real ranks holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.ir.program.recompute_segments import RECOMPUTATIONS
from autopar.models.named import named
from autopar.runtime.module.compiled_module import ParallelModule
from tests.support.experts import SortedExperts
from tests.support.measured_bytes import filled, peak_of_step, saved_and_planned
from tests.support.options import by_flag
from tests.support.ranks import Ranks, mesh

AXES = ("dp", "tp")


def _measured(
    name: str, shape: tuple[int, ...], strategy: str, batch: int, sequence: int, **options: Any
) -> tuple[int, int]:
    """Bytes at the highest moment of the second step on this rank, and those of the plan."""
    model, inputs = named(name, batch, sequence)
    assert isinstance(inputs, tuple)
    on = mesh(shape, AXES[: len(shape)])
    compiled = autopar.compile(model, on, inputs, strategy=strategy, **by_flag(**options))
    assert isinstance(compiled, ParallelModule)
    filled(compiled)
    values = tuple(
        torch.randn(each.shape) if each.is_floating_point() else torch.randint(0, 200, each.shape) for each in inputs
    )
    return peak_of_step(compiled, values), compiled.plan.peak_bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "shape", "strategy", "batch", "sequence"),
    [
        ("tiny-llama", (2, 2), "zero3", 8, 64),  # gathered over one axis and then over the other
        ("tiny-llama", (4,), "zero3", 8, 64),
        ("tiny-llama", (4,), "zero3", 4, 8),  # mostly weights: most when the first layer's are reduced with the table's
        ("tiny-llama", (2,), "megatron", 32, 128),  # mostly logits and what the loss makes of them
        ("tiny-llama", (2,), "ring", 32, 128),  # the same, with zigzag-sharded positions
        ("tiny-llama", (2,), "ring_self_attention", 2, 512),  # mostly scores
        ("tiny-llama", (2,), "async_tensor_parallel", 8, 512),  # rows that several products gather once
        ("tiny-llama", (2,), "megatron_regather", 8, 512),  # rows that are gathered again
    ],
)
def test_ranks_hold_what_the_plan_predicts(
    ranks: Ranks, name: str, shape: tuple[int, ...], strategy: str, batch: int, sequence: int
) -> None:
    world = torch.Size(shape).numel()
    for found, predicted in ranks.run(_measured, name, shape, strategy, batch, sequence, world_size=world):
        assert predicted == pytest.approx(found, rel=0.05)


def _recomputed(strategy: str, modes: tuple[str, ...]) -> list[tuple[int, int]]:
    return [_measured("tiny-llama", (2,), strategy, 4, 512, recompute=mode) for mode in modes]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["megatron_sequence", "megatron_regather", "ring"])
def test_ranks_hold_what_the_plan_predicts_in_every_mode_of_recomputation(ranks: Ranks, strategy: str) -> None:
    for every in ranks.run(_recomputed, strategy, RECOMPUTATIONS, timeout=240):
        for found, predicted in every:
            # Plans count what only a second forward takes, such as queries before their rotation, up to the backward.
            assert 0.95 * found < predicted < 1.1 * found
        none, *_, saving_collectives, full = [found for found, _ in every]
        assert none > saving_collectives > full or (strategy == "ring" and none > saving_collectives >= full)


def _saved() -> tuple[int, int]:
    """Bytes that a forward leaves for its backward on this rank, weights excluded, and those of the plan."""
    model, inputs = named("tiny-llama", 2, 128)
    compiled: Any = autopar.compile(
        model, mesh((4,), ("tp",)), inputs, strategy="megatron_sequence", **by_flag(recompute="selective")
    )
    return saved_and_planned(compiled, tuple(torch.randint(0, 200, each.shape) for each in inputs))


def test_of_partial_sums_selective_recomputation_saves_what_is_reduced(ranks: Ranks) -> None:
    for found, predicted in ranks.run(_saved, world_size=4):
        assert predicted == pytest.approx(found, rel=0.02)


@pytest.mark.slow
def test_products_in_chunks_keep_no_gathered_rows_under_selective_recomputation(ranks: Ranks) -> None:
    # The backward of products that share an input is one, and holds the outputs and gradients of all: plans count it
    # call by call.
    for keeping, gathering in ranks.run(_recomputed, "async_tensor_parallel", ("none", "selective"), timeout=240):
        assert gathering[0] < 0.8 * keeping[0]
        for found, predicted in (keeping, gathering):
            assert predicted == pytest.approx(found, rel=0.12)


class Dropping(nn.Module):
    """Causal attention under a mask of padding, and products, with dropout as in GPT-2."""

    def __init__(self, p: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.p, self.qkv, self.o = p, nn.Linear(64, 3 * 64), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x_BSD: Tensor, seen_BS: Tensor) -> Tensor:
        for _ in range(2):
            q, k, v = self.qkv(x_BSD).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True)
            y = y + F.scaled_dot_product_attention(q, k, v, seen_BS[:, None, None], dropout_p=self.p)
            x_BSD = x_BSD + F.dropout(self.o(y.transpose(1, 2).flatten(2)), self.p)
            x_BSD = x_BSD + F.dropout(self.down(F.gelu(self.up(x_BSD))), self.p)
        return x_BSD.square().mean()


def _with_dropout(p: float, strategy: str) -> tuple[int, int]:
    """Bytes at the highest moment of the second step on this rank, and those of the plan."""
    torch.manual_seed(0)
    inputs = torch.randn(4, 256, 64), torch.ones(4, 256, dtype=torch.bool)
    compiled = autopar.compile(Dropping(p), mesh((2,), ("cp",)), inputs, strategy=strategy)
    assert isinstance(compiled, ParallelModule)
    return peak_of_step(compiled, inputs, torch.optim.SGD(compiled.parameters())), compiled.plan.peak_bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", ["data_parallel", "ring"])
def test_a_dropout_keeps_nothing(ranks: Ranks, strategy: str) -> None:
    for (dropping, predicted), (without, predicted_without) in zip(
        ranks.run(_with_dropout, 0.1, strategy), ranks.run(_with_dropout, 0.0, strategy), strict=True
    ):
        assert predicted == pytest.approx(dropping, rel=0.1)
        assert predicted == pytest.approx(predicted_without, rel=0.001)
        assert dropping < 1.05 * without, "but for what it works on"


def _in_precision(sequence: int, precision: str) -> tuple[int, int]:
    return _measured("tiny-llama", (2,), "zero3", 4, sequence, precision=precision)


def _fetched_ahead() -> list[tuple[int, int]]:
    """Return the measured and predicted bytes with weights fetched 0, 1 and 2 layers ahead.

    The smaller of two measurements counts: on a busy machine a thread of gloo may be late to free what was sent.
    """
    return [min(_measured("tiny-llama", (2,), "zero3", 4, 64, prefetch=depth) for _ in range(2)) for depth in (0, 1, 2)]


@pytest.mark.slow
def test_weights_that_are_fetched_ahead_are_counted(ranks: Ranks) -> None:
    for by_depth in ranks.run(_fetched_ahead):
        assert sorted(by_depth) == by_depth, "each layer ahead takes more"
        for found, predicted in by_depth:
            assert predicted == pytest.approx(found, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [8, 64])  # mostly weights, and more of activations
def test_storage_in_float32_costs_little_more_than_itself_next_to_bfloat16(ranks: Ranks, sequence: int) -> None:
    model, _ = named("tiny-llama", 4, sequence)
    pure, mixed = (ranks.run(_in_precision, sequence, precision)[0] for precision in ("bf16", "bf16-mixed"))
    # Parameters, gradients and two moments, each of two bytes more, in two parts.
    shards = sum(each.numel() for each in model.parameters()) * 4 * 2 // 2
    assert mixed[0] < 1.1 * (pure[0] + shards)
    assert mixed[1] == pytest.approx(mixed[0], rel=0.05)


class Classes(nn.Module):
    """A head of many classes and its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(32, 4096, bias=False)

    def forward(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x_BD), labels_B)


def _of_classes(dtype: torch.dtype, role: str) -> tuple[int, int]:
    """Bytes at the highest moment of the second step on this rank, and those of the plan."""
    inputs = torch.randn(512, 32, dtype=dtype), torch.randint(0, 4096, (512,))
    model = Classes().to(dtype)
    autopar.annotate(model, "head", tp=role)
    compiled: Any = autopar.compile(model, mesh((2,), ("tp",)), inputs)
    return peak_of_step(compiled, inputs), compiled.plan.peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("role", ["column", "data"])
def test_a_loss_works_on_its_logits_once_in_float32(ranks: Ranks, dtype: torch.dtype, role: str) -> None:
    for found, predicted in ranks.run(_of_classes, dtype, role):
        assert predicted == pytest.approx(found, rel=0.03)


class Layer(nn.Module):
    """Routed experts, whose rows are much of its memory, next to a shared one, which works on more."""

    def __init__(self, weighted: str) -> None:
        super().__init__()
        self.experts = SortedExperts(weighted=weighted, top_k=4, sizes=(64, 16))  # all take every token: none has more
        self.shared = nn.Sequential(nn.Linear(64, 512), nn.SiLU(), nn.Linear(512, 64))

    def forward(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + (self.experts(x_BSD) + self.shared(x_BSD))


class Experts(nn.Module):
    """Two layers of experts."""

    def __init__(self, weighted: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(weighted) for _ in range(2))

    def forward(self, x_BSD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return x_BSD.square().mean()


def _of_experts(weighted: str, mode: str, padded: float | None = None) -> tuple[int, int]:
    """Bytes at the highest moment of a later step on this rank, and those of the plan."""
    x_BSD = torch.randn(2, 256, 64)
    on, options = mesh((2,), ("ep",)), by_flag(recompute=mode, padded_rows=padded)
    compiled: Any = autopar.compile(Experts(weighted), on, (x_BSD,), strategy="expert_data", **options)
    return min(peak_of_step(compiled, (x_BSD,)) for _ in range(2)), compiled.plan.peak_bytes


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("weighted", ["before", "after"])
def test_rows_of_experts_are_counted_while_a_shared_expert_runs(ranks: Ranks, weighted: str, mode: str) -> None:
    for found, predicted in ranks.run(_of_experts, weighted, mode):
        assert predicted == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("padded", [1.5, 2.0])
def test_padded_rows_of_experts_are_counted(ranks: Ranks, padded: float, mode: str) -> None:
    for found, predicted in ranks.run(_of_experts, "after", mode, padded):
        assert predicted == pytest.approx(found, rel=0.03)
