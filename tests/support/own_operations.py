"""Operations as users write them, custom operators and autograd.Functions, and a model of them to train.

Their gradients are not those of what they compute (each is larger by a factor), so that a lost backward shows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import autopar
from autopar.strategies.registered import REGISTERED
from autopar.strategies.ruled import ruled
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import mesh


@torch.library.custom_op("autopar_own::project", mutates_args=())
def project(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """A linear layer, scaled; its bias may be missing."""
    y = (x @ weight.T) * scale
    return y if bias is None else y + bias


@project.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _project_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.scale, ctx.has_bias = inputs[3], inputs[2] is not None


def _project_backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    flat = g.flatten(0, -2)
    bias = flat.sum(0) if ctx.has_bias else None
    return 3 * (g @ weight) * ctx.scale, (flat.T @ x.flatten(0, -2)) * ctx.scale, bias, None


project.register_autograd(_project_backward, setup_context=_project_setup)


@torch.library.custom_op("autopar_own::energy", mutates_args=())
def energy(pieces: list[Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted sum of several tensors over their last dim, and its square."""
    total = sum((x * weight).sum(-1) for x in pieces)
    assert isinstance(total, Tensor)
    return total, torch.stack(list(pieces)).square()[0]


@energy.register_fake
def _(pieces: list[Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    return pieces[0].new_empty(pieces[0].shape[:-1]), torch.empty_like(pieces[0])


def _energy_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[0], inputs[1])


def _energy_backward(ctx: Any, g: Tensor, square: Tensor) -> tuple[list[Tensor], Tensor]:
    *pieces, weight = ctx.saved_tensors
    gradients = [2 * g.unsqueeze(-1) * weight for _ in pieces]
    gradients[0] = gradients[0] + 2 * square * pieces[0]
    return gradients, sum((g.unsqueeze(-1) * x).flatten(0, -2).sum(0) for x in pieces)  # type: ignore[return-value]


energy.register_autograd(_energy_backward, setup_context=_energy_setup)


class Squashed(torch.autograd.Function):
    """Two outputs, one of them without a gradient; a number that only scales the gradient; no second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, steepness: float) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x) * weight
        above = x > 0
        ctx.save_for_backward(x, weight, y)
        ctx.steepness = steepness
        ctx.mark_non_differentiable(above)
        return y, above

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, y = ctx.saved_tensors
        slope = ctx.steepness * (1 - torch.tanh(x).square())
        return g * slope * weight, (g * y).flatten(0, -2).sum(0), None


class Layer(nn.Module):
    """8 → 16 → 8."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(16, 8) / 4), nn.Parameter(torch.randn(8, 16) / 4)
        self.bias, self.gain = nn.Parameter(torch.randn(16) / 4), nn.Parameter(torch.randn(16))

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSH, above_BSH = Squashed.apply(project(x_BSD, self.up, self.bias, 0.5), self.gain, 2.0)
        return project(h_BSH * (1 + above_BSH), self.down, None, 2.0)


class Own(nn.Module):
    """Two layers of the operations above; the loss of a batch of sequences."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSD = x_BSD
        for layer in self.layers:
            y_BSD = y_BSD + layer(y_BSD)
        total_BS, square_BSD = energy([y_BSD, x_BSD * y_BSD], self.weight)
        return total_BS.square().mean() + square_BSD.mean()


def register_own(**changed: str) -> None:
    """Register a rule for each of them; `changed` are rules in the place of the right ones."""
    autopar.register_rule(project, changed.get("project", "~... k, ~o k, +o -> ... o"), flops=2, override=True)
    autopar.register_rule("autopar_own::energy", changed.get("energy", "... d, d -> ..., ... d"), override=True)
    autopar.register_rule(Squashed, changed.get("squashed", "... d, d -> ... d, ... d"), override=True)


def forget_rules() -> None:
    """Let there be no rules but those of the tables."""
    REGISTERED.clear()
    ruled.cache_clear()


def batch(step: int) -> Tensor:
    return torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(step))


def trained(model: nn.Module, steps: int = 3) -> dict[str, Tensor]:
    """The losses, the gradients of the first step and the parameters after the last, by name."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    found: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        found[f"loss {step}"] = _whole(loss)
        if step == 0:
            found |= {f"gradient of {name}": _whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
    return found | {name: _whole(p) for name, p in model.named_parameters()}


def trained_on_ranks(
    sizes: tuple[int, ...], options: dict[str, Any], with_rules: bool = True, compiled: bool = False
) -> tuple[dict[str, Tensor], set[str]]:
    """Train as `trained` does on the ranks of this process group.

    Also returns the strategies of the operations above.
    """
    forget_rules()
    if with_rules:
        register_own()
    options = {"hardware": SLOW_DEVICES, **options}
    model = autopar.compile(Own(), mesh(sizes, ("dp", "tp")[-len(sizes) :]), (batch(0),), **by_flag(**options))
    own = ("project", "energy", "squashed")
    choices = {f"{name}: {choice}" for name, choice in model.plan.choices.items() if name.startswith(own)}
    found = trained(torch.compile(model, backend="aot_eager") if compiled else model)  # type: ignore[arg-type]
    return {name.replace("_orig_mod.", ""): value for name, value in found.items()}, choices


def _whole(x: Any) -> Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()
