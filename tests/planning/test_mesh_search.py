"""mesh="auto": the best of all arrangements, and the others with what they cost or why they are none."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar
from autopar.capture.export import capture, trace
from autopar.compiler.offline_planner import OfflinePlanner
from autopar.compiler.plan_cache import PlanCache
from autopar.console.units import format_seconds
from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Hardware
from autopar.costs.plans.plan import Plan
from autopar.costs.space.build import build_space
from autopar.errors import CutOffError, InfeasibleError, MeshError, TimeLimitError
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import built_in
from autopar.planning import planner
from autopar.planning.memory_limit.answers import Answer
from autopar.planning.memory_limit.memory_limit import best_within
from autopar.planning.mesh_search.arrangements import factorizations, meshes_of
from autopar.planning.mesh_search.search import EQUAL_SECONDS, MOST_PIPELINES, Candidate, Searched, Turn, best_mesh
from autopar.planning.options.groups import Pipeline
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.stage_seconds import step_parts
from autopar.planning.planner import make_plan
from autopar.planning.request import PlanRequest
from tests.support.families import FAMILIES
from tests.support.meshes import candidate, compared_text, maker, plans_of, table
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.planned import SLOW_LINKS, X_BD, TwoLinears


def search(make: Callable[[Mesh], Plan], meshes: Sequence[Mesh], time_limit: float = math.inf) -> Searched[Plan]:
    """The best of the plans that `make` finds."""
    return best_mesh(lambda mesh, _: candidate(make(mesh)), meshes, time_limit)


@pytest.mark.sample(9)
@pytest.mark.parametrize("hardware", [SLOW_DEVICES, SLOW_LINKS, load("cpu")], ids=lambda each: each.name)
@pytest.mark.parametrize(("devices", "max_axes"), [(4, 1), (4, 2), (8, 3), (6, 2), (1, 2), (2, 3)])
def test_the_best_mesh_is_the_best_of_all_meshes_planned_one_by_one(
    hardware: Hardware, devices: int, max_axes: int
) -> None:
    make, meshes = maker(hardware), meshes_of("auto", devices, hardware, max_axes)
    found = search(make, meshes).best
    each = [make(mesh) for mesh in meshes]
    least = min(plan.seconds for plan in each)
    assert least <= found.seconds <= least * (1 + EQUAL_SECONDS)
    assert found.mesh.num_devices == devices
    assert found == next(plan for plan in each if plan.mesh == found.mesh)


def test_a_family_is_planned_on_every_mesh_of_eight_devices() -> None:
    family = FAMILIES["mlp"]
    program = capture(family.build(), *family.inputs(0))

    def make(mesh: Mesh) -> Plan:
        return make_plan(build_space(program, mesh, load("h100")), {})[0]

    found = search(make, meshes_of("auto", 8, "h100", 3))
    assert found.best.mesh.hardware == "h100"
    assert table(found).startswith("compared: 4 candidates")
    assert all(text in table(found) for text in ("dp=8", "dp=2 × tp=4", "dp=4 × tp=2", "dp=2 × tp=2 × sp=2"))


def test_equal_plans_are_one_line_under_the_simplest_mesh_also_where_another_is_faster_by_a_latency() -> None:
    plans = plans_of((1.0005, 100), (1.2, 100), (1.0, 100), (1.0004, 100))
    found = search(plans.__getitem__, tuple(plans))
    assert [[str(each.mesh) for each in line] for line in found.lines] == [
        ["dp=8", "dp=4 × tp=2", "dp=2 × tp=2 × sp=2"],
        ["dp=2 × tp=4"],
    ]
    assert found.best is plans[found.lines[0][0].mesh]
    assert "dp=4 × tp=2, dp=2 × tp=2 × sp=2" in table(found)


@pytest.mark.parametrize("other", [(1.002, 100), (1.0, 103)])
def test_plans_that_differ_in_seconds_or_bytes_are_lines_of_their_own(other: tuple[float, int]) -> None:
    plans = plans_of(other, (1.0, 100))
    found = search(plans.__getitem__, tuple(plans))
    assert [len(line) for line in found.lines] == [1, 1]
    assert found.best.seconds == 1.0


def test_meshes_are_compared_by_a_step_of_all_micro_batches() -> None:
    plans = plans_of((1.0, 100), (2.0, 100))
    steps = dict(zip(plans, (8.0, 2.0), strict=True))
    found = best_mesh(lambda mesh, _: candidate(plans[mesh], steps[mesh]), tuple(plans))
    assert found.best.seconds == 2.0 and "8.00 s" in table(found)


def test_a_search_that_ends_beforeany_plan_is_found_is_no_proof_that_there_is_none() -> None:
    def late(mesh: Mesh, turn: Turn) -> Candidate[Plan]:
        raise TimeLimitError("the time limit passed")

    with pytest.raises(TimeLimitError, match="no mesh of 4 devices has a plan; on each of them:\n  dp=4: not tried"):
        best_mesh(late, meshes_of("auto", 4, None, 1), 0)


def test_a_pipeline_axis_is_tried_in_every_length_outside_of_the_others() -> None:
    meshes = meshes_of("auto", 4, SLOW_LINKS, 2, "pp")
    assert [str(mesh) for mesh in meshes] == ["dp=4", "pp=4", "dp=2 × tp=2", "pp=2 × dp=2"]
    assert all(mesh.num_devices == 4 for mesh in meshes)


@pytest.mark.parametrize("number", [1, 2, 12, 64, 97])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_factorizations_are_all_ordered_products_of_factors_above_one(number: int, count: int) -> None:
    def divide(rest: int, left: int) -> set[tuple[int, ...]]:
        if left == 1:
            return {(rest,)} if rest > 1 or count == 1 else set()
        return {(f, *tail) for f in range(2, rest + 1) if rest % f == 0 for tail in divide(rest // f, left - 1)}

    found = list(factorizations(number, count))
    assert set(found) == divide(number, count) and len(found) == len(set(found))
    assert all(math.prod(sizes) == number for sizes in found)


def test_meshes_come_with_few_axes_first_and_both_orders() -> None:
    meshes = meshes_of("auto", 6, SLOW_LINKS, 2)
    assert [str(mesh) for mesh in meshes] == ["dp=6", "dp=2 × tp=3", "dp=3 × tp=2"]
    assert {mesh.hardware for mesh in meshes} == {SLOW_LINKS.name}


def test_a_mesh_without_a_plan_is_listed_with_the_reason() -> None:
    found = search(maker(annotated=True), meshes_of("auto", 4, SLOW_DEVICES, 2))
    assert str(found.best.mesh) == "dp=2 × tp=2"
    line = next(line for line in table(found).splitlines() if line.startswith("dp=4:"))
    assert 'the mesh has no axis "tp"' in line and "1 not possible" in table(found)


def test_a_search_withoutany_plan_says_why_for_each_mesh() -> None:
    def make(mesh: Mesh) -> Plan:
        raise InfeasibleError(f"nothing fits {mesh.ndim} axes")

    with pytest.raises(InfeasibleError) as raised:
        search(make, meshes_of("auto", 4, None, 2))
    assert str(raised.value) == (
        "no mesh of 4 devices has a plan; on each of them:\n"
        "  dp=4: nothing fits 1 axes\n  dp=2 × tp=2: nothing fits 2 axes"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("auto", None, None, 2), "found devices=None"),
        (("auto", 0, None, 2), "found devices=0"),
        (("auto", 6.0, None, 2), "found devices=6.0"),
        (("auto", True, None, 2), "found devices=True"),
        (("2x2", 4, None, 2), "mesh='2x2'; give a DeviceMesh"),
        (("auto", 4, None, 2, "tp"), "pipeline='tp' is one of the axes that mesh=\"auto\" arranges (dp, tp, sp)"),
        (("auto", 4, None, 0), "Search(max_axes=0); a mesh is searched for in 1 to 3 axes"),
        (("auto", 4, None, 4), "max_axes=4"),
    ],
)
def test_what_names_no_meshes_is_refused(arguments: tuple, text: str) -> None:
    with pytest.raises(MeshError) as raised:
        meshes_of(*arguments)
    assert text in str(raised.value)


def test_the_api_searches_with_one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = []

    def counting(*arguments: Any, **options: Any) -> Any:
        captured.append(arguments)
        return trace(*arguments, **options)

    monkeypatch.setattr("autopar.planning.request.trace", counting)
    found = autopar.plan(TwoLinears(), "auto", (X_BD,), devices=4, hardware="a100", search=autopar.Search(max_axes=2))
    assert len(captured) == 1 and "compared: 2 candidates" in compared_text(found)
    assert isinstance(found, Plan)
    each = [autopar.plan(TwoLinears(), mesh, (X_BD,)) for mesh in meshes_of("auto", 4, "a100", 2)]
    assert found.seconds <= min(plan.seconds for plan in each) * (1 + EQUAL_SECONDS) and found.verify().ok
    assert replace(found, notes=(), comparison=None) == replace(
        next(plan for plan in each if plan.mesh == found.mesh), notes=()
    )


class Layers(nn.Module):
    """Products that are as large as what goes through them, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BD = layer(x_BD).relu()
        return x_BD.sum()


X_64_16 = torch.zeros(64, 16)


def test_with_a_pipeline_every_length_of_it_is_compared_and_the_best_is_found_again_by_its_own_options() -> None:
    found = autopar.plan(Layers(), "auto", (X_64_16,), devices=4, hardware=SLOW_DEVICES, pipeline="pp")
    steps = {}
    for mesh in meshes_of("auto", 4, SLOW_DEVICES, 2, "pp"):
        plan = autopar.plan(Layers(), mesh, (X_64_16,), hardware=SLOW_DEVICES)
        steps[mesh] = plan.seconds
        assert str(mesh) in compared_text(found)
    assert found.seconds <= min(steps.values()) * (1 + EQUAL_SECONDS)
    assert found.seconds == steps[found.mesh]


def test_a_pipeline_that_is_requested_by_its_schedule_is_found_and_planned_again() -> None:
    requested = {"hardware": SLOW_DEVICES, "pipeline": "pp", "schedule": "1f1b", "microbatches": 4}
    found = autopar.plan(Layers(), "auto", (X_64_16,), devices=4, **by_flag(**requested))
    assert isinstance(found, PipelinePlan) and found.schedule.name == "1f1b"
    assert f"{found.mesh}".replace(" × ", ",") + " --microbatches 4 --schedule 1f1b" in compared_text(found)
    assert "Pipeline(schedule='1f1b') is given, but no axis of the mesh dp=4" in compared_text(found)
    again = autopar.plan(Layers(), found.mesh, (X_64_16,), **by_flag(**requested))
    assert replace(found, notes=(), comparison=None) == replace(again, notes=())


def test_a_batch_that_does_not_fit_is_halved_until_its_micro_batches_do() -> None:
    example, requested = torch.zeros(4096, 16), {"hardware": SLOW_DEVICES, "recompute": "none", "prefetch": 0}
    whole, half = (
        autopar.plan(Layers(), Mesh({"dp": 2}), (example,), microbatches=count, **by_flag(**requested))
        for count in (None, 2)
    )
    memory = (whole.peak_bytes + half.peak_bytes) // 2
    with pytest.raises(InfeasibleError):
        autopar.plan(Layers(), Mesh({"dp": 2}), (example,), **by_flag(memory=memory, **requested))
    found = autopar.plan(Layers(), "auto", (example,), devices=2, **by_flag(memory=memory, **requested))
    assert "dp=2 --microbatches 2" in compared_text(found) and "give microbatches=2" in found.notes[-1]
    again = autopar.plan(Layers(), found.mesh, (example,), microbatches=2, **by_flag(memory=memory, **requested))
    assert replace(found, notes=(), comparison=None) == replace(again, notes=()) and found.peak_bytes <= memory
    assert isinstance(found, Plan)
    parts = step_parts(found)
    assert format_seconds(2 * (parts.forward + parts.backward) + parts.once) in compared_text(found)


def test_what_fits_in_no_micro_batches_says_so_for_each_mesh() -> None:
    with pytest.raises(
        InfeasibleError, match=r"no mesh of 2 devices has a plan; on each of them:\n  dp=2: the memory limit is 1.00 kB"
    ):
        autopar.plan(Layers(), "auto", (X_64_16,), devices=2, hardware=SLOW_DEVICES, memory=1000)


def test_compiling_on_a_mesh_that_is_to_be_found_says_how_to_find_it() -> None:
    with pytest.raises(MeshError, match=r"init_device_mesh\(device_type, plan\.mesh\.sizes"):
        autopar.compile(TwoLinears(), "auto", (X_BD,))  # type: ignore[arg-type]


# What is left out, and what is planned twice.


def test_a_mesh_that_cannot_be_better_is_not_planned_and_says_so() -> None:
    plans, made = plans_of((3.0, 100), (2.0, 100), (1.0, 100), (4.0, 100)), []
    bounds = dict(zip(plans, (0.5, 2.5, 0.4, 1.0), strict=True))

    def make(mesh: Mesh, turn: Turn) -> Candidate[Plan]:
        made.append((str(mesh), turn.cutoff))
        return candidate(plans[mesh])

    found = best_mesh(make, tuple(plans), at_least=bounds.__getitem__)
    # By their bounds; the last, whose bound is as long as the best plan, may be the same plan on another mesh.
    gained = 1.0 - EQUAL_SECONDS
    assert made == [("dp=4 × tp=2", math.inf), ("dp=8", 1.0), ("dp=2 × tp=2 × sp=2", gained)]
    assert found.best.seconds == 1.0 and "no better: a step takes at least 2.50 s" in table(found)


@given(
    seconds=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    slack=st.lists(st.integers(0, 9), min_size=8, max_size=8),
)
@settings(max_examples=25, deadline=None)
def test_bounds_and_cut_offs_lose_no_best_mesh(seconds: list[int], slack: list[int]) -> None:
    """Whatever is proven of meshes beforehand and by searches that end early, the search ends with the best of all."""
    plans = plans_of(*((float(each), 100) for each in seconds))
    bounds = {mesh: each - more for mesh, each, more in zip(plans, seconds, slack[:4], strict=True)}
    eager = dict(zip(plans, slack[4:], strict=True))

    def make(mesh: Mesh, turn: Turn) -> Candidate[Plan]:
        exact = candidate(plans[mesh])
        if exact.seconds >= turn.cutoff and eager[mesh] > 4:
            raise CutOffError(exact.seconds)
        return exact

    found = best_mesh(make, tuple(plans), at_least=bounds.__getitem__)
    first = found.lines[0][0].found
    assert first is not None and first.seconds == min(seconds)


def test_the_bound_of_a_pipeline_counts_as_many_micro_batches_as_its_plan_may_have() -> None:
    """The devices of a stage cannot share six samples: micro-batches may be of one."""
    request = PlanRequest(hardware=SLOW_DEVICES, pipeline=Pipeline("pp"))
    planner = OfflinePlanner(Layers(), (X_64_16[:6],), request, PlanCache())
    mesh = Mesh({"pp": 2, "dp": 4}, SLOW_DEVICES.name)
    assert planner.in_stages(mesh, "pp").microbatches > 1
    own = planner.at_least(Mesh({"dp": 8}, SLOW_DEVICES.name))
    of_one = own / (3 * (len(planner.blocks) // 2))
    assert planner.at_least(mesh) == pytest.approx(own + of_one / 6)
    assert [planner.at_least(mesh, count) for count in (1, 3)] == pytest.approx([own + of_one, own + of_one / 3])


def test_a_mesh_that_is_no_simpler_has_to_gain_more_than_equal_plans_differ_by() -> None:
    plans, cutoffs = plans_of((1.0, 100), (1.0, 100), (0.5, 100), (0.5, 100)), []

    def make(mesh: Mesh, turn: Turn) -> Candidate[Plan]:
        cutoffs.append(turn.cutoff)
        return candidate(plans[mesh])

    assert best_mesh(make, tuple(plans)).best.seconds == 0.5
    assert cutoffs == [math.inf, *[1.0 - EQUAL_SECONDS] * 2, 0.5 * (1.0 - EQUAL_SECONDS)]


def test_within_a_limit_the_search_on_a_mesh_ends_where_it_is_proven_to_be_no_better() -> None:
    cutoffs: list[float] = []

    def within(*arguments: Any) -> Answer:
        cutoffs.append(arguments[-1].cutoff)
        return best_within(*arguments)

    memory = int(0.9 * autopar.plan(Layers(), Mesh({"dp": 4}), (X_64_16,), hardware=SLOW_DEVICES).peak_bytes)
    requested = {"hardware": SLOW_DEVICES, "memory": memory}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "best_within", within)
        found = autopar.plan(Layers(), "auto", (X_64_16,), devices=4, **by_flag(**requested))
    first, *later = cutoffs
    assert first >= sys.float_info.max and later and max(later) < 1
    each = [
        autopar.plan(Layers(), mesh, (X_64_16,), **by_flag(**requested))
        for mesh in meshes_of("auto", 4, SLOW_DEVICES, 2)
    ]
    assert found.seconds <= min(plan.seconds for plan in each) * (1 + EQUAL_SECONDS)


def test_numbers_of_micro_batches_that_leave_too_much_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    example, requested = torch.zeros(4096, 16), {"hardware": SLOW_DEVICES, "recompute": "none", "prefetch": 0}
    few, many = (
        autopar.plan(Layers(), Mesh({"dp": 2}), (example,), microbatches=count, **by_flag(**requested))
        for count in (16, 32)
    )
    captured = []

    def counting(*arguments: Any, **options: Any) -> Any:
        captured.append(len(arguments[2]["x_BD"]))
        return trace(*arguments, **options)

    monkeypatch.setattr("autopar.planning.request.trace", counting)
    memory = (few.peak_bytes + many.peak_bytes) // 2
    found = autopar.plan(Layers(), "auto", (example,), devices=2, **by_flag(memory=memory, **requested))
    assert "give microbatches=32" in found.notes[-1] and found.peak_bytes <= memory
    assert captured[0] == 4096 and captured[-1] == 128 and 2048 not in captured


def test_as_many_pipelines_are_planned_as_are_worth_their_time() -> None:
    made = maker()(meshes_of("auto", 4, SLOW_DEVICES, 1)[0])
    meshes = meshes_of("auto", 64, SLOW_DEVICES, 1, "pp")
    found = best_mesh(lambda mesh, _: candidate(replace(made, mesh=mesh)), meshes, pipeline="pp")
    planned = [each.mesh for line in found.lines for each in line]
    assert sum("pp" in mesh.axes for mesh in planned) == MOST_PIPELINES < sum("pp" in mesh.axes for mesh in meshes)
    assert f"left out: {MOST_PIPELINES} pipelines that may be faster were planned" in table(found)


def test_where_nothing_fits_the_nearest_is_stated_with_the_limit_that_would_do() -> None:
    requested = {"hardware": SLOW_DEVICES, "microbatches": 1, "max_axes": 1}
    with pytest.raises(InfeasibleError) as raised:
        autopar.plan(Layers(), "auto", (X_64_16,), devices=2, **by_flag(memory=1000, **requested))
    found = re.search(r"What came nearest is dp=2, with .* per device: memory=(\d+) would do", str(raised.value))
    assert found is not None and raised.value.least_bytes is None
    assert autopar.plan(
        Layers(), "auto", (X_64_16,), devices=2, **by_flag(memory=int(found[1]), **requested)
    ).peak_bytes == int(found[1])


def test_a_pipeline_is_looked_for_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(planner: OfflinePlanner, mesh: Mesh, request: PlanRequest) -> Plan:
        raise InfeasibleError("it does not fit in one piece", 123)

    monkeypatch.setattr(OfflinePlanner, "on", on)
    requested = {"devices": 2, "hardware": SLOW_DEVICES, "microbatches": 2}
    found = autopar.plan(Layers(), "auto", (X_64_16,), **by_flag(memory="1MB", **requested))
    assert isinstance(found, PipelinePlan) and str(found.mesh) == "pp=2" and found.peak_bytes <= 10**6
    with pytest.raises(InfeasibleError, match="does not fit in one piece") as raised:  # so little, no pipeline fits
        autopar.plan(Layers(), "auto", (X_64_16,), **by_flag(memory=1000, **requested))
    assert "In stages" not in str(raised.value)


def test_the_table_says_what_each_axis_splits() -> None:
    found = autopar.plan(TwoLinears(), "auto", (X_BD,), devices=4, hardware=SLOW_DEVICES)
    assert isinstance(found, Plan)
    roles = {row.roles[0] for row in found.rows if row.kind == "call"} - {"replicated", "partial"}
    assert any(role in compared_text(found).partition("dp: ")[2] for role in roles)


def test_experts_and_few_samples_are_worth_a_third_axis() -> None:
    def axes_for(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
        return OfflinePlanner(model, inputs, PlanRequest(), PlanCache()).most_axes(8)

    assert axes_for(*built_in("tiny-moe", 64, 16, None)) == 3
    assert axes_for(Layers(), (X_64_16,)) == 2 and axes_for(Layers(), (X_64_16[:4],)) == 3
