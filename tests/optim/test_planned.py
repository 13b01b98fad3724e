"""Plans for optimizers of matrices: formulas, timelines, tables and files say what the plan does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autopar
from autopar.cli import main
from autopar.costs.plans.plan import Plan
from tests.support.families import BATCH, FAMILIES
from tests.support.optimizing import planned_for

CASES = [
    ("muon", "zero3"),
    ("muon", "fsdp_megatron"),
    ("galore", "zero3"),
    ("galore", "fsdp_megatron"),
    ("galore", "megatron"),
    ("adamw-8bit", "fsdp_megatron"),
]


def _planned(kind: str, strategy: str, dp: int = 2, batches: int = 1) -> Plan:
    """On dp × 2 devices, for so many times the batch of the family."""
    _, inputs = FAMILIES["llama"].inputs(0)
    plan = autopar.plan(
        FAMILIES["llama"].build(),
        autopar.Mesh({"dp": dp, "tp": 2}, hardware="h100"),
        {name: torch.cat([each] * batches) for name, each in inputs.items()},
        strategy=strategy,
        optimizer=planned_for(kind, 8),
    )
    assert isinstance(plan, Plan)
    return plan


def _moved_by_the_optimizer(plan: Plan) -> list[tuple[str, str, int]]:
    rows = [row for row in plan.rows if row.kind == "parameter"]
    return sorted((each.collective, each.axis, each.num_bytes) for row in rows for each in row.transfers)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "strategy"), CASES)
def test_formulas_and_timelines_have_the_step_of_the_optimizer(kind: str, strategy: str) -> None:
    plan = _planned(kind, strategy)
    again = plan.reprice()
    assert again.seconds == pytest.approx(plan.seconds, rel=1e-9)
    assert again.traffic == {key: count for key, count in plan.traffic.items() if count}
    assert again.memory["memory"] == plan.peak_bytes
    assert plan.verify().ok
    moved = _moved_by_the_optimizer(plan)
    tasks = [each.task for each in plan.timeline().events if each.task.phase == "optimizer" and each.task.axis]
    assert bool(moved) is (kind != "adamw-8bit") and moved == sorted(
        (each.name, each.axis, each.num_bytes) for each in tasks
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "strategy"), [("galore", "fsdp_megatron"), ("muon", "zero3")])
def test_another_mesh_and_batch_cost_what_a_plan_for_them_costs(kind: str, strategy: str) -> None:
    plan = _planned(kind, strategy)
    other = _planned(kind, strategy, dp=4, batches=2)
    again = plan.reprice(dp=4, batch=2 * BATCH)
    assert again.seconds - plan.host_seconds == pytest.approx(other.device_seconds, rel=1e-9)
    assert again.traffic == {key: count for key, count in other.traffic.items() if count}


def test_a_plan_with_them_is_saved_and_explained(tmp_path: Path) -> None:
    plan = _planned("galore", "fsdp_megatron")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert _moved_by_the_optimizer(loaded) == _moved_by_the_optimizer(plan)
    loaded.to_trace(tmp_path / "trace.json")
    name = "p_model_layers_0_mlp_up_proj_weight"
    found = plan.explain(name)
    assert found.optimizer_seconds > 0 and {each.collective for each in found.own} >= {"reduce_scatter", "all_gather"}
    row = next(row for row in plan.rows if row.name == name)
    assert found.optimizer_seconds + sum(each.seconds for each in found.own) == pytest.approx(row.seconds)


@pytest.mark.slow
def test_galore_and_muon_hold_less_than_adamw() -> None:
    uses = {kind: _planned(kind, "zero3").memory for kind in ("adamw", "muon", "galore")}
    held = {kind: use.parts["optimizer"] for kind, use in uses.items() if use is not None}
    assert held["galore"] < held["adamw"] and held["muon"] < held["adamw"]


@pytest.mark.slow
def test_a_stage_of_a_pipeline_has_the_state_of_its_matrices() -> None:
    _, inputs = FAMILIES["llama"].inputs(0)

    def held(kind: str) -> list[float]:
        plan = autopar.plan(
            FAMILIES["llama"].build(),
            autopar.Mesh({"pp": 2, "dp": 2}, hardware="h100"),
            inputs,
            strategy="zero3",
            optimizer=kind,
            microbatches=2,
        )
        return [stage.plan.memory.parts["optimizer"] for stage in plan.stages]  # pyright: ignore[reportAttributeAccessIssue]

    muon, adamw = held("muon"), held("adamw")
    assert [mine < other for mine, other in zip(muon, adamw, strict=True)] == [True, True, False, False]  # two layers


def test_the_command_line_plans_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "tiny-gpt2", "--mesh", "dp=2", "--optimizer", "muon", "--strategy", "zero3"])
    assert "optimizer" in capsys.readouterr().out
