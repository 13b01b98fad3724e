"""Layers that an earlier one equals are one call of the traced graph; the program is that of tracing each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.export import capture
from autopar.capture.layers import once
from autopar.errors import CaptureError
from autopar.program.program import Program
from tests.support.eager import assert_as_eager

NUMBER, WIDTH = 4, 8
COUNT = 0


class Layer(nn.Module):
    """A residual MLP with all that the tests below change about it."""

    calls = 0
    seen: Tensor
    extra: int

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.scale = 0.5
        self.sizes = [1, 2]
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.activation: Callable[[Tensor], Tensor] = F.gelu
        self.owner: list[nn.ModuleList] = []
        self.norm: nn.Module = nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Any, *args: Any) -> Any:
        gain, factor = args if args else (None, 1.0)
        for size in self.sizes:
            x = x + size
        moved = x + self.scale * self.down(self.activation(self.up(self.norm(x))))
        return moved * factor if gain is None else moved * gain


class Stack(nn.Module):
    """Layers one after the other."""

    def __init__(self, kind: type[Layer] = Layer) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(kind(index) for index in range(NUMBER))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def each(self) -> list[Layer]:
        """Its layers."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]


def stack(kind: type[Layer] = Layer) -> Stack:
    torch.manual_seed(0)
    return Stack(kind)


def example() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


@contextlib.contextmanager
def counted() -> Iterator[list[nn.Module]]:
    """The layers that are not traced, inside."""
    repeated: list[nn.Module] = []
    original = once.EqualLayers._repeated

    def count(self: Any, template: Any, *args: Any) -> Any:
        repeated.append(template.layer)
        return original(self, template, *args)

    with mock.patch.object(once.EqualLayers, "_repeated", count):
        yield repeated


def one_by_one(model: nn.Module, *args: Any) -> Program:
    """The program of a model whose every layer is traced."""
    with mock.patch.object(once, "FEWEST", 10**9):
        return capture(model, args, {})


def check(model: nn.Module, repeated: int, *args: Any) -> Program:
    """The model trains as eager, its program is that of tracing each layer, and so many layers were not traced."""
    args = args or (example(),)
    with counted() as found:
        program = assert_as_eager(model, args, tolerance=1e-4)
    assert len(found) == repeated
    expected = one_by_one(model, *args)
    assert list(program.lines()) == list(expected.lines())
    for ours, theirs in zip(program.graph.nodes, expected.graph.nodes, strict=True):
        assert (ours.name, ours.meta.get("module")) == (theirs.name, theirs.meta.get("module"))
    assert sorted(place.name for place in program.python.read) == sorted(x.name for x in expected.python.read)
    return program


def test_equal_layers_are_traced_once() -> None:
    program = check(stack(), NUMBER - 1)
    assert {node.meta.get("module") for node in program.graph.nodes} >= {
        f"layers.{index}.up" for index in range(NUMBER)
    }


def test_what_repeated_layers_read_is_watched_in_each_of_them() -> None:
    names = {place.name for place in capture(stack(), (example(),), {}).python.read}
    assert names >= {f"layers.{index}.{name}" for index in range(NUMBER) for name in ("scale", "sizes", "activation")}
    assert not any(name.endswith("index") for name in names)


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


class Indexed(Layer):
    def forward(self, x: Any, *args: Any) -> Any:
        return super().forward(x, *args) * (self.index + 1)


class ThroughVars(Layer):
    def forward(self, x: Any, *args: Any) -> Any:
        return super().forward(x, *args) * (vars(self)["index"] + 1)


class ThroughDict(Layer):
    def forward(self, x: Any, *args: Any) -> Any:
        return super().forward(x, *args) * (self.__dict__["index"] + 1)


class Owned(Layer):
    """Knows its place from the list that it is in."""

    def forward(self, x: Any, *args: Any) -> Any:
        return super().forward(x, *args) * (2 if self.owner[0][-1] is self else 1)


class Writing(Layer):
    """Writes into its own buffer."""

    def forward(self, x: Any, *args: Any) -> Any:
        self.seen.add_(1)
        return super().forward(x, *args)


class Assigning(Layer):
    """Puts another tensor into its buffer."""

    def forward(self, x: Any, *args: Any) -> Any:
        self.seen = self.seen + 1
        return super().forward(x, *args)


class InPlace(Layer):
    """Writes into what it was given."""

    def forward(self, x: Any, *args: Any) -> Any:
        x = x * 1.5
        return super().forward(x.mul_(2), *args)


class WritesInput(Layer):
    def forward(self, x: Any, *args: Any) -> Any:
        moved = super().forward(x, *args)
        return moved + x.clone().add_(1)


class WithoutGradient(Layer):
    def forward(self, x: Any, *args: Any) -> Any:
        with torch.no_grad():
            moved = x * 2
        return super().forward(x, *args) + moved


class Autocasting(Layer):
    def forward(self, x: Any, *args: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, *args).float()


class Viewing(Layer):
    """Gives a view of what it was given."""

    def forward(self, x: Any, *args: Any) -> Any:
        return (x + super().forward(x, *args) if self.index < 0 else x).view(-1, WIDTH)


class Transposing(Layer):
    """Gives a tensor in an order of its own."""

    def forward(self, x: Any, *args: Any) -> Any:
        return super().forward(x, *args).t().contiguous().t()


class WithConstant(Layer):
    def forward(self, x: Any, *args: Any) -> Any:
        return super().forward(x, *args) * torch.tensor([2.0])


@pytest.mark.parametrize(
    ("kind", "repeated"),
    [
        *((Indexed, 0), (ThroughVars, 0), (ThroughDict, 0), (Owned, 0)),
        *((Writing, 0), (Assigning, 0), (InPlace, NUMBER - 1), (WritesInput, NUMBER - 1)),
        *((WithoutGradient, 0), (Autocasting, 0), (Viewing, 0), (Transposing, NUMBER - 2), (WithConstant, 0)),
    ],
)
def test_what_a_layer_does_beside_its_calls_is_not_lost(kind: type[Layer], repeated: int) -> None:
    model = stack(kind)
    if kind is Owned:
        for layer in model.each():
            layer.owner = [model.layers]
    check(model, repeated)


class Shared:
    """What all layers hold."""

    turn = 0


class Counting(Layer):
    def __init__(self, index: int, shared: Shared) -> None:
        super().__init__(index)
        self.shared = shared

    def forward(self, x: Any, *args: Any) -> Any:
        self.shared.turn = (self.shared.turn + 1) % NUMBER
        return super().forward(x, *args) * (self.shared.turn + 1)


def test_a_counter_that_layers_share_counts_each_of_them() -> None:
    model, shared = stack(), Shared()
    model.layers = nn.ModuleList(Counting(index, shared) for index in range(NUMBER))
    with counted() as found:
        program = capture(model, (example(),), {})
    assert not found
    assert list(program.lines()) == list(one_by_one(model, example()).lines())


class Holding(Layer):
    """Holds an object of its own."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.shared = Shared()
        self.shared.turn = index

    def forward(self, x: Any, *args: Any) -> Any:
        return super().forward(x, *args) * (self.shared.turn + 1)


def test_layers_with_objects_of_their_own_are_each_traced() -> None:
    check(stack(Holding), 0)


TURN = 0
TURNS: list[int] = []


class TakingTurns(Layer):
    """Leaves a global as it was when all layers have run."""

    def forward(self, x: Any, *args: Any) -> Any:
        global TURN
        TURN = (TURN + 1) % NUMBER
        return super().forward(x, *args) * (TURN + 1)


class TakingTurnsInList(Layer):
    """Leaves a list as it was when all layers have run."""

    def forward(self, x: Any, *args: Any) -> Any:
        TURNS.append(len(TURNS))
        moved = super().forward(x, *args) * len(TURNS)
        if len(TURNS) == NUMBER:
            TURNS.clear()
        return moved


@pytest.mark.parametrize("kind", [TakingTurns, TakingTurnsInList])
def test_layers_that_take_turns_are_each_traced(kind: type[Layer]) -> None:
    check(stack(kind), 0)


class CountingInClass(Layer):
    def forward(self, x: Any, *args: Any) -> Any:
        type(self).calls += 1
        return super().forward(x, *args) * type(self).calls


class CountingGlobally(Layer):
    def forward(self, x: Any, *args: Any) -> Any:
        global COUNT
        COUNT += 1
        return super().forward(x, *args) * COUNT


@pytest.mark.parametrize("kind", [CountingInClass, CountingGlobally])
def test_a_counter_that_never_stands_still_is_refused_as_ever(kind: type[Layer]) -> None:
    with pytest.raises(CaptureError, match="with every call"):
        capture(stack(kind), (example(),), {})


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
