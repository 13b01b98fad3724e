"""Watching a run: what is counted of a step, and where it is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.capture.export import capture
from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Hardware
from autopar.costs.pricing.model_flops import batch_of, model_flops
from autopar.integrations.watch import Record, Watch
from tests.support.families import FAMILIES
from tests.support.options import by_flag
from tests.support.ranks import Ranks, mesh


@pytest.mark.parametrize("name", ["mlp", "resnet", "unet"])
def test_flops_of_a_step_are_those_that_torch_counts(name: str) -> None:
    family = FAMILIES[name]
    model, (args, kwargs) = family.build(), family.inputs(0)
    with FlopCounterMode(display=False) as counted:
        family.loss(model(*args, **kwargs)).backward()
    program = capture(family.build(), args, kwargs)
    assert model_flops(program) == {torch.float32: counted.get_total_flops()}


def test_frozen_parameters_and_evaluation_ask_for_less() -> None:
    model, x = torch.nn.Linear(8, 16, bias=False), (torch.zeros(4, 8),)
    forward = 2 * 4 * 8 * 16  # and to the weights alone: x needs no gradient
    assert model_flops(capture(model, x, {})) == {torch.float32: 2 * forward}
    assert model_flops(capture(model, x, {}, training=False)) == {torch.float32: forward}
    assert model_flops(capture(model.requires_grad_(False), x, {})) == {torch.float32: forward}


def test_tokens_are_of_the_first_input_of_whole_numbers() -> None:
    ids = torch.zeros(4, 6, dtype=torch.long)
    assert batch_of(capture(torch.nn.Embedding(12, 8), (ids,), {})) == (4, 24)
    assert batch_of(capture(torch.nn.Linear(8, 8), (torch.zeros(4, 8),), {})) == (4, None)


def _compiled(**options: Any) -> Any:
    model = torch.nn.Sequential(torch.nn.Embedding(12, 8), torch.nn.Linear(8, 8), torch.nn.Flatten(0), Mean())
    ids = torch.zeros(8, 6, dtype=torch.long)
    return autopar.compile(model, mesh((2,), ("dp",)), (ids,), strategy="zero3", **by_flag(**options)), ids


class Mean(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def _watched(folder: Path) -> list[Record]:
    return [
        _two_steps(folder / f"{microbatches}.jsonl", microbatches, calls) for microbatches, calls in ((1, 1), (2, 3))
    ]


def _two_steps(path: Path, microbatches: int, calls: int) -> Record:
    model, ids = _compiled(microbatches=microbatches)
    watch = Watch(model, path, calls=calls)
    assert watch.step() is None
    record, losses = None, []
    for _ in range(2):
        losses = [model.train_step(ids) for _ in range(calls)]
        record = watch.step(loss=losses[-1])
    dist.barrier()
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["step"] for each in written] == [2, 3], "the first rank alone writes"
    assert written[1]["values"] == {"loss": float(losses[-1])}
    assert record is not None
    assert record.predicted_bytes == model.plan.peak_bytes
    assert record.predicted_seconds is not None
    more = record.predicted_seconds / model.plan.step_seconds
    assert more == 1 if microbatches == 1 else 3 < more < 6
    return record


def test_a_record_has_the_work_of_all_micro_batches_and_calls(ranks: Ranks, tmp_path: Path) -> None:
    one, many = ranks.run(_watched, tmp_path)[0]
    products = 2 * 48 * 8 * 8 * 3  # of 48 tokens: forward, and backward to weights and inputs
    assert (one.flops, many.flops) == (products, 3 * products)
    peak = load("cpu").flops_of(torch.float32)
    for record, calls in ((one, 1), (many, 3)):
        assert record.tokens_per_second == pytest.approx(48 * calls / record.seconds)
        assert record.samples_per_second == pytest.approx(8 * calls / record.seconds)
        assert record.mfu == pytest.approx(record.flops / (record.seconds * 2 * peak))
        assert record.peak_bytes is None


def _into_tensorboard() -> list[tuple[str, float, int]]:
    told: list[tuple[str, float, int]] = []
    board = ModuleType("torch.utils.tensorboard")
    writer = SimpleNamespace(add_scalar=lambda *given: told.append(given), flush=lambda: None)
    board.SummaryWriter = lambda folder: writer  # type: ignore[attr-defined]
    model, ids = _compiled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", board)
        watch = Watch(model, tensorboard="runs", peak_flops=1e9)
        watch.step()
        model(ids)
        watch.step(lr=0.5)
        patch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(autopar.InputError, match=r"needs the package tensorboard.*install it, or give a path"):
            Watch(model, tensorboard="runs")
    return told


def test_tensorboard_gets_every_number(ranks: Ranks) -> None:
    first, second = ranks.run(_into_tensorboard)
    assert second == [], "the first rank alone writes"
    names = {name for name, _, step in first if step == 2}
    assert {"autopar/mfu", "autopar/tokens_per_second", "autopar/predicted_seconds", "autopar/lr"} <= names
    assert ("autopar/lr", 0.5, 2) in first


def _refused() -> None:
    with pytest.raises(autopar.InputError, match=r"model is a Linear; give what autopar.compile returns"):
        Watch(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    model, _ = _compiled(hardware=Hardware("mine", {"float32": 1e9}, 1e9, 10**9, 0.0, load("cpu").links))
    with pytest.raises(autopar.InputError, match="calls=0; give how many"):
        Watch(model, calls=0)
    watch = Watch(model)
    watch.step()
    with pytest.raises(autopar.InputError, match=r"hardware 'mine' is no profile.*peak_flops=989e12"):
        watch.step()
    given = Watch(model, peak_flops=1e9)
    given.step()
    assert given.step() is not None


def test_what_cannot_be_watched_is_refused(ranks: Ranks) -> None:
    ranks.run(_refused)


def _by_the_trainer(path: Path) -> Any:
    from autopar.integrations.trainer_watch import WatchCallback

    model, _ = _compiled()
    callback, arguments = WatchCallback(path, peak_flops=1e9), SimpleNamespace(gradient_accumulation_steps=2)
    callback.on_train_begin(arguments, None, None, model=model)
    for _ in range(3):
        callback.on_step_end(arguments, None, None)
    dist.barrier()
    return [json.loads(line)["flops"] for line in path.read_text().splitlines()]


def test_the_trainer_is_watched_by_a_callback(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    products = 2 * 48 * 8 * 8 * 3
    assert ranks.run(_by_the_trainer, tmp_path / "run.jsonl")[0] == [2 * products] * 2
