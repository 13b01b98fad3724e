"""The documents: their examples run, their links resolve, and they name the packages that there are."""

from __future__ import annotations

import contextlib
import doctest
import io
import math
import multiprocessing
import os
import re
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.docs.prose import blocks
from tests.support.ranks import PRELOADED
from tests.test_house import ORDER, ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
RUN = [page for page in PAGES if ">>> " in page.read_text()]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def _anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


SLOW = {"other-systems.md", "own-operations.md", "offload.md"}


@pytest.mark.parametrize(
    "page", [pytest.param(each, id=each.name, marks=pytest.mark.slow if each.name in SLOW else ()) for each in RUN]
)
def test_the_examples_of_a_page_run(page: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run_examples, args=(page, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(300), f"{page.name} took more than five minutes"
        num_failed, output = ours.recv()
        assert num_failed == 0, output
    finally:
        process.kill()
        process.join()


def _run_examples(page: Path, answer: Connection) -> None:
    """Run the examples of a page in this process, as they may add to the tables; send failures and output."""
    os.chdir(ROOT)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        num_failed, _ = doctest.testfile(str(page), module_relative=False)
    answer.send((num_failed, output.getvalue()))


def test_what_tells_how_to_add_something_is_run() -> None:
    assert {"architecture.md", "CONTRIBUTING.md"} <= {page.name for page in RUN}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_resolve(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M) if anchor else []
        assert not anchor or anchor in map(_anchor, headings), f"{page.name} links to {target}; no such heading"


def test_the_architecture_names_every_package() -> None:
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    listed = set(re.findall(r"`([\w.]+)`", " ".join(rows)))
    assert listed == {name for row in ORDER for name in row if name}
    folders = {file.parent.name for folder in (ROOT / "autopar").iterdir() for file in folder.glob("*/__init__.py")}
    assert not {name for name in folders if f"`{name}`" not in text}


def test_the_readme_is_what_a_newcomer_reads() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    for specified in ("make demo", "make test", "autopar.compile(", "docs/index.md"):
        assert any(specified in line for line in lines), f"README lacks {specified}"


@pytest.mark.slow
def test_the_script_of_the_readme_trains_under_torchrun(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    script = next(each.text for each in blocks(text) if each.text.startswith("import autopar"))
    command = re.search(r"`torchrun ([^`]+ train\.py)`", text)
    assert command
    (tmp_path / "train.py").write_text(script)
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command[1].split()]
    ran = subprocess.run(launched, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "plan for the mesh dp=2 × tp=1" in ran.stdout
    losses = re.findall(r" (\d\.\d{6,})$", ran.stdout, re.MULTILINE)
    assert len(losses) == 2 and losses[0] == losses[1] and float(losses[0]) < math.log(8)
