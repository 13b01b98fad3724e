from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from autopar.costs.plans.decision_rows import Instant, KeptWhole, MemoryUse, Moved, PlanRow
from autopar.costs.plans.plan import Plan
from autopar.ir.sharding.mesh import Mesh
from autopar.views.report.html import colour_of, page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = "up<script>document.title=1</script>&\"'</script>"
VOID = {"meta", "link", "input"}


def _row(module: str, role: str = "column", **values: Any) -> PlanRow:
    moved = (Moved("all_reduce", "tp", 2_000_000, 0.001),)
    name = f"linear_{module}"
    return PlanRow(name, "call", module, "linear", ("data", role), "S(0) S(2)", 0.003, moved, 0.001, 0.001, **values)


def _plan(num_layers: int = 3, **values: Any) -> Plan:
    rows = tuple(_row(f"layers.{number}.up") for number in range(num_layers))
    weight = PlanRow("w", "parameter", "layers.0.up.weight", "parameter", ("replicated", "S(0)"), "I S(0)", 0.0, ())
    memory = MemoryUse({"parameters": 600, "activations": 300}, (Instant("a", False, 500), Instant("a", True, 900)))
    given = {"memory": memory, "memory_limit": 1000, "peak_bytes": 900, "recompute": {"layers.0": "full"}, **values}
    return Plan(
        mesh=Mesh({"dp": 2, "tp": 2}),
        fingerprint="",
        choices={},
        descriptions={},
        rows=given.pop("rows", (*rows, weight)),
        seconds=0.009,
        bound=0.009,
        traffic={},
        solver="by hand",
        **given,
    )


class _Reader(HTMLParser):
    """Checks that elements close in order; keeps addresses, texts and elements by name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def _embedded(text: str) -> dict[str, Any]:
    found = re.search(r'<script id="plan" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_the_page_is_whole_and_loads_nothing() -> None:
    text = page(_plan())
    reader = _Reader(text)
    assert not reader.open and "{{" not in text
    assert reader.addresses == ["data:,"]
    assert "url(" not in text and "@import" not in text and "fetch(" not in text


def test_the_rows_of_the_plan_are_in_the_page() -> None:
    data = _embedded(page(_plan()))
    assert data["axes"] == ["dp", "tp"]
    assert [data["texts"][row[0]] for row in data["rows"]] == [
        "layers.0.up", "layers.1.up", "layers.2.up", "layers.0.up.weight",
    ]  # fmt: skip
    choice = data["choices"][data["rows"][0][2]]
    assert data["texts"][choice[0]] == "linear" and choice[2] == [["data", "data"], ["column", "column"]]
    assert data["moves"] == [["all_reduce", "tp", 2_000_000, 0.001, False]]


def test_names_are_never_read_as_html() -> None:
    rows = (replace(_row(EVIL), operation=EVIL),)
    plan = _plan(
        rows=rows,
        notes=(EVIL,),
        kept_whole=(KeptWhole(EVIL, EVIL, 1, EVIL, EVIL, 1.0, 0.5, 8),),
        memory=MemoryUse({EVIL: 900}),
    )
    text = page(plan)
    reader = _Reader(text)
    assert not reader.open and EVIL not in text
    assert EVIL in reader.texts  # the note, as text
    assert EVIL in _embedded(text)["texts"]
    assert "<" not in text.partition('type="application/json">')[2].partition("</script>\n<script>")[0]
    assert sum(tag == "script" for tag, _ in reader.elements) == 2


def test_nothing_of_a_plan_is_a_placeholder() -> None:
    assert "{{header}}" in page(_plan(notes=("{{header}}",)))


def test_memory_is_drawn_against_the_limit() -> None:
    text = page(_plan())
    assert "90% of the limit of 1.00 kB" in text
    lines = [
        attributes for tag, attributes in _Reader(text).elements if tag == "line" and attributes["class"] == "limit"
    ]
    assert [line["x1"] for line in lines] == ["1000.0", "0"]  # at the end of the bar, and over the whole step
    assert 'width="600.0" height="40"' in text  # the 600 bytes of parameters, of 1000
    free = page(_plan(memory_limit=None))
    assert 'class="limit"' not in free and "no limit set" in free


def test_memory_without_parts_is_not_told_apart() -> None:
    text = page(_plan(memory=None))
    assert "not told apart" in text and "Over the step" not in text


def test_a_plan_without_rows_has_a_page() -> None:
    assert not _Reader(page(_plan(rows=(), memory=None, peak_bytes=0))).open


@pytest.mark.parametrize(
    ("role", "colour"),
    [
        ("data", "data"),
        ("R", "replicated"),
        ("I", "replicated"),
        ("P", "partial"),
        ("S(0)", "other"),
        ("heads", "other"),
    ],
)
def test_every_role_has_a_colour(role: str, colour: str) -> None:
    assert colour_of(role) == colour


def test_a_plan_of_126_layers_stays_small() -> None:
    rows = tuple(
        replace(_row(f"model.layers.{layer}.block.part_{part}"), name=f"call_{layer}_{part}")
        for layer in range(126)
        for part in range(159)
    )
    assert len(rows) > 20_000 and len(page(_plan(rows=rows))) < 10_000_000


def _in_chromium(text: str, script: str, folder: Path, width: int = 1280) -> dict[str, Any]:
    """Show the page in headless Chromium, run `script` in it, and return its `out` with the errors of the page."""
    errors = "<script>window.errors = []; window.onerror = message => errors.push(message);</script>"
    # The window of headless Chromium has a smallest width, which a frame has not.
    after = f"<script>const out = {{errors}}; {script}; parent.postMessage(JSON.stringify(out), '*');</script></body>"
    (folder / "page.html").write_text(text.replace("<body>", f"<body>{errors}").replace("</body>", after))
    (folder / "frame.html").write_text(
        "<script>onmessage = event => { document.body.innerText = 'found' + event.data; };</script>"
        f'<iframe src="page.html" style="width:{width}px;height:900px;border:0"></iframe>'
    )
    command = [
        str(CHROMIUM),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
    ]
    command += ["--virtual-time-budget=5000", "--dump-dom", (folder / "frame.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r"<body>found(\{.*\})</body>", shown, re.DOTALL)
    assert found is not None, shown
    return json.loads(found.group(1).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")


@needs_chromium
def test_the_tree_folds_opens_and_is_searched(tmp_path: Path) -> None:
    rows = (*(_row(f"layers.{number}.up") for number in range(3)), _row("layers.3.up", role="row"))
    script = """
      const tree = document.getElementById("tree"), search = document.getElementById("search");
      const names = () => [...tree.querySelectorAll(".name")].map(each => each.textContent);
      out.first = names();
      for (const each of tree.querySelectorAll("details")) each.open = false;
      search.value = "tp row"; search.dispatchEvent(new Event("input"));
      out.found = document.getElementById("found").textContent; out.after = names();
      search.value = "nothing"; search.dispatchEvent(new Event("input")); out.none = names();
      const before = document.documentElement.dataset.theme;
      document.getElementById("theme").click();
      out.themes = [before, document.documentElement.dataset.theme].sort()"""
    out = _in_chromium(page(_plan(rows=rows)), script, tmp_path)
    assert out["errors"] == []
    assert out["first"][:2] == ["layers", "0-2"] and "3.up" in out["first"]
    assert out["found"] == "1 of 4 decisions" and "linear" in out["after"] and "0-2" not in out["after"]
    assert out["none"] == [] and out["themes"] == ["dark", "light"]


@needs_chromium
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_page(width: int, tmp_path: Path) -> None:
    plan = _plan(rows=(_row(f"{'a_long_name_' * 12}.up"), _row(EVIL)), notes=("word" * 100,))
    script = "out.width = document.documentElement.scrollWidth; out.title = document.title"
    out = _in_chromium(page(plan), script, tmp_path, width)
    assert out["errors"] == [] and out["width"] <= width
    assert out["title"] == "Plan for dp=2 × tp=2"
