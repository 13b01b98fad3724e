"""Measured figures of the pages: `10.2<!--=published.mean_error-->` is the figure that docs/figures.toml names.

An entry of the table is a result file with a regular expression (its one group is the figure) or a key of a JSON file.
`scale` multiplies the file's figure: 100 where a file has a ratio and the page writes percents.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from decimal import ROUND_HALF_EVEN, ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.test_house import ROOT

RESULTS = ROOT / "benchmarks" / "results"
MARKER = re.compile(r"<!--=\s*([\w.-]+)\s*-->")
FIGURE = re.compile(r"([-−]?\d(?:[\d,]*\d)?(?:\.\d+)?)$")
FIELDS = {"file", "pattern", "key", "scale"}


def pages() -> dict[str, str]:
    """Return the texts that may hold figures, by path."""
    files = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
    files += sorted((ROOT / "docs").rglob("*.md"))
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


def named(table: Mapping[str, Any], above: str = "") -> dict[str, Mapping[str, Any]]:
    """Return the entries of a table by dotted name."""
    found: dict[str, Mapping[str, Any]] = {}
    for name, value in table.items():
        path = f"{above}{name}"
        if all(isinstance(each, Mapping) for each in value.values()):
            found |= named(value, f"{path}.")
        else:
            found[path] = value
    return found


def measured(entry: Mapping[str, Any]) -> Decimal | str:
    """Return the figure that an entry names, or the reason why it names none."""
    if not {"file"} < set(entry) <= FIELDS or ("pattern" in entry) == ("key" in entry):
        return f"has {', '.join(sorted(entry))}; needed are file, one of pattern and key, and maybe scale"
    file = ROOT / entry["file"]
    if not file.exists():
        return f"names {entry['file']}, which is not there"
    if "key" in entry:
        value: Any = json.loads(file.read_text())
        for each in entry["key"].split("."):
            try:
                value = value[int(each)] if isinstance(value, list) else value[each]
            except (KeyError, IndexError, ValueError, TypeError):
                return f"names the key {entry['key']}, which {entry['file']} has not"
    else:
        match = re.search(entry["pattern"], file.read_text(), re.MULTILINE)
        if match is None or match.re.groups != 1:
            return f"has a pattern that finds no one group in {entry['file']}: {entry['pattern']}"
        value = match[1]
    return Decimal(str(value).replace(",", "").replace("−", "-").rstrip(".")) * Decimal(str(entry.get("scale", 1)))


def rounded(value: Decimal, written: str) -> set[str]:
    """Return the value with the decimals of what a page wrote; both roundings of a half."""
    step = Decimal(1).scaleb(-len(written.partition(".")[2]))
    return {str(value.quantize(step, rounding)) for rounding in (ROUND_HALF_EVEN, ROUND_HALF_UP)}


def faults(texts: Mapping[str, str], table: Mapping[str, Any]) -> list[str]:
    """Return where pages and table differ, a sentence each."""
    entries = named(table)
    values = {name: measured(entry) for name, entry in entries.items()}
    found = [f"{name} {value}" for name, value in values.items() if isinstance(value, str)]
    used = set[str]()
    for page, text in texts.items():
        for marker in MARKER.finditer(text):
            name, where = marker[1], f"{page}:{text.count(chr(10), 0, marker.start()) + 1}"
            used.add(name)
            written, value = FIGURE.search(text[: marker.start()][-30:]), values.get(name)
            if written is None:
                found.append(f"{where} marks {name} behind no figure; write the marker right behind the number")
            elif value is None:
                found.append(f"{where} names {name}, which docs/figures.toml has not")
            elif isinstance(value, Decimal):
                plain = written[1].replace(",", "").replace("−", "-")
                if plain not in rounded(value, plain):
                    found.append(f"{where} says {written[1]}, {entries[name]['file']} has {value:f} for {name}")
    return found + [
        f"{name} is used by no page; delete it from docs/figures.toml" for name in entries if name not in used
    ]


def test_figures_of_pages_are_those_of_their_result_files() -> None:
    assert faults(pages(), tomllib.loads((ROOT / "docs" / "figures.toml").read_text())) == []


SPEED = {"speed": {"gain": {"file": "speed.txt", "pattern": r"^gain\s+([\d.]+)"}}}


@pytest.mark.parametrize(
    ("text", "table", "fault"),
    [
        ("1.3<!--=speed.gain--> times", SPEED, ""),
        ("1.25<!--=speed.gain-->, 1<!--=speed.gain-->", SPEED, ""),
        ("125<!--=speed.gain-->%", {"speed": {"gain": SPEED["speed"]["gain"] | {"scale": 100}}}, ""),
        ("1,252.8<!--=seconds-->", {"seconds": {"file": "speed.json", "key": "rows.0.seconds"}}, ""),
        ("1.4<!--=speed.gain-->", SPEED, "page:1 says 1.4, speed.txt has 1.25 for speed.gain"),
        ("1.20<!--=speed.gain-->", SPEED, "page:1 says 1.20, speed.txt has 1.25 for speed.gain"),
        (
            "\n9<!--=speed.loss--> 1.3<!--=speed.gain-->",
            SPEED,
            "page:2 names speed.loss, which docs/figures.toml has not",
        ),
        ("gain<!--=speed.gain-->", SPEED, "page:1 marks speed.gain behind no figure"),
        ("none", SPEED, "speed.gain is used by no page"),
        ("1<!--=a-->", {"a": {"file": "lost.txt", "pattern": "(1)"}}, "a names lost.txt, which is not there"),
        ("1<!--=a-->", {"a": {"file": "speed.txt", "pattern": "loss (.)"}}, "a has a pattern that finds no one group"),
        (
            "1<!--=a-->",
            {"a": {"file": "speed.json", "key": "rows.7"}},
            "a names the key rows.7, which speed.json has not",
        ),
        ("1<!--=a-->", {"a": {"pattern": "(1)"}}, "a has pattern; needed are file, one of pattern and key"),
        ("1<!--=a-->", {"a": {"file": "speed.txt"}}, "a has file; needed are file, one of pattern and key"),
    ],
)
def test_a_fault_of_a_figure_is_named(
    text: str, table: dict[str, Any], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "speed.txt").write_text("steps 3\ngain  1.25\n")
    (tmp_path / "speed.json").write_text('{"rows": [{"seconds": 1252.81}]}')
    monkeypatch.setattr("tests.docs.test_figures.ROOT", tmp_path)
    found = faults({"page": text}, table)
    assert len(found) == bool(fault) and all(each.startswith(fault) for each in found)


def test_result_files_say_when_where_and_how_they_were_measured() -> None:
    needed = {
        "date": r"20\d\d-\d\d-\d\d",
        "machine": r"core|GPU|CPU",
        "command": r"python -m (benchmarks|pytest)|python benchmarks/|autopar bench|autopar\.plan",
    }
    for file in sorted(RESULTS.glob("*.txt")):
        head = "\n".join(file.read_text().splitlines()[:15])
        lacking = [name for name, pattern in needed.items() if not re.search(pattern, head)]
        assert not lacking, f"{file.name} lacks {', '.join(lacking)} in its first 15 lines"


def test_a_benchmark_has_one_result_file_whose_name_has_no_date() -> None:
    assert [file.name for file in RESULTS.iterdir() if re.search(r"20\d\d|-\d+\.", file.name)] == []
