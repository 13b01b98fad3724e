"""Generated parts of pages are those of the code, and name all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import autopar
from autopar.compiler.arguments import GROUPS
from autopar.costs.hardware.load import known_profiles
from autopar.strategies.presets import PRESETS
from docs.site.reference import DOCS, PART, ROOT, commands, pages, regenerated

REFERENCE = DOCS / "reference"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_is_up_to_date(page: Path) -> None:
    assert regenerated(page) == page.read_text(), f"{page.name} is out of date; run make reference."


def parts(page: str, kind: str) -> set[str]:
    """Return the arguments of the generated parts of a kind."""
    found = PART.findall((REFERENCE / page).read_text())
    return {each for _, own, arguments, _ in found if own == kind for each in arguments.split()}


def test_nothing_is_left_out() -> None:
    public = {f"autopar.{name}" for name in autopar.__all__ if name != "__version__"}
    assert not public - parts("api.md", "names")
    assert parts("options.md", "options") == {each.__name__ for each in GROUPS.values()}
    assert parts("strategies.md", "preset") == set(PRESETS)
    assert parts("hardware-profiles.md", "profile") == set(known_profiles())
    assert parts("command-line.md", "command") == set(commands())


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {autopar.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_folder_has_an_index_of_its_pages() -> None:
    home = (DOCS / "index.md").read_text()
    folders = {page.parent for page in DOCS.glob("*/*.md")}
    assert not [folder.name for folder in folders if f"({folder.name}/index.md)" not in home]
    unlisted = [
        page.name
        for folder in folders
        for page in folder.glob("*.md")
        if page.name != "index.md" and f"({page.name})" not in (folder / "index.md").read_text()
    ]
    assert not unlisted, f"{unlisted} are in no index; run make reference."


def test_a_change_of_the_code_changes_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Text\n<!-- generated: options Search -->\nold\n<!-- end -->\nmore\n")
    made = regenerated(page)
    assert made.startswith("Text\n") and made.endswith("<!-- end -->\nmore\n") and "\nold\n" not in made
    assert "| `time_limit` | seconds of at least 0 | `120.0` | `--time-limit` | Seconds, capture included" in made
