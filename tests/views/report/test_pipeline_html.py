"""Times at which the stages of a pipeline run: the trace and the page agree with the timeline."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.views.report.pipeline_html import LEFT, WIDTH, page
from autopar.views.report.pipeline_trace import trace
from tests.planning.pipeline.test_plan import SCHEDULES, pipeline
from tests.views.report.test_html import EVIL, _in_chromium, _Reader, needs_chromium


def slices(plan: PipelinePlan) -> dict[int, list[dict[str, Any]]]:
    """The slices of a trace by rank, in time."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in json.loads(trace(plan))["traceEvents"]:
        if event["ph"] == "X":
            found[event["tid"]].append(event)
    return {rank: sorted(events, key=lambda event: event["ts"]) for rank, events in sorted(found.items())}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_slices_of_a_rank_follow_each_other_and_add_up(schedule: Schedule) -> None:
    plan = pipeline(schedule)
    by_rank = slices(plan)
    assert list(by_rank) == list(range(schedule.num_ranks))
    for rank, events in by_rank.items():
        for one, other in pairwise(events):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-6
        busy = sum(event["dur"] for event in events)
        assert busy == pytest.approx((1 - plan.idle(rank)) * plan.seconds * 1e6)
        of_one = plan.stages[0].seconds
        stages = len(schedule.stages_of(rank))
        expected = stages * (plan.microbatches * (of_one.forward + of_one.of("B")) + of_one.once)
        assert busy == pytest.approx(expected * 1e6)


def test_a_slice_is_named_by_kind_and_microbatch() -> None:
    plan = pipeline(Schedule("1f1b", 2, 4))
    events = slices(plan)[1]
    assert [event["name"] for event in events] == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3", "once"]
    assert events[2]["args"] == {"stage": 1, "microbatch": 1, "blocks": "layers.2 … layers.3"}
    assert len({event["cname"] for event in events}) == len({event["cat"] for event in events}) == 3
    names = [event for event in json.loads(trace(plan))["traceEvents"] if event["name"] == "thread_name"]
    assert [(event["tid"], event["args"]["name"]) for event in names] == [
        (0, "rank 0 (stage 0)"),
        (1, "rank 1 (stage 1)"),
    ]


def test_the_trace_says_what_it_is_of(tmp_path: Path) -> None:
    plan = pipeline(Schedule("zbv", 2, 6, 2))
    plan.to_trace(tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert found["predicted seconds"] == plan.seconds and found["bubble"] == plan.bubble
    assert found["schedule"] == "zbv"


def rectangles(text: str) -> list[dict[str, str | None]]:
    """The rectangles of the slices in a page's chart, in order."""
    chart = re.search(r'<svg class="gantt".*?</svg>', text, re.DOTALL)
    assert chart is not None
    every = [attributes for tag, attributes in _Reader(chart.group()).elements if tag == "rect"]
    return [each for each in every if "fill-opacity" in each]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_the_chart_draws_every_slice_to_scale(schedule: Schedule) -> None:
    plan = pipeline(schedule)
    drawn = rectangles(page(plan))
    assert len(drawn) == len(plan.timeline.slices)
    for shape, each in zip(drawn, plan.timeline.slices, strict=True):
        left, width = float(shape["x"] or 0), float(shape["width"] or 0)
        assert (left - LEFT) / (WIDTH - LEFT) * plan.seconds == pytest.approx(each.start, abs=plan.seconds * 1e-4)
        assert width / (WIDTH - LEFT) * plan.seconds == pytest.approx(each.end - each.start, abs=plan.seconds * 1e-4)
    assert len({shape["y"] for shape in drawn}) == schedule.num_ranks
    assert len({shape["fill-opacity"] for shape in drawn}) == schedule.chunks


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    plan = pipeline(Schedule("interleaved_zero_bubble", 2, 4, 2), notes=("said by hand",))
    plan.to_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    reader = _Reader(text)
    assert not reader.open and "{{" not in text
    assert reader.addresses == ["data:,"]
    assert "url(" not in text and "@import" not in text and "fetch(" not in text
    assert f"{plan.bubble:.1%}" in text and "said by hand" in text
    assert sum(tag == "details" for tag, _ in reader.elements) == 4
    found = "".join(reader.texts)
    assert "I: backward, gradient of the input" in found and "lighter: later stages of a rank" in found
    assert "F1: forward of micro-batch 1 on stage 2 (layers.4 … layers.5), rank 0" in found


def test_only_kinds_that_occur_have_a_key() -> None:
    found = "".join(_Reader(page(pipeline(Schedule("gpipe", 2, 4)))).texts)
    assert "B: backward" in found and "gradient of the weights" not in found and "lighter" not in found


def test_names_are_never_read_as_html() -> None:
    plan = pipeline(Schedule("gpipe", 2, 4), notes=(EVIL, "{{header}}"))
    plan = replace(plan, stages=tuple(replace(stage, blocks=(EVIL, EVIL)) for stage in plan.stages))
    text = page(plan)
    reader = _Reader(text)
    assert not reader.open and EVIL not in text and EVIL in reader.texts and "{{header}}" in text
    assert sum(tag == "script" for tag, _ in reader.elements) == 1


def test_a_long_step_stays_a_small_page() -> None:
    assert len(page(pipeline(Schedule("1f1b", 8, 128)))) < 1_000_000


@needs_chromium
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_has_two_themes_and_is_no_wider_than_the_window(width: int, tmp_path: Path) -> None:
    plan = pipeline(Schedule("zbv", 2, 6, 2), notes=("word" * 100,))
    script = """
      const before = document.documentElement.dataset.theme;
      document.getElementById("theme").click();
      out.themes = [before, document.documentElement.dataset.theme].sort();
      out.width = document.documentElement.scrollWidth; out.title = document.title"""
    out = _in_chromium(page(plan), script, tmp_path, width)
    assert out["errors"] == [] and out["width"] <= width and out["themes"] == ["dark", "light"]
    assert out["title"] == "Pipeline plan for pp=2 × tp=2"
