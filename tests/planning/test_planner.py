"""Plans: best by brute force, equal on every run, within memory, and moving what the literature says they move."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.costs.hardware.collectives import Transfer
from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Hardware
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.peak import memory_use
from autopar.costs.space.space import Space
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.annotations.annotate import annotate
from autopar.planning.options.groups import Memory, Search
from autopar.planning.planner import make_plan
from autopar.planning.record import choices_of, evaluate
from autopar.planning.settings import Settings
from tests.solver.test_search import taking
from tests.support.families import BATCH, FAMILIES, HIDDEN, LAYERS, SEQUENCE
from tests.support.parity import SLOW_DEVICES
from tests.support.planned import IDS_BS, SLOW_LINKS, X_BD, Attention, Planned, TwoLinears, planned, space_of

HARDWARE = pytest.mark.parametrize("hardware", [SLOW_DEVICES, SLOW_LINKS, load("cpu")], ids=lambda each: each.name)


def every_choice(space: Space, peaks: bool = False) -> dict[tuple[int, ...], tuple[float, int]]:
    """Return (seconds, bytes at the peak if requested) of every combination of strategies, without the solver."""
    decisions, memory = space.decisions, MemoryModel(space)
    nodes = [decision.candidates.seconds for decision in decisions]
    edges = [(edge.source, edge.target, space.reshard_seconds(edge)) for edge in space.edges]
    found = {}
    for choices in itertools.product(*(range(len(decision.candidates.strategies)) for decision in decisions)):
        seconds = sum(float(each[c]) for each, c in zip(nodes, choices, strict=True))
        seconds += sum(float(pairs[choices[a], choices[b]]) for a, b, pairs in edges)
        found[choices] = seconds, memory_use(memory, choices, {})[0] if peaks else 0
    return found


@HARDWARE
def test_no_choice_of_strategies_is_better_than_the_plan(hardware: Hardware) -> None:
    space = space_of(TwoLinears(), (X_BD,), hardware)
    choices = every_choice(space)
    best = min(seconds for seconds, _ in choices.values())
    for solver in ("auto", "ilp"):
        plan, chosen = make_plan(space, {}, Settings(search=Search(solver=solver)))
        assert plan.seconds == pytest.approx(best, rel=1e-9)
        assert choices[chosen][0] == pytest.approx(best, rel=1e-9)
        assert plan.bound <= best * (1 + 1e-12) and plan.gap <= 1e-5


@pytest.mark.slow
@HARDWARE
def test_no_choice_of_strategies_within_the_memory_is_better_than_the_plan(hardware: Hardware) -> None:
    space = space_of(TwoLinears(), (X_BD,), hardware)
    choices = every_choice(space, peaks=True)
    sizes = sorted({num_bytes for _, num_bytes in choices.values()})
    limits = sizes[:: max(len(sizes) // 6, 1)]
    tried, proven = len(limits), 0
    for memory in limits:
        best = min(seconds for seconds, num_bytes in choices.values() if num_bytes <= memory)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            plan, chosen = make_plan(space, {}, Settings(Memory(memory)))
        assert plan.bound <= best * (1 + 1e-9)
        assert plan.seconds == pytest.approx(best, rel=1e-9) or plan.gap > 0, memory
        assert plan.seconds >= best * (1 - 1e-9)
        assert plan.peak_bytes == choices[chosen][1] <= memory
        proven += plan.gap <= 1e-3
    assert proven == tried


def test_a_layer_with_a_bias_and_a_residual_connection_is_planned_as_well_as_by_brute_force() -> None:
    class RemainingProblem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x_BD: Tensor) -> Tensor:
            y_BD = x_BD * self.scale
            return y_BD + self.linear(y_BD)

    space = space_of(RemainingProblem(), (X_BD,), load("cpu"))
    problem = [len(decision.candidates.strategies) for decision in space.decisions]
    assert math.prod(problem) < 300_000
    best = min(seconds for seconds, _ in every_choice(space).values())
    assert make_plan(space, {})[0].seconds == pytest.approx(best, rel=1e-9)


@HARDWARE
@pytest.mark.parametrize("post_norm", [False, True])
def test_both_solvers_find_plans_of_the_same_seconds(hardware: Hardware, post_norm: bool) -> None:
    space = space_of(Attention(post_norm), (IDS_BS,), hardware)
    auto, ilp = (make_plan(space, {}, Settings(search=Search(solver=solver)))[0] for solver in ("auto", "ilp"))
    assert auto.seconds == pytest.approx(ilp.seconds, rel=1e-8)


@HARDWARE
def test_the_seconds_of_a_plan_are_those_of_its_nodes_and_edges(hardware: Hardware) -> None:
    space = space_of(Attention(post_norm=True), (IDS_BS,), hardware, dp=2, tp=2)
    plan, choices = make_plan(space, {})
    assert evaluate(space, choices) == pytest.approx(plan.seconds, rel=1e-9)
    assert sum(row.seconds for row in plan.rows) == pytest.approx(plan.seconds, rel=1e-9)
    assert plan.memory is not None
    assert plan.peak_bytes == max(each.num_bytes for each in plan.memory.timeline) == sum(plan.memory.parts.values())


def test_the_traffic_of_a_plan_is_that_of_its_rows() -> None:
    space = space_of(Attention(post_norm=True), (IDS_BS,), SLOW_DEVICES, dp=2, tp=2)
    plan, _ = make_plan(space, {})
    total: Counter[tuple[str, str]] = Counter()
    for row in plan.rows:
        for collective, axis, num_bytes, *_ in row.transfers:
            total[collective, axis] += num_bytes
    assert total and dict(total) == dict(plan.traffic)


PLAN_AGAIN = """
from tests.planning.test_planner import plans_as_text
print(plans_as_text())
"""


def plans_as_text() -> str:
    """Two plans of one model, without and with a memory limit."""
    space = space_of(Attention(post_norm=True), (IDS_BS,), SLOW_DEVICES, dp=2, tp=2)
    return "\n".join(make_plan(space, {}, Settings(Memory(memory)))[0].to_json() for memory in (None, 7500))


def test_the_same_model_gets_the_same_plan_in_this_and_in_any_other_process() -> None:
    other_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    ran = subprocess.run(
        [sys.executable, "-c", PLAN_AGAIN],
        env={**os.environ, "PYTHONHASHSEED": other_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert {plans_as_text(), plans_as_text(), plans_as_text()} == {ran.stdout.rstrip("\n")}


@pytest.mark.slow
def test_less_memory_gives_plans_that_obey_it_and_are_no_faster() -> None:
    space = space_of(Attention(post_norm=False), (IDS_BS,), SLOW_LINKS)
    unlimited, _ = make_plan(space, {})
    plans = []
    for share in (1.0, 0.95, 0.9, 0.85, 0.8):
        limit = int(share * unlimited.peak_bytes)
        plan, choices = make_plan(space, {}, Settings(Memory(limit)))
        assert plan.peak_bytes <= limit == plan.memory_limit
        assert evaluate(space, choices) == pytest.approx(plan.seconds, rel=1e-9)
        plans.append(plan)
    seconds = [plan.seconds for plan in plans]
    assert seconds == sorted(seconds) and seconds[0] == pytest.approx(unlimited.seconds) and seconds[-1] > seconds[0]


def test_a_wide_graph_is_planned_as_a_narrow_one() -> None:
    space = space_of(Attention(post_norm=False), (IDS_BS,), SLOW_LINKS)
    unlimited, _ = make_plan(space, {})
    limits = 2 * unlimited.peak_bytes, int(0.85 * unlimited.peak_bytes)
    narrow = [make_plan(space, {}, Settings(Memory(limit)))[0] for limit in limits]
    with taking("messages"):
        wide = [make_plan(space, {}, Settings(Memory(limit)))[0] for limit in limits]
    assert [each.seconds for each in wide] == pytest.approx([each.seconds for each in narrow])
    assert wide[0].seconds == pytest.approx(unlimited.seconds) and wide[1].peak_bytes <= limits[1]


def test_too_little_memory_is_an_error_that_states_the_least() -> None:
    space = space_of(Attention(post_norm=False), (IDS_BS,), SLOW_LINKS)
    with pytest.raises(InfeasibleError, match=r"needs at least .*\(\d+ bytes\)") as caught:
        make_plan(space, {}, Settings(Memory(100)))
    least = int(re.findall(r"\((\d+) bytes\)", str(caught.value))[-1])
    with pytest.raises(InfeasibleError):
        make_plan(space, {}, Settings(Memory(least - 1)))
    assert make_plan(space, {}, Settings(Memory(int(least * 1.1))))[0].peak_bytes >= least


def test_a_pin_that_takes_too_much_memory_is_called_by_its_name_in_the_model() -> None:
    def least(model: TwoLinears, memory: int) -> tuple[int, str]:
        with pytest.raises(InfeasibleError) as caught:
            autopar.plan(
                model, Mesh({"tp": 2}, hardware="h100"), (X_BD,), memory=autopar.Memory(memory, conventions="tensors")
            )
        return int(re.findall(r"\((\d+) bytes\)", str(caught.value))[-1]), str(caught.value)

    pinned = TwoLinears()
    annotate(pinned, "*.weight", tp=None)
    limit = (least(TwoLinears(), 1)[0] + least(pinned, 1)[0]) // 2
    message = least(pinned, limit)[1]
    assert "without the pin on 'up.weight' the least is" in message or "on 'down.weight' the least is" in message


def with_storage(layout: int | None) -> Planned:
    """Two linear layers whose weights are stored split along a dim, or whole."""
    model = TwoLinears()
    annotate(model, "up.weight", tp=layout)
    annotate(model, "down.weight", tp=layout)
    return planned(space_of(model, (X_BD,)), model)


def test_weights_stored_whole_need_twice_the_memory_of_weights_stored_split() -> None:
    def of_parameters(found: Planned) -> int:
        return sum(row.stored_bytes for row in found.plan.rows if row.kind == "parameter")

    whole, split = with_storage(None), with_storage(0)
    assert of_parameters(whole) == 2 * of_parameters(split) == 2 * (8 * 16) * 16
    assert whole.plan.peak_bytes > split.plan.peak_bytes


def test_megatron_reduces_twice_forward_and_twice_backward_per_layer() -> None:
    """Shoeybi et al., Megatron-LM (2019), figure 4: f and g around attention and around the MLP."""
    model = FAMILIES["llama"].build()
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        annotate(model, f"layers.*.{name}", tp="column")
    for name in ("o_proj", "down_proj"):
        annotate(model, f"layers.*.{name}", tp="row")
    _, kwargs = FAMILIES["llama"].inputs(0)
    found = planned(space_of(model, kwargs, SLOW_LINKS), model)
    num_bytes = BATCH * SEQUENCE * HIDDEN * 4
    assert found.counts() == {
        ("all_reduce", False, num_bytes): 2 * LAYERS,
        ("all_reduce", True, num_bytes): 2 * LAYERS,
    }
    assert found.plan.traffic == {("all_reduce", "tp"): 4 * LAYERS * num_bytes}


def data_parallel(storage: str | None, regather: bool | None = None) -> Planned:
    """Two linear layers with biases, data parallel; weights whole, or stored split over the axis (ZeRO-3)."""
    model = TwoLinears(bias=True)
    annotate(model, "*", dp="data")
    if storage is None:
        for name in ("up", "down"):
            annotate(model, f"{name}.weight", dp=None)
            annotate(model, f"{name}.bias", dp=None)
    else:
        annotate(model, "*", storage=storage, regather=regather)
    return planned(space_of(model, (X_BD,), SLOW_LINKS, dp=2), model)


def by_parameter(found: Planned) -> dict[str, list[Transfer]]:
    moved: dict[str, list[Transfer]] = {}
    for source, _, transfer in found.transfers():
        if source.startswith("p_"):
            moved.setdefault(source, []).append(transfer)
    return moved


BYTES = {"p_up_weight": 8 * 16 * 4, "p_up_bias": 16 * 4, "p_down_weight": 8 * 16 * 4, "p_down_bias": 8 * 4}


def test_data_parallelism_reduces_the_gradient_of_every_parameter_once() -> None:
    found = data_parallel(storage=None)
    assert by_parameter(found) == {
        name: [Transfer("all_reduce", "dp", num_bytes, backward=True)] for name, num_bytes in BYTES.items()
    }
    loss = 4
    assert found.plan.traffic == {("all_reduce", "dp"): sum(BYTES.values()) + loss}


def test_zero_3_gathers_every_weight_twice_and_scatters_its_gradient_once() -> None:
    """Rajbhandari et al., ZeRO (2020), section 7.2.2: three times the parameters' bytes.

    Biases, and the weight of a layer whose input has no gradient, are not needed in the backward.
    """
    found = by_parameter(data_parallel(storage="dp", regather=True))
    assert found.keys() == BYTES.keys()
    for name, num_bytes in BYTES.items():
        expected = [
            Transfer("all_gather", "dp", num_bytes),
            Transfer("reduce_scatter", "dp", num_bytes, backward=True),
        ]
        if name == "p_down_weight":
            expected.append(Transfer("all_gather", "dp", num_bytes, backward=True))
        assert Counter(found[name]) == Counter(expected), name


def test_zero_2_gathers_every_weight_once_and_scatters_its_gradient_once() -> None:
    """Rajbhandari et al., ZeRO (2020), section 7.2.1: twice the parameters' bytes."""
    requested, free = (by_parameter(data_parallel("dp", regather)) for regather in (False, None))
    assert requested == free  # without a memory limit nothing speaks for gathering twice
    for name, num_bytes in BYTES.items():
        assert Counter(requested[name]) == Counter(
            [Transfer("all_gather", "dp", num_bytes), Transfer("reduce_scatter", "dp", num_bytes, backward=True)]
        )


def test_a_plan_is_carried_out_as_it_was_chosen() -> None:
    space = space_of(TwoLinears(), (X_BD,), SLOW_DEVICES)
    plan, choices = make_plan(space, {})
    assert choices_of(plan, space) == choices


def test_a_plan_for_another_mesh_is_refused() -> None:
    plan, _ = make_plan(space_of(TwoLinears(), (X_BD,)), {})
    with pytest.raises(PlanError, match="the plan is for the mesh tp=2, this mesh is tp=4"):
        choices_of(plan, space_of(TwoLinears(), (X_BD,), tp=4))


def test_a_plan_for_another_batch_is_refused_with_what_differs() -> None:
    plan, _ = make_plan(space_of(TwoLinears(), (X_BD,)), {})
    with pytest.raises(PlanError, match=r"x_bd is input float32\[4, 8\] in the plan and input float32\[2, 8\] here"):
        choices_of(plan, space_of(TwoLinears(), (torch.ones(2, 8),)))


def test_a_pin_forbids_every_other_strategy() -> None:
    model = TwoLinears()
    space = space_of(model, (X_BD,))
    free = planned(space, model)
    number = space.index["linear_default"]
    decision = space.decisions[number]
    for strategy in range(len(decision.candidates.strategies)):
        mask = np.arange(len(decision.candidates.strategies)) == strategy
        plan, choices = make_plan(space, {number: mask})
        assert choices[number] == strategy
        assert plan.seconds >= free.plan.seconds


def test_pins_that_cannot_hold_together_are_an_error() -> None:
    model = TwoLinears()
    space = space_of(model, (X_BD,))
    nothing = np.zeros(len(space.decisions[space.index["linear_default"]].candidates.strategies), dtype=bool)
    with pytest.raises(InfeasibleError):
        make_plan(space, {space.index["linear_default"]: nothing})


def test_a_mesh_of_one_device_moves_nothing() -> None:
    space = space_of(TwoLinears(), (X_BD,), SLOW_LINKS, tp=1)
    assert space.mesh == Mesh({"tp": 1})
    assert not any(make_plan(space, {})[0].traffic.values())
