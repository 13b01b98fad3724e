"""Matmuls in chunks are offered on request, priced by what they hide, and gather an input once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.capture.export import capture
from autopar.costs.hardware.collectives import transfer_seconds
from autopar.costs.hardware.profile import Hardware, Link
from autopar.costs.memory.moments import FORWARD
from autopar.costs.memory.peak import bytes_by_moment
from autopar.costs.plans.plan import Plan
from autopar.costs.space.call_candidates import Candidates
from autopar.costs.space.space import Space
from autopar.errors import InfeasibleError
from autopar.ir.sharding.mesh import Mesh
from autopar.models.named import named
from autopar.planning.best_plan import best_plan
from autopar.planning.options.groups import Recompute
from autopar.planning.request import PlanRequest
from autopar.planning.settings import context_of
from autopar.strategies.rules.products.chunked import AGAIN, MOST_CHUNKS, NAME, chunks_of
from tests.support.options import by_flag
from tests.support.simulation.training import SLOW_DEVICES, Steps, train_alike

COLUMN, ROW = f"...1+o via {NAME}", f"...1+k via {NAME}"
OVERLAPPING = Hardware(
    "overlapping", {"float32": 1e12}, 1e12, 10**12, 1e-6, (Link("wire", None, 1e-6, 1e10),), communication_share=0.0
)


class Layer(nn.Module):
    """Causal attention between tokens and the loss of their successors, with a norm before, as Llama has it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(16, width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.last, self.head = nn.RMSNorm(width), nn.Linear(width, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Tokens and labels [batch, positions] → the loss."""
        x = self.table(x)
        h = self.norm(x)
        q, k, v = (each(h).unflatten(-1, (4, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(self.last(x)).flatten(0, 1), y.flatten())


def batch(positions: int = 16, samples: int = 4) -> dict[str, Tensor]:
    ids = torch.arange(samples * positions).view(samples, -1) * 7 % 16
    return {"x": ids, "y": ids.roll(-1, 1)}


def planned(
    model: nn.Module, positions: int = 16, strategy: str | None = NAME, samples: int = 4, **options: object
) -> Plan:
    """A plan on two ranks; plain collectives of one sample copy nothing, and those of several may be avoided."""
    requested = {"hardware": SLOW_DEVICES, **options}
    return autopar.plan(model, Mesh({"tp": 2}), batch(positions, samples), strategy=strategy, **by_flag(**requested))


def space_of(request: PlanRequest, mesh: dict[str, int], model: nn.Module | None = None) -> Space:
    program = capture(model or Layer(), (), batch(), training=True)
    return request.space(program, Mesh(mesh))


def candidates_of(space: Space, number: int = 0) -> Candidates:
    return space.decisions[space.index["linear_default" + (f"_{number}" if number else "")]].candidates


def names(candidates: Candidates) -> list[str]:
    return [str(each) for each in candidates.strategies]


def test_they_stand_among_candidates_only_where_they_are_requested() -> None:
    request = PlanRequest(hardware=SLOW_DEVICES)
    before = names(candidates_of(space_of(request, {"tp": 2})))
    assert not any(NAME in each for each in before)
    after = names(candidates_of(space_of(request.running(frozenset({NAME})), {"tp": 2})))
    assert [each for each in after if NAME not in each] == before and {COLUMN, ROW} <= set(after)


def test_the_preset_has_them_move_what_plain_products_move() -> None:
    plain, chunked = (planned(Layer(), strategy=each, samples=1) for each in ("megatron_sequence", NAME))
    products = ["linear_default", *(f"linear_default_{number}" for number in range(1, 5))]
    assert [chunked.choices[each] for each in products] == [COLUMN, COLUMN, COLUMN, ROW, COLUMN]
    assert chunked.traffic == plain.traffic
    assert plain.peak_bytes == pytest.approx(chunked.peak_bytes, rel=0.1)


def test_an_axis_within_that_splits_rows_leaves_nothing_to_gather_alone() -> None:
    request = PlanRequest(hardware=SLOW_DEVICES).running(frozenset({NAME}))
    found = names(candidates_of(space_of(request, {"tp": 2, "cp": 2})))
    both = f"...1+o via {NAME}".replace("...1+o", "...1 ...1+o"), f"...1+o ...1 via {NAME}"
    assert both[0] in found and both[1] not in found
    assert not any(each.startswith("...1+o ...1+") for each in found)  # one axis gathers


def test_calls_that_share_an_input_gather_it_together_or_not_at_all() -> None:
    def requested(**specified: str) -> nn.Module:
        model = Layer()
        for name, way in specified.items():
            autopar.annotate(model, f"{name}.linear", tp=f"factor:{way}")
        return model

    with pytest.raises(InfeasibleError, match=r"linear_default of q' and 'linear_default_1 of k' exclude each other"):
        planned(requested(q=COLUMN, k="o"), strategy=None)
    plan = planned(requested(q=COLUMN), strategy=None)
    assert [plan.choices[f"linear_default{end}"] for end in ("", "_1", "_2")] == [COLUMN] * 3
    assert plan.choices["rms_norm_default/reshard"] == "S(1) together"


def test_a_preset_trains_as_one_process_does() -> None:
    steps = Steps([batch(), batch()])
    plan = train_alike(Layer().double(), steps, {"dp": 2, "tp": 2}, {"strategy": NAME})
    assert f"...0 {COLUMN}" in plan.choices.values()


def test_a_plan_that_has_them_is_loaded_attached_and_run(tmp_path: Path) -> None:
    planned(Layer().double()).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    attached = plan.attach(Layer().double(), batch(), hardware=SLOW_DEVICES)
    assert COLUMN in names(candidates_of(context_of(attached).space))
    steps = Steps([batch()])
    train_alike(Layer().double(), steps, {"tp": 2}, {"plan": plan})


@pytest.mark.parametrize("strategy", [NAME, AGAIN])
def test_formulas_say_what_they_cost(strategy: str) -> None:
    plan = planned(Layer(), strategy=strategy)
    again = plan.reprice()
    assert again.seconds == pytest.approx(plan.seconds, rel=1e-9) and again.memory["memory"] == plan.peak_bytes
    longer = planned(Layer(), 32, strategy).seconds
    assert plan.reprice(sequence=32).seconds == pytest.approx(longer, rel=1e-9)


def test_rows_that_are_gathered_again_are_kept_in_parts() -> None:
    kept, again = (planned(Layer(), 64, each, samples=1) for each in ("megatron_sequence", AGAIN))
    gathered = 64 * 8 * 4  # bytes of positions and features
    # What queries, keys and values share, and what the head takes: gathered once more, and half of it kept.
    assert again.traffic["all_gather", "tp"] - kept.traffic["all_gather", "tp"] == 2 * gathered
    others = {key: moved for key, moved in kept.traffic.items() if key[0] != "all_gather"}
    assert others == {key: moved for key, moved in again.traffic.items() if key[0] != "all_gather"}
    assert activations(kept) - activations(again) == 2 * gathered // 2


def activations(plan: Plan) -> int:
    """Bytes that stand when the forward is over."""
    context = context_of(plan)
    by_moment = bytes_by_moment(context.memory_model, context.choices, plan.recompute)
    return int(by_moment.reshape(FORWARD + 1, -1)[FORWARD, -1])


@pytest.mark.parametrize(
    ("leading", "num_bytes", "expected"),
    [
        ((8, 64), 2**22, (0, (8,))),
        ((8, 64), 3 * 2**22, (0, (2, 3, 3))),
        ((8, 64), 2**30, (0, (2, 2, 2, 2))),
        ((2, 64), 2**30, (1, (16, 16, 16, 16))),
        ((2,), 2**30, (0, (1, 1))),
    ],
)
def test_chunks_are_of_samples_where_there_are_enough(
    leading: tuple[int, ...], num_bytes: int, expected: tuple[int, tuple[int, ...]]
) -> None:
    assert chunks_of(leading, num_bytes) == expected


class Products(nn.Module):
    """Up and down, between norms."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.norm, self.last = nn.LayerNorm(1024), nn.LayerNorm(1024)
            self.up, self.down = nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 1024, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, positions, 1024] → a number."""
        return self.last(self.down(self.up(self.norm(x)))).square().mean()


def of_products(hardware: Hardware, requested: frozenset[str] = frozenset({NAME})) -> tuple[PlanRequest, Space]:
    program = capture(Products(), (torch.empty(8, 1024, 1024, device="meta"),), {}, training=True)
    request = PlanRequest(hardware=hardware).running(requested)
    return request, request.space(program, Mesh({"tp": 4}))


def test_a_chunk_travels_while_another_is_multiplied() -> None:
    _, space = of_products(OVERLAPPING)
    candidates = candidates_of(space)
    number = names(candidates).index(COLUMN)
    strategy, forward = candidates.strategies[number], candidates.forward_seconds[number]
    flops = 2 * 8 * 1024 * 1024 * 4096 / 4
    assert forward == pytest.approx(flops / 1e12 + MOST_CHUNKS * OVERLAPPING.op_latency_s)
    chunk = 8 * 1024 * 1024 * 4 // MOST_CHUNKS
    assert [(each.collective, each.num_bytes, each.backward) for each in strategy.transfers] == [
        *[("all_gather", chunk, False)] * MOST_CHUNKS,
        *[("reduce_scatter", chunk, True)] * MOST_CHUNKS,
    ]
    moving = sum(transfer_seconds(each, space.mesh, OVERLAPPING) for each in strategy.transfers)
    # Three chunks of four overlap with matmuls of the next; backward all overlap with that for the weight's gradient.
    assert sum(strategy.waits) == pytest.approx(moving * (1 - (3 / 4 + 1) / 2))
    slow = replace(OVERLAPPING, name="slow links", links=(Link("wire", None, 1e-6, 1e8),))
    _, space = of_products(slow)
    waits = sum(candidates_of(space).strategies[number].waits)
    moving = sum(transfer_seconds(each, space.mesh, slow) for each in strategy.transfers)
    assert waits == pytest.approx(moving - 3 * forward)  # no more than what is computed


def test_the_solver_takes_them_where_computing_hides_what_travels() -> None:
    def chosen(hardware: Hardware) -> list[str]:
        request, space = of_products(hardware)
        plan = best_plan(request, space)
        plan.verify()
        return [name for name in plan.choices.values() if name in (COLUMN, ROW)]

    sharing = replace(OVERLAPPING, name="nothing hidden", communication_share=1.0)
    assert chosen(OVERLAPPING) == [COLUMN, ROW] and chosen(sharing) == []
    with_them, without = (
        best_plan(request, space).seconds
        for request, space in map(of_products, [OVERLAPPING] * 2, [frozenset({NAME}), frozenset()])
    )
    assert with_them < without


def test_the_timeline_has_chunks_travel_next_to_products() -> None:
    _, space = of_products(OVERLAPPING)

    def seconds(strategy: str) -> float:
        request = PlanRequest(hardware=OVERLAPPING, strategy=strategy)
        return best_plan(request, request.space(space.program, space.mesh)).timeline().seconds

    assert seconds(NAME) < seconds("megatron_sequence")


def test_under_selective_recomputation_they_gather_again_and_keep_no_gathered_rows() -> None:
    model, inputs = named("tiny-llama", 8, 512)

    def plan_of(strategy: str, recompute: Recompute) -> Plan:
        return autopar.plan(
            model,
            Mesh({"tp": 2}, hardware="h100"),
            inputs,
            strategy=strategy,
            memory=autopar.Memory(recompute=recompute),
        )

    keeping, again = (plan_of(NAME, each) for each in ("none", "selective"))
    assert again.choices == keeping.choices and again.peak_bytes < keeping.peak_bytes
    by_megatron, selective = plan_of(AGAIN, "none").traffic, dict(again.traffic)
    in_layers = selective["all_gather", "tp"] - keeping.traffic["all_gather", "tp"]
    outside = by_megatron["all_gather", "tp"] - selective["all_gather", "tp"]
    assert in_layers == 4 * outside, "two gathers of both layers; the head's stands in none"
    assert {**selective, ("all_gather", "tp"): 0} == {**by_megatron, ("all_gather", "tp"): 0}
    assert again.verify().ok
    at_these_sizes = again.reprice()
    assert at_these_sizes.seconds == pytest.approx(again.seconds, rel=1e-9)
    assert at_these_sizes.memory["memory"] == again.peak_bytes
    assert at_these_sizes.traffic == {key: count for key, count in again.traffic.items() if count}
