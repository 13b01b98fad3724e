"""Rules of layers with too many tensors, or too careless kernels, for all placements to be tried: theirs are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.capture.composites import COMPOSITES
from autopar.ir.sharding.operation import largest_split_input
from autopar.strategies import rule_of
from tests.support.simulation.samples.draw import Draw
from tests.support.simulation.samples.recurrent import KINDS, recurrent
from tests.support.simulation.validate import Whole, fault_of

aten = torch.ops.aten


def faults(target: Any, *args: Any) -> list[str]:
    """Return the faults of the choices of the call's rule on two ranks; at least one choice must split something."""
    whole = Whole.of(target, args, {})
    op = rule_of(whole.call)
    assert op is not None
    choices = whole.bind(op).choices(weight_only=True)
    assert any(choice.factors for choice in choices)
    return [fault for each in choices if (fault := fault_of(whole, each.inputs, each.outputs, 2))]


@pytest.mark.sample(6)
@pytest.mark.parametrize("target", KINDS, ids=str)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("both", [False, True])
def test_samples_of_recurrent_nets_are_free(target: Any, layers: int, both: bool) -> None:
    for batch_first in (False, True):
        call = recurrent(Draw(0), *KINDS[target], layers=layers, both=both, batch_first=batch_first, biases=True)
        assert not faults(target, *call.args)


def test_dropout_between_layers_leaves_no_rule_for_the_whole() -> None:
    call = recurrent(Draw(0), *KINDS[aten.lstm.input], layers=2).args
    whole = Whole.of(aten.lstm.input, (*call[:5], 0.5, *call[6:]), {})
    assert rule_of(whole.call) is None
    idle = Whole.of(aten.lstm.input, (*call[:5], 0.5, False, *call[7:]), {})
    assert rule_of(idle.call) is not None


def test_a_recurrent_net_has_the_flops_of_its_products_at_every_position() -> None:
    inputs, hidden, batch, positions = 3, 5, 4, 6
    call = recurrent(Draw(0), *KINDS[aten.lstm.input], layers=2, both=True, biases=True)
    op = rule_of(Whole.of(aten.lstm.input, call.args, {}).call)
    first, second = 4 * hidden * (inputs + hidden), 4 * hidden * (2 * hidden + hidden)
    assert op is not None and op.flops == 2 * batch * positions * 2 * (first + second)
    weights = Draw(0).x(4 * hidden, inputs), Draw(0).x(4 * hidden, hidden)
    states = [Draw(0).x(batch, hidden), Draw(0).x(batch, hidden)]
    cell = rule_of(Whole.of(aten.lstm_cell.default, (Draw(0).x(batch, inputs), states, *weights), {}).call)
    assert cell is not None and cell.flops == 2 * batch * first


@pytest.mark.parametrize(("dim", "lengths"), [(0, (4, 1, 1)), (2, (1, 1, 8)), (1, (1, 6, 1))])
def test_a_normed_weight_is_split_along_the_dim_of_its_lengths(dim: int, lengths: tuple[int, ...]) -> None:
    draw = Draw(0)
    assert not faults(aten._weight_norm.default, draw.x(4, 6, 8), draw.x(*lengths), dim)


def test_layers_one_by_one_compute_what_the_whole_net_does() -> None:
    for target, kind in KINDS.items():
        call = recurrent(Draw(0), *kind, layers=3, both=True, biases=True).args
        apart = COMPOSITES[target](*call[:5], 1e-300, *call[6:])  # drops nothing, yet is taken apart
        for ours, theirs in zip(apart, target(*call), strict=True):
            assert isinstance(ours, Tensor)
            torch.testing.assert_close(ours, theirs)


def test_what_a_recurrent_net_keeps_is_counted_as_split_like_its_input_not_like_a_larger_weight() -> None:
    x, state = torch.ones(2, 3, 8, dtype=torch.float64), torch.ones(1, 2, 16, dtype=torch.float64)
    weights = [torch.ones(64, 8, dtype=torch.float64), torch.ones(64, 16, dtype=torch.float64)]
    whole = Whole.of(aten.lstm.input, (x, [state, state], weights, False, 1, 0.0, True, False, True), {})
    op = rule_of(whole.call)
    assert op is not None
    assert largest_split_input(whole.call, whole.bind(op)) == 0
    assert largest_split_input(whole.call, None) == 4
