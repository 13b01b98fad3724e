"""The chart of candidates on a plan's page: a point for each, the front, and what the user put there."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autopar.costs.plans.comparison import Comparison, Contender
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.views.report.comparison_chart import SLOWEST, comparison_section
from autopar.views.report.html import page
from autopar.views.report.pipeline_html import page as pipeline_page
from tests.planning.pipeline.test_plan import pipeline
from tests.views.report.test_html import EVIL, _plan, _Reader

TAKEN = Contender(Mesh({"dp": 8}), 1, "", 1, 2.0, 300, is_planned=True)
COMPARED = Contender(
    Mesh({"tp": 8}), 1, "", 1, 3.0, 200, is_planned=True, is_compared=True, requested="tp=8 --strategy tp"
)
ESTIMATED = Contender(Mesh({"dp": 4, "tp": 2}), 4, "1f1b", 2, 2.5, 400, estimate=2.5)
SLOW = Contender(Mesh({"sp": 8}), 1, "", 1, 2 * SLOWEST * 2.0, 100, estimate=2.5)
EXCLUDED = Contender(Mesh({"dp": 2, "tp": 4}), 8, excluded="memory", reason=f"needs more {EVIL}")
ALL = Comparison((TAKEN, COMPARED, ESTIMATED, SLOW, EXCLUDED))


@pytest.mark.parametrize(
    "html",
    [
        page(replace(_plan(), comparison=ALL)),
        pipeline_page(replace(pipeline(Schedule("1f1b", 2, 4)), comparison=ALL)),
    ],
)
def test_the_page_has_a_point_for_each_candidate_and_loads_nothing(html: str) -> None:
    reader = _Reader(html)
    assert not reader.open and not [each for each in reader.addresses if not each.startswith("data:")]
    chart = re.search(r'<svg class="chart".*?</svg>', html, re.DOTALL)
    assert chart is not None
    titles = re.findall(r"<title>(.*?)</title>", chart.group())
    assert titles == [
        "dp=8: 2.00 s, 300 B",
        "tp=8 --strategy tp: 3.00 s, 200 B",
        "dp=4,tp=2 --microbatches 4 --schedule 1f1b --stages-per-rank 2: ≈ 2.50 s, 400 B",
    ]
    assert chart.group().count("<rect") == 1 and chart.group().count('class="ring"') == 1
    assert "1 that take over 2 times the fastest are in the table alone" in html
    assert "http" not in chart.group() and EVIL not in html


def test_the_front_joins_the_points_that_no_other_beats() -> None:
    section = comparison_section(ALL)
    centres = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', section)]
    front = re.search(r'class="front" points="([^"]*)"', section)
    assert front is not None
    line = [tuple(map(float, pair.split(","))) for pair in front.group(1).split()]
    assert line[0] == centres[0] and len(line) == 2, "the one taken, then the user's, which takes less memory"
    assert line[0][0] > line[1][0] and line[0][1] > line[1][1], "less memory lies left, more seconds above"


def test_recipes_of_the_taken_one_and_the_users_stand_below() -> None:
    section = comparison_section(ALL)
    assert "taken: <code>dp=8</code>: 2.00 s" in section
    assert "compared: <code>tp=8 --strategy tp</code>: 3.00 s" in section


def test_a_plan_on_a_mesh_that_was_given_has_no_chart() -> None:
    assert 'id="comparison"' not in page(_plan()) and comparison_section(Comparison(())) != ""
