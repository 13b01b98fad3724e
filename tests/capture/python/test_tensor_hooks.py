"""Hooks that a forward registers on its tensors: calls of the graph, in the right place, or refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.export import capture, skeleton
from autopar.errors import CaptureError
from autopar.ir.program.gradient_hooks import GRADIENT_HOOK, use_hooks
from autopar.ir.program.program import Program


class Hooked(nn.Module):
    """Computes with one weight as it is told to."""

    def __init__(self, compute: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))
        self.compute = compute
        self.gain = 3.0
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)

    def scaled(self, gradient: Tensor, by: float = 1.0) -> Tensor:
        return gradient * self.gain * by


def _both(compute: Any) -> tuple[nn.Module, Program, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The model, its program, and the loss and gradients of the model and of the program."""
    x = torch.arange(8.0).reshape(2, 4)
    eager, kept = Hooked(compute), skeleton(Hooked(compute))
    program = capture(kept, (x,), {}, training=True)
    loss = eager(x)
    loss.backward()
    found = eager.weight.detach().clone().requires_grad_()
    values = {program.parameters["weight"]: found, program.inputs[0]: x}
    with use_hooks(program.python.hooks):
        module = torch.fx.GraphModule(nn.Module(), program.graph)
        (out,) = module(*(values[name] for name in program.placeholders()))[: program.num_outputs]
    out.backward()
    assert eager.weight.grad is not None and found.grad is not None
    return kept, program, (loss, eager.weight.grad), (out, found.grad)


def _after_a_use(self: Any, x: Tensor) -> Tensor:
    hidden = x * self.weight
    first = hidden.sin()
    hidden.register_hook(lambda gradient: gradient / gradient.norm())
    return (first + hidden.exp() * 0.01).sum()


def _two(self: Any, x: Tensor) -> Tensor:
    hidden = x * self.weight
    hidden.register_hook(lambda gradient: gradient.clamp(max=0.5))
    hidden.register_hook(lambda gradient: gradient * 3)
    hidden.register_hook(lambda gradient: gradient + 1)
    return hidden.sin().sum()


def _written_later(self: Any, x: Tensor) -> Tensor:
    hidden = x * self.weight
    hidden.register_hook(lambda gradient: gradient * 3)
    hidden.mul_(2)
    hidden.register_hook(lambda gradient: gradient + 1)
    return hidden.square().sum()


def _method(self: Any, x: Tensor) -> Tensor:
    hidden = x * self.weight
    hidden.register_hook(self.scaled)
    hidden.register_hook(functools.partial(self.scaled, by=2.0))
    handle = hidden.register_hook(lambda gradient: gradient * 0)
    handle.remove()
    return hidden.square().sum()


@pytest.mark.parametrize("compute", [_after_a_use, _two, _written_later, _method])
def test_a_hook_sees_the_whole_gradient_of_its_tensor(compute: Any) -> None:
    _, program, expected, found = _both(compute)
    assert len(program.python.hooks) == sum(node.target is GRADIENT_HOOK for node in program.graph.nodes)
    torch.testing.assert_close(found, expected)


def test_a_hook_acts_on_the_modules_of_the_model() -> None:
    def compute(self: Any, x: Tensor) -> Tensor:
        hidden = x * self.weight
        seen = self.seen
        hidden.register_hook(lambda gradient: seen.append(gradient) or gradient * self.gain)
        hidden.register_hook(seen.append)
        return hidden.sum()

    model, _, _, _ = _both(compute)
    assert len(model.seen) == 2, "the list that the compiled module shows"  # type: ignore[arg-type]


def _on_parameter(self: Any, x: Tensor) -> Tensor:
    self.weight.register_hook(lambda gradient: gradient * 2)
    return (x * self.weight).sum()


def _accumulated(self: Any, x: Tensor) -> Tensor:
    self.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return (x * self.weight).sum()


def _retained(self: Any, x: Tensor) -> Tensor:
    hidden = x * self.weight
    hidden.retain_grad()
    return hidden.sum()


def _of_a_tensor(self: Any, x: Tensor) -> Tensor:
    hidden = x * self.weight
    hidden.register_hook(lambda gradient: gradient * x)
    return hidden.sum()


def _without_gradients(self: Any, x: Tensor) -> Tensor:
    hidden = x * self.weight
    with torch.no_grad():
        hidden.register_hook(lambda gradient: gradient * 2)
    return hidden.sum()


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (_on_parameter, r"hook on a parameter \(.*test_tensor_hooks.py:\d+\).*outside of forward"),
        (_accumulated, r"register_post_accumulate_grad_hook.*test_tensor_hooks.py:\d+.*outside of forward"),
        (_retained, r"retain_grad.*test_tensor_hooks.py:\d+.*return the tensor"),
        (_of_a_tensor, r"uses a tensor of the forward.*custom operator"),
        (_without_gradients, r"where gradients are off .*outside of torch.no_grad"),
        (lambda self, x: x.register_hook(lambda g: g) and x * self.weight, "on a tensor without gradient"),
    ],
)
def test_a_hook_that_a_graph_cannot_keep_is_refused(compute: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Hooked(compute), (torch.ones(2, 4),), {}, training=True)
