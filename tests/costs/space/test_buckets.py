"""Parameters that move together, and parameters whose gradients are reduced in place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.costs.hardware.profile import Link
from autopar.costs.memory.model import MemoryModel
from autopar.costs.pricing import message_sizes as shared_messages
from autopar.costs.pricing.reshard import reshard_table
from autopar.costs.space.parameter_buckets import Bucket, buckets_of
from autopar.costs.space.space import Space
from autopar.ir.sharding.layout import I, Layout, P, R, S
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.settings import context_of
from benchmarks.transformer_model import Size, batch, transformer
from tests.support.parity import SLOW_DEVICES

WIDE_LINKS = replace(SLOW_DEVICES, links=(Link("wire", None, 0.0, 1e9),))
"""Without a latency, so that bytes alone count."""


class _Model(nn.Module):
    """Parameters whose gradients are products or sums, or come from two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.places = nn.Parameter(torch.zeros(4, 8))
        self.factor = nn.Parameter(torch.zeros(8, 8))
        self.twice = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.twice((self.linear(x) + self.places) @ self.factor)).square().mean()


def _buckets() -> tuple[Space, tuple[Bucket, ...]]:
    context = context_of(autopar.plan(_Model(), Mesh({"dp": 2}), (torch.zeros(8, 4, 8),), strategy="data_parallel"))
    return context.space, buckets_of(context.space, context.choices)


def _parameters(space: Space, bucket: Bucket) -> list[str]:
    names = {placeholder: name for name, placeholder in space.program.parameters.items()}
    return [names[space.decisions[source].name] for source in bucket.sources]


def test_only_the_gradient_of_a_product_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_messages, "LARGE", 1)  # every parameter by itself
    space, buckets = _buckets()
    assert all(len(bucket.sources) == 1 for bucket in buckets)
    assert {name for b in buckets if b.in_place for name in _parameters(space, b)} == {"linear.weight", "factor"}


def test_a_layer_is_gathered_at_once_though_not_all_of_it_is_gathered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_messages, "SMALLEST_MESSAGE", 0)  # every layer by itself
    context = context_of(autopar.plan(_Model(), Mesh({"dp": 2}), (torch.zeros(8, 4, 8),), strategy="zero3"))
    buckets = buckets_of(context.space, context.choices)
    (linear,) = (b for b in buckets if "linear.weight" in _parameters(context.space, b))
    names = _parameters(context.space, linear)
    assert set(names) == {"linear.weight", "linear.bias"}
    assert "linear.bias" not in [names[position] for position in linear.regathered], "the backward does not read it"


def test_no_bucket_takes_a_weight_on_its_way_from_a_shared_reshard() -> None:
    space, _ = _buckets()
    weight = space.index[space.program.parameters["twice.weight"]]
    (into,) = (edge for edge in space.edges if edge.source == weight)
    behind = [edge for edge in space.edges if edge.source == into.target]
    assert len(behind) == 2, "both uses take what is moved once"
    for edge, is_in_bucket in ((into, True), *((each, False) for each in behind)):
        table = reshard_table(edge.tensor, frozenset({0}), space.mesh, space.hardware)
        for source, target in ((Layout((S(0),)), Layout((R,))), (Layout((I,)), Layout((R,)))):
            messages = table.path(source, target).messages
            assert messages and all((message is not None) == is_in_bucket for message in messages)


class _Decoder(nn.Module):
    """A table that is too large to travel with the first layer, and a norm before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5000, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 16)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSH = self.table(ids_BS)
        for layer in self.layers:
            x_BSH = layer(x_BSH)
        return self.head(self.norm(x_BSH)).square().mean()


def test_a_norm_is_gathered_with_the_head_and_held_as_long() -> None:
    inputs = (torch.zeros(8, 4, dtype=torch.int64),)
    context = context_of(autopar.plan(_Decoder(), Mesh({"dp": 2}), inputs, strategy="zero3"))
    space = context.space
    messages = [set(_parameters(space, bucket)) for bucket in buckets_of(space, context.choices)]
    assert messages == [
        {"table.weight"},
        {"layers.0.weight", "layers.0.bias"},
        {"layers.1.weight", "layers.1.bias"},
        {"norm.weight", "norm.bias", "head.weight", "head.bias"},
    ]
    memory = MemoryModel(space)
    layer_of_call = {
        space.decisions[number].node.meta["module"]: memory.lifetimes.layer[number] for number in memory.lifetimes.calls
    }
    assert layer_of_call["norm"] == layer_of_call["head"] == "head"
    assert layer_of_call["table"] == "table"


def test_a_bias_is_gathered_with_its_layer_though_parts_of_a_sum_take_it() -> None:
    """The row-parallel product adds it on the first rank alone."""
    size = Size(1, 64, 4, 128, 8, 8)
    plan = autopar.plan(
        transformer(size), Mesh({"dp": 2, "tp": 2}), batch(size), strategy="fsdp_megatron", hardware=SLOW_DEVICES
    )
    context = context_of(plan)
    gathered = [each for each in buckets_of(context.space, context.choices) if not each.at_entry]
    (layer,) = (each for each in gathered if "blocks.0.attention.o.weight" in _parameters(context.space, each))
    assert {"blocks.0.attention.o.bias", "blocks.0.feedforward.down.bias"} < {*_parameters(context.space, layer)}
    for path in layer.paths:
        assert path.together and path.moves[0].gathers
    assert Layout((R, P)) in [path.moves[-1].after for path in layer.paths]


@pytest.mark.parametrize(
    ("strategy", "axes", "moved"),
    [
        ("data_parallel", {"dp": 2, "tp": 2}, {("dp_tp", False)}),
        ("zero2", {"dp": 2, "tp": 2}, {("dp_tp", True)}),
        ("hsdp", {"dp": 2, "tp": 2}, {("dp", False), ("tp", True)}),
        ("data_parallel", {"dp": 2, "one": 1, "tp": 2}, {("dp_tp", False)}),
        ("data_parallel", {"dp": 2, "one": 1}, {("dp", False)}),
    ],
)
def test_a_bucket_moves_over_the_axes_that_its_parameters_have_in_common(
    strategy: str, axes: dict[str, int], moved: set[tuple[str, bool]]
) -> None:
    context = context_of(
        autopar.plan(_Model(), Mesh(axes), (torch.zeros(8, 4, 8),), strategy=strategy, hardware=WIDE_LINKS)
    )
    buckets = buckets_of(context.space, context.choices)
    assert {(step.axis, step.gathers) for bucket in buckets for step in bucket.steps} == moved
    assert sum(len(bucket.sources) for bucket in buckets) == 5


def test_gradients_that_share_a_bucket_are_copied() -> None:
    space, (bucket,) = _buckets()
    assert len(_parameters(space, bucket)) == 5
    assert not bucket.in_place


class _Transposed(nn.Module):
    """Products with a weight as it is, which is stored by its first dim, and with one whose first dim is too short."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(64, 64, bias=False)
        self.short = nn.Parameter(torch.zeros(1, 64))
        self.small = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.plain(x) * self.short * self.small).square().mean()


@pytest.mark.parametrize("latency", [0.0, 1.0])
def test_what_takes_longer_to_copy_than_a_message_to_start_is_gathered_alone(
    monkeypatch: pytest.MonkeyPatch, latency: float
) -> None:
    monkeypatch.setattr(shared_messages, "LARGE", 64 * 64 * 4)
    hardware = replace(SLOW_DEVICES, links=(Link("wire", None, latency, 1e12),))
    given = Mesh({"dp": 2}), (torch.zeros(8, 64),)
    context = context_of(autopar.plan(_Transposed(), *given, strategy="zero3", hardware=hardware))
    found = [_parameters(context.space, bucket) for bucket in buckets_of(context.space, context.choices)]
    alone, together = [["plain.weight"], ["short", "small"]], [["plain.weight", "short", "small"]]
    assert sorted(map(sorted, found)) == (alone if latency == 0 else together)
