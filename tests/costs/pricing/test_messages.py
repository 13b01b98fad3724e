"""Number of parameters that share a message, as in the runtime's buckets."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.capture.export import capture
from autopar.costs.hardware.load import load
from autopar.costs.pricing.message_sizes import SMALLEST_MESSAGE, Sharing, joined_layers, messages, sharing
from autopar.costs.pricing.moves import MovedTensor, in_bucket, makes_parts
from autopar.costs.pricing.reshard import reshard_table
from autopar.costs.space import parameter_buckets
from autopar.ir.program.paths import layer_or_owner
from autopar.ir.sharding.layout import I, Layout, R, S
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.settings import context_of


class _Layers(nn.Module):
    """An embedding of 2 MB, and layers of a matrix of 1.25 MB and three vectors each."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(1024, 512)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 640)) for _ in range(num_layers))

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        x_BSH = self.table(ids_BS)
        return sum((layer(x_BSH).sum() for layer in self.layers), torch.zeros(()))


def _model() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return _Layers(), (torch.zeros(4, 8, dtype=torch.int64),)


def test_a_layer_is_gathered_at_once_and_gradients_in_messages_of_megabytes() -> None:
    program = capture(*_model(), {})
    found = sharing(program)
    at = {name: found[placeholder] for name, placeholder in program.parameters.items()}
    # 13 parameters of 5.8 MB in 3 messages, one of them the table's
    assert at["table.weight"] == Sharing(gathered=1, reduced=4)
    assert at["layers.1.1.weight"] == at["layers.1.0.bias"] == Sharing(gathered=4, reduced=4)
    assert {each.reduced for each in found.values()} == {4}, "equal layers stay equal"


class _Factor(nn.Module):
    """A parameter of so many KiB."""

    def __init__(self, kib: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256 * kib))

    def forward(self, x_B: torch.Tensor) -> torch.Tensor:
        return x_B * self.weight.sum()


@pytest.mark.parametrize(
    ("kib", "messages"),
    [
        ({"table": 64, "0": 64, "norm": 1, "head": 64}, [["table", "0"], ["norm", "head"]]),
        ({"table": 1025, "norm": 1, "head": 2048}, [["table"], ["norm", "head"]]),
        ({"0": 8, "norm": 1}, [["0"], ["norm"]]),
        ({"a": 512, "b": 512, "c": 512, "d": 512, "0": 8}, [["a", "b"], ["c", "d", "0"]]),
    ],
)
def test_what_is_small_and_of_no_numbered_layer_is_gathered_with_what_is_used_next(
    kib: dict[str, int], messages: list[list[str]]
) -> None:
    assert SMALLEST_MESSAGE == 1024 * 2**10
    model = nn.Sequential(OrderedDict((name, _Factor(each)) for name, each in kib.items()))
    found = joined_layers(capture(model, (torch.zeros(2),), {}))
    assert found == {name: together[-1] for together in messages for name in together}


def test_what_joins_a_layer_pays_least_and_the_layer_what_equal_ones_pay() -> None:
    model = _Layers()
    model.table = nn.Embedding(512, 512)
    program = capture(model, (torch.zeros(4, 8, dtype=torch.int64),), {})
    found = sharing(program)
    at = {name: found[placeholder] for name, placeholder in program.parameters.items()}
    assert at["layers.0.1.weight"] == at["layers.1.1.weight"] == Sharing(gathered=4, reduced=6)
    assert at["table.weight"] == Sharing(gathered=6, reduced=6)


@pytest.mark.parametrize(
    ("strategy", "collective"), [("data_parallel", "all_reduce"), ("zero3", "all_gather"), ("zero3", "reduce_scatter")]
)
def test_shares_add_up_to_the_messages_of_the_runtime(strategy: str, collective: str) -> None:
    model, inputs = _model()
    context = context_of(autopar.plan(model, Mesh({"dp": 2}), inputs, strategy=strategy))
    space, choices = context.space, context.choices
    paths = [space.path(edge, choices) for edge in space.edges]
    shares = sum(
        1 / message.num_parameters
        for path in paths
        for each, message in zip(path.transfers, path.messages, strict=True)
        if message is not None and each.collective == collective
    )
    made = parameter_buckets.buckets_of(space, choices)
    twice = collective == "all_gather"
    messages = sum(2 if bucket.regathered and twice else 1 for bucket in made)
    assert shares == pytest.approx(messages, rel=0.25)  # whole parameters to a message


@pytest.mark.parametrize(
    ("megabytes", "count"),
    [
        ([], 0),
        ([0.5, 0.5], 1),
        ([0.5, 0.75], 2),
        ([2, 0.25, 0.25, 0.25], 2),
        ([1.5] * 40, 3),
        ([12, 1, 1, 12], 4),
        ([40, 40], 2),
        ([1] * 12, 2),
        ([1.75, 1, 1, 1, 1, 1], 2),
    ],
)
def test_messages_have_about_equal_shares_of_the_step(megabytes: list[float], count: int) -> None:
    sizes = [int(each * 2**20) for each in megabytes]
    found = messages(sizes)
    assert len(found) == count and sorted(number for each in found for number in each) == [*range(len(sizes))]
    together = [sum(sizes[number] for number in each) for each in found if len(each) > 1]
    assert max(together, default=0) - min(together, default=0) <= 2 * max(sizes, default=0)


def test_a_large_gradient_is_a_message_by_itself() -> None:
    large = 2 * 2**20
    assert messages([8, large, 8, large - 1, 2 * large, 8]) == [[0, 2], [1], [3, 5], [4]]


def test_the_messages_are_as_large_as_the_runtime_makes_them() -> None:
    assert parameter_buckets.messages is messages


@pytest.mark.parametrize(
    ("name", "layer"),
    [("model.layers.3.mlp.up.weight", "model.layers.3"), ("model.head.weight", "model.head"), ("w", "")],
)
def test_a_layer_is_named_up_to_its_number_or_by_the_module_that_owns_the_parameter(name: str, layer: str) -> None:
    assert layer_or_owner(name) == layer


def test_a_parameter_pays_its_part_of_a_message_that_it_shares() -> None:
    hardware = load("cpu")
    mesh, seconds = Mesh({"dp": 2}), {}
    for shared in (Sharing(1, 1), Sharing(4, 2)):
        tensor = MovedTensor((4,), torch.float32, True, bucketed=True, sharing=shared)
        table = reshard_table(tensor, frozenset((0,)), mesh, hardware)
        for source in (I, S(0)):
            seconds[shared, source] = table.path(Layout((source,)), Layout((R,))).seconds
    assert seconds[Sharing(4, 2), I] == pytest.approx(seconds[Sharing(1, 1), I] / 2, rel=1e-2)
    assert seconds[Sharing(4, 2), S(0)] == pytest.approx(seconds[Sharing(1, 1), S(0)] / 4, rel=1e-2)


def test_a_path_with_a_move_that_no_bucket_takes_shares_no_message() -> None:
    """Check that S → I runs alone, although a bucketed gather and reduction would be cheaper.

    The runtime does not bucket that move.
    """
    hardware = load("cpu")
    tensor = MovedTensor((4,), torch.float32, True, bucketed=True, sharing=Sharing(gathered=1, reduced=100))
    table = reshard_table(tensor, frozenset((0,)), Mesh({"dp": 2}), hardware)
    gathered = table.path(Layout((S(0),)), Layout((R,)))
    assert [(move.source, move.target) for move in gathered.moves] == [(S(0), R)]
    assert gathered.together and [message and message.num_parameters for message in gathered.messages] == [1, 1]
    kept = table.path(Layout((S(0),)), Layout((I,)))
    assert (kept.together, kept.messages) == (False, (None,)), "S → I runs alone"
    (message,) = table.path(Layout((I,)), Layout((R,))).messages
    assert message is not None and message.num_parameters == 100


@pytest.mark.parametrize("regather", [True, False])
def test_a_parameter_pays_the_less_of_paths_alone_and_of_paths_in_buckets(regather: bool) -> None:
    hardware, mesh = load("cpu"), Mesh({"dp": 2, "tp": 2})
    shared = MovedTensor((8, 8), torch.float32, True, bucketed=True, regather=regather, sharing=Sharing(2, 4))
    alone = reshard_table(replace(shared, bucketed=False), frozenset((0,)), mesh, hardware)
    table = reshard_table(shared, frozenset((0,)), mesh, hardware)
    for source, target in itertools.product(table.layouts, repeat=2):
        if not np.isfinite(table.seconds[table.index[source], table.index[target]]):
            continue
        path = table.path(source, target)
        moves = list(path.moves)
        while path.together and moves and makes_parts(moves[-1]):
            moves.pop()
        kinds = [in_bucket(move, shared) for move in moves]
        assert path.together == all(kinds), "in buckets altogether, or not at all"
        if not path.together:
            assert not any(path.messages), "nor is any of its moves in a bucket"
            assert path.seconds == alone.path(source, target).seconds
