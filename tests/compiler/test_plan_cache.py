"""A plan that was made before is taken from its folder, but not from a damaged file, nor from another request's."""

from __future__ import annotations

import json
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.cli import main
from autopar.compiler import plan_cache
from autopar.costs.hardware.load import load
from autopar.errors import InputError
from autopar.planning.planner import best_plan_of
from autopar.strategies.registered import REGISTERED
from autopar.strategies.ruled import ruled
from tests.support.mutations import mutated
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

MESH, X = autopar.Mesh({"dp": 2, "tp": 2}), (torch.zeros(8, 16),)


class _Mlp(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


def _planned(folder: Path, model: nn.Module | None = None, on: Any = MESH, example: Any = X, **options: Any) -> Any:
    """The plan, and whether something was solved for it."""
    options = {"hardware": SLOW_DEVICES} | options
    with mock.patch("autopar.planning.best_plan.best_plan_of", wraps=best_plan_of) as solved:
        found = autopar.plan(model or _Mlp(), on, example, **by_flag(plan_cache=folder, **options))
    return found, solved.called


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_an_equal_request_is_not_solved_again(tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    made, solved = _planned(folder)
    again, solved_again = _planned(folder)
    assert (solved, solved_again, len(_files(folder))) == (True, False, 1)
    assert again == made
    assert again.attach(_Mlp(), X, hardware=SLOW_DEVICES).verify().ok


def _annotated() -> nn.Module:
    model = _Mlp()
    autopar.annotate(model, "up", tp="column")
    return model


CHANGES: dict[str, dict[str, Any]] = {
    "memory": {"memory": "1GB"},
    "strategy": {"strategy": "zero3"},
    "optimizer": {"optimizer": "sgd"},
    "gap": {"gap": 0.1},
    "microbatches": {"microbatches": 2},
    "inputs": {"inputs": "dp"},
    "outputs": {"outputs": "full"},
    "precision": {"precision": "bf16-mixed"},
    "hardware": {"hardware": replace(SLOW_DEVICES, memory_bytes=10**10)},
    "mesh": {"on": autopar.Mesh({"dp": 4})},
    "names of axes": {"on": autopar.Mesh({"dp": 2, "cp": 2})},
    "shape": {"example": (torch.zeros(4, 16),)},
    "model": {"model": _Mlp(64)},
    "names of modules": {"model": nn.Sequential(_Mlp())},
    "annotations": {"model": _annotated()},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("plans")
    _planned(found)
    return found


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", CHANGES)
def test_whatever_else_is_requested_is_planned(folder: Path, name: str) -> None:
    before = len(_files(folder))
    _, solved = _planned(folder, **CHANGES[name])
    assert solved and len(_files(folder)) == before + 1


def test_other_rules_and_another_version_of_autopar_plan_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _planned(tmp_path)
    try:
        autopar.register_rule("aten::relu", "b d -> b d", flops=10**6, override=True)
        assert _planned(tmp_path)[1]
    finally:
        del REGISTERED[torch.ops.aten.relu.default]
        ruled.cache_clear()
    assert not _planned(tmp_path)[1]
    monkeypatch.setattr(plan_cache, "_code", lambda: "another version")
    assert _planned(tmp_path)[1]


def _damage(text: str, seed: int) -> str:
    source = random.Random(seed)
    if seed % 2:
        return text[: source.randrange(len(text))]
    return json.dumps(mutated(json.loads(text), source))


def test_a_damaged_file_is_ignored_with_a_warning_and_replaced(tmp_path: Path) -> None:
    made, _ = _planned(tmp_path)
    (path,) = _files(tmp_path)
    intact = path.read_text()
    for seed in range(8):
        path.write_text(_damage(intact, seed))
        if path.read_text() == intact:
            continue
        with pytest.warns(UserWarning, match=r"is no plan for this \(.*\); it is planned anew and replaced"):
            found, solved = _planned(tmp_path)
        assert solved and found == made
        assert path.read_text() == intact


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"{}", b'{"cached_plan": 2}', b"[" * 10**5])
def test_a_foreign_file_is_ignored_with_a_warning_and_replaced(tmp_path: Path, content: bytes) -> None:
    _planned(tmp_path)
    (path,) = _files(tmp_path)
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="is no plan for this"):
        assert _planned(tmp_path)[1]
    assert not _planned(tmp_path)[1]


def test_the_plan_of_another_request_under_this_name_is_not_taken(tmp_path: Path) -> None:
    _planned(tmp_path / "one")
    _planned(tmp_path / "other", _Mlp(64))
    (path,), (other,) = _files(tmp_path / "one"), _files(tmp_path / "other")
    path.write_text(other.read_text())
    with pytest.warns(UserWarning, match="it was changed since it was written"):
        assert _planned(tmp_path / "one")[1]
    entry = json.loads(other.read_text())
    path.write_text(json.dumps(entry | {"key": path.stem}))
    with pytest.warns(UserWarning, match="the plan belongs to another model"):
        assert _planned(tmp_path / "one")[1]


def _planned_at_once(folder: str) -> bool:
    dist.barrier()
    return _planned(Path(folder))[1]


@pytest.mark.slow
def test_processes_that_write_at_once_leave_one_whole_plan(ranks: Ranks, tmp_path: Path) -> None:
    assert any(ranks.run(_planned_at_once, str(tmp_path), world_size=2))
    assert len(_files(tmp_path)) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".* splits nothing")  # the model is tiny
        assert not _planned(tmp_path)[1]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="the plan cannot be kept in .*; it is used all the same"):
        assert _planned(tmp_path / "file")[1]


def test_what_is_no_folder_is_refused() -> None:
    with pytest.raises(InputError, match=r"Search\(cache=3\); give the path of a folder, or None"):
        autopar.plan(_Mlp(), MESH, X, search=autopar.Search(cache=3))  # type: ignore[arg-type]


def test_plans_are_found_wherever_their_folder_is_and_however_a_size_is_written(tmp_path: Path) -> None:
    made, _ = _planned(tmp_path / "here", memory="1GB")
    (tmp_path / "here").rename(tmp_path / "there")
    found, solved = _planned(tmp_path / "there", memory=10**9, max_axes=3)
    assert not solved and found == made


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_PLAN_CACHE", str(tmp_path))
    autopar.plan(_Mlp(), MESH, X)
    assert len(_files(tmp_path)) == 1
    autopar.plan(_Mlp(), "auto", X, devices=2, hardware="cpu")
    assert len(_files(tmp_path)) == 1  # meshes that are compared are not kept


def test_a_plan_in_tiles_is_found_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(2048, 8), nn.Linear(8, 2048))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())

    inputs = (torch.zeros(8, 64, dtype=torch.long),)
    made, _ = _planned(tmp_path, Loss(), example=inputs, memory="1MB")
    assert any(text.startswith("linear_cross_entropy") for text in made.descriptions.values())
    again, solved = _planned(tmp_path, Loss(), example=inputs, memory="1MB")
    assert again == made and not solved


def test_plans_of_pipelines_are_kept(tmp_path: Path) -> None:
    model, on = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4))), {"pp": 2, "dp": 2}
    options: dict[str, Any] = {"microbatches": 2, "schedule": "1f1b", "hardware": "cpu", "plan_cache": tmp_path}
    made = autopar.plan(model, autopar.Mesh(on), X, **by_flag(**options))
    with mock.patch.object(plan_cache, "plan_pipeline", side_effect=AssertionError("planned again")):
        again = autopar.plan(model, autopar.Mesh(on), X, **by_flag(**options))
    assert again.to_json() == made.to_json()
    (path,) = _files(tmp_path)
    entry = json.loads(path.read_text())
    path.write_text(json.dumps(entry | {"plan": entry["plan"].replace("1f1b", "gpipe")}))
    with pytest.warns(UserWarning, match="it was changed since it was written"):
        autopar.plan(model, autopar.Mesh(on), X, **by_flag(**options))


def test_the_command_line_takes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "tiny-mlp", "--mesh", "2", "--plan-cache", str(tmp_path)]
    assert main(words) == 0
    made = capsys.readouterr().out
    with mock.patch("autopar.planning.best_plan.best_plan_of", side_effect=AssertionError("planned again")):
        assert main(words) == 0
    assert made.splitlines()[:2] == capsys.readouterr().out.splitlines()[:2]


def _compiled(folder: str) -> tuple[float, str, list[str]]:
    torch.manual_seed(0)
    model = autopar.compile(_Mlp(), mesh((2,), ("dp",)), X, hardware=SLOW_DEVICES, search=autopar.Search(cache=folder))
    loss = model(torch.ones(8, 16))
    loss.backward()
    dist.barrier()
    return loss.item(), model.plan.to_json(), [each.name for each in Path(folder).iterdir()]


def test_compiled_models_find_their_plans(ranks: Ranks, tmp_path: Path) -> None:
    first, second = (ranks.run(_compiled, str(tmp_path)) for _ in range(2))
    assert first == second
    assert len(first[0][2]) == 1


def test_profiles_of_a_name_are_kept_by_what_they_say(tmp_path: Path) -> None:
    _planned(tmp_path, hardware="cpu")
    assert not _planned(tmp_path, hardware="cpu")[1]
    assert _planned(tmp_path, hardware=replace(load("cpu"), memory_bytes=10**9))[1]
