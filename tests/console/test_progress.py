from __future__ import annotations

import io
import sys
import time

import pytest

from autopar.console import progress as shown
from autopar.console.progress import counter, progress, stages


class Terminal(io.StringIO):
    """Text that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def _terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as stderr; no fixture, for pytest sets stderr anew between its fixtures and the test."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    with stages("planning", 2) as step:
        step("capture")
        step("solve")
    assert list(progress(range(3), "pairs")) == [0, 1, 2]
    assert terminal.getvalue() == ""


def test_long_work_shows_the_stage_it_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    monkeypatch.setattr(shown, "DELAY_SECONDS", 1e-9)
    monkeypatch.setattr(shown, "MIN_INTERVAL_SECONDS", 0.0)
    with stages("planning", 2) as step:
        step("capture")
        step("solve")
    text = terminal.getvalue()
    assert "planning: step 2 of 2, solve" in text


def test_the_seconds_go_on_while_one_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    for name in ("DELAY_SECONDS", "LATE_SECONDS", "TICK_SECONDS"):
        monkeypatch.setattr(shown, name, 0.01)
    with stages("planning", 2) as step:
        step("capture")
        step("solve")
        before = terminal.getvalue()
        time.sleep(0.3)
        drawn = terminal.getvalue().removeprefix(before)
    assert drawn.count("step 2 of 2, solve") > 2


def test_a_file_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "DELAY_SECONDS", 1e-9)
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    with stages("planning", 1) as step:
        step("capture")
    list(progress(range(3), "pairs"))
    assert file.getvalue() == ""


def test_an_error_in_a_stage_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    _terminal(monkeypatch)
    with pytest.raises(ValueError, match="inside"), stages("planning", 1):
        raise ValueError("inside")


def test_work_without_an_end_shows_what_is_stated_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    monkeypatch.setattr(shown, "DELAY_SECONDS", 1e-9)
    monkeypatch.setattr(shown, "MIN_INTERVAL_SECONDS", 0.0)
    say = counter("candidates")
    for number in range(3):
        say(f"{number} done, best step 2.00 s")
    assert "candidates, 2 done, best step 2.00 s [00:00]" in terminal.getvalue()
