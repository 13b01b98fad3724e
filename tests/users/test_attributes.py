"""Attributes of a compiled module are those of the model, for wrappers that forward to what they wrap, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import autopar
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

X_BD = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
MISSING = "no such attribute"


class Plain(nn.Module):
    """A model with attributes of its instance, of its class, a property, a buffer and a parameter."""

    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(8, 8)
        self.temperature = 5.0
        self.inner_only = [1]
        self.register_buffer("scale", torch.ones(()))

    @property
    def doubled(self) -> float:
        return 2 * self.temperature

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return (self.up(x_BD) * self.temperature * self.of_class).square().mean()


class Wrapper(nn.Module):
    """Forwards attributes that it does not have, as PEFT's models do; has a temperature of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.temperature = 2.0
        self.nothing = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inner":
                raise
            return getattr(self.inner, name)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return self.inner(x_BD) * self.temperature


class WithDefaults(Wrapper):
    """Has an answer for every name."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return f"default {name}"


MODELS = {
    "plain": Plain,
    "wrapper": lambda: Wrapper(Plain()),
    "wrapper of a wrapper": lambda: Wrapper(Wrapper(Plain())),
    "defaults": lambda: WithDefaults(Plain()),
}
NAMES = ("temperature", "nothing", "of_class", "doubled", "inner_only", "_private", "new")


def read(model: Any, name: str) -> Any:
    try:
        return getattr(model, name)
    except AttributeError:
        return MISSING


def _same_as_the_model() -> None:
    for kind, make in MODELS.items():
        eager, parallel = make(), autopar.compile(make(), mesh((2,), ("dp",)), (X_BD,), hardware=SLOW_DEVICES)

        def check(eager: Any = eager, parallel: Any = parallel, kind: str = kind) -> None:
            for name in NAMES:
                assert read(parallel, name) == read(eager, name), f"{kind}: {name}"

        check()
        for name, value in (
            ("temperature", 0.5),
            ("nothing", [3]),
            ("of_class", 3.0),
            ("new", "text"),
            ("_private", 1),
        ):
            for model in (eager, parallel):
                setattr(model, name, value)
            check()
        assert_close(parallel(X_BD), eager(X_BD))
        for name in ("new", "of_class", "_private"):
            for model in (eager, parallel):
                delattr(model, name)
            check()
        for model in (eager, parallel):
            with pytest.raises(AttributeError):
                delattr(model, "new")


def test_reading_setting_and_deleting_attributes_is_as_on_the_model(ranks: Ranks) -> None:
    ranks.run(_same_as_the_model, timeout=120)


def _adapters_off() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["up"], r=2, init_lora_weights=False)

    def make() -> Any:
        model = peft.get_peft_model(Plain(), config)
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                nn.init.normal_(parameter, std=0.1)
        return model

    eager, parallel = make(), autopar.compile(make(), mesh((2,), ("dp",)), (X_BD,), hardware=SLOW_DEVICES)
    with_adapters = eager(X_BD).detach()
    assert_close(parallel(X_BD).detach(), with_adapters)
    with eager.disable_adapter(), parallel.disable_adapter():
        assert_close(parallel(X_BD).detach(), eager(X_BD).detach())
        assert not torch.allclose(parallel(X_BD).detach(), with_adapters)
    for model in (eager, parallel):
        model(X_BD).backward()
    assert_close(parallel(X_BD).detach(), with_adapters)
    for name, parameter in eager.named_parameters():
        grad = parallel.get_parameter(name).grad
        assert (grad is None) == (parameter.grad is None), name
        if grad is not None:
            assert_close(getattr(grad, "full_tensor", lambda grad=grad: grad)(), parameter.grad)


def test_adapters_of_peft_are_off_inside_disable_adapter_and_on_again_behind_it(ranks: Ranks) -> None:
    ranks.run(_adapters_off)
