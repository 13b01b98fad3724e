"""Groups of options: checked when they are made, printed as they were given, and defined in one place."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cli.groups import OF_PLANS, flag_of
from autopar.cli.parser import parser
from autopar.compiler.arguments import GROUPS
from autopar.errors import InputError
from autopar.planning.options.definition import Group, Option, docs_of, options_of

MODEL, MESH, X = nn.Linear(8, 8), autopar.Mesh({"dp": 2}), (torch.zeros(4, 8),)
FIELDS = [(name, group, each) for name, group in GROUPS.items() for each in options_of(group)]
ALONE = [each for each in FIELDS if each[2].flat != each[0]]
"""Fields whose name by itself is no option."""


def _planned(**options: Any) -> Any:
    return autopar.plan(MODEL, MESH, X, **options)


def _id(value: Any) -> str:
    return value.name if isinstance(value, Option) else getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("name", "group", "field"), ALONE, ids=_id)
def test_an_option_without_its_group_is_refused_with_its_place(name: str, group: type[Group], field: Option) -> None:
    place = rf"{field.flat} is a field of autopar.{group.__name__}; give {name}={group.__name__}\({field.name}='x'\)"
    if name == "run":
        place = f"{field.flat} is a field of autopar.Run"
    with pytest.raises(InputError, match=place):
        _planned(**{field.flat: "x"})


def test_a_field_of_an_optimizer_is_named_with_its_place_and_an_unknown_option_with_those_there_are() -> None:
    with pytest.raises(InputError, match=r"give optimizer=Optimizer\(master_copies=True\)"):
        _planned(master_copies=True)
    with pytest.raises(InputError, match="strtegy is no option here; options are mode, strategy, memory"):
        _planned(strtegy="zero3")


@pytest.mark.parametrize(("name", "group", "field"), FIELDS, ids=_id)
def test_every_field_has_a_docstring_that_ends(name: str, group: type[Group], field: Option) -> None:
    assert docs_of(group)[field.name].endswith((".", ")")), f"{name}: {docs_of(group)[field.name]}"


def test_every_field_of_a_plan_is_a_flag_with_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for group in OF_PLANS:
        for each in options_of(group):
            assert f" {flag_of(each)} " in text
            assert " ".join(docs_of(group)[each.name].split()[1:6]) in text


def test_a_group_prints_what_was_given() -> None:
    assert repr(autopar.Memory()) == "Memory()"
    assert repr(autopar.Memory("80GB", recompute="full")) == "Memory(limit='80GB', recompute='full')"
    assert repr(autopar.Search(gap=0)) == "Search(gap=0)"


def test_a_group_is_a_value() -> None:
    made: Any = autopar.Pipeline(split_points=["layers.1"])
    assert made == autopar.Pipeline(split_points=("layers.1",)) and hash(made)
    with pytest.raises(FrozenInstanceError):
        made.schedule = "1f1b"


def test_the_first_field_stands_for_its_group() -> None:
    assert autopar.Memory.of("80GB").limit_bytes == autopar.Memory(80 * 10**9).limit_bytes == 80 * 10**9
    assert autopar.Pipeline.of("pp") == autopar.Pipeline(axis="pp")
    assert autopar.Search.of(None) == autopar.Search()


@pytest.mark.parametrize("name", sorted(set(GROUPS) - {"memory", "pipeline", "run"}))
def test_what_is_no_group_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=rf"{name}=60; give autopar.{GROUPS[name].__name__}\(…\), or None"):
        _planned(**{name: 60})


@pytest.mark.parametrize(
    ("group", "given", "message"),
    [
        (autopar.Memory, {"limit": -5}, r"Memory\(limit=-5\); give bytes per device, as a whole number above 0 or"),
        (autopar.Memory, {"limit": "lots"}, "'lots' is no size; write a number and a unit"),
        (autopar.Memory, {"limit": "0GB"}, r"Memory\(limit='0GB'\); give at least 1 byte, and at most 9007.20 TB"),
        (autopar.Memory, {"limit": 10**400}, r"Memory\(limit=1000.*; give at least 1 byte, and at most 9007.20 TB"),
        (
            autopar.Memory,
            {"host_limit": 2**53 + 1, "offload": "auto"},
            r"host_limit=9007199254740993\); give at least 1",
        ),
        (autopar.Memory, {"recompute": "some"}, r"Memory\(recompute='some'\); give one of 'auto', 'none', 'selective'"),
        (autopar.Memory, {"prefetch": 3}, r"Memory\(prefetch=3\); give one of 'auto', or a whole number .* at most 2"),
        (autopar.Memory, {"loss_tiles": 0}, r"Memory\(loss_tiles=0\); give a whole number .* 1024, or one of 'auto'"),
        (autopar.Memory, {"mlp_tiles": False}, r"Memory\(mlp_tiles=False\); give a whole number .*'auto', 'none'"),
        (autopar.Memory, {"conventions": "mine"}, r"Memory\(conventions='mine'\); give one of 'autopar'.*MemoryConv"),
        (autopar.Memory, {"weight_tiles": True}, r'give a limit, as in Memory\(limit="40GB", weight_tiles=True\)'),
        (autopar.Memory, {"host_limit": "8GB"}, r"Memory\(host_limit='8GB'\) limits what is offloaded, and nothing is"),
        (autopar.Memory, {"offload": "both", "recompute": "full"}, r"give Memory\(recompute=\"auto\"\) or"),
        (autopar.Pipeline, {"schedule": "2f2b"}, r"Pipeline\(schedule='2f2b'\); give one of 'gpipe', .*, or None"),
        (autopar.Pipeline, {"stages_per_rank": 1.5}, r"Pipeline\(stages_per_rank=1.5\); give a whole number of at le"),
        (autopar.Pipeline, {"split_points": "layers.4"}, r"split_points='layers.4'\); give a list of names of modules"),
        (autopar.Experts, {"capacity_factor": 10**400}, r"capacity_factor=1000.*; give a finite number above 0"),
        (autopar.Experts, {"imbalance": 10**400}, r"imbalance=1000.*; give a finite number of at least 1"),
        (autopar.Experts, {"imbalance": 0.5}, r"Experts\(imbalance=0.5\); give a finite number of at least 1"),
        (autopar.Search, {"gap": 1.5}, r"Search\(gap=1.5\); give a share of the step of at least 0 and below 1, 0 for"),
        (autopar.Search, {"time_limit": -1}, r"Search\(time_limit=-1\); give seconds of at least 0"),
        (autopar.Search, {"time_limit": 10**400}, r"time_limit=1000.*; give seconds of at least 0"),
        (autopar.Search, {"solver": "lp"}, r"Search\(solver='lp'\); give one of 'auto', 'ilp'"),
        (autopar.Search, {"cache": 3}, r"Search\(cache=3\); give the path of a folder, or None"),
        (autopar.Capture, {"assume": "model.py:1"}, r"Capture\(assume='model.py:1'\); give a list of the lines"),
        (autopar.Run, {"seed": "x"}, r"Run\(seed='x'\); give a whole number"),
        (autopar.Run, {"buckets": "always"}, r'Run\(buckets=\'always\'\); give "auto", "none" or autopar.Buckets'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_group_refuses_what_it_cannot_have(group: type[Group], given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        group(**given)
