"""The benchmark of planning: which rows it measures, what it measures of one, and what it says where it cannot."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.capture.export import capture
from autopar.ir.program.program import TensorInfo, info_of
from benchmarks import plan_speed
from benchmarks.plan_row import Measured, Row, measure
from benchmarks.plan_speed import GROUPS, HEADERS, Line, main, planned, selected
from benchmarks.unet import unet
from benchmarks.wide_models import wide_model

SMALL = Row("demo", (2, 2), 4, 16, layers=1, hardware="cpu")
FOUND = Measured(1.0, 2.0, 3.0, 6.5, 6.0, 10**9, 99, step=0.5, gap=0.0, peak_bytes=10**10, solver="elimination")


def test_without_a_choice_all_rows_are_measured() -> None:
    assert selected((), quick=False) == GROUPS


def test_a_group_or_a_model_can_be_chosen() -> None:
    chosen = selected(("devices", "vit-h"), quick=False)
    assert chosen == {"models": tuple(r for r in GROUPS["models"] if r.model == "vit-h"), "devices": GROUPS["devices"]}


def test_quick_takes_few_layers_and_leaves_the_sweeps_out() -> None:
    chosen = selected((), quick=True)
    assert list(chosen) == ["models"]
    assert {row.layers for row in chosen["models"]} == {plan_speed.QUICK_LAYERS}
    assert [row.model for row in chosen["models"]] == [row.model for row in GROUPS["models"]]


def test_a_name_that_is_neither_group_nor_model_ends_with_what_there_is() -> None:
    with pytest.raises(SystemExit, match=r"--only llama: no such group or model; there are models, .*llama-8b"):
        selected(("llama",), quick=False)


def test_a_row_measures_the_stages_of_a_plan() -> None:
    found = measure(SMALL)
    assert found.capture and found.build and found.solve
    assert found.capture + found.build + found.solve <= found.total
    assert found.cpu_of_planning and 0 < found.cpu_of_planning < found.cpu
    assert found.nodes > 50 and found.rss_bytes > 10**8
    assert found.step and found.peak_bytes and found.gap == 0 and found.solver


@pytest.mark.slow
def test_rows_of_pipelines_and_of_searched_meshes_are_measured() -> None:
    staged = measure(replace(SMALL, mesh=(2, 2, 1), layers=2, schedule="1f1b", microbatches=4))
    searched = measure(replace(SMALL, mesh=(4,), is_searched=True))
    assert staged.step and staged.peak_bytes and staged.solver == "1f1b" and staged.solve is None
    assert staged.gap is not None and 0 <= staged.gap < 0.1
    assert searched.step and searched.gap == 0 and searched.solve
    assert Line(replace(SMALL, mesh=(4,), is_searched=True), searched).cells()[1] == "4 devices"


def test_a_row_with_a_limit_of_its_own_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_speed, "planned", lambda row: Line(row, FOUND))
    assert [line.row for line in plan_speed.lines(GROUPS["limits"], (0.9,))] == list(GROUPS["limits"])


def test_a_limit_is_one_on_tensors() -> None:
    row = Row("tiny-mlp", (2,), 8, 64)
    free = measure(row).peak_bytes
    assert free is not None
    within = measure(replace(row, memory=free - 1))
    assert within.peak_bytes is not None and within.peak_bytes < free


@pytest.mark.slow
def test_a_row_that_no_plan_satisfies_is_measured_as_such() -> None:
    found = measure(Row("demo", (2, 2), 4, 16, layers=1, memory=1, hardware="cpu"))
    assert found.solver == "infeasible" and found.step is None and found.solve


def test_a_row_survives_the_way_to_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert Row.from_json(command[-1]) == SMALL
        return subprocess.CompletedProcess(command, 0, "a warning\n" + json.dumps(asdict(FOUND)) + "\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert planned(SMALL) == Line(SMALL, FOUND)


def test_a_process_that_fails_leaves_its_last_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "Traceback …\nKeyError: 'x'\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert planned(SMALL).cells()[-1] == "failed with status 1: KeyError: 'x'"


@pytest.mark.parametrize("measured", [None, FOUND, Measured(1, 2, 3, 6, 6, 10**9, 99, solver="infeasible")])
def test_every_line_fills_every_column(measured: Measured | None) -> None:
    assert len(Line(SMALL, measured).cells()) == len(HEADERS)


def test_the_limit_is_a_share_of_what_the_free_plan_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = []
    monkeypatch.setattr(plan_speed, "planned", lambda row: limits.append(row.memory) or Line(row, FOUND))
    main(["--only", "vit-h", "--memory", "0.5"])
    assert limits == [None, 5 * 10**9]
    printed = capsys.readouterr().out
    assert "AutoParallel was skipped: git clone" in printed and "vit-h" in printed
    main(["--only", "vit-h", "--memory", "0"])
    assert limits == [None, 5 * 10**9, None]


def test_small_models_have_several_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    monkeypatch.setattr(plan_speed, "planned", lambda row: limits.append(row.memory) or Line(row, FOUND))
    main(["--only", "tiny-mlp"])
    assert limits == [None, 95 * 10**8, 9 * 10**9, 8 * 10**9, 7 * 10**9] * 2


def test_the_peer_needs_its_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plan_speed, "planned", lambda row: Line(row, FOUND))
    with pytest.raises(SystemExit, match=r"no autoparallel/api\.py there; give a checkout of"):
        main(["--only", "vit-h", "--peer", str(tmp_path)])


def test_the_peer_is_measured_from_its_sources(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "autoparallel").mkdir()
    (tmp_path / "autoparallel" / "api.py").touch()
    monkeypatch.setattr(plan_speed, "planned", lambda row: Line(row, FOUND))
    monkeypatch.setattr(plan_speed, "planned_by_peer", lambda row, path: Line(row, failure=f"from {path}"))
    main(["--only", "vit-h", "--peer", str(tmp_path)])
    assert f"from {tmp_path}" in capsys.readouterr().out


def test_the_unet_gives_a_loss_and_joins_every_skip() -> None:
    model, inputs = unet(2, num_levels=2)
    program = capture(model, inputs, {})
    (loss,) = program.output
    assert isinstance(loss, torch.fx.Node) and info_of(loss) == TensorInfo((), torch.float32, requires_grad=True)
    joined = [node for node in program.graph.nodes if node.target is torch.ops.aten.cat.default]
    assert len(joined) == len(model.down) + len(model.narrow) + 1 == len(model.up)


def test_the_unrolled_scan_gives_a_loss() -> None:
    program = capture(*wide_model("rwkv-4-169m", 2, 2, 1), {})
    (loss,) = program.output
    assert isinstance(loss, torch.fx.Node) and info_of(loss) == TensorInfo((), torch.float32, requires_grad=True)


def test_every_layer_of_a_densenet_sees_all_before_it() -> None:
    model, inputs = wide_model("densenet-121", 2, 0, 1)
    joined = [node for node in capture(model, inputs, {}).graph.nodes if node.target is torch.ops.aten.cat.default]
    assert [len(node.args[0]) for node in joined] == [1, 2, 3, 4, 5, 6, 7]
