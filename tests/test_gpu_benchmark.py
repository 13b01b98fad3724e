"""`make gpu` on a CPU: the Llama that is written by hand, what the parts say, and what becomes of one that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
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
from benchmarks.gpu.setting import Draft, Finding, Row, Setting
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

    def run(part: Part, setting: Setting, folder: Path, left_s: float, before: Finding | None) -> Outcome:
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


def test_cases_after_one_that_ends_the_ranks_run_on_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_ranks(world: Any, work: Any, arguments: Any) -> None:
        cases, _, draft = arguments
        draft.add(Row(cases[0].name, "as one", reached=True))
        if cases == CASES:
            raise RuntimeError("rank 1 failed")

    monkeypatch.setattr(gpu_ranks, "on_ranks", on_ranks)
    rows = gpu_ranks.trained_as_one(CASES, 2)(SMALL, Draft(tmp_path / "found.json")).rows
    assert [(row.name, row.found, row.reached) for row in rows] == [
        ("one", "as one", True),
        ("two", "RuntimeError: rank 1 failed", False),
        ("three", "as one", True),
    ]


def test_finished_cases_of_a_part_outlive_its_time_and_a_resumed_run_measures_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Draft(tmp_path / "case-one.json").add(Row("one", "as one", reached=True))
    script = f"cd {tmp_path} && mv case-one.json ranks-2.json && echo in case two && exec sleep 60"

    def wait(process: Any, seconds: float | None = None) -> int:  # the time is over once case two has begun
        if seconds is None:
            return waited(process)
        while "in case two" not in (tmp_path / "ranks-2.log").read_text():
            time.sleep(0.05)
        raise subprocess.TimeoutExpired("", seconds)

    waited = subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    outcome = of_command(_part("ranks-2"), ["sh", "-c", script], tmp_path / "ranks-2.json", 60.0)
    monkeypatch.undo()
    assert outcome.finding == Finding((Row("one", "as one", reached=True),))
    assert outcome.reason.splitlines() == ["did not end in its 60 s", "in case two"]
    assert results.verdict([outcome]) == "1 of 1 goals met; in part: ranks-2" and not results.is_whole([outcome])

    known = {"device": "NVIDIA H200"}
    text = results.write(tmp_path, known, [outcome]).read_text()
    assert "as one" in text and "more was not measured; did not end in its 60 s" in text

    def measure(part: Part, command: Any, output: Path, box_s: float) -> Outcome:
        monkeypatch.setattr(gpu_ranks, "on_ranks", on_ranks)
        return Outcome(part.name, part.about, 1.0, gpu_ranks.trained_as_one(CASES, 2)(SMALL, Draft(output)))

    def on_ranks(world: Any, work: Any, arguments: Any) -> None:
        for case in arguments[0]:
            arguments[-1].add(Row(case.name, "later", reached=True))

    monkeypatch.setattr(parts, "of_command", measure)
    (whole,) = run_all(SMALL, [_part("ranks-2")], tmp_path, 60.0, results.latest(tmp_path, known))
    assert whole.finding is not None and not whole.reason
    assert [(row.name, row.found) for row in whole.finding.rows] == [
        ("one", "as one"),
        ("two", "later"),
        ("three", "later"),
    ]
    (left,) = run_all(SMALL, [_part("ranks-2")], tmp_path, 0.0, {outcome.part: outcome})
    assert left.finding == outcome.finding, "what was found stays where no time is left to go on"


def test_tests_that_are_over_count_though_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "test_on_the_device.py"
    module.write_text(
        "import pytest\n@pytest.mark.cuda\n@pytest.mark.parametrize('n', range(3))\ndef test_it(n): assert n != 1\n"
    )
    monkeypatch.setattr(parts, "CUDA_TESTS", str(module))
    draft = Draft(tmp_path / "tests.json")
    total, failed = _part("tests").measure(Setting(), draft).rows
    assert "1 failed, 2 passed" in total.found and total.reached is False
    assert "test_it[1]" in failed.found
    (so_far,) = draft.read().rows
    assert so_far == Row("tests so far", "2 passed, 1 failed", "all pass")


def _difference(wrong: bool) -> list[Row]:
    """Rows of a case on these ranks; `wrong`: its losses are those of other weights."""
    case = Case("messages", {"pp": 2}, {"schedule": "1f1b", "microbatches": 2})
    with tempfile.TemporaryDirectory() as folder:
        draft = Draft(Path(folder, "rows.json"))
        if wrong:
            gpu_ranks.CLOSE = -1.0
        gpu_ranks._run([case], "cpu", draft)
        return list(draft.read().rows)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_ranks_of_a_pipeline_train_as_one_process(wrong: bool, ranks: Ranks) -> None:
    (row,), _ = ranks.run(_difference, wrong)
    assert row.reached is not wrong


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
