"""Recurrent layers: samples are free. Positions follow each other, and each needs all features of the one before.

The call has all layers and directions, and all positions. Dropout between layers takes it apart, layer by layer
(`capture.composites`); packed sequences, of which each position has other samples, have no rule.
"""

from __future__ import annotations

import math

import torch

from autopar.program.program import TensorInfo
from autopar.sharding.operation import Call, OpRule
from autopar.sharding.rule import WHOLE
from autopar.strategies.notation import Entry, rule, term

aten = torch.ops.aten


def recurrent(call: Call) -> OpRule | None:
    """`input` (positions, batch, features) or batch first, states (layers, batch, hidden), weights and biases."""
    if call["train"] and call["dropout"] > 0 and call["num_layers"] > 1:
        return None
    sequence = term(["b", WHOLE, WHOLE] if call["batch_first"] else [WHOLE, "b", WHOLE])
    state, given = term([WHOLE, "b", WHOLE]), call["hx"]
    states = [state] * (1 if isinstance(given, TensorInfo) else len(given))
    weights = [term([WHOLE] * len(info.shape)) for info in call["params"]]
    # A multiplication and an addition per weight, sample and position; biases, and what gates do, are little.
    num_weights = sum(info.num_elements for info in call["params"] if len(info.shape) == 2)
    flops = 2 * num_weights * math.prod(call["input"].shape[:2])
    return OpRule(rule([sequence, *states, *weights], [sequence, *states]), flops=flops)


RULES: dict[torch._ops.OpOverload, Entry] = {
    aten.gru.input: recurrent,
    aten.lstm.input: recurrent,
    aten.rnn_relu.input: recurrent,
    aten.rnn_tanh.input: recurrent,
}
