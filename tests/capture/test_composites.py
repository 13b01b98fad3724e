"""Operations that are taken apart: of parts that have rules, and with the values and gradients of the whole."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture.composites import COMPOSITES, counted
from autopar.capture.export import capture
from autopar.errors import CaptureError
from autopar.ir.program.calls import is_call
from autopar.ir.sharding.operation import Call
from autopar.strategies import RULES
from autopar.strategies.ruled import ruled
from tests.support.eager import assert_as_eager, calls
from tests.support.simulation.samples.composites import SAMPLES
from tests.support.simulation.samples.draw import Draw, Sample, sample

aten = torch.ops.aten

LAYERS = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
"""Taken apart where dropout is between them, else whole."""
COMPOSED = [target for target in COMPOSITES if target not in LAYERS]


class Calling(nn.Module):
    """A call of an operation whose tensors with gradients are parameters."""

    def __init__(self, target: Any, call: Sample) -> None:
        super().__init__()
        self.target = target
        self.leaves, self.spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.register_parameter(f"x{i}", nn.Parameter(leaf.detach().clone()))
            elif isinstance(leaf, Tensor):
                self.register_buffer(f"x{i}", leaf)

    def forward(self) -> Any:
        leaves = [getattr(self, f"x{i}", leaf) for i, leaf in enumerate(self.leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        found = self.target(*args, **kwargs)
        return list(found) if isinstance(found, tuple | list) else found


def loss(output: Any) -> Tensor:
    """A number that every element of every output has a part in; zero where no gradient flows."""
    parts = [x.square().sum() for x in pytree.tree_leaves(output) if x.is_floating_point() and x.requires_grad]
    return torch.stack(parts).sum() if parts else torch.zeros((), requires_grad=True)


@pytest.mark.sample(12)
@pytest.mark.parametrize("target", COMPOSED, ids=str)
def test_a_composite_is_calls_that_have_rules_and_computes_the_same(target: Any) -> None:
    for each in SAMPLES[target](Draw(0)):
        program = assert_as_eager(Calling(target, each), loss=loss)
        assert not calls(program, target)
        found = [ruled(Call.of(node)) for node in calls(program) if is_call(node)]
        without = [f"{one.call.target}: {one.reason}" for one in found if one.reason]
        assert not without


def test_every_composite_has_samples_and_no_rule_of_its_own() -> None:
    assert set(COMPOSED) == set(SAMPLES)
    assert not set(COMPOSED) & set(RULES)


@pytest.mark.parametrize(("kind", "layer"), [(nn.LSTM, aten.lstm.input), (nn.RNN, aten.rnn_tanh.input)])
def test_dropout_between_layers_takes_a_recurrent_net_apart(kind: Any, layer: Any) -> None:
    model = kind(3, hidden_size=5, num_layers=3, bidirectional=True, batch_first=True, dropout=0.5)
    x = torch.randn(4, 2, 3)
    training = capture(model, (x,), {}, training=True)
    assert [len(calls(training, target)) for target in (layer, aten.dropout.default)] == [3, 2]
    assert all(node.args[-5:] == (1, 0.0, True, True, True) for node in calls(training, layer))
    model.eval()
    evaluated = assert_as_eager(model, (x,), loss=lambda output: output[0].square().sum())
    assert [len(calls(evaluated, target)) for target in (layer, aten.dropout.default)] == [1, 0]


def test_what_autocast_casts_as_one_is_recorded_whole() -> None:
    model = Calling(aten.inverse.default, SAMPLES[aten.inverse.default](Draw(0))[0])
    with torch.autocast("cpu", torch.bfloat16):
        program = capture(model, (), {})
    assert len(calls(program, aten.inverse.default)) == 1


def test_an_embedding_bag_of_rows_of_indices_has_a_row_for_each_bag() -> None:
    bags = functools.partial(nn.EmbeddingBag, 10, 6)
    ids = torch.randint(10, (4, 8))
    for model in (bags(mode="sum"), bags(mode="mean", padding_idx=-1), bags(mode="max")):
        program = assert_as_eager(model, (ids,))
        (call,) = calls(program)
        assert call.meta["tensor"].shape == (4, 6) and call.args[1].op == "placeholder"  # type: ignore[union-attr]
    weighted = assert_as_eager(bags(mode="sum"), (ids,), {"per_sample_weights": torch.rand(4, 8)})
    assert len(calls(weighted)) == 1
    ragged = assert_as_eager(bags(mode="sum"), (ids.flatten(), torch.tensor([0, 3, 3, 9])))
    assert [str(node.target) for node in calls(ragged)] == ["autopar.ragged_embedding_bags.default"]


def test_numbers_are_counted_with_any_weights_and_one_beyond_the_last_raises() -> None:
    numbers = torch.tensor([0, 3, 3])
    weighted = torch.tensor([0.5, 1, 2])
    for weights in (None, weighted, weighted.double(), weighted.half(), torch.tensor([1, 2, 3])):
        torch.testing.assert_close(counted(numbers, weights, 5), torch.bincount(numbers, weights, 5))
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        counted(numbers, None, 3)


def test_counts_whose_number_depends_on_values_are_refused() -> None:
    with pytest.raises(CaptureError, match="bincount"):
        capture(Calling(aten.bincount.default, sample(torch.tensor([0, 2]))), (), {})
