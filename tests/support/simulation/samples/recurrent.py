"""Sample calls of recurrent layers."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.simulation.samples.draw import Draw, Sample, Samples, sample

aten = torch.ops.aten

INPUTS, HIDDEN = 3, 5


def recurrent(
    d: Draw,
    gates: int,
    num_states: int,
    layers: int = 1,
    both: bool = False,
    batch_first: bool = True,
    biases: bool = False,
) -> Sample:
    """A call with `num_states` states, whose layers have `gates` times as many rows of weights as features."""
    directions, weights = 1 + both, []
    for layer in range(layers):
        width = INPUTS if layer == 0 else directions * HIDDEN
        for _ in range(directions):
            weights += [d.x(gates * HIDDEN, width), d.x(gates * HIDDEN, HIDDEN)]
            weights += [d.x(gates * HIDDEN), d.x(gates * HIDDEN)] if biases else []
    states = [d.x(layers * directions, 4 if batch_first else 6, HIDDEN) for _ in range(num_states)]
    given = states if num_states > 1 else states[0]
    return sample(d.x(4, 6, INPUTS), given, weights, biases, layers, 0.0, True, both, batch_first)


def one_layer(gates: int, num_states: int) -> Samples:
    """Return two samples only: many weights have too many placements to try them all."""
    return lambda d: [recurrent(d, gates, num_states), recurrent(d, gates, num_states, batch_first=False)]


KINDS = {aten.lstm.input: (4, 2), aten.gru.input: (3, 1), aten.rnn_tanh.input: (1, 1), aten.rnn_relu.input: (1, 1)}
"""Gates and states of each kind."""


def cell(gates: int, num_states: int) -> Samples:
    """One step, with and without biases."""

    def samples(d: Draw) -> list[Sample]:
        states = [d.x(4, HIDDEN) for _ in range(num_states)]
        given = states if num_states > 1 else states[0]
        call = d.x(4, INPUTS), given, d.x(gates * HIDDEN, INPUTS), d.x(gates * HIDDEN, HIDDEN)
        return [sample(*call), sample(*call, d.x(gates * HIDDEN), d.x(gates * HIDDEN))]

    return samples


CELLS = {
    aten.lstm_cell.default: (4, 2),
    aten.gru_cell.default: (3, 1),
    aten.rnn_tanh_cell.default: (1, 1),
    aten.rnn_relu_cell.default: (1, 1),
}

SAMPLES: dict[Any, Samples] = {
    **{target: one_layer(*kind) for target, kind in KINDS.items()},
    **{target: cell(*kind) for target, kind in CELLS.items()},
}
