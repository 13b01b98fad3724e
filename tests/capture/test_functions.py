"""A user's autograd.Function is one call of the captured graph, with its own backward; what that loses is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from autopar.capture.export import capture
from autopar.errors import CaptureError
from autopar.ir.program.autograd_function import FunctionCall
from autopar.ir.program.program import Program
from autopar.ir.program.saved_tensors import saved_in
from tests.support.eager import assert_as_eager, calls


class Reversed(torch.autograd.Function):
    """The identity, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


class Split(torch.autograd.Function):
    """Several outputs (one that is no tensor, one without gradient), several saved tensors, a gradient that is None."""

    @staticmethod
    def forward(x: Tensor, scale: float, other: Tensor, names: Any = None) -> tuple[Any, ...]:
        half = x.shape[-1] // 2
        return x[..., :half] * scale, None, (x > 0).clone(), torch.exp(x + other)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale, ctx.names = inputs[1], inputs[3]
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(output[3])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, left: Tensor, nothing: None, positive: Tensor, right: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (e,) = ctx.saved_tensors
        return torch.cat([5 * left * ctx.scale, torch.zeros_like(left)], -1) + right * e, None, None, None


class Mixed(torch.autograd.Function):
    """Runs under autocast as torch.amp says, and shows by its gradient whether it did."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, 2 * x.T @ gradient


class Model(nn.Module):
    """A linear layer, and what a test does with its output."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, self.linear(x))


def _functions(program: Program) -> list[FunctionCall]:
    return [node.target for node in calls(program) if isinstance(node.target, FunctionCall)]


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))


def test_a_function_is_one_call_with_its_own_backward() -> None:
    program = assert_as_eager(Model(lambda self, h: Reversed.apply(h * self.weight.sum())), (X,))
    (function,) = _functions(program)
    assert str(function) == "tests.capture.test_functions.Reversed", "the same in every process"
    assert (
        program.fingerprint
        == capture(Model(lambda self, h: Reversed.apply(h * self.weight.sum())), (X,), {}).fingerprint
    )
    assert torch.equal(Reversed.apply(torch.ones(1)), torch.ones(1)), "the guard ends with the capture"


def test_outputs_that_are_several_none_or_without_gradient() -> None:
    def forward(self: Any, h: Tensor) -> Tensor:
        left, nothing, positive, right = Split.apply(h, 2.0, self.weight[0], {"a": object()})
        assert nothing is None
        return left.sum() + (right * positive).sum()

    program = assert_as_eager(Model(forward), (X,))
    (node,) = (node for node in calls(program) if isinstance(node.target, FunctionCall))
    assert node.args[1] == 2.0 and node.args[3] is None
    assert [place for place, _ in _functions(program)[0].objects] == [3]
    saved = saved_in(program)[node]
    assert saved.inputs == frozenset() and saved.outputs == {2}, "autograd has said what the Function keeps"


def test_a_function_without_gradients_passes_none_back() -> None:
    def forward(self: Any, h: Tensor) -> Tensor:
        with torch.no_grad():
            factor = Reversed.apply(h)
        return h * factor

    assert_as_eager(Model(forward), (X,))


@pytest.mark.parametrize("inside", [True, False], ids=["around a call", "around the model"])
def test_a_function_runs_under_the_autocast_of_its_call(inside: bool) -> None:
    def forward(self: Any, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside or torch.is_autocast_enabled("cpu")):
            return Mixed.apply(h, self.weight).float()

    model = Model(forward)
    if inside:
        program = assert_as_eager(model, (X,))
    else:
        with torch.autocast("cpu", torch.bfloat16):
            program = capture(model, (X,), {})
    (function,) = _functions(program)
    assert function.autocast is torch.bfloat16
    node = next(node for node in calls(program) if node.target is function)
    assert node.meta["tensor"].dtype is torch.bfloat16


def test_a_function_inside_a_function_is_part_of_it() -> None:
    class Outer(Reversed):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with torch.enable_grad():  # leaves no trace in the graph either
                return Reversed.apply(x) * 2

    assert len(_functions(assert_as_eager(Model(lambda self, h: Outer.apply(h)), (X,)))) == 1


def _function(forward: Callable[..., Any]) -> type[torch.autograd.Function]:
    return type("Own", (Reversed,), {"forward": staticmethod(forward), "__module__": __name__})


class Pair:
    """An argument that no graph can look into."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def _in_place(ctx: Any, x: Tensor) -> Tensor:
    ctx.mark_dirty(x)
    return x.add_(1)


@pytest.mark.parametrize(
    ("forward", "found"),
    [
        (_in_place, r"writes into its arguments \(aten.add_.*work on a clone"),
        (lambda ctx, x: x * torch.rand_like(x), r"draws random numbers \(aten.rand_like.*outside"),
        (lambda ctx, x: x if x.sum() > 0 else -x, r"value of a tensor.*test_functions.py:\d+, in <lambda>"),
        (lambda ctx, x: x[x > 0], "shape depends on values"),
        (lambda ctx, x: torch.from_numpy(x.numpy()), "does not run on tensors without values.*register_fake"),
    ],
    ids=["in place", "random", "a branch", "a shape", "numpy"],
)
def test_what_one_call_would_lose_is_refused(forward: Any, found: str) -> None:
    with pytest.raises(CaptureError, match=found):
        capture(Model(lambda self, h: _function(forward).apply(h * 1)), (X,), {})


def test_tensors_inside_lists_and_dicts_are_arguments_too() -> None:
    summed = _function(lambda ctx, x, several, named: x + sum(several) + named["w"] * named["scale"])
    summed.backward = staticmethod(lambda ctx, gradient: (2 * gradient, None, None))  # type: ignore[method-assign]

    def forward(self: Any, h: Tensor) -> Tensor:
        return summed.apply(h, [h * 2, self.weight[0]], {"w": self.weight[1], "scale": 3}) * self.weight.sum()

    program = assert_as_eager(Model(forward), (X,))
    (node,) = (node for node in calls(program) if isinstance(node.target, FunctionCall))
    assert len(node.all_input_nodes) == 4 and not _functions(program)[0].objects


def test_tensors_inside_objects_of_other_kinds_are_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"argument 1 of the autograd.Function .*Own holds tensors together with.*\(dict\)"
    ):
        own = _function(lambda ctx, x, pair: x + pair["w"][0])
        capture(Model(lambda self, h: own.apply(h, {"w": self.weight, "other": object()})), (X,), {})


def test_a_function_inside_vmap_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"Reversed is used inside a transform of torch.func"):
        capture(Model(lambda self, h: torch.func.vmap(Reversed.apply)(h)), (X,), {})


def test_a_tensor_that_is_no_argument_is_refused() -> None:
    hiding = _function(lambda ctx, x, pair: x @ pair.hidden)
    with pytest.raises(CaptureError, match=r"test_functions.Own reads a tensor \[4, 4\] of the model.*as an argument"):
        capture(Model(lambda self, h: hiding.apply(h, Pair(self.weight))), (X,), {})
