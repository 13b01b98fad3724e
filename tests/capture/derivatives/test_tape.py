"""torch.autograd.grad in a forward has the values, and the gradients of parameters, that it has in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.export import capture
from autopar.errors import CaptureError
from tests.support.eager import assert_as_eager, calls

aten = torch.ops.aten
X_B3 = torch.arange(12.0).reshape(4, 3).sin()
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "leaky_relu in place": lambda x: F.leaky_relu(x, 0.2, inplace=True),
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "elu": F.elu,
    "sin": torch.sin,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "cubed": lambda x: x**3,
    "chunks": lambda x: torch.cat([part.tanh() * (i + 1) for i, part in enumerate(x.chunk(2, -1))], -1),
    "written": lambda x: torch.tanh(x).index_fill(1, torch.tensor([0]), 0.0).mul_(2.0).add_(x),
    "slices": lambda x: x[:, ::2].tanh().repeat(1, 2) * x[:, [0, 2, 4, 6, 1, 3, 5, 7]],
}


class Energy(nn.Module):
    """An energy, and the forces that are its gradient by positions."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.tanh, create_graph: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(3, 8), nn.Linear(8, 1)
        self.activation, self.create_graph = activation, create_graph

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        energy = self.down(self.activation(self.up(x)))
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=self.create_graph, retain_graph=True)
        return energy, -forces


def _loss(output: tuple[Tensor, Tensor]) -> Tensor:
    return output[0].square().mean() + output[1].square().mean()


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_forces_through_an_activation_are_those_of_one_process(name: str) -> None:
    assert_as_eager(Energy(ACTIVATIONS[name]), (X_B3,), loss=_loss, tolerance=1e-5)


def _attention(x: Tensor) -> Tensor:
    x_11BH = x.view(1, 1, 4, 8)
    return F.scaled_dot_product_attention(x_11BH, x_11BH, x_11BH).view(4, 8)


@pytest.mark.parametrize("activation", [torch.tanh, _attention])
def test_without_create_graph_the_gradient_is_a_constant(activation: Callable[[Tensor], Tensor]) -> None:
    program = assert_as_eager(Energy(activation, create_graph=False), (X_B3,), loss=_loss)
    assert not any(node.meta["tensor"].requires_grad for node in calls(program, aten.mm.default))


class Laplacian(nn.Module):
    """A physics-informed loss: second derivatives by each coordinate, by nested calls, on a stack of equal layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(3, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad = True
        h = self.up(x)
        for layer in self.layers:
            h = layer(h)
        u = self.down(h)
        (du,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
        second = [torch.autograd.grad(du[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(3)]
        return (sum(second) + u.squeeze(-1).sin()).square().mean()


def test_a_laplacian_by_nested_calls_is_that_of_one_process() -> None:
    assert_as_eager(Laplacian(), (X_B3.clone(),), loss=lambda loss: loss, tolerance=1e-5)


class Critic(nn.Module):
    """WGAN-GP's penalty on a critic of convolutions, in which nothing but the interpolation is random."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2)
        self.norm, self.last = nn.GroupNorm(2, 4), nn.Linear(36, 1)

    def score(self, image: Tensor) -> Tensor:
        h = F.leaky_relu(self.norm(self.first(image)), 0.2, inplace=True)
        return self.last(F.leaky_relu(self.second(h), 0.2).flatten(1))

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        mixed = (0.3 * real + 0.7 * fake).requires_grad_()
        score = self.score(mixed)
        (slope,) = torch.autograd.grad(score, mixed, torch.ones_like(score), create_graph=True, retain_graph=True)
        return self.score(fake).mean() - self.score(real).mean() + (slope.flatten(1).norm(2, 1) - 1).square().mean()


def test_a_gradient_penalty_is_that_of_one_process() -> None:
    real, fake = torch.arange(128.0).reshape(2, 1, 8, 8).sin(), torch.arange(128.0).reshape(2, 1, 8, 8).cos()
    assert_as_eager(Critic(), (real, fake), loss=lambda loss: loss, tolerance=1e-5)


def test_gradients_by_activations_and_parameters_and_of_what_is_unused() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.one(x).tanh()
            with torch.no_grad():
                held = self.two(h)
            loss = (self.two(h) * held).square().mean()
            by_h, by_weight = torch.autograd.grad(loss, (h, self.two.weight), create_graph=True)
            return loss + by_h.square().sum() + by_weight.square().sum() + (h.detach() * self.one(x)).sum()

    assert_as_eager(Several(), (X_B3,), loss=lambda loss: loss, tolerance=1e-5)


def test_a_strain_that_is_made_in_forward_is_differentiated() -> None:
    class Stress(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            strain = torch.zeros(3, 3, requires_grad=True)
            energy = self.linear((x @ (torch.eye(3) + strain)).square()).tanh().sum()
            (stress,) = torch.autograd.grad(energy, strain, create_graph=True)
            return stress.square().sum() + energy

    assert_as_eager(Stress(), (X_B3,), loss=lambda loss: loss, tolerance=1e-5)


class Random(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(3, 8), how

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        h = self.linear(x)
        if self.how == "dropout":
            h = F.dropout(h, 0.5)
        elif self.how == "rrelu":
            h = F.rrelu(h, training=True)
        elif self.how == "hook":
            h.register_hook(lambda gradient: gradient * 2)
        elif self.how == "unused":
            h = self.linear(x.detach())
        elif self.how == "backward":
            h.sum().backward()
        (slope,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return (h.sum(1) - (slope * x).sum(1)).square().sum() + slope.sum()


def test_dropout_is_drawn_once_for_a_value_and_its_gradient() -> None:
    model = Random("dropout")
    nn.init.zeros_(model.linear.bias)
    program = capture(model, (X_B3,), {})
    (drawn,) = calls(program, aten.dropout.default)
    assert len(drawn.users) > 1


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("rrelu", r"through aten\.rrelu.*which draws random numbers; draw them apart"),
        ("hook", r"through a tensor with a hook"),
        ("unused", r"of a tensor that its outputs do not depend on; leave that tensor out"),
        ("backward", r"calls backward\(\) .*adds to the \.grad of tensors.*Use torch\.autograd\.grad"),
    ],
)
def test_what_no_graph_says_is_refused_by_the_line_that_asks(how: str, found: str) -> None:
    with pytest.raises(CaptureError, match=rf"test_tape\.py:\d+.*{found}|{found}") as raised:
        capture(Random(how), (X_B3,), {})
    assert "test_tape.py:" in str(raised.value)
