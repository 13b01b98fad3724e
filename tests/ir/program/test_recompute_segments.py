"""Segments are runs of calls by module path; a mode of recomputation says which of their calls run again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.export import capture
from autopar.ir.program.paths import layer_of
from autopar.ir.program.program import Program
from autopar.ir.program.recompute_segments import Recomputation, recomputation, segments_of
from autopar.strategies.roles import RoledProgram
from tests.support.eager import calls

X_BD = torch.ones(4, 8)
aten = torch.ops.aten


class Layer(nn.Module):
    """A linear layer and a function of its output and of the layer's input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x), x)


class Stack(nn.Module):
    """Layers in a list, after a linear layer that is in none, in the order `order`."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], order: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList([Layer(function) for _ in set(order)])
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in self.order:
            x = self.layers[number](x)
        return x.sum()


def program_of(function: Callable[[Tensor, Tensor], Tensor], *order: int) -> Program:
    return capture(Stack(function, order or (0,)), (X_BD,), {})


def names(again: Recomputation) -> tuple[list[str], list[str]]:
    """The operations that run again, and those whose outputs are kept."""
    return tuple(sorted(n.target._schema.name[6:] for n in nodes) for nodes in (again.rerun, again.saved))  # type: ignore[return-value, union-attr]


@pytest.mark.parametrize(
    ("module", "prefix"),
    [
        ("model.layers.3.mlp.up_proj", "model.layers.3"),
        ("h.0", "h.0"),
        ("encoder.0.blocks.1", "encoder.0"),
        ("0.weight", "0"),
        ("model.layer3.norm", ""),
        ("", ""),
    ],
)
def test_a_prefix_ends_with_the_first_number(module: str, prefix: str) -> None:
    assert layer_of(module) == prefix


def test_a_segment_is_a_run_of_calls_of_one_layer() -> None:
    program = program_of(lambda y, x: y.tanh() + x, 0, 1)
    found = segments_of(program)
    assert [segment.name for segment in found] == ["layers.0", "layers.1"]
    inside = [node for segment in found for node in segment.nodes]
    assert [node.name for node in program.graph.nodes if node in inside] == [node.name for node in inside]
    assert {node.meta["module"].split(".")[0] for node in inside} == {"layers"}
    outside = [n for n in program.graph.nodes if n.op == "call_function" and n not in inside]
    assert {node.meta["module"] for node in outside} == {"first", ""}


def test_a_layer_that_is_called_twice_makes_two_segments() -> None:
    found = segments_of(program_of(lambda y, x: y.tanh(), 0, 1, 0))
    assert [segment.name for segment in found] == ["layers.0", "layers.1", "layers.0#2"]


def test_a_run_without_gradients_is_no_segment() -> None:
    model = Stack(lambda y, x: y.tanh(), (0, 1))
    model.first.weight.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    assert [segment.name for segment in segments_of(capture(model, (X_BD,), {}))] == ["layers.1"]


@pytest.mark.parametrize(
    ("function", "full", "selective"),
    [
        # tanh keeps its output; the linear layer keeps the layer's input, which comes from outside.
        (lambda y, x: y.tanh(), (["linear", "tanh"], []), (["tanh"], ["linear"])),
        # The last addition keeps nothing, and nobody needs its result.
        (lambda y, x: y.tanh() + x, (["linear", "tanh"], []), (["tanh"], ["linear"])),
        # Nothing needs what the linear layer makes.
        (lambda y, x: y + x, ([], []), ([], [])),
        # A norm keeps its input and hidden statistics, which only it can make again.
        (lambda y, x: F.layer_norm(y, (8,)), (["layer_norm", "linear"], []), (["layer_norm"], ["linear"])),
        # A view runs again, for nothing, where somebody needs it.
        (lambda y, x: y.view(2, 16).sin(), (["linear", "view"], []), (["view"], ["linear"])),
        # Of two linear layers only the one whose result is needed is kept.
        (
            lambda y, x: y.tanh() @ x.t(),
            (["linear", "t", "tanh"], []),
            (["t", "tanh"], ["linear"]),
        ),
    ],
)
def test_only_what_the_backward_asks_for_runs_again_or_is_kept(
    function: Callable[[Tensor, Tensor], Tensor],
    full: tuple[list[str], list[str]],
    selective: tuple[list[str], list[str]],
) -> None:
    program = program_of(function)
    (segment,) = segments_of(program)
    assert names(recomputation(program, segment, "full", RoledProgram.of(program).products)) == full
    assert names(recomputation(program, segment, "selective", RoledProgram.of(program).products)) == selective
    assert recomputation(program, segment, "none", RoledProgram.of(program).products) == Recomputation(
        frozenset(), frozenset()
    )


def test_a_call_of_several_outputs_runs_again_with_its_parts() -> None:
    program = program_of(lambda y, x: y.sort(-1)[0].sin())
    (segment,) = segments_of(program)
    found = {node.name for node in recomputation(program, segment, "full", RoledProgram.of(program).products).rerun}
    assert {"sort_default", "getitem"} <= found or {"sort", "getitem"} <= found


def test_selective_saves_attention_as_it_saves_products() -> None:
    def attention(y: Tensor, x: Tensor) -> Tensor:
        query = y.view(1, 2, 4, 4)
        return F.scaled_dot_product_attention(query, query, query).view(4, 8) @ torch.ones(8, 8)

    program = program_of(attention)
    (attended,) = calls(program, aten.scaled_dot_product_attention.default)
    products = [n for n in program.graph.nodes if n in RoledProgram.of(program).products]
    names_of_products = ("linear", "linear", "scaled_dot_product_attention", "matmul")
    assert [str(n.target) for n in products] == [f"aten.{name}.default" for name in names_of_products]
    selective = recomputation(program, segments_of(program)[0], "selective", RoledProgram.of(program).products)
    assert {attended, products[1]} <= selective.saved and attended not in selective.rerun
