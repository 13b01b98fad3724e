"""The values of a draft: equal calls are evaluated once, and nothing is shared that a write may change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.capture.export import capture
from autopar.capture.inlining.inline import add_placeholder
from autopar.capture.passes.autocast import Autocast, Casts
from autopar.capture.passes.traced_graph import Source, TracedGraph, aten, call_key, value_of
from autopar.ir.program.program import info_of
from tests.support.eager import run


def _draft(**sizes: tuple[int, ...]) -> tuple[TracedGraph, list[fx.Node]]:
    """A draft with a placeholder of each shape, where "learned" requires a gradient."""
    draft = TracedGraph(fx.Graph(), FakeTensorMode(shape_env=ShapeEnv()))
    nodes = [
        add_placeholder(draft, name, torch.empty(size, requires_grad=name == "learned"), Source("input", name))
        for name, size in sizes.items()
    ]
    return draft, nodes


def test_equal_calls_on_equal_shapes_are_evaluated_once() -> None:
    draft, (a, b) = _draft(a=(4, 2), b=(4, 2))
    first, second = draft.call(aten.exp.default, a), draft.call(aten.exp.default, b)
    assert first.meta["val"] is second.meta["val"]
    assert draft.call(aten.exp.default, second).meta["val"] is second.meta["val"]


@pytest.mark.parametrize("name", ["longer", "learned"])
def test_calls_on_other_shapes_or_gradients_are_evaluated_anew(name: str) -> None:
    draft, (a, b) = _draft(**{"a": (4, 2), name: (5, 2) if name == "longer" else (4, 2)})
    first, second = draft.call(aten.exp.default, a), draft.call(aten.exp.default, b)
    for made, read in ((first, a), (second, b)):
        assert value_of(made).shape == value_of(read).shape
        assert value_of(made).requires_grad == value_of(read).requires_grad


def test_calls_on_other_strides_are_evaluated_anew() -> None:
    draft, (square,) = _draft(square=(4, 4))
    turned = draft.call(aten.t.default, square)
    assert value_of(draft.call(aten.exp.default, square)).is_contiguous()
    assert not value_of(draft.call(aten.exp.default, turned)).is_contiguous()


def test_equal_numbers_of_different_types_are_different_arguments() -> None:
    draft, _ = _draft()
    made = [draft.call(aten.full.default, [3], value) for value in (1, 1.0, True)]
    assert [value_of(node).dtype for node in made] == [torch.int64, torch.float32, torch.bool]


def test_an_argument_that_is_an_object_has_no_key() -> None:
    assert call_key(aten.rand.generator, ([3],), {"generator": torch.Generator()}) is None


def test_a_value_of_a_call_s_own_is_not_shared() -> None:
    draft, _ = _draft()
    first, own, third = (draft.call(aten.zeros.default, [4], own=own) for own in (False, True, False))
    assert first.meta["val"] is third.meta["val"] is not own.meta["val"]


def test_autocast_is_requested_once_about_equal_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, (a, b) = _draft(a=(4, 4), b=(4, 4))
    requested = []
    result = Casts._result
    monkeypatch.setattr(Casts, "_result", lambda *args, **kwargs: requested.append(args[1]) or result(*args, **kwargs))
    casts = Casts(draft, Autocast("cpu", torch.bfloat16))
    for pair in ((a, b), (b, a), (a, a)):
        (left, right), _ = casts.applied(aten.mm.default, pair, {}, "")
        assert {value_of(left).dtype, value_of(right).dtype} == {torch.bfloat16}
    assert requested == [aten.mm.default]


class _OneOfTwinsIsWritten(nn.Module):
    """Two tensors of equal calls, of which one is written, and views of both that are read afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        written, other = torch.zeros(4), torch.zeros(4)
        view, other_view = written[1:], other[1:]
        written.add_(self.weight * x)
        return written.relu().relu(), other.relu().relu(), view * 1.5, other_view * 1.5


def test_of_two_equal_tensors_only_the_written_one_changes() -> None:
    model, x = _OneOfTwinsIsWritten(), torch.ones(4)
    program = capture(model, (x,), {})
    found = run(program, dict(model.named_parameters()), {}, [x])
    for value, node, expected in zip(found, program.output, model(x), strict=True):
        torch.testing.assert_close(value, expected)
        assert isinstance(node, fx.Node) and info_of(node).requires_grad == expected.requires_grad
