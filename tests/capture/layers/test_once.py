"""Layers that an earlier one equals are one call of the traced graph; the program is that of tracing each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.export import capture
from tests.support.layers_once import NUMBER, WIDTH, Layer, Stack, check, counted, example, one_by_one, stack


def test_equal_layers_are_traced_once() -> None:
    program = check(stack(), NUMBER - 1)
    assert {node.meta.get("module") for node in program.graph.nodes} >= {
        f"layers.{index}.up" for index in range(NUMBER)
    }


def test_what_repeated_layers_read_is_watched_in_each_of_them() -> None:
    names = {place.name for place in capture(stack(), (example(),), {}).python.read}
    assert names >= {f"layers.{index}.{name}" for index in range(NUMBER) for name in ("scale", "sizes", "activation")}
    assert not any(name.endswith("index") for name in names)


def test_layers_may_differ_in_what_no_forward_reads() -> None:
    """Adapters of peft note in a dict which layer they stand for."""
    model = stack()
    for index, layer in enumerate(model.each()):
        noted: Any = {"name": f"layers.{index}", "places": [index, (index, None)]}
        layer.noted = noted
    check(model, NUMBER - 1)


def _scale(model: Stack) -> None:
    model.each()[2].scale = 0.25


def _sizes(model: Stack) -> None:
    model.each()[2].sizes = [1, 3]


def _activation(model: Stack) -> None:
    model.each()[2].activation = F.silu


def _dropped(model: Stack) -> None:
    model.each()[2].extra = 1


def _frozen(model: Stack) -> None:
    model.each()[2].up.weight.requires_grad_(False)


def _norm(model: Stack) -> None:
    model.each()[2].norm = nn.LayerNorm(WIDTH, eps=0.1)


def _other_norm(model: Stack) -> None:
    model.each()[2].norm = nn.Identity()


def _doubled(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2


def _hook(model: Stack) -> None:
    model.each()[2].up.register_forward_hook(_doubled)


def _hook_of_layer(model: Stack) -> None:
    model.each()[2].register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def _narrow(model: Stack) -> None:
    model.each()[2].up, model.each()[2].down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


def _without_bias(model: Stack) -> None:
    model.each()[2].up.register_parameter("bias", None)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "change",
    [
        *(_scale, _sizes, _activation, _dropped, _frozen, _norm, _other_norm),
        *(_hook, _hook_of_layer, _narrow, _without_bias),
    ],
)
def test_a_layer_that_differs_is_traced(change: Callable[[Stack], None]) -> None:
    model = stack()
    change(model)
    check(model, NUMBER - 2)


@pytest.mark.parametrize("evaluating", [False, True])
def test_batch_statistics_are_written_in_each_layer(evaluating: bool) -> None:
    model = stack()
    for layer in model.each():
        layer.norm = nn.BatchNorm1d(WIDTH)
    model.each()[2].train(not evaluating)
    check(model, 0)


def test_ties_within_a_layer_are_seen() -> None:
    model = stack()
    for layer in model.each():
        layer.up, layer.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    model.each()[2].down.weight = model.each()[2].up.weight
    check(model, NUMBER - 2)


def test_a_weight_that_layers_share_is_each_one_s() -> None:
    model = stack()
    for layer in model.each():
        layer.up.weight = model.each()[0].up.weight
    check(model, NUMBER - 1)


def test_one_layer_called_again_and_again_is_traced_once() -> None:
    class Again(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(3):
                x = self.layers[0](x)
            return x

    torch.manual_seed(0)
    check(Again(), 2)


class Outputs(nn.Module):
    """Layers that give and take several things, of which the model reads all."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.layers = nn.ModuleList(Giving(index) for index in range(NUMBER))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        kept, first = [], x
        for index, layer in enumerate(self.layers):
            found = layer((x, {"first": first}), gain=1.0 if self.again else float(index))
            x, first = found["moved"], found["first"]
            assert found["none"] is None and found["number"] == 3
            kept.append(found["twice"][1])
        return x, first, *kept


class Giving(Layer):
    def forward(self, x: Any, *args: Any, gain: float = 1.0) -> Any:
        inner, first = x[0], x[1]["first"]
        moved = super().forward(inner, first, gain)
        return {"moved": moved, "first": first, "none": None, "number": 3, "twice": (moved, moved * 2)}


@pytest.mark.parametrize("again", [True, False])
def test_outputs_of_any_form_come_back(again: bool) -> None:
    torch.manual_seed(0)
    model = Outputs(again)
    with counted() as found:
        program = capture(model, (example(),), {})
    # The first layer is given one tensor twice.
    assert len(found) == (NUMBER - 2 if again else 0)
    assert list(program.lines()) == list(one_by_one(model, example()).lines())


class WrittenAfter(Stack):
    """Writes into what a layer has given, and into what one is given."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x.mul_(1.5)
            x = layer(x)
            x += 1
        return x


def test_what_is_written_into_the_tensors_of_a_layer_is_as_eager() -> None:
    torch.manual_seed(0)
    check(WrittenAfter(), NUMBER - 1)


class Nested(nn.Module):
    """Layers in groups of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList(nn.Sequential(*(Layer(index) for index in range(3))) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for group in self.groups:
            x = group(x)
        return x


def test_layers_in_groups_have_the_paths_of_their_own() -> None:
    torch.manual_seed(0)
    # Two groups whole, and two layers of the first.
    check(Nested(), 4)


def test_two_places_of_one_layer_are_traced() -> None:
    model = stack()
    model.other = model.layers[1]
    check(model, 0)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.sampled_from((0.5, 2.0)), st.booleans()), min_size=3, max_size=6))
def test_any_mixture_of_layers_is_as_eager(kinds: list[tuple[float, bool]]) -> None:
    torch.manual_seed(0)
    model = Stack()
    model.layers = nn.ModuleList(Layer(index) for index in range(len(kinds)))
    for layer, (scale, normed) in zip(model.each(), kinds, strict=True):
        layer.scale = scale
        layer.norm = layer.norm if normed else nn.Identity()
    repeated = sum(kind in kinds[:index] for index, kind in enumerate(kinds))
    with counted() as found:
        program = capture(model, (example(),), {})
    assert len(found) == repeated
    assert list(program.lines()) == list(one_by_one(model, example()).lines())
