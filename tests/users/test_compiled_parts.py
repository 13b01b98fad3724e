"""Models with parts that torch.compile or torch.jit has changed already are refused; the way out trains as always."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InputError
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

X_BD = torch.ones(4, 8)
MESH = autopar.Mesh({"dp": 2})


class Loss(nn.Module):
    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return x_BD.square().mean()


def net(wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(wrap(nn.Linear(8, 8)), nn.ReLU()), Loss())


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module)


def _compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile()
    return module


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: net(_compiled), "the part 1.0 was wrapped by torch.compile"),
        (lambda: torch.compile(net()), "the model was wrapped by torch.compile"),
        (lambda: net(torch.jit.script), "the part 1.0 is a RecursiveScriptModule of torch.jit"),
        (lambda: torch.jit.script(net()), "the model is a RecursiveScriptModule of torch.jit"),
        (lambda: torch.jit.trace(net(), X_BD), "the model is a TopLevelTracedModule of torch.jit"),
        (lambda: net(_compiled_in_place), 'model.get_submodule("1.0").compile() was called before autopar.compile'),
        (lambda: _compiled_in_place(net()), "model.compile() was called before autopar.compile"),
    ],
    ids=("part", "model", "scripted part", "scripted model", "traced model", "part in place", "model in place"),
)
def test_what_is_compiled_or_scripted_already_is_refused_by_name(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        autopar.plan(model(), MESH, (X_BD,))


def _trained_as_the_messages_say() -> None:
    def compiled(module: nn.Module) -> Any:
        return torch.compile(module, backend="eager")

    for model in (compiled(net()), net(compiled)):
        with pytest.raises(InputError) as error:
            autopar.compile(model, mesh((2,), ("dp",)), (X_BD,), hardware=SLOW_DEVICES)
        if "autopar.compile(model._orig_mod, …)" in str(error.value):
            model: Any = model._orig_mod
        else:
            advice = re.search(r"write (model.set_submodule\(.*\))\. Then", str(error.value))
            assert advice is not None
            exec(advice[1])
        module = autopar.compile(model, mesh((2,), ("dp",)), (X_BD,), strategy="data_parallel", hardware=SLOW_DEVICES)
        module.compile(backend="eager")
        eager = net()
        eager(X_BD).backward()
        module(X_BD).backward()
        for name, parameter in eager.named_parameters():
            torch.testing.assert_close(module.get_parameter(name).grad, parameter.grad)


@pytest.mark.slow
def test_the_module_inside_trains_and_is_compiled_by_compile(ranks: Ranks) -> None:
    ranks.run(_trained_as_the_messages_say)
