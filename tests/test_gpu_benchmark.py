"""`make gpu` on a CPU: the Llama that is written by hand, what the parts say, and what becomes of one that fails."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import parts, results, steps
from benchmarks.gpu import ranks as gpu_ranks
from benchmarks.gpu.llama_by_hand import LlamaByHand
from benchmarks.gpu.parts import CALIBRATION, PARTS, Outcome, Part, of_command, run_all
from benchmarks.gpu.ranks import Case
from benchmarks.gpu.setting import Finding, Row, Setting
from tests.support.ranks import Ranks, mesh

SMALL = Setting("cpu", small=True, profile="cpu")
DP, TP = 2, 2
CASES = [Case(name, {"dp": 2}) for name in ("one", "two", "three")]


def _trained_by_hand(config: Any, weights: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's loss, and its parts of the gradients."""
    axes = mesh((DP, TP), ("dp", "tp"))
    model = LlamaByHand(config, axes.get_group("tp"), axes.get_group("dp"))
    model.load_parts(weights)
    model.reduce_gradients()
    loss = model(*(x.chunk(DP)[axes.get_local_rank("dp")] for x in SMALL.batch(DP)))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss, {"rank": torch.tensor(dist.get_rank(axes.get_group("tp"))), **gradients}


@pytest.mark.slow
def test_the_llama_by_hand_is_that_of_transformers(ranks: Ranks) -> None:
    whole = SMALL.whole_model(2)
    expected = whole(*SMALL.batch(DP))
    expected.backward()
    gradients: dict[str, Any] = {name.rpartition("decoder.")[2]: p.grad for name, p in whole.named_parameters()}
    for loss, found in ranks.run(_trained_by_hand, SMALL.config(2), whole.state_dict(), world_size=DP * TP):
        assert_close(loss, expected.detach())
        number = int(found.pop("rank"))
        assert len(found) == len(gradients)
        for name, theirs in gradients.items():
            mine = found[name.replace("model.", "").replace("self_attn.", "").replace("mlp.", "")]
            for dim, (size, part) in enumerate(zip(theirs.shape, mine.shape, strict=True)):
                theirs = theirs.narrow(dim, number * part, part) if size != part else theirs
            assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_step_is_measured_next_to_the_one_by_hand() -> None:
    finding = steps.compared(SMALL, {"dp": 8, "tp": 8}, compiled=False)
    rows = {row.name: row for row in finding.rows}
    assert rows["losses apart"].reached and rows["memory beside the plan's"].reached
    assert rows["speed beside by hand"].reached is None, "tiny shapes say nothing"
    assert not dist.is_initialized()


@pytest.mark.parametrize(("ours_s", "reached"), [(1.0, True), (1.02, True), (1.05, False)])
def test_a_step_may_take_a_little_longer_than_by_hand(ours_s: float, reached: bool) -> None:
    plan: Any = type("Plan", (), {"seconds": 0.5, "device_seconds": 0.5, "rows": (), "peak_bytes": 100})
    speed, _, losses, memory = steps.found(Setting(), plan, (ours_s, 1.0), (120, 90), [3.0, 3.0], False).rows
    assert (speed.reached, losses.reached, memory.reached) == (reached, True, False)
    assert memory.found == "1.200 of 100 B; by hand 90 B"


def _part(name: str = "tp8") -> Part:
    return next(part for part in PARTS if part.name == name)


def test_a_part_that_hangs_is_ended_in_its_time(tmp_path: Path) -> None:
    hanging = ["sh", "-c", "echo $$; exec sleep 60"]  # which, unlike Python, has begun within a second on any machine
    outcome = of_command(_part(), hanging, tmp_path / "found.json", 1.0)
    assert outcome.finding is None and outcome.seconds < 30
    reason, process = outcome.reason.splitlines()
    assert reason == "did not end in its 1 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int(process), 0)


def test_a_part_that_fails_says_why(tmp_path: Path) -> None:
    outcome = of_command(_part(), [sys.executable, "-c", "raise SystemExit('no memory')"], tmp_path / "found.json", 60)
    assert outcome.reason == "failed with status 1\nno memory"


def test_the_parts_go_on_after_one_that_fails_and_predict_with_the_measured_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def run(part: Part, setting: Setting, folder: Path, left_s: float) -> Outcome:
        seen.append((part.name, Path(setting.profile).name))
        finding = Finding(data={"name": "measured"}) if part.name == CALIBRATION else None
        return Outcome(part.name, part.about, 1.0, finding, "" if finding else "failed")

    monkeypatch.setattr(parts, "run", run)
    outcomes = run_all(SMALL, PARTS[:3], tmp_path, 60.0)
    assert seen == [(CALIBRATION, "cpu"), ("operations", "profile.json"), ("tp8", "profile.json")]
    assert json.loads((tmp_path / "profile.json").read_text()) == {"name": "measured"}
    assert results.verdict(outcomes) == "0 of 0 goals met; not measured: operations, tp8"
    assert not results.is_whole(outcomes)


def test_a_resumed_run_measures_what_the_last_results_of_the_device_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"date": "2026-11-23", "device": "NVIDIA H100"}
    finding = Finding((Row("speed", "1.0"),), {"name": "measured"})
    outcomes = [Outcome(CALIBRATION, "a", 1.0, finding), Outcome("tp8", "b", 2.0, None, "failed")]
    results.write(tmp_path, known, outcomes)
    before = results.latest(tmp_path, known)
    assert before == {CALIBRATION: outcomes[0]}
    assert not results.latest(tmp_path, {**known, "device": "NVIDIA H200"})
    assert not results.latest(tmp_path, {**known, "sizes": "tiny"})
    monkeypatch.setattr(parts, "run", lambda part, setting, *_: Outcome(part.name, setting.profile, 1.0))
    calibrated, other = run_all(SMALL, [_part(CALIBRATION), _part()], tmp_path, 60.0, before)
    assert calibrated is before[CALIBRATION]
    assert Path(other.about).name == "profile.json", "the profile of the results is predicted with"


def test_cases_after_one_that_ends_the_ranks_are_listed_as_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_ranks(world: Any, work: Any, arguments: Any) -> None:
        *_, log = arguments
        log.write_text(json.dumps([{"name": CASES[0].name, "found": "", "goal": "", "reached": True}]))
        raise RuntimeError("rank 1 failed")

    monkeypatch.setattr(gpu_ranks, "on_ranks", on_ranks)
    rows = gpu_ranks.trained_as_one(CASES, 2)(SMALL).rows
    assert [(row.name, row.reached) for row in rows] == list(
        zip([c.name for c in CASES], [True, False, False], strict=True)
    )
    assert "rank 1 failed" in rows[1].found and "not run" in rows[2].found


def _difference(wrong: bool) -> list[Any]:
    """Rows of a case on these ranks; `wrong`: its losses are those of other weights."""
    case = Case("messages", {"pp": 2}, {"schedule": "1f1b", "microbatches": 2})
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "rows.json")
        if wrong:
            gpu_ranks.CLOSE = -1.0
        gpu_ranks._run([case], "cpu", log)
        return json.loads(log.read_text()) if dist.get_rank() == 0 else []


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_ranks_of_a_pipeline_train_as_one_process(wrong: bool, ranks: Ranks) -> None:
    (row,), _ = ranks.run(_difference, wrong)
    assert row["reached"] is not wrong


def test_parts_for_which_no_time_is_left_are_left_out(tmp_path: Path) -> None:
    (outcome,) = run_all(SMALL, [_part()], tmp_path, 0.0)
    assert outcome.reason == "left out: the time for all parts is over"


def test_results_have_hardware_date_goals_and_reasons(tmp_path: Path) -> None:
    known = {"date": "2026-11-23", "device": "NVIDIA H100 80GB HBM3"}
    rows = Row("speed", "0.96", "≥ 0.97", False), Row("memory", "1.01", "1 ± 0.1", True), Row("step", "1.3")
    outcomes = [Outcome("tp8", "a step", 7.0, Finding(rows, {"x": 1})), Outcome("tests", "on it", 9.0, None, "failed")]
    path = results.write(tmp_path, known, outcomes)
    assert path.name == "gpu-nvidia-h100-80gb-hbm3-tp8-tests.txt"
    text = path.read_text()
    assert "device: NVIDIA H100 80GB HBM3" in text and "nothing was measured; failed" in text
    assert [line.split() for line in text.splitlines() if line.startswith("speed")] == [
        ["speed", "0.96", "≥", "0.97", "MISSED"]
    ]
    assert text.splitlines()[-1] == "1 of 2 goals met; not measured: tests"
    assert json.loads(path.with_suffix(".json").read_text())["parts"][0]["finding"]["data"] == {"x": 1}


def test_a_run_of_all_parts_replaces_the_current_results(tmp_path: Path) -> None:
    outcomes = [Outcome(part.name, part.about, 1.0, None, "failed") for part in PARTS]
    paths = [results.write(tmp_path, {"device": "NVIDIA H200"}, outcomes) for _ in range(2)]
    assert {path.name for path in paths} == {"gpu-nvidia-h200.txt"}


def test_without_a_gpu_it_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"finds none here: nothing was measured. Run it on a machine with one"):
        command.main([])
    with pytest.raises(SystemExit, match="--device cpu needs --small"):
        command.main(["--device", "cpu"])


@pytest.mark.slow
def test_the_script_runs_on_a_cpu(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--small", "--results", str(tmp_path), "--seconds", "1200"]
    assert command.main(arguments) == 0
    (path,) = tmp_path.glob("*.txt")
    assert "tiny: a trial of the script" in path.read_text() and "nothing was measured" not in path.read_text()
