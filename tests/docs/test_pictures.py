"""Pictures of the documentation: the script draws them, the committed ones are there, and pages show them."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.test_house import ROOT

pytest.importorskip("matplotlib")

from benchmarks.pictures.__main__ import FOLDER, PICTURES, main


def test_committed_pictures_are_those_that_the_script_draws() -> None:
    assert sorted(file.name for file in FOLDER.glob("*.svg")) == sorted(f"{name}.svg" for name in PICTURES)


def test_each_picture_is_shown_by_a_page() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert [name for name in PICTURES if f"images/{name}.svg" not in text] == []


@pytest.mark.parametrize("name", ["predicted-and-measured", pytest.param("layouts-ulysses", marks=pytest.mark.slow)])
def test_a_picture_is_drawn_the_same_again(name: str, tmp_path: Path) -> None:
    main([name, "--folder", str(tmp_path)])
    drawn = (tmp_path / f"{name}.svg").read_text()
    assert ElementTree.fromstring(drawn).tag.endswith("svg") and "<dc:date>" not in drawn
    texts = [re.findall(r"<text [^>]*>([^<]+)", each) for each in (drawn, (FOLDER / f"{name}.svg").read_text())]
    assert texts[0] == texts[1] and len(texts[0]) > 10


def test_a_name_that_is_no_picture_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["layouts"])
    assert "no picture layouts; there are layouts-data-parallel, " in capsys.readouterr().err
