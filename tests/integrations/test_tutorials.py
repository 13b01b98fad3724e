"""The tutorials of docs/tutorials, followed: what their commands and cells print is what the pages show."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from doctest import ELLIPSIS, OutputChecker
from itertools import pairwise
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.docs.prose import blocks
from tests.integrations.scripts import environment
from tests.test_house import ROOT

TUTORIALS = ROOT / "docs" / "tutorials"


def _assert_shows(expected: str, found: str) -> None:
    """Compare without spaces at the ends of lines; a line of the page with … alone stands for any number of lines."""
    expected, found = (re.sub(r" +$", "", text, flags=re.M).strip("\n") for text in (expected, found))
    pattern = re.sub(r"^…$", "...", expected, flags=re.M)
    assert OutputChecker().check_output(pattern + "\n", found + "\n", ELLIPSIS), found


def test_the_notebook_is_that_of_its_page() -> None:
    made = runpy.run_path(str(TUTORIALS / "notebook.py"))["notebook"]((TUTORIALS / "first-plan.md").read_text())
    assert made == (TUTORIALS / "first-plan.ipynb").read_text(), "run: python docs/tutorials/notebook.py"


@pytest.mark.slow
def test_the_cells_of_the_notebook_show_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cells = nbformat.read(TUTORIALS / "first-plan.ipynb", as_version=4)
    nbclient.NotebookClient(cells, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    found = ["".join(each.get("text", "") for each in cell.outputs) for cell in cells.cells if cell.cell_type == "code"]
    untitled = [each for each in blocks((TUTORIALS / "first-plan.md").read_text()) if not each.title]
    shown: list[str] = []
    for (before, *_), (kind, _, text) in pairwise([("", "", ""), *untitled]):
        if kind == "python":
            shown.append("")
        elif (before, kind) == ("python", "text"):
            shown[-1] = text
    assert len(shown) == len(found) and sum(map(bool, shown)) >= 5
    for expected, printed in zip(shown, found, strict=True):
        _assert_shows(expected, printed)


@pytest.mark.slow  # each page trains on several ranks, or plans a large model
@pytest.mark.parametrize("page", sorted(each.stem for each in TUTORIALS.glob("*.md") if each.stem != "index"))
def test_the_commands_of_a_tutorial_print_what_it_shows(page: str, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    printed, checked = "", 0
    for kind, title, text in blocks((TUTORIALS / f"{page}.md").read_text()):
        if title:
            (tmp_path / title).write_text(text)
        elif kind == "sh":
            done = subprocess.run(
                ["bash", "-ec", text.replace("autopar plan ", "autopar plan --time-limit 1000 ")],  # on a busy machine
                cwd=tmp_path,
                env={**environment(), "PATH": path, "COLUMNS": "100"},
                capture_output=True,
                text=True,
                timeout=1200,
            )
            assert done.returncode == 0, done.stderr
            printed = done.stdout
        elif kind == "text" and printed:
            _assert_shows(text, printed)
            printed, checked = "", checked + 1
    assert checked > 0
