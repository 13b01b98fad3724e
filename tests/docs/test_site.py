"""The site is built without a warning, and every link and anchor of it leads somewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from docs.site.doctests import fenced
from docs.site.hooks import Built, faults, on_page_content
from tests.test_house import ROOT


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    api = (tmp_path / "reference" / "api.html").read_text()
    assert 'id="autopar.compile"' in api and 'id="autopar.Memory.limit"' in api
    assert (tmp_path / "files" / "strategies" / "presets.html").exists()
    unknown = [page.name for page in tmp_path.rglob("*.html") if "<mi>&</mi>" in page.read_text()]
    assert not unknown, f"formulas in {unknown} have an environment that latex2mathml does not know; use split"


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    texts = {
        "a.html": '<a href="b.html#there"></a><a href="#own" id="own"></a><a href="https://example.org/x"></a>',
        "b.html": '<p id="there"></p><a href="c.html"></a><a href="a.html#gone"></a><script src="//cdn.org/x.js">',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = sorted(faults({tmp_path / name: Built(text) for name, text in texts.items()}))
    assert [each.partition(" ")[2] for each in found] == [
        "links to a.html#gone; no such anchor",
        "links to c.html, which is not there",
        "loads //cdn.org/x.js from elsewhere",
    ]


def test_examples_of_docstrings_are_code() -> None:
    docstring = "Text.\n\n>>> f(1)  # doctest: +SKIP\n2\n\nMore."
    assert fenced(docstring) == "Text.\n\n```pycon\n>>> f(1)\n2\n```\n\nMore."


def test_formulas_are_mathml() -> None:
    made = on_page_content(r'a <span class="arithmatex">\(t_v &lt; 1\)</span> b <div class="arithmatex">\[x^2\]</div>')
    assert made.startswith("a <math") and "<msub><mi>t</mi><mi>v</mi></msub><mo>&#x0003C;</mo>" in made
    assert 'display="block"' in made and "arithmatex" not in made
