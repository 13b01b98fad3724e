"""The demonstration: losses like one process, bytes as predicted, and a rank that fails ends it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from autopar.cli import main
from autopar.ir.sharding.mesh import Mesh
from autopar.runtime.ranks.launch import RankError
from autopar.tools import demo
from autopar.tools.demo import Measured

MEASURED = Measured(
    losses=[2.0, 1.0],
    seconds=[0.2, 0.1],
    predicted=[("all_reduce", "dp", 2000)],
    counted=[("all_reduce", "dp", 2000)],
    predicted_peak=10,
    state=[4, 4],
    process=[100, 200],
)


def test_the_report_accepts_equal_losses_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo._report(MEASURED, [2.0, 1.0005], 0.3)
    out = capsys.readouterr().out
    assert "largest relative difference 5.0e-04 in 2 steps, tolerance 0.001" in out
    assert "100 B to 200 B" in out
    assert "1,000            1,000" in out


def test_the_report_refuses_losses_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    assert not demo._report(MEASURED, [2.0, 1.01], 0.3)
    assert "losses      DIFFER" in capsys.readouterr().out


def test_the_report_refuses_losses_that_are_no_numbers() -> None:
    assert not demo._report(dataclasses.replace(MEASURED, losses=[2.0, float("nan")]), [2.0, 1.0], 0.3)
    assert not demo._report(dataclasses.replace(MEASURED, losses=[float("nan"), 1.0]), [2.0, 1.0], 0.3)


def test_the_report_refuses_bytes_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    counted = [*MEASURED.counted, ("all_gather", "tp", 8)]
    assert not demo._report(dataclasses.replace(MEASURED, counted=counted), [2.0, 1.0], 0.3)
    out = capsys.readouterr().out
    assert "NOT AS PREDICTED" in out
    assert "all_gather" in out


def test_a_short_demo_trains_like_one_process() -> None:
    # In a process of its own: ranks print to the output that the fork server was started with, maybe by another test.
    code = "import sys; from autopar.cli import main; sys.exit(main(sys.argv[1:]))"
    options = ["demo", "--mesh", "tp=2", "--steps", "2", "--layers", "1", "--sequence", "16"]
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "plan for the mesh tp=2" in out
    assert "losses      agree" in out
    assert "bytes       as predicted" in out


@pytest.mark.slow
def test_an_error_of_autopar_on_a_rank_ends_the_demo_with_its_message() -> None:
    settings = demo.DemoRun(Mesh({"dp": 2}), steps=1, layers=1, sequence=5_000_000)
    with pytest.raises(RankError, match=r"^rank \d of 2 failed: a text of \d+ bytes has no piece of 5000001"):
        demo._start(settings, [1.0])


@pytest.mark.slow
def test_a_rank_that_breaks_ends_the_others_and_shows_where() -> None:
    settings = demo.DemoRun(Mesh({"dp": 2}), steps=1, layers=1, sequence=16)
    losses_too_few_for_rank_0_to_print: list[float] = []
    with pytest.raises(RankError, match=r"(?s)^rank 0 of 2 failed: .*IndexError"):
        demo._start(settings, losses_too_few_for_rank_0_to_print)


@pytest.mark.slow
def test_the_whole_demo_trains_like_one_process(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    assert "losses      agree" in capfd.readouterr().out
