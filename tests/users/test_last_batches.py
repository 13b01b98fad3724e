"""A last batch that does not divide, and evaluation on other sizes, under presets: the numbers of one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import autopar
from autopar.errors import StrategyError
from tests.support.language_models import language_model, texts
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh

TEXTS = {(batch, length): texts(batch, length, seed=batch) for batch in (1, 2, 3, 4, 5) for length in (8, 7)}
LINE = ("data_parallel", "zero1", "zero2", "zero3")
GRID = ("megatron", "megatron_sequence", "fsdp_megatron", "hsdp", "ring", "ulysses", "tensor_2d")


def _epoch(model: nn.Module) -> dict[str, Any]:
    """An epoch whose last batches are smaller, an evaluation, and a step on shorter texts."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    found: dict[str, Any] = {}
    for size in ((4, 8), (3, 8), (1, 8), (4, 7)):
        optimizer.zero_grad()
        loss = model(**TEXTS[size])["loss"]
        loss.backward()
        found |= {f"{size} {name}": whole(each.grad) for name, each in model.named_parameters()}
        found[f"{size} loss"] = loss.detach()
        optimizer.step()
    with torch.no_grad():
        found["evaluated"] = model.eval()(**TEXTS[5, 8])["loss"]
    return found | {name: whole(each) for name, each in model.named_parameters()}


def _epochs(strategies: tuple[str, ...], shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    expected = _epoch(language_model())
    for strategy in strategies:
        model = autopar.compile(
            language_model(), mesh(shape, names), TEXTS[4, 8], strategy=strategy, hardware=SLOW_DEVICES
        )
        stored = {name: str(getattr(each, "placements", None)) for name, each in model.named_parameters()}
        found = _epoch(model)
        assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, s=strategy: f"{s}: {text}")
        assert stored == {name: str(getattr(each, "placements", None)) for name, each in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:.*replicated over")
def test_a_last_batch_that_does_not_divide_trains_as_on_one_process(ranks: Ranks) -> None:
    ranks.run(_epochs, ("data_parallel", "zero3"), (2,), ("dp",))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*replicated over")
def test_presets_over_two_axes_take_a_last_batch_and_other_lengths_too(ranks: Ranks) -> None:
    ranks.run(_epochs, ("megatron_sequence", "fsdp_megatron"), (2, 2), ("dp", "tp"), world_size=4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:zero1", "ignore:.*replicated over", "ignore:megatron")
@pytest.mark.parametrize("strategy", LINE + GRID)
def test_every_preset_takes_a_last_batch_that_does_not_divide(ranks: Ranks, strategy: str) -> None:
    line = strategy in LINE
    shape, names = ((2,), ("dp",)) if line else ((2, 2), ("dp", "tp"))
    ranks.run(_epochs, (strategy,), shape, names, world_size=2 if line else 4)


def _stages() -> None:
    """A pipeline whose last batch has micro-batches of one sample, on stages that split samples over two ranks."""
    trained: dict[str, dict[str, Any]] = {}
    for where in ("one process", "ranks"):
        model: Any = language_model()
        if where == "ranks":
            options = {"strategy": "zero3", "microbatches": 2, "schedule": "gpipe", "hardware": SLOW_DEVICES}
            model = autopar.compile(model, mesh((2, 2), ("pp", "dp")), TEXTS[4, 8], **by_flag(**options))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in (TEXTS[4, 8], TEXTS[2, 8]):
            optimizer.zero_grad()
            if where == "ranks":
                model.train_step(**batch)
            else:
                model(**batch)["loss"].backward()
            optimizer.step()
        trained[where] = {name: whole(each) for name, each in model.named_parameters()}
    for name, each in trained["ranks"].items():
        assert_close(each, trained["one process"][name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*replicated over")
def test_a_pipeline_takes_a_last_batch_whose_micro_batches_do_not_divide(ranks: Ranks) -> None:
    ranks.run(_stages, world_size=4)


def _first_batch() -> None:
    with pytest.raises(StrategyError, match=r"zero3 splits the batch into 2 parts over dp; found a batch of 3\."):
        autopar.compile(language_model(), mesh((2,), ("dp",)), TEXTS[3, 8], strategy="zero3")
    model = autopar.compile(language_model(), mesh((2,), ("dp",)), TEXTS[4, 8], strategy="zero3", hardware=SLOW_DEVICES)
    with warnings.catch_warnings(record=True) as specified:
        warnings.simplefilter("always")
        model(**TEXTS[3, 8])
        model(**TEXTS[3, 8])
    found = [str(each.message) for each in specified if "replicated over dp" in str(each.message)]
    # The first rank plans for all.
    assert len(found) == (not dist.get_rank())
    assert all("give a batch and a length that the axis divides" in each for each in found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**TEXTS[2, 8])


def test_the_first_batch_is_refused_where_it_does_not_divide_and_later_ones_are_warned_of(ranks: Ranks) -> None:
    ranks.run(_first_batch)
