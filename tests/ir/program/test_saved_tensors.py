"""Tensors that a call saves for its backward, as autograd reports them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.export import capture
from autopar.errors import CaptureError
from autopar.ir.program import saved_tensors
from autopar.ir.program.program import Program
from autopar.ir.program.saved_tensors import Saved, saved_in
from tests.support.eager import calls
from tests.support.families import FAMILIES

aten = torch.ops.aten


class Calls(nn.Module):
    """A function of the input after a linear layer, so that a gradient flows through it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.function = function

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.function(self.first(x_BD))


def _positions(saved: Saved) -> tuple[frozenset[int], frozenset[int]]:
    return saved.inputs, saved.outputs


def program_of(function: Callable[[Tensor], Tensor]) -> Program:
    return capture(Calls(function), (torch.ones(2, 4),), {})


def kept(function: Callable[[Tensor], Tensor], target: object) -> Saved:
    return saved_by(program_of(function), target)


def saved_by(program: Program, target: object) -> Saved:
    """Return the tensors that the last call of a target saves."""
    return saved_in(program)[calls(program, target)[-1]]


def test_linear_keeps_its_input_and_its_weight_but_not_its_bias() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    program = capture(Two(), (torch.ones(2, 4),), {})
    assert _positions(saved_by(program, aten.linear.default)) == (frozenset({0, 1}), frozenset())


def test_a_linear_layer_whose_input_needs_no_gradient_keeps_the_input_alone() -> None:
    assert _positions(kept(lambda x: x, aten.linear.default)) == (frozenset({0}), frozenset())


def test_a_linear_layer_with_a_frozen_weight_keeps_the_weight_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight.requires_grad_(False)
    program = capture(model, (torch.ones(2, 4),), {})
    assert _positions(saved_by(program, aten.linear.default)) == (frozenset({1}), frozenset())


@pytest.mark.parametrize(
    ("function", "target", "inputs", "outputs"),
    [
        (torch.relu, aten.relu.default, (), (0,)),
        (torch.exp, aten.exp.default, (), (0,)),
        (torch.sin, aten.sin.default, (0,), ()),
        (lambda x: x + x.sin(), aten.add.Tensor, (), ()),
        (lambda x: x * x.sin(), aten.mul.Tensor, (0, 1), ()),
        (lambda x: x.transpose(0, 1), aten.transpose.int, (), ()),
        (lambda x: x.softmax(-1), aten.softmax.int, (), (0,)),
    ],
)
def test_a_pointwise_call_keeps_what_its_derivative_needs(
    function: Callable[[Tensor], Tensor], target: object, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> None:
    assert _positions(kept(function, target)) == (frozenset(inputs), frozenset(outputs))


def test_a_call_without_gradients_keeps_nothing() -> None:
    program = capture(nn.ReLU(), (torch.ones(2, 4),), {})
    assert _positions(saved_by(program, aten.relu.default)) == (
        frozenset(),
        frozenset(),
    )


def test_the_answer_is_the_same_under_no_grad() -> None:
    with torch.no_grad():
        assert _positions(kept(torch.tanh, aten.tanh.default)) == (frozenset(), frozenset({0}))


def test_hidden_tensors_are_counted_in_bytes() -> None:
    """The log-probabilities that a cross-entropy keeps are neither its input nor its output."""

    def loss(x_BD: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x_BD, torch.arange(2))

    assert kept(loss, aten.cross_entropy_loss.default).other_bytes >= 2 * 4 * 4


def test_of_what_is_dropped_nothing_is_counted() -> None:
    saved = kept(lambda x: F.dropout(x, 0.5).sin(), aten.dropout.default)
    assert (saved.other_bytes, *_positions(saved)) == (0, frozenset(), frozenset())


@pytest.mark.parametrize("masked", [False, True])
def test_attention_with_dropout_keeps_what_it_keeps_without_and_its_mask(masked: bool) -> None:
    seen = torch.ones(4, 4, dtype=torch.bool).tril() if masked else None

    def attention(p: float) -> Saved:
        def attend(x_BD: Tensor) -> Tensor:
            x = x_BD.repeat(2, 1)[None, None]
            return F.scaled_dot_product_attention(x, x, x, seen, p)

        return kept(attend, aten.scaled_dot_product_attention.default)

    dropped, without = attention(0.5), attention(0.0)
    assert _positions(without) == (frozenset({0, 1, 2}), frozenset({0}))
    assert _positions(dropped) == (frozenset({0, 1, 2, 3} if masked else {0, 1, 2}), frozenset({0}))
    assert dropped.strides == without.strides


def test_a_reshape_of_a_transposed_tensor_is_a_copy_and_of_another_a_view() -> None:
    class Reshape(nn.Module):
        def __init__(self, swapped: bool) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2, 3))
            self.swapped = swapped

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.scale
            return (y.transpose(0, 1) if self.swapped else y).reshape(6).exp()

    for swapped in (False, True):
        program = capture(Reshape(swapped), (torch.ones(2, 3),), {})
        (saved,) = (s for n, s in saved_in(program).items() if n.target in (aten.reshape.default, aten.view.default))
        assert bool(saved.aliases) is not swapped


class _Everything:
    def __contains__(self, target: object) -> bool:
        return True


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_meta_device_answers_as_the_cpu_does(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args, kwargs = FAMILIES[family].inputs(0)
    program = capture(FAMILIES[family].build(), args, kwargs)
    found = saved_in(program)
    program.facts.clear()
    saved_tensors._saved.cache_clear()
    monkeypatch.setattr(saved_tensors, "DEVICE_DECIDES", _Everything())
    assert saved_in(program) == found
    saved_tensors._saved.cache_clear()


def test_a_call_that_wants_other_strides_than_planned_is_refused() -> None:
    class ByColumns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32, 32).t())

        def forward(self, x_BD: Tensor) -> Tensor:
            given = (each.detach().to(torch.float8_e4m3fn) for each in (x_BD, self.weight))
            return torch.ops.aten._scaled_mm(*given, torch.ones(()), torch.ones(()), out_dtype=torch.float32)

    assert ByColumns()(torch.ones(32, 32)).eq(32).all()
    program = capture(ByColumns(), (torch.ones(32, 32),), {})
    with pytest.raises(CaptureError, match=r"_scaled_mm.*mat2 must be col_major.* within forward \(w\.t\(\)\)"):
        saved_in(program)
