"""Blocks are layers where the model has enough of them, and become modules and then calls where it has not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.export import capture
from autopar.errors import PipelineError
from autopar.ir.program.effects import changed_buffers
from autopar.ir.program.program import Program
from autopar.planning.pipeline.stages.blocks import blocks_of, shared_calls
from tests.support.eager import calls
from tests.support.families import FAMILIES
from tests.support.planned import X_BD

aten = torch.ops.aten

LAYERS = {
    "llama": "model.embed_tokens model.layers.0 model.layers.1 model.norm lm_head",
    "gpt2": "transformer.wte transformer.wpe transformer.h.0 transformer.h.1 transformer.ln_f lm_head",
    "t5": "encoder.embed_tokens encoder.block.0 encoder.block.1 encoder.final_layer_norm decoder.embed_tokens "
    "decoder.block.0 decoder.block.1 decoder.final_layer_norm lm_head",
    "bert": "bert.embeddings bert.encoder.layer.0 bert.encoder.layer.1 cls",
    "unet": "enter down bottom up1 up2 leave",
    "resnet": "stem norm blocks.0 blocks.1 head",
    "mlp": "up middle down",
}


@functools.cache
def _captured(name: str) -> Program:
    family = FAMILIES[name]
    return capture(family.build(), *family.inputs(0))


class Model(nn.Module):
    """Linear layers by these names, a buffer, and a function of them and of the input."""

    def __init__(self, function: Callable[..., Any], *names: str) -> None:
        super().__init__()
        self.linears = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
        self.register_buffer("count", torch.zeros(8))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x, *self.linears.values())


class Wrapper(nn.Module):
    """A module that does nothing of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def _program(function: Callable[..., Any], *names: str) -> Program:
    return capture(Model(function, *names), (X_BD,), {})


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", LAYERS)
def test_a_block_is_a_layer(name: str) -> None:
    assert [block.name for block in blocks_of(_captured(name))] == LAYERS[name].split()


@pytest.mark.parametrize("at_least", [1, 9, 30])
@pytest.mark.parametrize("name", ["llama", "t5", "unet"])
def test_blocks_and_shared_calls_are_all_calls_once(name: str, at_least: int) -> None:
    program = _captured(name)
    blocks, shared = blocks_of(program, at_least), shared_calls(program)
    nodes = [node for block in blocks for node in block.nodes]
    assert [node for node in calls(program) if node not in shared] == nodes
    assert len({block.name for block in blocks}) == len(blocks) >= at_least


def test_too_few_layers_become_modules_and_then_calls() -> None:
    program = _captured("mlp")
    assert [block.name for block in blocks_of(program, 3)] == ["up", "middle", "down"]
    assert [block.name for block in blocks_of(program, 4)] == ["up", "gelu_default", "middle", "gelu_default_1", "down"]
    modules = [block.name for block in blocks_of(_captured("unet"), 7)]
    assert modules[:3] == ["enter.conv1", "enter.norm1", "enter.conv2"]


def test_more_stages_than_calls_are_refused_with_the_number_there_can_be() -> None:
    with pytest.raises(PipelineError, match=r"found 6 pipeline stages for 5 calls .* Use at most 5 stages: a smaller"):
        blocks_of(_captured("mlp"), 6)


def test_a_module_around_the_whole_model_is_looked_through() -> None:
    wrapped = capture(Wrapper(FAMILIES["mlp"].build()), *FAMILIES["mlp"].inputs(0))
    names = [block.name for block in blocks_of(wrapped)]
    assert names == ["inner.up", "inner.middle", "inner.down"]


def test_a_run_without_parameters_goes_to_the_block_before_it_and_at_the_start_to_the_one_after() -> None:
    program = _program(lambda model, x, a, b: F.relu(b(F.relu(a(F.dropout(x, 0.5))))), "a", "b")
    found = [(block.name, [node.name for node in block.nodes]) for block in blocks_of(program)]
    assert found == [
        ("linears.a", ["dropout_default", "linear_default", "relu_default"]),
        ("linears.b", ["linear_default_1", "relu_default_1"]),
    ]


def test_a_module_called_again_later_gives_two_blocks_with_two_names() -> None:
    program = _program(lambda model, x, a, b: a(b(a(x))), "a", "b")
    assert [block.name for block in blocks_of(program)] == ["linears.a", "linears.b", "linears.a#2"]


def test_pieces_stay_with_the_call_that_makes_them() -> None:
    def late(model: Any, x: Tensor, a: nn.Module, b: nn.Module) -> Tensor:
        values, indices = a(x).topk(4)
        y = b(x)
        return y * values.sum() * indices.sum()

    program = _program(late, "a", "b")
    (topk,) = calls(program, aten.topk.default)
    (block,) = [block for block in blocks_of(program, 5) if topk in block.nodes]
    assert block.nodes == (topk, *topk.users) and len(block.nodes) == 3


def test_masks_and_positions_are_shared_and_random_numbers_are_not() -> None:
    shared = {str(node.target) for node in shared_calls(_captured("llama")) if "rotary" in node.meta["module"]}
    assert shared >= {"aten.cos.default", "aten.sin.default"}
    program = _program(lambda model, x, a: a(x * 2) + F.dropout(x * 3, 0.5) * 4, "a")
    assert [node.name for node in calls(program) if node in shared_calls(program)] == ["mul_tensor", "mul_tensor_1"]


def test_what_has_to_do_with_a_changed_buffer_happens_once_and_in_one_block() -> None:
    def counting(model: Any, x: Tensor, a: nn.Module, b: nn.Module, c: nn.Module) -> Tensor:
        y = a(x) + model.count.sum()
        y = b(y)
        model.count.add_(y.sum(0))
        return c(y)

    program = _program(counting, "a", "b", "c")
    assert changed_buffers(program) == {"b_count"} == set(program.buffers.values())
    assert [block.name for block in blocks_of(program)] == ["linears.a", "linears.c"]
    assert not shared_calls(program)


def test_running_statistics_are_changed_buffers() -> None:
    program = _captured("resnet")
    assert changed_buffers(program) == set(program.buffers.values())
    assert not shared_calls(program)
