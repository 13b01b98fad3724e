"""Steps that are graphs, as a list of recorded calls replays them on a CPU: they train as steps without a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import autopar
from autopar.runtime.step_graphs.step import WARM_UP
from benchmarks.transformer_model import Size, transformer
from tests.support.divided_experts import Form, batches, with_experts
from tests.support.options import by_flag
from tests.support.ranks import Ranks, mesh
from tests.support.recorded_calls import RecordedCalls

SIZE = Size(1, 16, 2, 32, 8, 4)
STEPS = WARM_UP + 3


def _batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(SIZE.vocabulary, (2, SIZE.batch, SIZE.sequence), generator=generator)
    return ids, labels


def _model(strategy: str, **options: Any) -> Any:
    torch.manual_seed(0)
    axes = ((2,), ("tp",)) if strategy == "megatron" else ((2,), ("dp",))
    return autopar.compile(transformer(SIZE), mesh(*axes), _batch(0), strategy=strategy, **by_flag(**options))


def _local(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.to_local() if isinstance(x, DTensor) else x


def _trained(
    model: Any, step: Callable[..., Tensor], optimizer: torch.optim.Optimizer | None, set_to_none: bool = True
) -> tuple[list[Tensor], list[set[int]]]:
    """The losses and parameters of some steps on unlike batches, and the places of each gradient since the warm-up."""
    found, places = [], [set[int]() for _ in model.parameters()]
    for number in range(STEPS):
        found.append(step(*_batch(number)).clone())
        if optimizer is not None:
            if number > WARM_UP:
                for each, parameter in zip(places, model.parameters(), strict=True):
                    each.add(_local(parameter.grad).data_ptr())
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    return [*found, *(_local(each.detach()).clone() for each in model.parameters())], places


def _train_step(strategy: str, options: dict[str, Any], set_to_none: bool) -> tuple[Any, ...]:
    found = []
    for graphed in (True, False):
        model, recorder = _model(strategy, **options), RecordedCalls()
        if graphed:
            model.capture_steps(True, recorder)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found += [*_trained(model, model.train_step, optimizer, set_to_none), recorder.captures, recorder.replays]
    return tuple(found)


@pytest.mark.parametrize(
    ("strategy", "options", "set_to_none"),
    [
        ("zero3", {"microbatches": 2, "precision": "bf16-mixed", "recompute": "full"}, True),
        ("zero3", {"prefetch": 1}, False),
        pytest.param("megatron", {"microbatches": 2}, True, marks=pytest.mark.slow),
        pytest.param("data_parallel", {}, True, marks=pytest.mark.slow),
    ],
)
def test_a_replayed_train_step_trains_as_one_without_a_graph(
    strategy: str, options: dict[str, Any], set_to_none: bool, ranks: Ranks
) -> None:
    for found, places, captures, replays, expected, *_ in ranks.run(_train_step, strategy, options, set_to_none):
        assert_close(found, expected, rtol=0, atol=0)
        assert all(len(each) == 1 for each in places), "gradients lie elsewhere from step to step"
        first_without_gradients = 0 if set_to_none else 1
        assert (captures, replays) == (1, STEPS - WARM_UP - first_without_gradients)


FORM = Form(num_experts=4, hidden=8, num_layers=2)


def _experts_step(choice: str) -> tuple[Any, ...]:
    found = []
    for graphed in (True, False):
        devices, given = mesh((2,), ("ep",)), batches(STEPS, torch.float32)
        source = autopar.annotate(with_experts(FORM, torch.float32), "*experts.dispatch", ep=f"factor:{choice}")
        model: Any = autopar.compile(source, devices, given[0], **by_flag(padded_rows=2.0, precision="bf16-mixed"))
        recorder = RecordedCalls()
        if graphed:
            model.capture_steps(True, recorder)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for each in given:
            losses.append(model.train_step(**each).clone())
            optimizer.step()
            optimizer.zero_grad()
        found += [[*losses, *(_local(each.detach()).clone() for each in model.parameters())], recorder.replays]
    return tuple(found)


@pytest.mark.parametrize("choice", ["a0+x", pytest.param("x", marks=pytest.mark.slow)])
def test_experts_on_several_ranks_are_in_the_graph_if_their_rows_are_padded(choice: str, ranks: Ranks) -> None:
    for found, replays, expected, _ in ranks.run(_experts_step, choice):
        assert_close(found, expected, rtol=0, atol=0)
        assert replays >= STEPS - WARM_UP - 1


def _loop() -> tuple[Any, ...]:
    found = []
    for graphed in (True, False):
        model, recorder = _model("zero3"), RecordedCalls()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(ids: Tensor, labels: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            loss = model(ids, labels)
            loss.backward()
            model.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        if graphed:
            model.capture_steps(True, recorder)
        found += [_trained(model, model.cuda_graph(step) if graphed else lambda *b: step(*b).detach(), None)[0]]
        found += [recorder.replays]
    return tuple(found)


def test_a_loop_with_its_optimizer_is_one_graph(ranks: Ranks) -> None:
    for found, replays, expected, _ in ranks.run(_loop):
        assert_close(found, expected, rtol=0, atol=0)
        assert replays == STEPS - WARM_UP
