"""Questions of `autopar plan --devices`: the best mesh next to recipes, the least devices, the largest size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import autopar
from autopar.cli import main
from autopar.costs.plans.plan import Plan
from autopar.errors import InputError


def test_devices_alone_are_the_whole_command_and_a_recipe_is_put_next_to_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, html = tmp_path / "plan.json", tmp_path / "plan.html"
    recipe = "tp=4 --strategy megatron"
    arguments = ["plan", "tiny-mlp", "--devices", "4", "--hardware", "a100-80gb", "--batch", "64", "--compare", recipe]
    options = ["--compare", "dp=4 --schedule 1f1b", "--max-axes", "1", "--save", str(file), "--html", str(html)]
    assert main([*arguments, *options]) == 0
    printed = capsys.readouterr().out
    assert "plan for the mesh dp=4 (4 devices, hardware a100-80gb)" in printed and "→  dp=4" in printed
    assert f"+  {recipe} " in printed and "dp=4: --schedule 1f1b is given" in printed
    saved = Plan.load(file).comparison
    assert saved is not None and [each.recipe for each in saved.planned] == ["dp=4", recipe]
    assert saved.excluded[0].requested == "dp=4 --schedule 1f1b" and saved.excluded[0].is_compared
    assert html.read_text().count("<title>tp=4 --strategy megatron: ") == 1


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ([], "neither --mesh nor --devices is given; give --devices 64"),
        (["--devices", "4", "--compare", "dp=2"], "--compare 'dp=2' is of 2 devices; give 4."),
        (["--devices", "4", "--compare", "dp=4 --steps 2"], "'--steps 2' of --compare 'dp=4 --steps 2' is no option"),
        (["--devices", "4", "--compare", "dp=4 --stages-per-rank two"], "'--stages-per-rank two' of --compare"),
        (["--mesh", "4", "--compare", "dp=4"], "--compare is compared with the best mesh of --devices"),
    ],
)
def test_a_question_that_lacks_something_says_what(
    capsys: pytest.CaptureFixture[str], options: list[str], needed: str
) -> None:
    assert main(["plan", "tiny-mlp", *options]) == 2
    assert needed in capsys.readouterr().err


def test_the_least_devices_of_a_deadline_are_printed_with_the_sizes_tried(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "tiny-llama", "--hardware", "h100", "--batch", "16", "--sequence", "16", "--layers", "1"]
    assert main([*arguments, "--max-axes", "1", "--tokens", "100M", "--days", "1"]) == 0
    printed = capsys.readouterr().out
    assert "plan for the mesh dp=8" in printed
    assert "8 devices: 100.00 M tokens in 1 days, 390,625 steps of at most" in printed


@pytest.mark.parametrize("largest", ["batch", "sequence"])
def test_the_largest_size_is_requested_with_the_options_of_the_command(
    monkeypatch: pytest.MonkeyPatch, largest: str
) -> None:
    requested: dict[str, Any] = {}

    def answered(model: nn.Module, inputs: Any, **options: Any) -> Any:
        requested.update(options)
        raise InputError("asked")

    monkeypatch.setattr(f"autopar.api.sizing.largest_{largest}", answered)
    limit = ["--hardware", "h100", "--devices", "4", "--memory", "2GB", "--largest", largest]
    assert main(["plan", "tiny-mlp", *limit]) == 2
    assert (requested["devices"], requested["memory"], requested["hardware"]) == (4, autopar.Memory("2GB"), "h100")
    assert requested["microbatches"] == (1 if largest == "batch" else None)


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        (["--tokens", "1T"], "--tokens and --days go together"),
        (["--days", "1"], "--tokens and --days go together"),
        (["--tokens", "1T", "--days", "1", "--devices", "8"], "leave --devices out"),
        (["--tokens", "1T", "--days", "0"], "--days 0.0; give the days"),
        (["--tokens", "many", "--days", "1"], "'many' is no number of tokens"),
        (["--tokens", "1T", "--days", "1", "--mesh", "8"], "leave --mesh, --compare"),
        (["--tokens", "1T", "--days", "1", "--largest", "batch"], "two questions"),
        (["--largest", "batch"], "--largest is of a number of devices"),
        (["--largest", "sequence", "--devices", "2"], "without a limit any size fits; give it, as --memory 80GB"),
    ],
)
def test_a_question_for_a_size_that_lacks_something_says_what(
    capsys: pytest.CaptureFixture[str], options: list[str], needed: str
) -> None:
    assert main(["plan", "tiny-llama", "--layers", "1", *options]) == 2
    assert needed in capsys.readouterr().err
