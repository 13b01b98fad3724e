"""Forward hooks that the first call of a model registers, as transformers do to record outputs, in later captures."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import autopar
from autopar.capture.export import capture, skeleton
from autopar.errors import CaptureError
from autopar.ir.program.python_state import Watch
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh


def _twice(module: nn.Module, args: Any, output: Any) -> Tensor:
    return output * 2


class Lazy(nn.Module):
    """Registers a hook in its first call, and notes that in a flag."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 4)
        self.is_ready = False

    def forward(self, x_BD: Tensor) -> Tensor:
        if not self.is_ready:
            self.begin()
            self.is_ready = True
        return self.up(x_BD)

    def begin(self) -> None:
        self.up.register_forward_hook(_twice)


class WithMethod(Lazy):
    def begin(self) -> None:
        self.up.register_forward_hook(self.scaled, always_call=True)

    def scaled(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.up.weight.sum()


class WithClosure(Lazy):
    def begin(self) -> None:
        def scaled(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            return output * self.up.weight.sum()

        self.up.register_forward_hook(scaled, with_kwargs=True)


class WithTable(Lazy):
    """The table of hooks is its flag."""

    def forward(self, x_BD: Tensor) -> Tensor:
        if not self.up._forward_pre_hooks:
            self.up.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        return self.up(x_BD)


class FromTheSecond(Lazy):
    """Registers its hook at the end of the first call: later ones compute something else."""

    def forward(self, x_BD: Tensor) -> Tensor:
        result = self.up(x_BD)
        if not self.is_ready:
            self.begin()
            self.is_ready = True
        return result


class PilingUp(Lazy):
    def forward(self, x_BD: Tensor) -> Tensor:
        self.begin()
        return self.up(x_BD)


class WithTensor(Lazy):
    def forward(self, x_BD: Tensor) -> Tensor:
        if not self.is_ready:
            factor: Any = x_BD.sum()
            self.up.register_forward_hook(lambda module, args, output: factor * output)
            self.is_ready = True
        return self.up(x_BD)


class WithFunction(Lazy):
    def begin(self) -> None:
        self.twice = lambda x: 2 * x

    def forward(self, x_BD: Tensor) -> Tensor:
        result = super().forward(x_BD)
        return self.twice(result)


X_BD = torch.arange(8.0).reshape(2, 4)


@pytest.mark.parametrize("make", [Lazy, WithMethod, WithClosure, WithTable])
def test_a_hook_of_the_first_call_is_part_of_every_capture(make: Callable[[], nn.Module]) -> None:
    model = skeleton(make())
    first = capture(model, (X_BD,), {}, training=True)
    watch = Watch(model, first.python)
    for _ in range(2):  # each step leaves what a call leaves
        watch.leave_written()
    second = capture(model, (X_BD,), {}, training=True)
    assert first.python.settled and second.fingerprint == first.fingerprint and not second.constants
    assert "mul" in str(second.graph) and not second.python.registered


def test_a_hook_that_counts_from_the_second_call_asks_for_a_second_plan() -> None:
    model = skeleton(FromTheSecond())
    first = capture(model, (X_BD,), {}, training=True)
    watch = Watch(model, first.python)
    assert not first.python.settled and "mul" not in str(first.graph) and watch.holds()
    watch.leave_written()
    assert not watch.holds() and "mul" in str(capture(model, (X_BD,), {}, training=True).graph)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (PilingUp, "registers a forward hook on up with every call, so that they pile up; register it once"),
        (
            WithTensor,
            r"a forward hook on up \(.*lambda.*\) that holds a tensor of the forward.*before autopar sees",
        ),
        (WithFunction, r"first call of forward changes is_ready \(.*py:\d+\), after which .* no attribute 'twice'"),
    ],
)
def test_what_cannot_stay_from_one_call_to_the_next_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(skeleton(make()), (X_BD,), {}, training=True)


def test_a_parameter_that_a_hook_holds_itself_is_no_constant() -> None:
    model: Any = Lazy()
    weight = model.up.weight
    model.up.register_forward_hook(lambda module, args, output: output * weight.sum())
    with pytest.raises(CaptureError, match=r"a parameter that a forward hook holds itself .let the hook read it from"):
        capture(skeleton(model), (X_BD,), {}, training=True)


def test_a_variable_of_a_hook_that_knows_its_model_is_watched() -> None:
    model: Any = Lazy()
    factor = 2.0
    model.up.register_forward_hook(lambda module, args, output: output * factor * model.up.in_features)
    model = skeleton(model)
    watch = Watch(model, capture(model, (X_BD,), {}, training=True).python)
    assert watch.holds()
    factor = 3.0
    assert not watch.holds()


def test_a_hook_that_calls_itself_is_captured() -> None:
    model: Any = Lazy()

    def halved(module: nn.Module, args: Any, output: Tensor, depth: int = 2) -> Tensor:
        return halved(module, args, output / 2, depth - 1) if depth else output * model.up.weight.sum()

    model.up.register_forward_hook(halved)
    program = capture(skeleton(model), (X_BD,), {}, training=True)
    assert str(program.graph).count("div") and not program.constants


def _hooked_from_outside() -> nn.Module:
    model: Any = Lazy()
    model.is_ready = True
    model.up.register_forward_hook(lambda module, args, output: output * model.up.weight.sum())
    return model


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    whole = lambda x: getattr(x, "full_tensor", lambda: x)()  # noqa: E731
    return {name: whole(p.grad).clone() for name, p in model.named_parameters()}


def _trains(make: Callable[[], nn.Module]) -> None:
    eager, model = make(), autopar.compile(make(), mesh((2,), ("dp",)), hardware=SLOW_DEVICES)
    plans = []
    for samples in (2, 4, 2):
        x_BD = X_BD.repeat(samples, 1)
        for each in (eager, model):
            each(x_BD).square().mean().backward()
        plans.append(model.plan)
        assert_close(_gradients(model), _gradients(eager))
        for each in (eager, model):
            each.zero_grad()
    assert plans[2] is plans[0]  # a hook that the first call has registered is no change
    double = copy.deepcopy(model)
    assert_close(double(X_BD).sum(), eager(X_BD).sum())


@pytest.mark.parametrize("make", [Lazy, WithMethod, WithClosure, WithTable, _hooked_from_outside])
def test_further_batches_train_as_the_plain_model(make: Callable[[], nn.Module], ranks: Ranks) -> None:
    ranks.run(_trains, make, timeout=120)


def _records(recorded: tuple[str, ...], ran_before: bool) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2, "use_cache": False}
    model: Any = MixtralForCausalLM(MixtralConfig(**sizes, **heads, **dict.fromkeys(recorded, True)))  # type: ignore[arg-type]
    eager = copy.deepcopy(model)
    if ran_before:
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    model = autopar.compile(model, mesh((2,), ("dp",)), hardware=SLOW_DEVICES)
    for training in (True, False):
        for samples in (2, 4):
            ids = torch.arange(samples * 4).reshape(samples, 4) % 16
            found, expected = (each.train(training)(input_ids=ids, labels=ids) for each in (model, eager))
            assert found.keys() == expected.keys()
            for name in expected:
                assert_close(found[name], expected[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("recorded", [("output_router_logits", "output_hidden_states"), ("output_hidden_states",)])
def test_outputs_that_transformers_record_are_those_of_the_plain_model(recorded: tuple[str, ...], ranks: Ranks) -> None:
    ranks.run(_records, recorded, False, timeout=200)


def test_outputs_are_recorded_of_a_model_that_ran_before(ranks: Ranks) -> None:
    ranks.run(_records, ("output_router_logits",), True, timeout=200)
