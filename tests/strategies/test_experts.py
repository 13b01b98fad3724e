"""Choices by which a mesh axis shards experts: each trains as one process does, and moves the plan's bytes.

Ranks are simulated. The operators between dispatch and combine follow the choice of these two, which is shown by trying
all others.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

import numpy as np
import pytest

import autopar
from autopar.costs.space.space import Space, TensorEdge
from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH, GROUPED_MM, OF_EXPERT
from autopar.ir.sharding.layout import Layout, S
from autopar.runtime.collectives.mesh_axes import record_traffic
from autopar.strategies.roles import RoledProgram
from tests.support.divided_experts import BATCH, LENGTH, D, Form, batches, choices, forced, with_experts
from tests.support.planned import space_of
from tests.support.simulation.training import Steps, Training, fault_of, train_alone, train_on_ranks

STEPS = Steps(batches(4))
EIGHT = Form(num_experts=8)


def trained(form: Form, names: tuple[str, ...], storage: str | tuple[str, ...] = (), **options: Any) -> Training:
    """Training on two ranks for each of the choices, on axes a, b, …; parameters are stored in parts over `storage`.

    Raises where it is not as on one process, or moves other bytes than the plan says, in the mean of the ranks.
    """
    model, mesh = with_experts(form), dict(zip("abc"[: len(names)], (2,) * len(names), strict=True))
    if storage:
        autopar.annotate(model, "*", storage=storage)
    with record_traffic() as record:
        found = train_on_ranks(model, STEPS, mesh, options, forced(choices(*names)))
    fault = fault_of(found, train_alone(with_experts(form), STEPS))
    assert not fault, f"{names} of {form}: {fault}"
    assert found.plan is not None
    predicted = {key: num_bytes for key, num_bytes in found.plan.traffic.items() if num_bytes}
    assert in_the_mean(record.num_bytes) == {
        key: num_bytes * len(STEPS.batches) for key, num_bytes in predicted.items()
    }
    return found


def in_the_mean(counted: Mapping[Any, Any]) -> dict[Any, float]:
    """Bytes in the mean of the ranks, which count different ones where parts of rows are moved."""
    of_ranks = {key: getattr(getattr(each, "node", None), "_local_ints", {0: each}) for key, each in counted.items()}
    return {key: fmean(each.values()) for key, each in of_ranks.items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["t", "x", "t+x", "d", "o"])
def test_experts_are_divided_over_an_axis(name: str) -> None:
    trained(Form(), (name,))


@pytest.mark.sample(1)
@pytest.mark.parametrize("names", [("x", "t+x"), ("t", "t+x"), ("t+x", "o")], ids="|".join)
def test_experts_are_divided_over_two_axes(names: tuple[str, ...]) -> None:
    trained(Form(), names)


# The case of "d" says that matrices divide experts, that of "o" that they divide features: of both there is none.
PAIRS = [pair for pair in itertools.product(("t", "x", "t+x", "d", "o"), repeat=2) if set(pair) != {"d", "o"}]


@pytest.mark.slow
@pytest.mark.parametrize("names", PAIRS, ids="|".join)
def test_any_two_choices_meet(names: tuple[str, ...]) -> None:
    trained(Form(bias=True), names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("t", "x", "t+x"), ("x", "t+x", "t"), ("t+x", "t+x", "t+x"), ("t", "t+x", "o")], ids="|".join
)
def test_experts_are_divided_over_three_axes(names: tuple[str, ...]) -> None:
    trained(EIGHT, names)


@pytest.mark.slow
def test_rows_travel_over_both_axes_in_one_exchange() -> None:
    plan = trained(Form(), ("t+x", "t+x")).plan
    assert plan is not None
    rows, counts = BATCH * LENGTH // 4 * Form().top_k * D * 8, Form().num_experts * 8
    assert plan.traffic["all_to_all", "a_b"] == 4 * rows + counts


@pytest.mark.slow
def test_weights_of_experts_are_stored_in_parts_over_the_axes_that_divide_no_experts() -> None:
    found = trained(Form(), ("t", "t+x"), storage="a")
    assert found.plan is not None
    stored = {row.name: row.roles for row in found.plan.rows if row.kind == "parameter"}
    for name in ("p_layers_0_experts_w1", "p_layers_0_experts_w2"):
        assert stored[name][0].startswith("S(") and stored[name][1] == "S(0)", stored[name]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data_parallel", "zero3"])
def test_presets_for_samples_divide_the_tokens_of_experts(strategy: str) -> None:
    trained(Form(), ("t",), strategy=strategy)


def test_a_plan_within_a_memory_limit_trains_as_one_process() -> None:
    limit = 18_500  # between the least and what a plan takes without a limit
    found = trained(Form(), ("t+x",), memory=limit).plan
    assert found is not None and found.peak_bytes <= limit


@pytest.fixture(scope="module")
def space() -> Space:
    """A layer with experts on two ranks."""
    return space_of(with_experts(Form(bias=True)).layers[0], (batches(1)[0]["x"],), ep=2)


def test_biases_of_rows_are_looked_up_and_are_no_products(space: Space) -> None:
    found = [node for node in space.program.graph.nodes if node.target in (GROUPED_MM, OF_EXPERT)]
    products = RoledProgram.of(space.program).products
    assert {node.target for node in found} == {GROUPED_MM, OF_EXPERT}
    assert {node.target for node in found if node in products} == {GROUPED_MM}


def test_both_ends_and_all_between_make_one_choice(space: Space) -> None:
    """Every path from rows to tokens over edges of finite seconds is tried."""
    (start,) = (n for n, each in enumerate(space.decisions) if each.kind == "call" and each.node.target is DISPATCH)
    (end,) = (n for n, each in enumerate(space.decisions) if each.kind == "call" and each.node.target is COMBINE)
    inside = between(space, start, end)
    edges = [edge for edge in space.edges if {edge.source, edge.target} <= set(inside)]
    allowed = {edge: np.isfinite(space.reshard_seconds(edge)) for edge in edges}
    found: dict[str, set[str]] = defaultdict(set)
    partial: list[dict[int, int]] = [{}]
    for number in inside:
        arriving = [edge for edge in edges if edge.target == number]
        partial = [
            {**made, number: choice}
            for made in partial
            for choice in range(len(space.decisions[number].candidates.strategies))
            if all(allowed[edge][made[edge.source], choice] for edge in arriving)
        ]
        # Of the ways here, one is enough of those that later calls cannot tell apart.
        seen_later = sorted({edge.source for edge in edges if edge.target not in partial[0]} | {start, end})
        partial = list({tuple(made.get(each) for each in seen_later): made for made in partial}.values())

    def name(number: int, choice: int) -> str:
        return space.decisions[number].candidates.strategies[choice].choices[0]

    for made in partial:
        found[name(start, made[start])].add(name(end, made[end]))
    whole, divided = {"-", "d", "P0"}, {"a0", "b0", "x", "a0+x", "b0+x"}
    assert found == {**{each: {each} for each in divided}, "d": whole, "-": whole}


def between(space: Space, start: int, end: int) -> list[int]:
    """The decisions on any way from one to another, in order."""
    reached, reaching = {start}, {end}
    for _ in space.decisions:
        reached |= {edge.target for edge in space.edges if edge.source in reached}
        reaching |= {edge.source for edge in space.edges if edge.target in reaching}
    inside, order = reached & reaching, []
    while len(order) < len(inside):
        order += [
            number
            for number in inside - set(order)
            if all(w.source in order for w in space.edges if w.target == number and w.source in inside)
        ]
    return order


def moves(space: Space, edges: list[TensorEdge]) -> Iterator[tuple[Layout, Layout, float]]:
    """Yield every pair of layouts at the ends of some edges, with the seconds between them."""
    assert edges
    for edge in edges:
        seconds = space.reshard_seconds(edge)
        for i, source in enumerate(space.source_layouts(edge)):
            for j, target in enumerate(space.target_layouts(edge)):
                yield source, target, seconds[i, j]


def test_rows_are_not_moved_to_or_from_other_ranks(space: Space) -> None:
    for source, target, seconds in moves(space, [edge for edge in space.edges if edge.tensor.ragged]):
        if (S(0) in source) != (S(0) in target):
            assert seconds == np.inf, f"{source} → {target}"


def test_what_says_where_rows_are_is_not_moved(space: Space) -> None:
    for source, target, seconds in moves(space, [edge for edge in space.edges if edge.tensor.fixed]):
        assert np.isfinite(seconds) == (source == target), f"{source} → {target}"
