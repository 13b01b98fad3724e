"""Side effects of layers, in Python or in memory, are never lost when one layer is traced for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture.export import capture
from autopar.errors import CaptureError
from tests.support.layers_once import NUMBER, WIDTH, Layer, check, counted, example, one_by_one, stack

COUNT = 0


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


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("kind", "repeated"),
    [
        *((Indexed, 0), (ThroughVars, 0), (ThroughDict, 0), (Owned, 0)),
        *((Writing, 0), (Assigning, 0), (InPlace, NUMBER - 1), (WritesInput, NUMBER - 1)),
        *((WithoutGradient, 0), (Autocasting, 0), (Viewing, 0), (Transposing, NUMBER - 2), (WithConstant, 0)),
    ],
)
def test_what_a_layer_does_next_to_its_calls_is_not_lost(kind: type[Layer], repeated: int) -> None:
    model = stack(kind)
    if kind is Owned:
        for layer in model.each():
            layer.owner = [model.layers]
    check(model, repeated)


class Shared:
    """Object that all layers share."""

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
