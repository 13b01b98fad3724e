"""torch.func in a forward has the values, and the gradients of parameters, that it has in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F

from autopar.capture.export import capture
from autopar.errors import CaptureError
from tests.support.eager import assert_as_eager, calls

X_B3 = torch.arange(12.0).reshape(4, 3).sin()


class Net(nn.Module):
    """A net of which a forward takes derivatives."""

    def __init__(self, how: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.how = how

    def f(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).tanh())

    def plain(self, x: Tensor) -> Tensor:
        """Apply the net without its norm; forward-mode derivatives use this part."""
        return self.down(self.up(x).tanh())

    def energy(self, x: Tensor) -> Tensor:
        return self.f(x).square().sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def _pulled(net: Net, x: Tensor) -> Tensor:
    y, pull, *_ = vjp(net.f, x)
    return y + pull(y.cos())[0]


def _pushed(net: Net, x: Tensor) -> Tensor:
    y, tangent, *_ = jvp(net.plain, (x,), (x.cos(),))
    return y + tangent.square()


def _detached(net: Net, x: Tensor) -> Tensor:
    return vmap(grad(lambda row: (net.f(row.detach() + 1) * net.f(row) * net.f(row).detach()).sum()))(x)


def _called(net: Net, x: Tensor) -> Tensor:
    fast = {name: parameter * 1.5 for name, parameter in net.up.named_parameters()}
    return functional_call(net.up, fast, (x,))


def _adapted(net: Net, x: Tensor) -> Tensor:
    """One step of MAML on a layer: the gradient of a loss by parameters that are used again."""
    slow = dict(net.up.named_parameters())
    slopes, value = grad_and_value(lambda p: functional_call(net.up, p, (x,)).square().mean())(slow)
    fast = {name: parameter - 0.1 * slopes[name] for name, parameter in slow.items()}
    return functional_call(net.up, fast, (x,)) * value


def _ensemble(net: Net, x: Tensor) -> Tensor:
    stacked = torch.stack([net.up.weight, net.up.weight * 2])
    return vmap(lambda weight: F.linear(x, weight).relu(), out_dims=1)(stacked)


def _with_auxiliary(net: Net, x: Tensor) -> Tensor:
    slope, value = grad(lambda x: (net.energy(x), net.f(x)), has_aux=True)(x)
    return slope * value


HOW: dict[str, Callable[[Net, Tensor], Any]] = {
    "vmap": lambda net, x: vmap(net.f)(x),
    "nested vmap": lambda net, x: vmap(vmap(net.f))(x.view(2, 2, 3)),
    "vmap in chunks": lambda net, x: vmap(net.f, chunk_size=2)(x),
    "grad": lambda net, x: grad(net.energy)(x),
    "rows of grad": lambda net, x: vmap(grad(net.energy))(x),
    "jacrev": lambda net, x: vmap(jacrev(net.f))(x),
    "jacfwd": lambda net, x: vmap(jacfwd(net.plain))(x),
    "jacrev alone": lambda net, x: jacrev(lambda x: net.f(x).sum(0))(x),
    "hessian": lambda net, x: vmap(hessian(lambda x: net.plain(x).sum()))(x),
    "vjp": _pulled,
    "jvp": _pushed,
    "detach": _detached,
    "functional_call": _called,
    "adapted parameters": _adapted,
    "ensemble": _ensemble,
    "auxiliary outputs": _with_auxiliary,
    "autograd.functional": lambda net, x: torch.autograd.functional.vjp(net.f, x, x, create_graph=True)[1],
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("how", HOW)
def test_a_transform_is_that_of_one_process(how: str) -> None:
    assert_as_eager(Net(HOW[how]), (X_B3,), tolerance=1e-5)


def test_a_transform_leaves_nothing_of_torch_func_in_the_graph() -> None:
    program = capture(Net(HOW["rows of grad"]), (X_B3,), {})
    assert not [node for node in calls(program) if "functorch" in str(node.target)]


def test_forward_mode_that_does_not_run_without_values_is_refused_and_reverse_mode_is_the_way() -> None:
    with pytest.raises(CaptureError, match=r"torch\.func\.jvp, of which .* does not run here .*Use jacrev for jacfwd"):
        capture(Net(lambda net, x: vmap(hessian(net.energy))(x)), (X_B3,), {})

    def advised(net: Net, x: Tensor) -> Tensor:
        second = vmap(jacrev(jacrev(lambda x: net.plain(x).square().sum())))(x).sum(-1)
        return torch.autograd.functional.jvp(net.plain, x, x.cos(), create_graph=True)[1] * second

    assert_as_eager(Net(advised), (X_B3,), tolerance=1e-4)


def test_gradients_that_are_off_inside_of_a_transform_are_refused_and_detach_is_the_way() -> None:
    def held(net: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            return net.f(x)

    with pytest.raises(CaptureError, match=r"turns gradients off .* inside of a function that torch\.func transforms"):
        capture(Net(lambda net, x: vmap(lambda row: held(net, row) * row)(x)), (X_B3,), {})
    advised: Callable[[Net, Tensor], Tensor] = lambda net, x: vmap(lambda row: net.f(row).detach() * row)(x)  # noqa: E731
    capture(Net(advised), (X_B3,), {})
