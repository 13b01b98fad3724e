"""docs/how-to/pipelines.md: its code runs, and its table is that of the simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.planning.pipeline.schedules.choice import SEVERAL_STAGES
from autopar.planning.pipeline.schedules.schedule import NAMES, Schedule
from autopar.planning.pipeline.schedules.simulation import StageSeconds, simulate
from tests.docs.prose import blocks
from tests.planning.pipeline.test_planner import Layered, inputs
from tests.support.ranks import Ranks

DOCS = Path(__file__).parents[3] / "docs" / "how-to" / "pipelines.md"
CODE = [each.text for each in blocks(DOCS.read_text(encoding="utf-8")) if each.language == "python"]


def run(code: str, **names: Any) -> dict[str, Any]:
    """The names after the code, which finds those that its reader knows of."""
    ids, labels = inputs()
    known = {"autopar": autopar, "torch": torch, "init_device_mesh": init_device_mesh}
    found = {**known, "model": Layered(2), "ids": ids, "labels": labels, **names}
    exec(code, found)
    return found


def _trained() -> tuple[str, float, float]:
    found = run(CODE[0])
    after_each = run(CODE[3], mesh=found["mesh"], again=Layered(2))["loss"]
    return str(found["model"].plan), float(found["loss"]), float(after_each)


def test_the_training_step_runs(ranks: Ranks) -> None:
    (text, *losses), (_, *others) = ranks.run(_trained)
    assert "1f1b, m = 4 micro-batches, 2 stages on 2 ranks of axis pp" in text
    assert losses == others and min(losses) > 0


def test_plans_are_made_printed_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    named, chosen = CODE[1:3]
    plan = run(named)["plan"]
    assert plan.stages[1].blocks[-1] == "head" and plan.mesh.hardware == "h100"
    plan = run(chosen, mesh=plan.mesh)["plan"]
    assert str(plan) in capsys.readouterr().out and autopar.PipelinePlan.load("plan.json") == plan
    assert {each.name for each in tmp_path.iterdir()} == {"pipeline.html", "pipeline.json", "plan.json"}


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_schedules_is_simulated(name: str) -> None:
    chunks = 2 if name in SEVERAL_STAGES else 1
    schedule = Schedule(name, 4, 8, chunks)
    bubble = simulate(schedule, [StageSeconds(1.0, 1.0, 1.0)] * schedule.num_stages).bubble
    resident = max(sum(map(schedule.in_flight, schedule.stages_of(rank))) for rank in range(4)) / chunks
    row = next(line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{name}` |"))
    assert [cell.strip() for cell in row.split("|")[3:5]] == [f"{bubble:.1%}", f"{resident:g}"]
