"""Positions of causal attention are zigzag-sharded wherever they run, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.capture.export import capture
from autopar.costs.plans.plan import Plan
from autopar.costs.space.build import _Builder
from autopar.costs.space.zigzag_axes import is_worth_another_search
from autopar.errors import AnnotationError, StrategyError
from autopar.ir.sharding.layout import S, Z
from autopar.ir.sharding.mesh import Mesh
from autopar.planning import best_plan
from autopar.planning.settings import context_of
from autopar.strategies.roles import RoledProgram
from autopar.strategies.zigzag import ZigzagDims, zigzag_dims
from tests.support.planned import space_of
from tests.support.simulation.training import SLOW_DEVICES, Steps, fault_of, train_alone, train_on_ranks

POSITIONS, WIDTH, TOKENS = 16, 16, 32


class Text(nn.Module):
    """One causal layer between tokens and a loss, with learned positions and what a test puts before the loss."""

    def __init__(self, before_loss: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.places = nn.Parameter(torch.randn(1, POSITIONS, WIDTH) / 9)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.before_loss, self.dropout = before_loss, dropout

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Tokens and labels [batch, positions] → the loss."""
        h = F.dropout(self.table(x) + self.places, self.dropout)
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(h).chunk(3, -1))
        h = h + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        if self.before_loss == "mean":
            h = h - h.mean(1, keepdim=True)
        if self.before_loss == "sum before":
            h = h.cumsum(1)
        if self.before_loss == "pointer":  # a class for each position
            scores = self.head(h)[..., 0]
            return F.cross_entropy(scores, y[:, 0] % POSITIONS)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def batch(samples: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, TOKENS, (samples, POSITIONS))
    return {"x": ids, "y": ids.roll(-1, 1)}


def found(model: nn.Module, sizes: tuple[int, ...] = (4,)) -> tuple[ZigzagDims, RoledProgram]:
    given = batch()
    graph = RoledProgram.of(capture(model, (given["x"], given["y"]), {}))
    return zigzag_dims(graph, sizes), graph


def names(model: nn.Module) -> set[str]:
    dims, _ = found(model)
    return {name for (name, _), held in dims.dims.items() if held}


def test_positions_are_zigzag_from_tokens_to_logits_and_features_are_not() -> None:
    dims, graph = found(Text())
    logits = [name for name, call in graph.calls.items() if call.call.name == "linear"][-1]
    assert dims.of(("embedding_default", 0)) == dims.of((logits, 0)) == {1}
    assert dims.of(("scaled_dot_product_attention_default", 0)) == {2}
    assert dims.of(("x", 0)) == {1}
    assert not any(dims.of((name, 0)) for name in graph.parameters)
    add = graph.calls["add_tensor"]
    assert dims.inputs(graph.calls["cross_entropy_loss_default"], graph) == ({1}, {1}), "rows of a loss keep positions"
    assert dims.inputs(add, graph) == ({1}, {1}), "a weight is dealt for a call whose other tensors are"


@pytest.mark.parametrize("sizes", [(3,), (2, 16), (1,)])
def test_positions_that_do_not_divide_into_pieces_stay_in_order(sizes: tuple[int, ...]) -> None:
    dims, _ = found(Text(), sizes)
    assert bool(dims.dims) == (sizes == (1,))


def test_what_needs_positions_in_order_ends_it() -> None:
    assert "add_tensor_1" in names(Text("sum before"))
    assert "cumsum_default" not in names(Text("sum before"))


def test_positions_that_are_classes_stay_in_order() -> None:
    assert names(Text("pointer")) == set()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("before_loss", "dropout", "strategy"), [("mean", 0.0, "ring"), ("sum before", 0.2, "gather_kv")]
)
def test_zigzag_positions_train_as_one_process_does(before_loss: str, dropout: float, strategy: str) -> None:
    steps = Steps([batch(), batch()])
    expected = train_alone(Text(before_loss, dropout).double(), steps)
    trained = train_on_ranks(Text(before_loss, dropout).double(), steps, {"cp": 4}, {"strategy": strategy})
    assert fault_of(trained, expected) == ""
    assert trained.plan is not None and any("Z(" in row.layout for row in trained.plan.rows)


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [{"cp": 2, "tp": 2}, {"tp": 2, "cp": 2}], ids=" ".join)
def test_an_axis_that_divides_heads_has_positions_in_order_next_to_one_that_shards_them(axes: dict[str, int]) -> None:
    steps, options = Steps([batch(), batch()]), {"strategy": "megatron_sequence+ring"}
    expected = train_alone(Text("mean", 0.2).double(), steps)
    trained = train_on_ranks(Text("mean", 0.2).double(), steps, axes, options)
    assert fault_of(trained, expected) == ""
    assert trained.plan is not None and trained.plan.zigzag_axes == ("cp",)
    layouts = " ".join(row.layout for row in trained.plan.rows)
    assert ("Z(1) S(1)" if next(iter(axes)) == "cp" else "S(1) Z(1)") in layouts, "both split positions between blocks"


@pytest.mark.parametrize("strategy", ["ulysses", "megatron_sequence", None])
def test_positions_are_in_order_where_attention_divides_heads(strategy: str | None) -> None:
    model = Text()
    if strategy is None:
        # Attention is free, and its heads are the best to divide.
        for name, role in {"qkv": "column", "o": "row", "head": "sequence"}.items():
            autopar.annotate(model, name, cp=role)
    plan = autopar.plan(model, Mesh({"cp": 4}), batch(), hardware=SLOW_DEVICES, strategy=strategy)
    assert plan.zigzag_axes == () and not any("Z(" in row.layout for row in plan.rows)
    assert any("S(1)" in row.layout for row in plan.rows)


def test_tensors_are_not_priced_in_an_order_that_an_axis_does_not_shard_in() -> None:
    space = space_of(Text(), batch(4), cp=2, tp=2).with_zigzag_axes(("cp",))
    edge = space.inbound[space.index["linear_default_2"], 0]
    split = {(axis, each) for layout in space.table(edge).layouts for axis, each in enumerate(layout) if each.is_split}
    assert split == {(axis, S(dim)) for axis in (0, 1) for dim in (0, 1, 2)} - {(0, S(1))} | {(0, Z(1))}


@pytest.mark.parametrize(("strategy", "count"), [(None, 1), ("ring", 2)])
def test_a_free_plan_begins_in_the_space_in_which_all_axes_shard_positions(
    strategy: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces = []
    build = _Builder.build
    monkeypatch.setattr(_Builder, "build", lambda self: spaces.append(self.space.zigzag_axes) or build(self))
    autopar.plan(Text(), Mesh({"cp": 4}), batch(16), hardware=SLOW_DEVICES, strategy=strategy)
    assert spaces == [(), ("cp",)][-count:]


@pytest.mark.parametrize(("samples", "searches"), [(1, 2), (16, 1)])
def test_a_plan_without_positions_is_searched_once_where_each_device_has_many_samples(
    samples: int, searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = []
    monkeypatch.setattr(
        best_plan, "is_worth_another_search", lambda *args: requested.append(worth(*args)) or requested[-1]
    )
    worth = is_worth_another_search
    plan = autopar.plan(Text(), Mesh({"cp": 4}), batch(samples))
    assert not any("Z(" in row.layout or "S(1)" in row.layout for row in plan.rows if row.kind == "call")
    assert requested == [searches == 2]


def test_a_plan_that_is_read_again_shards_as_it_says() -> None:
    for strategy in ("ring", "ulysses"):
        plan = Plan.from_json(autopar.plan(Text(), Mesh({"cp": 4}), batch(), strategy=strategy).to_json())
        assert plan.zigzag_axes == (("cp",) if strategy == "ring" else ())
        assert context_of(plan.attach(Text(), batch())).space.zigzag_axes == plan.zigzag_axes


def test_a_plan_says_what_is_zigzag() -> None:
    plan = autopar.plan(Text(), Mesh({"cp": 4}), batch(), hardware=SLOW_DEVICES, strategy="ring")
    space, choices = context_of(plan).space, context_of(plan).choices
    number = space.index["scaled_dot_product_attention_default"]
    chosen = space.decisions[number].candidates.strategies[choices[number]]
    assert str(chosen) == "s+t" and chosen.zigzag == {"s", "t"} and chosen.outputs == ((Z(2),),)


def test_what_a_ring_sends_is_hidden_as_far_as_a_device_computes() -> None:
    def seconds(share: float, bytes_per_s: float) -> tuple[float, float]:
        (link,) = SLOW_DEVICES.links
        links = (replace(link, bytes_per_s=bytes_per_s),)
        hardware = replace(SLOW_DEVICES, links=links, communication_share=1 - share)
        plan = autopar.plan(Text(), Mesh({"cp": 4}), batch(), hardware=hardware, strategy="ring")
        space, choices = context_of(plan).space, context_of(plan).choices
        number = space.index["scaled_dot_product_attention_default"]
        candidates = space.decisions[number].candidates
        return float(candidates.seconds[choices[number]]), sum(candidates.strategies[choices[number]].waits)

    with_all, waits = seconds(1.0, 1e12)
    assert waits == 0
    exposed, sent = seconds(0.0, 1e12)
    assert exposed == pytest.approx(with_all + sent) and sent > 0
    computing = with_all
    slow, longer = seconds(1.0, 1e5)
    _, whole = seconds(0.0, 1e5)
    assert longer == pytest.approx(whole - computing) and slow == pytest.approx(whole)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
NO_RING: dict[str, Attend] = {
    "scaled_dot_product_attention_default has a mask with a gradient, for which keys are whole": lambda q, k, v: (
        F.scaled_dot_product_attention(q, k, v, torch.zeros(POSITIONS, POSITIONS) + q.mean())
    ),
    "scaled_dot_product_attention_default has a mask of numbers, which may hide all keys of a query by large ones, so "
    "that keys are whole; give a mask of truth values": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, torch.ones(POSITIONS, POSITIONS).tril()
    ),
    "scaled_dot_product_attention_default has 16 queries and 8 keys, and not as many of both": lambda q, k, v: (
        F.scaled_dot_product_attention(q, k[:, :, ::2], v[:, :, ::2])
    ),
    "matmul_default is no scaled_dot_product_attention": lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
}


@pytest.mark.parametrize(("why", "attend"), NO_RING.items())
def test_a_ring_says_which_attention_has_keys_that_cannot_be_divided(why: str, attend: Attend) -> None:
    class Other(Text):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.table(x)
            q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(h).chunk(3, -1))
            return F.cross_entropy(self.head(attend(q, k, v).transpose(1, 2).flatten(2)).flatten(0, 1), y.flatten())

    with pytest.raises(StrategyError) as caught:
        autopar.plan(Other(), Mesh({"cp": 4}), batch(), strategy="ring")
    assert str(caught.value) == (
        f"ring splits the queries and keys of attention over cp; {why}. Use gather_kv or ulysses or megatron_sequence."
    )


def test_padding_is_to_be_hidden_from_attention_that_is_not_causal() -> None:
    class Everywhere(Text):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.table(x).unflatten(-1, (4, -1)).transpose(1, 2)
            h = F.scaled_dot_product_attention(h, h, h).transpose(1, 2).flatten(2)
            return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())

    needed = "needed is a multiple of 3. Pad the sequences to 18, with labels that the loss ignores and a mask where"
    with pytest.raises(StrategyError, match=needed):
        autopar.plan(Everywhere(), Mesh({"cp": 3}), batch(), strategy="ring")


def test_heads_and_a_ring_need_two_axes() -> None:
    with pytest.raises(StrategyError, match="usp needs 2 mesh axes, one for heads and one for the ring; the mesh is"):
        autopar.plan(Text(), Mesh({"cp": 4}), batch(), strategy="usp")


def test_annotations_for_more_axes_than_a_zigzag_divides_over_say_what_to_pad() -> None:
    model = Text()
    autopar.annotate(model, "o", dp="sequence", cp="sequence")
    with pytest.raises(AnnotationError) as caught:
        autopar.plan(model, Mesh({"dp": 2, "cp": 8}), batch())
    assert str(caught.value) == (
        'annotate("o", dp="sequence", cp="sequence") says things of o that exclude each other on the mesh dp=2 × cp=8: '
        "each can hold, but not all. Positions of causal attention are zigzag-sharded, two chunks on each device of "
        "the axes that split them: for all axes pad its 16 positions to 32. Leave one out."
    )


@pytest.mark.parametrize("strategy", [None, "megatron", "zero3"])
def test_an_axis_of_one_device_changes_nothing(strategy: str | None) -> None:
    def planned(axes: dict[str, int]) -> tuple[float, int, int]:
        model = Text()
        if "one" in axes:
            autopar.annotate(model, "head", one="column")
        plan = autopar.plan(model, Mesh(axes), batch(), hardware=SLOW_DEVICES, strategy=strategy)
        return plan.seconds, plan.peak_bytes, sum(plan.traffic.values())

    assert planned({"one": 1, "tp": 2}) == planned({"tp": 2})
