"""The names that the command line lists are those of the tables that say what they mean."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

import autopar
from autopar import errors
from autopar.api import option_types
from autopar.compiler.arguments import defaults
from autopar.console import names
from autopar.costs.pricing import conventions
from autopar.ir.program import precision, recompute_segments
from autopar.models import catalogue
from autopar.planning.options import groups
from autopar.planning.pipeline.schedules import schedule
from autopar.strategies.presets import PRESETS
from autopar.tools.benchmarking import trainers


@pytest.mark.parametrize(
    ("listed", "table"),
    [
        (names.MODELS, catalogue.BUILT_IN),
        (names.PRESETS, PRESETS),
        (names.PEERS, trainers.PEERS),
        (names.EXPERT_PEERS, trainers.EXPERT_PEERS),
        (names.SCHEDULES, schedule.NAMES),
        (names.RECOMPUTATIONS, recompute_segments.RECOMPUTATIONS),
        (names.OFFLOADED, get_args(groups.Offloaded)),
        (("auto", *names.PREFETCH_DEPTHS), get_args(groups.Prefetch)),
        (("auto", *names.RECOMPUTATIONS), get_args(groups.Recompute)),
        (names.PRECISIONS, precision.NAMED),
        (names.MEMORY_CONVENTIONS, conventions.CONVENTIONS),
    ],
    ids=lambda value: type(value).__name__,
)
def test_names_are_the_keys_of_their_table(listed: tuple[Any, ...], table: Any) -> None:
    assert listed == tuple(table)


def test_aliases_mean_presets_and_hide_none() -> None:
    assert set(names.ALIASES.values()) <= set(PRESETS) and not set(names.ALIASES) & set(PRESETS)


def test_every_error_is_public() -> None:
    classes = {name for name, each in vars(errors).items() if isinstance(each, type)}
    assert classes <= set(autopar.__all__)


def test_public_names_are_what_type_checkers_are_told() -> None:
    tree = ast.parse(Path(str(autopar.__file__)).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    told = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert told == autopar._MODULES
    assert set(autopar.__all__) <= set(dir(autopar)) and all(hasattr(autopar, name) for name in autopar.__all__)


def test_a_name_that_autopar_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'autopar' has no attribute 'compil'"):
        autopar.compil  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_overloads_know_every_option() -> None:
    for options in (
        *(option_types.Training, option_types.Forward, option_types.InStages),
        *(option_types.InOnePiece, option_types.OnAnyMesh),
    ):
        assert set(options.__annotations__) == set(defaults())


CALLS = """
import autopar
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from autopar.models import built_in

def calls(model: nn.Module, mesh: DeviceMesh, inputs: tuple[object, ...]) -> None:
    reveal_type(autopar.compile(model, mesh, inputs))
    reveal_type(autopar.compile(model, mesh, inputs, strategy="zero3", memory="8GB"))
    reveal_type(autopar.compile(model, mesh, inputs, training=False))
    reveal_type(autopar.compile(model, mesh, inputs, pipeline="pp"))
    reveal_type(autopar.compile(model, mesh, inputs, pipeline=autopar.Pipeline(schedule="1f1b"), run=autopar.Run(0)))
    reveal_type(autopar.load(model, mesh, "model.safetensors", inputs))
    reveal_type(autopar.plan(model, mesh, inputs))
    reveal_type(autopar.plan(model, autopar.Mesh({"dp": 2}), inputs))
    reveal_type(autopar.plan(model, autopar.Mesh({"pp": 2}), inputs, pipeline="pp"))
    reveal_type(autopar.plan(model, "auto", inputs, devices=8))
    reveal_type(autopar.plan(model, mesh, inputs).explain("layers"))
"""


@pytest.mark.slow
def test_a_type_checker_is_told_what_calls_return(tmp_path: Path) -> None:
    script = tmp_path / "calls.py"
    script.write_text(CALLS)
    checker = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(script)]
    root = Path(__file__).parent.parent
    ran = subprocess.run(checker, cwd=root, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert re.findall(r'" is "(.+)"', ran.stdout) == [
        *("ParallelModule", "ParallelModule", "InferenceModule", "PipelineModule", "PipelineModule"),
        "ParallelModule",
        *("Plan", "Plan", "PipelinePlan", "Plan | PipelinePlan", "Explanation[Plan]"),
    ]
