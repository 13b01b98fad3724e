"""Growth of the tensors that autograd saves besides inputs and outputs: equal to what it saves of larger inputs."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.export import capture
from autopar.costs.plans.expressions import evaluate
from autopar.ir.program.saved_tensors import saved_in, saved_with
from autopar.ir.sharding.operation import Call
from autopar.views.formulas.autograd_bytes import hidden_bytes
from autopar.views.formulas.symbols import Size

SYMBOLS = {"batch": 2, "hidden": 64, "sequence": 16}


class Biased(nn.Module):
    def forward(self, query: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, query, query, attn_mask=bias)


@pytest.mark.parametrize("larger", [{}, {"batch": 6}, {"hidden": 96}, {"batch": 4, "hidden": 32, "sequence": 48}])
def test_copies_and_merged_dims_of_biased_attention_grow_with_the_dims_that_they_hold(larger: dict[str, int]) -> None:
    made = torch.zeros(2, 8, 16, 8, dtype=torch.bfloat16), torch.zeros(1, 8, 16, 16, dtype=torch.bfloat16)
    program = capture(Biased(), tuple(each.requires_grad_() for each in made), {})
    (node,) = [node for node in program.graph.nodes if node.op == "call_function"]
    call, now = Call.of(node), saved_in(program)[node].other_bytes
    batch, hidden, sequence = (Size.symbol(name, value) for name, value in SYMBOLS.items())
    query = (batch, hidden // 8, sequence, Size.of(8))
    found = hidden_bytes(node, call, [query] * 3 + [(Size.of(1), hidden // 8, sequence, sequence)], now, SYMBOLS)
    assert found == now > 0
    values = {**SYMBOLS, **larger}
    heads, length = values["hidden"] // 8, values["sequence"]
    shapes = [(values["batch"], heads, length, 8)] * 3 + [(1, heads, length, length)]
    infos = tuple(replace(info, shape=shape) for info, shape in zip(call.inputs, shapes, strict=True))
    expected = saved_with(node, infos).other_bytes
    assert evaluate(str(found.polynomial), {name: Fraction(value) for name, value in values.items()}) == expected
