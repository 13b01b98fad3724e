"""Measurements without measuring: their order, their tables and pictures, and what JSON and CSV keep of them."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest

from autopar.errors import InputError
from autopar.tools.benchmarking.bench import BenchResult
from autopar.tools.benchmarking.measurement import Costs, Measurement, from_json, largest_difference
from autopar.tools.benchmarking.measurement_tables import cell_table, report, summary
from autopar.tools.benchmarking.rank_correlation import spearman

AUTO = Measurement(
    "llama",
    "dp=2",
    "auto",
    measured=Costs(0.020, 1_100_000, {"all_reduce/dp": 4096}),
    predicted=Costs(0.010, 1_000_000, {"all_reduce/dp": 4096}),
    calls={"all_reduce/dp": 2},
    quartiles=(0.019, 0.022),
    setup_seconds=1.5,
    apart=1e-7,
)
ZERO3 = dataclasses.replace(
    AUTO,
    strategy="zero3",
    measured=Costs(0.030, 800_000, {"all_gather/dp": 8192}),
    predicted=Costs(0.020, 1_000_000, {"all_gather/dp": 4096}),
)
DDP = Measurement("llama", "dp=2", "ddp", Costs(0.025, 2_000_000, {"all_reduce/dp": 4096}), apart=0.5)
REFUSED = Measurement("llama", "dp=2", "megatron", reason="3 heads do not divide\nover 2 ranks")
ELSEWHERE = dataclasses.replace(
    AUTO, model="mlp", measured=Costs(0.001, 500, {}), predicted=Costs(0.002, 500, {"all_reduce/dp": 0}), calls={}
)
ALL = (ZERO3, AUTO, DDP, REFUSED, ELSEWHERE)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([106, 100, 86, 101, 99, 103, 97, 113, 112, 110], [7, 27, 2, 50, 28, 29, 20, 12, 6, 17], -29 / 165),
        ([1, 2, 2, 3], [1, 2, 3, 4], 4.5 / math.sqrt(4.5 * 5)),
    ],
)
def test_the_rank_correlation_is_that_of_known_lists(first: list[float], second: list[float], expected: float) -> None:
    assert spearman(first, second) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("first", "second"), [([], []), ([1.0], [2.0]), ([1, 1, 1], [1, 2, 3])])
def test_what_has_no_order_has_no_rank_correlation(first: list[float], second: list[float]) -> None:
    assert math.isnan(spearman(first, second))


def test_a_cell_lists_the_fastest_first_and_reasons_below() -> None:
    lines = cell_table([each for each in ALL if each.model == "llama"]).splitlines()
    assert lines[0] == "llama on dp=2"
    assert [line.split()[0] for line in lines[3:6]] == ["auto", "ddp", "zero3"]
    assert "1.25" in lines[4] and "1.50" in lines[5]
    assert lines[6] == "  megatron: 3 heads do not divide over 2 ranks"


def test_a_table_says_which_bytes_and_losses_are_not_as_they_should_be() -> None:
    lines = {line.split()[0]: line for line in cell_table([ZERO3, AUTO, DDP]).splitlines()[3:]}
    assert "NOT AS PREDICTED" in lines["zero3"] and "DISAGREE" not in lines["zero3"]
    assert "as predicted" in lines["auto"] and "agree (1e-07)" in lines["auto"]
    assert "PREDICTED" not in lines["ddp"] and "DISAGREE (5e-01)" in lines["ddp"]


def test_a_cell_in_which_nothing_trains_is_a_list_of_reasons() -> None:
    assert cell_table([REFUSED]) == "llama on dp=2\n  megatron: 3 heads do not divide over 2 ranks"


def test_the_summary_compares_predictions_with_measurements() -> None:
    text = summary(ALL)
    assert "rank correlation (Spearman) 1.000 of 3 predictions" in text
    assert "measured / predicted 0.50 to 2.00, median 1.50" in text
    assert "-20.0% to +10.0% of the predicted" in text
    assert "as predicted in 2 of 3" in text
    assert "DISAGREE: ddp in llama on dp=2" in text
    assert text.splitlines()[-1].split() == ["llama", "on", "dp=2", "0.67", "zero3", "0.80", "ddp"]


def test_the_summary_compares_timelines_too_where_plans_have_them() -> None:
    assert "timeline" not in summary(ALL)
    measured = [each for each in ALL if each.measured and each.predicted]
    seconds = [each.measured.seconds / 2 for each in measured if each.measured]
    with_timelines = [dataclasses.replace(m, timeline_seconds=s) for m, s in zip(measured, seconds, strict=True)]
    words = summary(with_timelines).split("timeline")[1]
    assert words.split()[:6] == ["rank", "correlation", "(Spearman)", "1.000", "of", "3"]
    assert "measured / predicted 2.00 to 2.00, median 2.00" in words


def test_a_ratio_has_twice_the_standard_error_of_its_medians() -> None:
    # 16 steps with a quartile 3% below and one 3% above: 1.253 * 6% / 1.349 / 4 = 1.39% each.
    auto = dataclasses.replace(AUTO, quartiles=(0.97 * 0.020, 1.03 * 0.020), num_steps=16)
    zero3 = dataclasses.replace(ZERO3, quartiles=(0.97 * 0.030, 1.03 * 0.030), num_steps=16)
    assert auto.relative_error == pytest.approx(0.0139, abs=1e-4)
    words = summary((auto, zero3)).splitlines()[-1].split()
    assert words == ["llama", "on", "dp=2", "0.67", "±", "0.03", "zero3"]  # 2 * 0.67 * sqrt(2) * 1.39%


def test_the_ratio_to_a_preset_that_is_the_same_program_has_no_error() -> None:
    auto = dataclasses.replace(AUTO, quartiles=(0.019, 0.021), num_steps=16, same_as="zero3")
    zero3 = dataclasses.replace(auto, strategy="zero3", same_as="")
    assert summary((auto, zero3)).splitlines()[-1].split() == ["llama", "on", "dp=2", "1.00", "zero3"]


def test_one_step_has_no_standard_error() -> None:
    assert math.isnan(dataclasses.replace(AUTO, num_steps=1).relative_error)
    assert math.isnan(dataclasses.replace(REFUSED, num_steps=5).relative_error)


def test_a_report_holds_every_cell_and_what_it_was_measured_on() -> None:
    text = report(ALL, {"machine": "an abacus"})
    assert text.startswith("machine  an abacus")
    assert text.count("\nllama on dp=2\n") == text.count("\nmlp on dp=2\n") == 1


def test_losses_that_are_no_numbers_do_not_agree() -> None:
    apart = largest_difference([1.0, math.nan, 3.0], [1.0, 2.0, 3.0])
    assert math.isnan(apart)
    assert not dataclasses.replace(AUTO, apart=apart).agrees
    assert largest_difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)


def test_json_keeps_everything(tmp_path: Path) -> None:
    strange = dataclasses.replace(AUTO, apart=math.inf)
    result = BenchResult((*ALL, strange), {"machine": "an abacus"})
    result.save_json(tmp_path / "all.json")
    assert BenchResult.load(tmp_path / "all.json") == result


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 1, "measurements": [{}], "about": {}}'])
def test_text_that_holds_no_measurements_is_an_error(text: str) -> None:
    with pytest.raises(InputError, match=r"^no measurements: .*give what `autopar bench --json` wrote"):
        from_json(text)


def test_measurements_of_another_format_are_an_error() -> None:
    with pytest.raises(InputError, match="measurements of format 0, not 1; measure again"):
        from_json('{"format": 0}')


def test_csv_has_a_line_per_measurement(tmp_path: Path) -> None:
    BenchResult(ALL).save_csv(tmp_path / "all.csv")
    with (tmp_path / "all.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["strategy"] for line in lines] == ["zero3", "auto", "ddp", "megatron", "auto"]
    auto, refused = lines[1], lines[3]
    assert float(auto["measured_seconds"]) == 0.020 and float(auto["predicted_seconds"]) == 0.010
    assert json.loads(auto["measured_traffic"]) == {"all_reduce/dp": 4096}
    assert (auto["agrees"], lines[2]["agrees"]) == ("True", "False")
    assert refused["measured_seconds"] == "" and refused["reason"] == REFUSED.reason


def test_the_rank_correlation_of_a_result_is_over_all_cells() -> None:
    assert BenchResult(ALL).rank_correlation == 1.0
    slower = dataclasses.replace(ELSEWHERE, measured=Costs(0.025, 500, {}))
    assert BenchResult((ZERO3, AUTO, slower)).rank_correlation == 0.5


@pytest.mark.slow
def test_plots_are_written_into_a_folder(tmp_path: Path) -> None:
    written = BenchResult(ALL).save_plots(tmp_path / "plots")
    assert [path.name for path in written] == ["time.png", "memory.png", "traffic.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_plots_of_nothing_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing was measured"):
        BenchResult((REFUSED,)).save_plots(tmp_path)


def test_plots_without_matplotlib_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r'pip install "autopar\[bench\]"'):
        BenchResult(ALL).save_plots(tmp_path)


def test_plots_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="the plots cannot be written"):
        BenchResult(ALL).save_plots(tmp_path / "file")
