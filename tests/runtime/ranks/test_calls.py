"""A rank that is called otherwise than the others ends all, each with the difference; nobody dies by a signal."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.runtime.ranks import failure
from autopar.runtime.ranks.calls import _difference
from tests.support.ending_ranks import ends_of
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh


class Net(nn.Module):
    """Normalizes, so that modes differ; H is the hidden size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16)

    def forward(self, x_BH: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x_BH)).relu()).square().mean()


def compiled(example: tuple[Tensor, ...] | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"hardware": SLOW_DEVICES, "strategy": "zero3", **options}
    return autopar.compile(Net(), mesh((2,), ("dp",)), (batch(),) if example is None else example, **by_flag(**options))


def batch(size: int = 8) -> Tensor:
    return torch.arange(size * 16.0).reshape(size, 16) / 100


def train(model: Any, x_BH: Tensor | None = None) -> None:
    model(batch() if x_BH is None else x_BH).backward()


def trained() -> Any:
    """Return a model whose steps have become regular."""
    model = compiled()
    for _ in range(4):
        train(model)
    return model


def a_new_shape(rank: int) -> None:
    model = trained()
    train(model, batch(8 - 4 * rank))


def a_known_shape(rank: int) -> None:
    model = compiled()
    for size in (8, 4, 8, 8):
        train(model, batch(size))
    train(model, batch(8 - 4 * rank))


def another_mode(rank: int) -> None:
    model = trained()
    model.train(rank == 0)
    train(model)


def another_frozen_set(rank: int) -> None:
    model = trained()
    model.up.weight.requires_grad_(rank == 0)
    train(model)


def another_autocast(rank: int) -> None:
    model = trained()
    with torch.autocast("cpu", torch.bfloat16) if rank else contextlib.nullcontext():
        train(model)


def no_gradients(rank: int) -> None:
    model = trained()
    with torch.no_grad() if rank else contextlib.nullcontext():
        model(batch())


def a_backward_skipped(rank: int) -> None:
    model = compiled()
    for step in range(6):
        loss = model(batch())
        if rank == 0 or step != 4:
            loss.backward()


def a_backward_more(rank: int) -> None:
    model = compiled()
    for step in range(6):
        loss = model(batch())
        if rank == 1 and step == 4:
            loss.backward(retain_graph=True)
        if rank == 1 or step < 4:
            loss.backward()


DIFFERENCES: dict[Callable[[int], None], str] = {
    a_new_shape: r"rank 0 with x_BH: float32\[8, 16\]; rank 1 with x_BH: float32\[4, 16\]\. Every rank needs",
    a_known_shape: r"rank 0 with x_BH: float32\[8, 16\]; rank 1 with x_BH: float32\[4, 16\]\. Every rank needs",
    another_mode: "rank 0 with mode: training; rank 1 with mode: evaluation. Set mode alike on every rank",
    another_frozen_set: "rank 0 with frozen parameters: none of these; rank 1 with frozen parameters: up.weight. Set",
    another_autocast: r"rank 0 with autocast: off; rank 1 with autocast: torch.bfloat16. Set autocast alike",
    no_gradients: "rank 0 with gradients: on; rank 1 with gradients: off. Set gradients alike",
    a_backward_skipped: "out of step: rank 0 begins a backward, rank 1 another call of the model. Every rank must",
    a_backward_more: "out of step: rank 0 begins another call of the model, rank 1 a backward. Every rank must",
}


IN_EVERY_TEST = (a_new_shape, a_backward_skipped)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "work",
    [pytest.param(work, marks=() if work in IN_EVERY_TEST else pytest.mark.slow) for work in DIFFERENCES],
    ids=lambda work: work.__name__,
)
def test_ranks_called_differently_all_end_with_the_difference(work: Callable[[int], None], tmp_path: Path) -> None:
    for end in ends_of(work, tmp_path, 2):
        assert re.search(DIFFERENCES[work], end.raised + end.printed), end
        assert end.status == 1, end


def _train(rank: int) -> None:
    train(compiled())


def _mode(rank: int) -> None:
    model = compiled()
    model.train(rank == 0)
    model(batch())


def _gradients(rank: int) -> None:
    model = compiled()
    with torch.set_grad_enabled(rank == 0):
        model(batch())


def _frozen(rank: int) -> None:
    model = compiled()
    (model.up if rank else model.down).requires_grad_(False)
    model(batch())


def _scalar(rank: int) -> None:
    model = autopar.compile(Scaled(), mesh((2,), ("dp",)), hardware=SLOW_DEVICES)
    model(batch(), scale=rank + 0.5)


def _values(rank: int) -> None:
    train(compiled(), batch() + rank)


def _micro_batch_values(rank: int) -> None:
    model = compiled(microbatches=2)
    x_BH = batch()
    x_BH[6] += rank
    model.train_step(x_BH)


def _later_values(rank: int) -> None:
    model = compiled(check_inputs=True)
    for step in range(4):
        train(model, batch() + rank * (step == 3))


class Scaled(Net):
    """Takes a number, which a graph is made for."""

    def forward(self, x_BH: Tensor, scale: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x_BH * scale)


TOGETHER: dict[Callable[[int], None], str] = {
    _mode: "rank 0 with mode: training; rank 1 with mode: evaluation. Set mode alike",
    _gradients: "rank 0 with gradients: on; rank 1 with gradients: off. Set gradients alike",
    _frozen: "rank 0 with frozen parameters: down.bias, down.weight; rank 1 with frozen parameters: up.bias, up.weig",
    _scalar: "rank 0 with scale: 0.5; rank 1 with scale: 1.5. A number is one for the whole batch",
    _values: r"rank \d with other values of x_BH than rank \d\. A plain tensor is the whole .* inputs=\"local\"",
    _micro_batch_values: r"rank \d with other values of x_BH than rank \d\.",
    _later_values: r"rank \d with other values of x_BH than rank \d\.",
}


def _messages() -> dict[str, str]:
    """Return the error that each case raises on this rank; the last case raises none."""
    found = {}
    for work in (*TOGETHER, _train):
        found[work.__name__] = "nothing was raised"
        try:
            work(dist.get_rank())
        except Exception as error:
            found[work.__name__] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def messages(ranks: Ranks) -> list[dict[str, str]]:
    return ranks.run(_messages, timeout=240)


@pytest.mark.parametrize("work", TOGETHER, ids=lambda work: work.__name__)
def test_a_difference_at_an_announcement_is_raised_by_all(
    messages: list[dict[str, str]], work: Callable[[int], None]
) -> None:
    for found in messages:
        assert re.match("InputError: the ranks were called differently: " + TOGETHER[work], found[work.__name__])


def test_equal_calls_raise_nothing(messages: list[dict[str, str]]) -> None:
    assert [found["_train"] for found in messages] == ["nothing was raised"] * 2


def _announcements(calls: Callable[[Any], None], repeated: int) -> list[int]:
    """Return the number of events that are announced in each repetition."""
    model, found = compiled(check_inputs=False), []
    for _ in range(repeated):
        before = len(model._calls._announced)
        calls(model)
        found.append(len(model._calls._announced) - before)
    return found


def _twice_forward(model: Any) -> None:
    (model(batch()) + model(batch())).backward()


def _epoch(model: Any) -> None:
    for _ in range(3):
        train(model.train())
    with torch.no_grad():
        for _ in range(2):
            model.eval()(batch())


def _forward(model: Any) -> None:
    with torch.no_grad():
        model(batch())


@pytest.mark.parametrize(
    ("calls", "counts"), [(train, [2, 1, 0, 0]), (_twice_forward, [4, 1, 0, 0]), (_forward, [1, 1, 0, 0])]
)
def test_what_went_before_is_not_announced_again(ranks: Ranks, calls: Callable[[Any], None], counts: list[int]) -> None:
    for found in ranks.run(_announcements, calls, 4):
        assert found == counts


def _refused_together() -> list[float]:
    """A call that all ranks refuse, between two that they do not."""
    model = compiled()
    before = model(batch())
    for inputs in ((), (torch.ones(8, 7),), (batch(8 + dist.get_rank()),)):
        with pytest.raises(Exception, match=r"forward|trace|differently"):
            model(*inputs)
    return [float(before), float(model(batch()))]


def test_ranks_that_all_refuse_a_call_go_on(ranks: Ranks) -> None:
    first, second = ranks.run(_refused_together)
    assert first == second


def _interrupted() -> str:
    """Return the error on this rank if rank 0 is interrupted while it plans."""
    try:
        with mock.patch("autopar.planning.best_plan.best_plan_of", side_effect=KeyboardInterrupt):
            compiled()
    except (KeyboardInterrupt, autopar.AutoparError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_an_interrupted_first_rank_ends_all(ranks: Ranks) -> None:
    interrupt = "PlanError: preparing the model was interrupted on rank 0: KeyboardInterrupt"
    assert ranks.run(_interrupted) == ["KeyboardInterrupt: ", interrupt]


def _late(rank: int) -> None:
    failure.NAMED_SECONDS = 1.5  # a busy machine is late by a second
    model = compiled()
    train(model)
    loss = model(batch())
    if rank == 1:
        time.sleep(4)
    loss.backward()
    train(model)


@pytest.mark.slow
def test_a_rank_that_waits_for_long_names_who_is_late_and_goes_on(tmp_path: Path) -> None:
    first, second = ends_of(_late, tmp_path, 2)
    assert (first.status, second.status, second.printed) == (0, 0, "")
    assert re.match(r"rank 0: \d s in a backward, to which rank 1 did not come yet\. Every rank must", first.printed)


def _last_backward_skipped(rank: int) -> None:
    model = compiled()
    train(model)
    loss = model(batch())
    if rank == 0:
        try:
            loss.backward()
        finally:
            model._watch.stop()  # as at the end of a script
    else:
        model._watch.stop()


@pytest.mark.slow
def test_a_rank_that_leaves_without_a_backward_is_named(tmp_path: Path) -> None:
    first, second = ends_of(_last_backward_skipped, tmp_path, 2)
    assert (first.status, second.status) == (1, 0)
    assert re.match(r"rank 0: rank 1 (left without coming to a backward|ended without a message)", first.printed)


def _checkpointed() -> list[float]:
    """Gradient norms of a model inside a checkpoint, which calls it again in the backward and stops it midway."""
    model, found = compiled(), []
    for _ in range(3):
        checkpoint(lambda x_BH: model(x_BH) * 2, batch(), use_reentrant=False).backward()
        found.append(float(model.clip_grad_norm_(1e9)))
        model.zero_grad()
    return found


def test_a_model_that_is_called_again_in_a_backward_is_in_step(ranks: Ranks) -> None:
    torch.manual_seed(0)
    eager = Net()
    (2 * eager(batch())).backward()
    norm = float(nn.utils.clip_grad_norm_(eager.parameters(), 1e9))
    for found in ranks.run(_checkpointed):
        assert found == pytest.approx([norm] * 3, rel=1e-4)


def test_a_difference_that_nothing_tells_is_stated_to_be_one_of_modules() -> None:
    text = _difference((1, {"mode": "training"}), (0, {"mode": "training"}))
    assert text.startswith("the ranks were called differently: rank 1 has other modules or hooks than rank 0")
