"""Recurrent layers and cells: samples are free. Positions follow each other; each needs all features of the last one.

The call has all layers and directions, and all positions. Dropout between layers takes it apart, layer by layer
(`capture.composites`); packed sequences, of which each position has other samples, have no rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.operation import Call, OpRule
from autopar.ir.sharding.rule import WHOLE
from autopar.strategies.notation import Entry, rule, term

aten = torch.ops.aten


def recurrent(call: Call) -> OpRule | None:
    """`input` (positions, batch, features) or batch first, states (layers, batch, hidden), weights and biases."""
    if call["train"] and call["dropout"] > 0 and call["num_layers"] > 1:
        return None
    sequence = term(["b", WHOLE, WHOLE] if call["batch_first"] else [WHOLE, "b", WHOLE])
    state, given = term([WHOLE, "b", WHOLE]), call["hx"]
    states = [state] * (1 if isinstance(given, TensorInfo) else len(given))
    weights, flops = _weights(call["params"], math.prod(call["input"].shape[:2]))
    return OpRule(rule([sequence, *states, *weights], [sequence, *states]), flops=flops)


def cell(call: Call) -> OpRule:
    """One position: `input` (batch, features), one or two states (batch, hidden), weights and biases."""
    samples, given = term(["b", WHOLE]), call["hx"]
    num_states = 1 if isinstance(given, TensorInfo) else len(given)
    weights, flops = _weights(call.inputs[1 + num_states :], call["input"].shape[0])
    return OpRule(rule([samples] * (1 + num_states) + weights, [samples] * num_states), flops=flops)


def _weights(given: Sequence[TensorInfo], num_samples: int) -> tuple[list[str], int]:
    """The terms of weights and biases, and the FLOPs of that many samples, at all positions."""
    # A multiplication and an addition per weight; biases, and what gates do, are little.
    num_weights = sum(info.num_elements for info in given if len(info.shape) == 2)
    return [term([WHOLE] * len(info.shape)) for info in given], 2 * num_weights * num_samples


RULES: dict[torch._ops.OpOverload, Entry] = {
    aten.gru.input: recurrent,
    aten.lstm.input: recurrent,
    aten.rnn_relu.input: recurrent,
    aten.rnn_tanh.input: recurrent,
    aten.gru_cell.default: cell,
    aten.lstm_cell.default: cell,
    aten.rnn_relu_cell.default: cell,
    aten.rnn_tanh_cell.default: cell,
}
