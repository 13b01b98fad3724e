"""Text that fits the terminal."""

from __future__ import annotations

import pytest

from autopar.console.tables import Fact, fact_lines


def test_a_list_that_is_too_long_for_a_line_is_broken_behind_a_comma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    numbers = ",".join(str(number) for number in range(100, 160))
    lines = fact_lines([Fact("recomputed", f"in decoder.layers.{numbers}")])
    assert len(lines) > 3 and all(line.endswith(",") for line in lines[1:-1])
    assert "".join(line.split()[-1] for line in lines).endswith(numbers)
