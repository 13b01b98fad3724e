"""Pipelines on the command line: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.cli import main
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.schedules.schedule import Schedule

HERE = "tests.planning.pipeline.test_planner"


def test_the_command_line_plans_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {option: str(tmp_path / option) for option in ("save", "html", "trace")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    ask = ["plan", f"{HERE}:layered", "--mesh", "pp=2", "--schedule", "zbv", "--microbatches", "4", *options]
    assert main(ask) == 0
    out = capsys.readouterr().out
    assert "zbv, m = 4 micro-batches, 4 stages on 2 ranks of axis pp, 2 on each" in out
    assert all(f"saved in {path}" in out for path in files.values())
    loaded = PipelinePlan.load(files["save"])
    assert str(loaded) in out and loaded.schedule == Schedule("zbv", 2, 4, 2)
    assert "<svg" in Path(files["html"]).read_text() and json.loads(Path(files["trace"]).read_text())


def test_the_command_line_takes_another_axis_for_the_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["plan", f"{HERE}:layered", "--mesh", "deep=2,tp=2", "--pipeline", "deep", "--microbatches", "4"]
    assert main(ask) == 0
    assert "2 ranks of axis deep" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "--mesh", "tp=2", "--pipeline", "pp"], "--pipeline pp is no axis of the mesh"),
        (["plan", "--mesh", "pp=2", "--microbatches", "5"], "does not divide into 5 micro-batches"),
        (["plan", "--mesh", "tp=2", "--schedule", "zbv"], "--schedule zbv is given, but no axis"),
        (["plan", "--mesh", "auto", "--devices", "2", "--schedule", "1f1b"], "With --mesh auto, give --pipeline pp."),
        (
            ["explain", "--mesh", "pp=2", "--microbatches", "4", "head"],
            "every stage has its own; plan without",
        ),
    ],
    ids=str,
)
def test_the_command_line_refuses_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *options = words
    assert main([command, f"{HERE}:layered", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("autopar: ") and message in error and error.count("\n") == 1
