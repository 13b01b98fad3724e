"""A model with fewer of its equal layers: which remain, what stands for the others, and what is never taken out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.export import capture, skeleton
from autopar.capture.layers.fewer import without_layers
from autopar.compiler.offline import not_estimated
from autopar.compiler.offline_planner import OfflinePlanner
from autopar.compiler.plan_cache import PlanCache
from autopar.ir.program.program import Program
from autopar.models.catalogue import built_in
from autopar.planning.mesh_estimates.shortened import Shortened, is_alike, shortened
from autopar.planning.pipeline.stages.blocks import blocks_of
from autopar.planning.request import PlanRequest

X_BD = torch.zeros(4, 8)


class Stack(nn.Module):
    """Layers of these inner sizes, one after the other, between a first and a last product."""

    def __init__(self, sizes: tuple[int, ...], returns_states: bool = False) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, size), nn.ReLU(), nn.Linear(size, 8)) for size in sizes)
        self.returns_states = returns_states

    def forward(self, x_BD: Tensor) -> Tensor | list[Tensor]:
        x_BD, states = self.stem(x_BD), []
        for layer in self.layers:
            x_BD = layer(x_BD)
            states.append(x_BD)
        loss = self.head(x_BD).sum()
        return [loss, *states] if self.returns_states else loss


def of_stack(*sizes: int, specified: dict[str, object] | None = None, returns_states: bool = False) -> Shortened:
    program = capture(skeleton(Stack(sizes, returns_states)), (X_BD,), {}, training=True)
    return shortened(program, blocks_of(program), specified or {})


def of_llama(num_layers: int) -> Program:
    model, inputs = built_in("tiny-llama", 4, 32, num_layers)
    return capture(skeleton(model), inputs, {}, training=True)


def kinds_of_calls(program: Program) -> list[tuple[str, str]]:
    return sorted((str(node.target), str(node.meta.get("tensor"))) for node in program.graph.nodes if node.args)


def test_the_shorter_form_of_a_model_is_the_model_with_three_layers() -> None:
    program, three = of_llama(7), of_llama(3)
    short = shortened(program, blocks_of(program), {}).program
    assert kinds_of_calls(short) == kinds_of_calls(three)
    assert len(short.parameters) == len(three.parameters)
    assert len(short.graph.nodes) == len(three.graph.nodes)


def test_the_second_layer_stands_for_all_between_the_first_and_the_last() -> None:
    short = of_stack(4, 4, 4, 4, 4, 4)
    assert short.origin == (0, 1, 2, 2, 2, 2, 3, 4)
    assert [block.name for block in short.blocks] == ["stem", "layers.0", "layers.1", "layers.5", "head"]


def test_layers_that_alternate_are_repeated_together() -> None:
    short = of_stack(4, 6, 4, 6, 4, 6, 4, 6, 4, 6)
    assert short.origin == (0, 1, 2, 3, 4, 3, 4, 3, 4, 5, 6, 7)


def test_runs_of_unlike_layers_are_shortened_each_for_itself() -> None:
    short = of_stack(4, 4, 4, 4, 6, 6, 6, 6, 6)
    assert short.origin == (0, 1, 2, 2, 3, 4, 5, 5, 5, 6, 7)


def test_three_equal_layers_remain() -> None:
    assert of_stack(4, 4, 4).origin == (0, 1, 2, 3, 4)


def test_a_layer_of_which_something_else_is_stated_stays() -> None:
    program = capture(skeleton(Stack((4,) * 9)), (X_BD,), {}, training=True)
    short = shortened(program, blocks_of(program), {program.parameters["layers.4.0.weight"]: "row"})
    assert short.origin == (0, 1, 2, 2, 3, 4, 5, 6, 6, 7, 8)


def test_layers_whose_states_are_returned_stay() -> None:
    assert of_stack(4, 4, 4, 4, 4, 4, returns_states=True).origin == tuple(range(8))


class Numbered(Stack):
    """Takes its layers by their number."""

    def forward(self, x_BD: Tensor) -> Tensor:
        x_BD = self.stem(x_BD)
        for number in range(len(self.layers)):
            x_BD = self.layers[number](x_BD)
        return self.head(x_BD).sum()


def planner_of(model: nn.Module, *inputs: Tensor) -> OfflinePlanner:
    return OfflinePlanner(model, inputs, PlanRequest(), PlanCache())


@pytest.mark.slow
def test_micro_batches_are_captured_of_a_model_with_fewer_layers() -> None:
    model, inputs = built_in("tiny-llama", 4, 32, 7)
    planner = planner_of(model, *inputs)
    assert not not_estimated(planner)
    found = planner.shortened(2, 1, planner.request.tiles)
    assert (2, 1) not in planner.traces, "the whole model was captured"
    program = planner.captured(2, 1, planner.request.tiles)
    whole = shortened(program, blocks_of(program), {})
    assert found.origin == whole.origin
    assert is_alike(whole, found.program, found.blocks, same_sizes=True)
    assert found.names(blocks_of(program)).keys() == whole.names(blocks_of(program)).keys()


def test_a_model_that_does_not_run_with_fewer_layers_is_captured_whole() -> None:
    planner = planner_of(Numbered((4,) * 9), X_BD)
    found = planner.shortened(2, 1, planner.request.tiles)
    assert (2, 1) in planner.traces
    assert found.origin == (0, 1, 2, *[2] * 6, 3, 4)


def test_blocks_of_other_sizes_are_no_shorter_form() -> None:
    short, model = of_stack(*(4,) * 6), Stack((4, 6, 4, 4, 4, 4))
    assert without_layers(model, ["layers.2", "layers.3", "layers.4"])
    program = capture(skeleton(model), (X_BD,), {}, training=True)
    assert [block.name for block in blocks_of(program)] == [block.name for block in short.blocks]
    assert not is_alike(short, program, blocks_of(program), same_sizes=True)
    assert not is_alike(short, program, blocks_of(program), same_sizes=False)
