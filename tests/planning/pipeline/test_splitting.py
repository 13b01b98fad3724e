"""Stages, run one after another and handing on what they send, compute what the whole program computes."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar.capture.export import capture
from autopar.costs.space.build import build_space
from autopar.costs.space.returned import WHOLE
from autopar.errors import PipelineError
from autopar.ir.program.program import Program, info_of
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.pipeline.stages.blocks import Block, blocks_of, shared_calls
from autopar.planning.pipeline.stages.splitting import Splitter, split
from autopar.strategies.roles import RoledProgram
from tests.support.eager import calls
from tests.support.families import FAMILIES
from tests.support.planned import SLOW_LINKS, X_BD

NAMES = ("gpt2", "llama", "t5", "bart", "unet", "resnet", "mlp", "vit")
SEED = 20240613


@functools.cache
def _captured(name: str) -> Program:
    family = FAMILIES[name]
    return capture(family.build(), *family.inputs(0))


def _starts(num_blocks: int, num_stages: int, seed: int) -> tuple[int, ...]:
    return 0, *sorted(random.Random(seed).sample(range(1, num_blocks), num_stages - 1))


def _stages(program: Program, num_stages: int, seed: int = 0) -> tuple[Program, ...]:
    blocks = blocks_of(program, num_stages)
    return split(program, blocks, _starts(len(blocks), num_stages, seed))


def _run(
    program: Program,
    received: Sequence[Tensor],
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    leaves: Sequence[Any],
) -> tuple[list[Tensor], list[Any], dict[str, Tensor]]:
    """Run a stage's program.

    Returns the tensors that it sends, the user's outputs, and the new values of its changed buffers.
    """
    values: dict[str, Any] = {
        **{placeholder: parameters[name] for name, placeholder in program.parameters.items()},
        **{placeholder: buffers[name] for name, placeholder in program.buffers.items()},
        **program.constants,
        **dict(zip(program.received, received, strict=True)),
        **{name: leaf for name, leaf in zip(program.inputs, leaves, strict=True) if name is not None},
    }
    module = fx.GraphModule(nn.Module(), program.graph)
    flat = module(*(values[name] for name in program.placeholders()))
    end = program.num_sent + program.num_outputs
    mutations = dict(zip(program.mutations, flat[end:], strict=True))
    return list(flat[: program.num_sent]), list(flat[program.num_sent : end]), mutations


def _run_all(stages: Sequence[Program], model: nn.Module, leaves: Sequence[Any]) -> tuple[list[Any], dict[str, Tensor]]:
    """The user's outputs of stages run one after another, and all buffers after them."""
    parameters = dict(model.named_parameters())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    sent: list[Tensor] = []
    outputs: list[Any] = []
    for stage in stages:
        sent, outputs, mutations = _run(stage, sent, parameters, buffers, leaves)
        buffers.update(mutations)
    assert not sent
    return outputs, buffers


@pytest.mark.sample(4)
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_stages_one_after_another_compute_what_the_whole_program_computes(name: str, num_stages: int) -> None:
    family, program = FAMILIES[name], _captured(name)
    leaves = pytree.tree_leaves(family.inputs(1))
    found, expected = [], []
    for each, stages in ((found, _stages(program, num_stages, SEED + num_stages)), (expected, (program,))):
        model = family.build()
        outputs, buffers = _run_all(stages, model, leaves)
        family.loss(pytree.tree_unflatten(outputs, program.out_spec)).backward()
        each.append((outputs, buffers, {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def _sums(program: Program) -> set[tuple[str, int]]:
    """The calls, with the inputs, whose gradient is added to that of later uses."""
    roled = RoledProgram.of(program)
    return {(call.name, position) for call in roled.learned for position in roled.summed(call)}


@pytest.mark.parametrize("name", NAMES)
def test_stages_sum_the_gradients_that_the_whole_sums(name: str) -> None:
    """Uses on several stages count, too, and so do outputs that stages hand on."""
    program = _captured(name)
    of_stages = [each for stage in _stages(program, 4) for each in _sums(stage)]
    assert len(set(of_stages)) == len(of_stages) and _sums(program) <= set(of_stages)
    given = {node.name for node in program.output[: program.num_outputs] if isinstance(node, fx.Node)}
    read = {RoledProgram.of(program).calls[name].inputs[at][0] for name, at in set(of_stages) - _sums(program)}
    assert read <= given


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_receives_what_the_one_before_sends_and_no_input_is_sent(name: str) -> None:
    program = _captured(name)
    shared = {node.name for node in shared_calls(program)}
    stages = _stages(program, 4)
    assert not stages[0].received and not stages[-1].num_sent
    for before, after in itertools.pairwise(stages):
        sent = [value for value in before.output[: before.num_sent] if isinstance(value, fx.Node)]
        assert [node.name for node in sent] == list(after.received)
        arriving = [after.placeholders()[name] for name in after.received]
        assert list(map(info_of, sent)) == list(map(info_of, arriving))
        assert not {node.name for node in sent} & {*shared, *program.placeholders()}
        assert not any(node.meta["module"] for node in arriving)


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_the_stages_together_are_those_of_the_whole(name: str) -> None:
    program = _captured(name)
    stages = _stages(program, 3)
    assert {name for stage in stages for name in stage.parameters} == set(program.parameters)
    assert {name for stage in stages for name in stage.tied} == set(program.tied)
    assert {name for stage in stages for name in stage.buffers} == set(program.buffers)
    assert sorted(name for stage in stages for name in stage.mutations) == sorted(program.mutations)
    assert [stage.num_outputs for stage in stages] == [0, 0, program.num_outputs]
    for stage in stages:
        parts = (stage.parameters.values(), stage.buffers.values(), stage.constants, stage.received, stage.inputs)
        kinds = [[name in part for part in parts].index(True) for name in stage.placeholders()]
        assert kinds == sorted(kinds) and len(kinds) == sum(name is not None for part in parts for name in part)


@pytest.mark.parametrize("name", NAMES)
def test_names_and_meta_are_those_of_the_whole_and_no_call_is_made_for_nothing(name: str) -> None:
    program = _captured(name)
    whole = {node.name: node for node in program.graph.nodes}
    for stage in _stages(program, 4):
        for node in calls(stage):
            assert node.meta == whole[node.name].meta and node.target is whole[node.name].target
            assert node.users, f"{node} is dead"


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_random_numbers_are_drawn_once_and_in_order(name: str) -> None:
    family = FAMILIES[name]
    model = family.build(dropout=0.2)
    program = capture(model, *family.inputs(0))
    found = []
    for stages in (_stages(program, 3), (program,)):
        torch.manual_seed(SEED)
        found.append(_run_all(stages, model, pytree.tree_leaves(family.inputs(0)))[0][0])
    torch.manual_seed(SEED + 1)
    other = _run_all((program,), model, pytree.tree_leaves(family.inputs(0)))[0][0]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], other)


def test_a_skip_is_handed_on_through_the_stages_between() -> None:
    program = _captured("unet")
    blocks = blocks_of(program)
    assert [block.name for block in blocks] == ["enter", "down", "bottom", "up1", "up2", "leave"]
    stages = split(program, blocks, range(6))
    skip = "silu_default_1"
    assert [skip in stage.received for stage in stages] == [False, True, True, True, False, False]
    assert [len(stage.received) for stage in stages] == [0, 2, 3, 2, 1, 1]
    assert [stage.inputs for stage in stages] == [("x_bchw", None), *[(None, None)] * 4, (None, "target_bchw")]


class Odd(nn.Module):
    """Three linear layers, a normalization, a buffer, and what `between` makes of the values after each layer."""

    def __init__(self, between: Callable[..., Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("count", torch.zeros(8))
        self.between = between

    def forward(self, x_BD: Tensor) -> Any:
        a = self.layers[0](x_BD)
        b = self.layers[1](a)
        c = self.layers[2](b)
        return self.between(self, x_BD, a, b, c)


def _odd(between: Callable[..., Any]) -> tuple[nn.Module, Program]:
    torch.manual_seed(SEED)
    model = Odd(between)
    return model, capture(model, (X_BD,), {})


def _weights_twice(model: Any, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a @ model.layers[0].weight.bfloat16().float() + c


def _one_cast(model: Any, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    weight = model.layers[0].weight.bfloat16().float()
    return a @ weight + c @ weight


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(lambda model, x, a, b, c: (a, x, model.layers[0].weight, 3, c), id="outputs of every kind"),
        pytest.param(lambda model, x, a, b, c: (a.chunk(2, 1)[0] + c.chunk(2, 1)[1], a.argmax(1)), id="pieces"),
        pytest.param(_weights_twice, id="a weight twice"),
        pytest.param(lambda model, x, a, b, c: (model.count.add_(a.sum(0)), c)[1], id="a buffer that changes"),
        pytest.param(lambda model, x, a, b, c: (model.count.copy_(x.sum(0)), c)[1], id="a buffer of inputs"),
        pytest.param(
            lambda model, x, a, b, c: (model.count.copy_(model.norm.weight.exp()), c)[1], id="a buffer of weights"
        ),
        pytest.param(lambda model, x, a, b, c: (model.norm(b), c)[1], id="statistics of what is dropped"),
        pytest.param(lambda model, x, a, b, c: torch.where(x > 0, a, c), id="an input again"),
    ],
)
def test_odd_graphs_are_split_as_they_are(between: Callable[..., Any]) -> None:
    model, program = _odd(between)
    blocks = blocks_of(program)
    found = [_run_all(stages, model, [X_BD]) for stages in ((program,), split(program, blocks, range(len(blocks))))]
    assert len(blocks) >= 2
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_a_weight_is_never_sent_nor_is_its_cast() -> None:
    _, program = _odd(lambda model, x, a, b, c: c @ model.layers[0].weight.bfloat16().float() + a)
    stages = split(program, blocks_of(program), (0, 1, 2))
    assert [sorted(stage.parameters) for stage in stages][2] == ["layers.0.weight", "layers.2.bias", "layers.2.weight"]
    assert [stage.received for stage in stages] == [(), ("linear_default",), ("linear_default", "linear_default_1")]


def test_a_cast_that_two_stages_use_is_made_on_both() -> None:
    model, program = _odd(_one_cast)
    second = calls(program, torch.ops.aten.matmul.default)[1]
    place = calls(program).index(second)
    blocks = [Block("first", tuple(calls(program)[:place])), Block("second", tuple(calls(program)[place:]))]
    stages = split(program, blocks, (0, 1))
    assert ["layers.0.weight" in stage.parameters for stage in stages] == [True, True]
    assert stages[1].received == ("linear_default_2", "matmul_default")
    torch.testing.assert_close(_run_all(stages, model, [X_BD]), _run_all((program,), model, [X_BD]))


def test_a_buffer_that_changes_on_another_stage_than_it_is_read_on_is_refused() -> None:
    _, program = _odd(lambda model, x, a, b, c: (c * model.count.sum(), model.count.add_(c.sum(0)))[0])
    single = [Block(node.name, (node,)) for node in calls(program)]
    split(program, single, (0, 1))
    with pytest.raises(PipelineError, match=r"changes the buffer count, which stages .* Put the modules"):
        split(program, single, range(len(single)))


def test_a_stage_can_be_planned_and_sends_in_any_layout() -> None:
    stages = _stages(_captured("t5"), 3)
    for stage in stages:
        space = build_space(stage, Mesh({"tp": 2}), SLOW_LINKS, returned=WHOLE)
        layouts = [
            len(space.decisions[space.index[f"output:{number}"]].candidates.strategies)
            for number, value in enumerate(stage.output)
            if isinstance(value, fx.Node)
        ]
        assert all(number > 1 for number in layouts[: stage.num_sent])
        of_user = layouts[stage.num_sent :]
        assert of_user == ([2, 1, 1] if stage is stages[-1] else []), "the loss is whole, or a part whose sum follows"
        assert all(space.decisions[space.index[name]].kind == "input" for name in stage.received)


def test_what_depends_on_a_received_tensor_is_planned_like_what_depends_on_a_parameter() -> None:
    _, program = _odd(lambda model, x, a, b, c: c.relu())
    relu = Block("relu", (calls(program)[-1],))
    stage = split(program, [Block("before", tuple(calls(program)[:-1])), relu], (0, 1))[1]
    assert not stage.parameters
    space = build_space(stage, Mesh({"tp": 2}), SLOW_LINKS)
    assert len(space.decisions[space.index[relu.nodes[0].name]].candidates.strategies) > 1


@pytest.mark.parametrize(("first", "end"), [(0, 2), (1, 3), (2, 4)])
def test_a_stage_made_alone_is_the_one_that_is_made_among_all(first: int, end: int) -> None:
    program = _captured("mlp")
    blocks = blocks_of(program, 4)
    end = len(blocks) if end == 4 else end
    starts = sorted({0, first, end} - {len(blocks)})
    alone, among = Splitter.of(program, blocks).between(first, end), split(program, blocks, starts)[starts.index(first)]
    assert str(alone.graph) == str(among.graph)
    assert (alone.received, alone.num_sent, alone.parameters) == (among.received, among.num_sent, among.parameters)
