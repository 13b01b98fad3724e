"""Steps of pipelines that are graphs: one on each rank for the whole schedule, which trains as steps without."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.testing import assert_close

import autopar
from autopar.errors import InputError
from autopar.runtime.step_graphs.step import WARM_UP
from tests.support.options import by_flag
from tests.support.ranks import Ranks, mesh
from tests.support.recorded_calls import RecordedCalls

STEPS = WARM_UP + 3
WORDS, HIDDEN = 16, 8
PATIENCE = 240.0  # seconds, on a busy machine


class Residual(nn.Module):
    """A layer that normalizes and drops, next to its input."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSM: Tensor) -> Tensor:
        return x_BSM + self.dropout(self.down(F.gelu(self.up(self.norm(x_BSM)))))


class Words(nn.Module):
    """A tower on words, which may have its first weight at its end, too; it returns its loss."""

    def __init__(self, dropout: float = 0.0, ties: bool = False, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.Sequential(*(Residual(dropout) for _ in range(layers)))
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)
        if ties:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.embedding(ids))).flatten(0, 1), labels.flatten())


def _batch(number: int, samples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids, labels = torch.randint(WORDS, (2, samples, 4), generator=generator)
    return ids, labels


def _compiled(axes: Mapping[str, int], model: nn.Module, **options: Any) -> Any:
    on = mesh(tuple(axes.values()), tuple(axes))
    return autopar.compile(model, on, _batch(0), **by_flag(**{"microbatches": 4, "seed": 3, **options}))


def _local(x: Tensor) -> Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach().clone()


def _gradients(model: nn.Module) -> list[Tensor]:
    return [_local(each.grad) for each in model.parameters() if each.grad is not None]


def _trained(axes: Mapping[str, int], model: dict[str, Any], options: dict[str, Any], set_to_none: bool) -> Any:
    """Losses, gradients and parameters of some steps, as graphs and without."""
    found = []
    for graphed in (True, False):
        compiled, recorder = _compiled(axes, Words(**model), **options), RecordedCalls()
        if graphed:
            compiled.capture_steps(True, recorder)
        optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
        steps: list[list[Tensor]] = []
        for number in range(STEPS):
            loss = compiled.train_step(*_batch(number)).clone()
            steps.append([loss, *_gradients(compiled)])
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        found += [[steps, [_local(each) for each in compiled.parameters()]], recorder.captures, recorder.replays]
    return tuple(found)


ALSO = [
    ({"pp": 2}, {}, {"schedule": "1f1b"}, True),
    ({"pp": 2}, {"dropout": 0.2}, {"schedule": "interleaved_zero_bubble"}, False),
    ({"pp": 2}, {"ties": True}, {"schedule": "gpipe", "precision": "bf16-mixed", "recompute": "full"}, True),
    ({"pp": 2}, {}, {"schedule": "zbv"}, True),
    ({"pp": 2}, {"dropout": 0.2}, {"schedule": "dualpipev", "precision": "bf16-mixed", "recompute": "full"}, True),
    ({"pp": 2, "dp": 2}, {}, {"strategy": "zero2", "precision": "bf16-mixed"}, True),
    ({"pp": 2, "tp": 2}, {}, {"strategy": "megatron", "microbatches": 2}, True),
]
CASES = [
    ({"pp": 2}, {"dropout": 0.2, "ties": True}, {"schedule": "interleaved_1f1b"}, False),
    ({"pp": 2, "dp": 2}, {"dropout": 0.2, "ties": True}, {"strategy": "zero3", "recompute": "full"}, False),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in ALSO),
]


@pytest.mark.parametrize(("axes", "model", "options", "set_to_none"), CASES)
def test_a_replayed_schedule_trains_as_one_without_a_graph(
    axes: dict[str, int], model: dict[str, Any], options: dict[str, Any], set_to_none: bool, ranks: Ranks
) -> None:
    world_size = 2 * len(axes)
    for found, captures, replays, expected, *_ in ranks.run(
        _trained, axes, model, options, set_to_none, world_size=world_size, timeout=PATIENCE
    ):
        assert_close(found, expected, rtol=0, atol=0)
        assert (captures, replays) == (1, STEPS - WARM_UP - (0 if set_to_none else 1))


def _loop() -> Any:
    found = []
    for graphed in (True, False):
        model, recorder = _compiled({"pp": 2}, Words(ties=True)), RecordedCalls()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(ids: Tensor, labels: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            loss = model.train_step(ids, labels)
            model.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        if graphed:
            model.capture_steps(True, recorder)
        called = model.cuda_graph(step) if graphed else step
        losses = [called(*_batch(number)).clone() for number in range(STEPS)]
        found += [[*losses, *map(_local, model.parameters())], recorder.replays]
    return tuple(found)


def test_a_loop_with_its_optimizer_and_clipping_is_one_graph(ranks: Ranks) -> None:
    for found, replays, expected, _ in ranks.run(_loop, timeout=PATIENCE):
        assert_close(found, expected, rtol=0, atol=0)
        assert replays == STEPS - WARM_UP


def _another_rate() -> str:
    model = _compiled({"pp": 2}, Words())
    model.capture_steps(True, RecordedCalls())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = model.cuda_graph(lambda *batch: (model.train_step(*batch), optimizer.step(), optimizer.zero_grad())[0])
    for number in range(STEPS):
        step(*_batch(number))
    if "head.weight" in dict(model.named_parameters()):
        optimizer.param_groups[0]["lr"] = 0.01
    try:
        step(*_batch(STEPS))
    except InputError as error:
        return str(error)
    return "replayed"


def test_a_learning_rate_that_changes_on_one_stage_is_refused_on_all(ranks: Ranks) -> None:
    for found in ranks.run(_another_rate, timeout=PATIENCE):
        assert found.startswith("lr of SGD in stage 1 is 0.01 now and was 0.1 when the step was captured")


def _between_steps() -> Any:
    found = []
    for graphed in (True, False):
        model, recorder = _compiled({"pp": 2}, Words(dropout=0.2, ties=True)), RecordedCalls()
        if graphed:
            model.capture_steps(True, recorder)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps: list[Any] = []
        saved: dict[str, Any] = {}
        for number in range(2 * WARM_UP + 6):
            samples = 8 if number % 2 else 12  # two shapes in turns
            steps.append([model.train_step(*_batch(number, samples)).clone(), *_gradients(model)])
            steps.append(model.clip_grad_norm_(0.5).clone())
            optimizer.step()
            if number % 5:  # else the next step adds to the gradients
                optimizer.zero_grad()
            if number % 3 == 0:
                model.eval()
                steps.append(model(*_batch(100 + number)).clone())
                model.train()
                optimizer.param_groups[0]["lr"] *= 0.7
            if number == 2 * WARM_UP:
                saved = {name: _local(each) for name, each in model.state_dict().items()}
            if number == 2 * WARM_UP + 3:
                model.load_state_dict(saved)
        found += [[*steps, *map(_local, model.parameters())], recorder.captures, recorder.replays]
    return tuple(found)


def test_what_a_user_does_between_steps_counts(ranks: Ranks) -> None:
    """Evaluation, another learning rate, clipping, another batch size, sums of gradients, a state dict."""
    for found, captures, replays, expected, *_ in ranks.run(_between_steps, timeout=PATIENCE):
        assert_close(found, expected, rtol=0, atol=0)
        assert captures >= 2 and replays > 2


def _frozen() -> Any:
    found = []
    for graphed in (True, False):
        model, recorder = _compiled({"pp": 2}, Words(), recompute="none"), RecordedCalls()
        if graphed:
            model.capture_steps(True, recorder)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for number in range(2 * STEPS):
            if number == STEPS and "embedding.weight" in dict(model.named_parameters()):
                for each in model.parameters():
                    each.requires_grad_(False)
                    each.grad = None
            losses.append(model.train_step(*_batch(number)).clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        found += [[*losses, *map(_local, model.parameters())], recorder.captures]
    return tuple(found)


def test_a_stage_that_learns_no_more_is_another_kind_on_all_ranks(ranks: Ranks) -> None:
    for found, captures, expected, _ in ranks.run(_frozen, timeout=PATIENCE):
        assert_close(found, expected, rtol=0, atol=0)
        assert captures == 2


class Alpha(nn.Module):
    """A layer whose draws take no generator."""

    def forward(self, x: Tensor) -> Tensor:
        return F.alpha_dropout(x, 0.1, self.training)


def _refused(where: str) -> tuple[list[str], list[Tensor]]:
    """The refusals of a step whose last stage has a layer, or a hook, that cannot be in a graph; and losses without."""
    found: list[str] = []
    losses: list[Tensor] = []
    for required in (True, False):
        model = Words()
        if where == "layer":
            model.layers.append(Alpha())
        compiled = _compiled({"pp": 2}, model)
        compiled.capture_steps(required, RecordedCalls())
        last = dict(compiled.named_parameters()).get("head.weight")
        if where == "hook" and last is not None:
            last.register_hook(lambda gradient: None)
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                losses += [compiled.train_step(*_batch(number)).clone() for number in range(WARM_UP + 1)]
            found += [str(each.message) for each in warned if "cuda_graph" in str(each.message)]
        except InputError as error:
            found.append(str(error))
    return found, losses


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("hook", "would leave out the hook on the parameter head.weight"),
        pytest.param("layer", "draws random numbers by aten.alpha_dropout", marks=pytest.mark.slow),
    ],
)
def test_what_one_stage_refuses_all_refuse_with_its_number(where: str, reason: str, ranks: Ranks) -> None:
    for found, losses in ranks.run(_refused, where, timeout=PATIENCE):
        assert len(found) == 2, "an error, and with `auto` a warning"
        assert all(reason in each and "(in stage 1)" in each for each in found)
        assert len(losses) == WARM_UP + 1
