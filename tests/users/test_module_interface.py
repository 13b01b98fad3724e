"""A compiled module to code that takes it for the model: attributes, copies, averages, optimizers made too early."""

from __future__ import annotations

import copy
import gc
import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional as F

import autopar
from autopar.errors import InputError
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh
from tests.users.scripts.setting import Classifier, Found, batches, parameters_of, seeded, whole


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.temperature, self.depth = 5.0, 3

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Wrapper(nn.Module):
    """Forwards what it does not have to what it wraps, as PEFT and many trainers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.temperature = Inner(), 2.0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inner":
                raise
            return getattr(self.inner, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean() * self.temperature


def _attributes(compiled: Any) -> list[Any]:
    x = torch.ones(4, 4)
    found = [compiled.temperature, compiled.depth, compiled.inner.temperature, compiled(x).item()]
    compiled.temperature = 3.0
    found += [compiled.temperature, compiled.inner.temperature, compiled(x).item()]
    compiled.note = "new"
    found += [compiled.note, hasattr(compiled, "nothing")]
    del compiled.temperature
    return [*found, compiled.temperature]


def _compiled_attributes() -> list[Any]:
    x = torch.ones(4, 4)
    return _attributes(autopar.compile(seeded(Wrapper), mesh((2,), ("dp",)), (x,)))


def test_attributes_of_a_wrapper_are_read_set_and_deleted_as_on_the_wrapper(ranks: Ranks) -> None:
    expected = _attributes(seeded(Wrapper))
    assert expected[:3] == [2.0, 3, 5.0]
    for found in ranks.run(_compiled_attributes):
        assert found == pytest.approx(expected)


def _trained(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _copies(model: nn.Module) -> Found:
    """Train a while, copy, train the copy and the model apart; average with AveragedModel; switch modes apart."""
    data = batches(6)
    first = _trained(model, data[:2])
    other = copy.deepcopy(model)
    second, third = _trained(other, data[2:4]), _trained(model, data[4:])
    other.eval()
    assert model.training and not other.training
    with torch.no_grad():
        evaluated = whole(other(data[0][0]))
    average = torch.optim.swa_utils.AveragedModel(model)
    for x, y in data[:2]:
        _trained(model, [(x, y)])
        average.update_parameters(model)
    again = copy.deepcopy(other)
    return {
        "losses": [*first, *second, *third],
        "evaluated": evaluated,
        "copied twice": whole(again(data[0][0])),
        **parameters_of(other, "copy."),
        **parameters_of(model),
        **parameters_of(average.module, "average."),
    }


def _compiled_copies(options: dict[str, Any]) -> Found:
    x, _ = batches(1)[0]
    given = {"hardware": SLOW_DEVICES, "outputs": "full", **options}
    return _copies(autopar.compile(seeded(Classifier), mesh((2,), ("dp",)), (x,), **given))


@pytest.mark.parametrize("options", [{}, {"strategy": "zero3"}, {"strategy": "data_parallel"}], ids=str)
def test_deep_copies_and_averages_train_as_those_of_the_model(options: dict[str, Any], ranks: Ranks) -> None:
    expected = _copies(seeded(Classifier))
    for found in ranks.run(_compiled_copies, options):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


class WithLoss(Classifier):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return F.cross_entropy(super().forward(x), y)


def _copied_pipeline() -> tuple[list[float], list[float]]:
    x, y = batches(1)[0]
    model = autopar.compile(seeded(WithLoss), mesh((2,), ("pp",)), (x, y), microbatches=2, stages=["head"])
    other = copy.deepcopy(model)
    losses: list[list[float]] = []
    for each in (model, other):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            losses[-1].append(float(each.train_step(x, y)))
            optimizer.step()
    return losses[0], losses[1]


def test_a_copy_of_a_pipeline_trains_by_itself(ranks: Ranks) -> None:
    for mine, copied in ranks.run(_copied_pipeline):
        assert mine == copied
        assert mine[0] > mine[-1]


def _pickled() -> str:
    model = autopar.compile(seeded(Classifier), mesh((2,), ("dp",)), (batches(1)[0][0],))
    with pytest.raises(InputError) as error:
        pickle.dumps(model)
    return str(error.value)


def test_pickling_a_compiled_module_is_refused_with_what_to_save_instead(ranks: Ranks) -> None:
    assert all("Save model.state_dict()" in text for text in ranks.run(_pickled))


def _made_before(strategy: str) -> str:
    model = seeded(Classifier)
    early = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, y = batches(1)[0]
    compiled = autopar.compile(model, mesh((2,), ("dp",)), (x,), strategy=strategy, outputs="full")
    F.cross_entropy(compiled(x), y).backward()
    with pytest.raises(InputError) as error:
        early.step()
    right = torch.optim.AdamW(compiled.parameters(), lr=0.1)
    right.step()
    # The original goes on as a model of its own.
    F.cross_entropy(model(x), y).backward()
    early.step()
    return str(error.value)


@pytest.mark.parametrize("strategy", ["data_parallel", "zero3"])
def test_an_optimizer_made_before_compile_is_refused_in_its_first_step(strategy: str, ranks: Ranks) -> None:
    for text in ranks.run(_made_before, strategy):
        assert text.startswith("AdamW was made before autopar.compile")
        assert "Make the optimizer after autopar.compile" in text


def _hooks_left() -> tuple[int, int]:
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before = len(hooks)
    compiled = autopar.compile(seeded(Classifier), mesh((2,), ("dp",)), (batches(1)[0][0],))
    while_alive = len(hooks) - before
    del compiled
    gc.collect()
    return while_alive, len(hooks) - before


def test_no_hook_on_optimizers_is_left_when_compiled_modules_are_gone(ranks: Ranks) -> None:
    ranks.kill()
    assert ranks.run(_hooks_left) == [(1, 0)] * 2


def _adapted() -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes)
    return get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, init_lora_weights=False))


def _losses_with_adapters_on_off_and_on(model: Any, ids: Tensor) -> list[float]:
    losses = [model(input_ids=ids, labels=ids).loss.item()]
    with model.disable_adapter():
        losses.append(model(input_ids=ids, labels=ids).loss.item())
    return [*losses, model(input_ids=ids, labels=ids).loss.item()]


def _without_adapters() -> list[float]:
    ids = torch.arange(24).view(4, 6)
    model = autopar.compile(seeded(_adapted), mesh((2,), ("dp",)), {"input_ids": ids, "labels": ids})
    return _losses_with_adapters_on_off_and_on(model, ids)


def test_disable_adapter_of_peft_leaves_the_adapters_out_for_a_while(ranks: Ranks) -> None:
    pytest.importorskip("peft")
    expected = _losses_with_adapters_on_off_and_on(seeded(_adapted), torch.arange(24).view(4, 6))
    assert expected[0] != pytest.approx(expected[1], rel=1e-3)
    for found in ranks.run(_without_adapters):
        assert found == pytest.approx(expected, rel=1e-5)


def _assigned_data() -> tuple[str, list[float]]:
    x, y = batches(1)[0]
    model = autopar.compile(seeded(Classifier), mesh((2,), ("dp",)), (x,), strategy="zero3")
    weight = model.head.weight
    half = whole(weight) * 0.5
    weight.data = weight.data * 0.5
    with pytest.raises(InputError) as error:
        model(x)
    losses = [F.cross_entropy(model(x), y).item()]
    weight.data.copy_(weight.data * 0.5)
    losses.append(F.cross_entropy(model(x), y).item())
    model.load_state_dict({"head.weight": half * 0.5}, strict=False)
    return str(error.value), [*losses, F.cross_entropy(model(x), y).item()]


def test_an_assignment_to_data_that_pytorch_ignores_is_refused_and_what_is_advised_works(ranks: Ranks) -> None:
    x, y = batches(1)[0]
    model = seeded(Classifier)
    expected = []
    for _ in range(3):
        expected.append(F.cross_entropy(model(x), y).item())
        model.head.weight.data *= 0.5
    for text, losses in ranks.run(_assigned_data):
        assert text.startswith("head.weight.data was assigned to, which has no effect")
        assert losses == pytest.approx(expected, rel=1e-5)


def _anomalies(strategy: str) -> str:
    """The first backward has gradients that arrive late, in memory that is NaN until then."""
    x, _ = batches(1)[0]
    model = autopar.compile(seeded(Classifier), mesh((2,), ("dp",)), (x,), strategy=strategy)
    torch.use_deterministic_algorithms(True)  # which fills what is allocated with NaN
    try:
        with torch.autograd.detect_anomaly():
            loss = model(x).square().mean()
            if dist.get_rank():
                time.sleep(1)
            loss.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan values") as error:
        (model(x).square().mean() * float("nan")).backward()
    return str(error.value)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("strategy", ["zero3", "data_parallel"])
def test_detect_anomaly_finds_nan_and_waits_for_gradients_in_flight(ranks: Ranks, strategy: str) -> None:
    assert all("MulBackward0" in text for text in ranks.run(_anomalies, strategy))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale).square().mean()


SCALED = torch.arange(16.0).view(4, 4) / 16


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(SCALED).backward()
        optimizer.step()


def _resumed_with_full_state(kind: Any, strategy: str) -> dict[str, Tensor]:
    options = StateDictOptions(full_state_dict=True)
    model = autopar.compile(seeded(Scaled), mesh((2,), ("dp",)), (SCALED,), strategy=strategy)
    optimizer = kind(model.parameters(), lr=0.1)
    _stepped(model, optimizer)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    again = autopar.compile(seeded(Scaled), mesh((2,), ("dp",)), (SCALED,), strategy=strategy)
    again.load_state_dict(model.state_dict())
    optimizer = kind(again.parameters(), lr=0.1)
    set_optimizer_state_dict(again, optimizer, state, options=options)
    _stepped(again, optimizer)
    return {name: whole(each) for name, each in again.named_parameters()}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.NAdam])
@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
def test_a_full_optimizer_state_resumes_parameters_of_no_dims(ranks: Ranks, kind: Any, strategy: str) -> None:
    model = seeded(Scaled)
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(2):
        _stepped(model, optimizer)
    expected = {name: each.detach() for name, each in model.named_parameters()}
    for found in ranks.run(_resumed_with_full_state, kind, strategy):
        torch.testing.assert_close(found, expected)
