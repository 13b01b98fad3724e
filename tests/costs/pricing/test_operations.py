"""Seconds and bytes of one operation on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture.export import capture
from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Hardware, Link
from autopar.costs.pricing.operations import (
    backward_launches,
    backward_share,
    bandwidth,
    flops,
    forward_seconds,
    peak_flops,
)
from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.ir.sharding.operation import ZIGZAG, Call, OpRule, is_contraction, is_view
from autopar.ir.sharding.rule import TOGETHER, Rule
from autopar.strategies import rule_of
from tests.support.eager import calls
from tests.support.planned import call_candidates, space_of

aten = torch.ops.aten
LINKS = (Link("wire", None, 0.0, 1.0),)
MATMUL_BOUND = Hardware("slow flops", {"float32": 10.0, "bfloat16": 40.0}, 1e30, 1, 0.0, LINKS)
BANDWIDTH_BOUND = Hardware("slow memory", {"float32": 1e30}, 8.0, 1, 0.0, LINKS)
LATENCY_BOUND = Hardware("slow starts", {"float32": 1e30}, 1e30, 1, 0.5, LINKS)


PLAIN = OpRule("")


def info(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> TensorInfo:
    return TensorInfo(shape, dtype, requires_grad)


def linear(learns: bool = True, dtype: torch.dtype = torch.float32) -> Call:
    """x[4, 6] through a weight[10, 6]."""
    x, weight = info(4, 6, dtype=dtype, requires_grad=False), info(10, 6, dtype=dtype, requires_grad=learns)
    return Call(aten.linear.default, (x, weight), (info(4, 10, dtype=dtype, requires_grad=learns),), {})


def seconds(
    call: Call,
    hardware: Hardware,
    total: float = 0.0,
    share: float = 1.0,
    layout: str = "I",
    op: OpRule | None = None,
) -> float:
    def same(infos: Sequence[TensorInfo]) -> list[Layout]:
        return [Layout.parse(layout)] * len(infos)

    layouts = same(call.inputs), same(call.outputs)
    forward = forward_seconds(call, op or PLAIN, total * share, layouts, (2,), hardware, hardware.memory_bytes_per_s)
    return forward * (1 + backward_share(call, op or PLAIN))


def test_a_matrix_product_has_two_operations_per_product_of_its_factors() -> None:
    bound = Rule.parse("b k, o k -> b o").bind([(4, 6), (10, 6)], [(4, 10)])
    assert is_contraction(bound)
    assert flops(linear(), OpRule("b k, o k -> b o"), bound) == 2 * 4 * 6 * 10


def test_a_pointwise_operation_has_one_operation_per_element_it_makes() -> None:
    call = Call(aten.relu.default, (info(4, 6),), (info(4, 6),), {})
    bound = Rule.parse("a b -> a b").bind([(4, 6)], [(4, 6)])
    assert not is_contraction(bound)
    assert flops(call, OpRule("a b -> a b"), bound) == 24


def test_a_rule_may_state_its_operations() -> None:
    bound = Rule.parse("a b -> a b").bind([(4, 6)], [(4, 6)])
    call = Call(aten.relu.default, (info(4, 6),), (info(4, 6),), {})
    assert flops(call, OpRule("a b -> a b", flops=7), bound) == 7


def test_a_table_lookup_does_not_multiply_its_table() -> None:
    (node,) = calls(capture(nn.Embedding(100, 8), (torch.zeros(4, dtype=torch.long),), {}), aten.embedding.default)
    call = Call.of(node)
    op = rule_of(call)
    assert op is not None
    bound = Rule.parse(op.rule).bind([i.shape for i in call.inputs], [o.shape for o in call.outputs])
    assert flops(call, op, bound) == 4 * 8


def test_a_table_lookup_reads_the_rows_it_needs() -> None:
    table, ids, rows = info(1000, 8), info(4, dtype=torch.int64, requires_grad=False), info(4, 8)
    call = Call(aten.embedding.default, (table, ids), (rows,), {"scale_grad_by_freq": False, "sparse": False})
    assert seconds(call, BANDWIDTH_BOUND, op=rule_of(call)) == 2 * (2 * 4 * 8 * 4) / 8.0


def test_an_operation_takes_the_longer_of_its_arithmetic_and_its_memory_traffic() -> None:
    moved = 4 * (4 * 6 + 10 * 6 + 4 * 10)
    assert seconds(linear(learns=False), MATMUL_BOUND, total=480.0) == 48.0
    assert seconds(linear(learns=False), BANDWIDTH_BOUND, total=480.0) == moved / 8.0


def test_the_backward_is_as_long_as_the_forward_for_every_input_with_a_gradient() -> None:
    both = Call(aten.linear.default, (info(4, 6), info(10, 6)), (info(4, 10),), {})
    assert seconds(linear(learns=True), MATMUL_BOUND, total=480.0) == 2 * 48.0
    assert seconds(both, MATMUL_BOUND, total=480.0) == 3 * 48.0


def test_every_pass_starts_with_a_latency() -> None:
    assert seconds(linear(learns=True), LATENCY_BOUND) == pytest.approx(2 * 0.5)


def test_a_dtype_computes_at_its_own_speed() -> None:
    assert seconds(linear(learns=False, dtype=torch.bfloat16), MATMUL_BOUND, total=480.0) == 12.0


def test_a_split_operation_takes_its_share() -> None:
    assert seconds(linear(), MATMUL_BOUND, total=480.0, share=0.5) == 48.0
    whole, split = seconds(linear(), BANDWIDTH_BOUND), seconds(linear(), BANDWIDTH_BOUND, layout="S(0)")
    assert split == whole / 2


def test_a_view_costs_nothing() -> None:
    call = Call(aten.transpose.int, (info(4, 6),), (info(6, 4),), {})
    assert is_view(call) and call.name == "transpose"
    assert seconds(call, LATENCY_BOUND) == 0.0


def test_a_strategy_that_splits_a_product_computes_half_of_it() -> None:
    model = nn.Linear(6, 10, bias=False)
    (node,) = calls(capture(model, (torch.ones(4, 6),), {}), aten.linear.default)
    candidates = call_candidates(node, [frozenset(), frozenset((0, 1))], Mesh({"tp": 2}), MATMUL_BOUND)
    times = {str(s): float(t) for s, t in zip(candidates.strategies, candidates.seconds, strict=True)}
    assert times["-"] == 2 * 48.0
    assert times["o"] == times["k"] == 48.0


def test_a_cast_is_no_view() -> None:
    same, cast = (Call(aten.to.dtype, (info(4),), (info(4, dtype=d),), {}) for d in (torch.float32, torch.bfloat16))
    assert is_view(same) and not is_view(cast)


def test_what_makes_no_products_goes_at_the_speed_of_elementwise_operations() -> None:
    hardware = replace(load("cpu"), memory_bytes_per_s=3e9, product_bytes_per_s=2e9, elementwise_bytes_per_s=1e9)
    pointwise = Rule.parse("a b -> a b").bind([(4, 6)], [(4, 6)])
    product = Rule.parse("b k, o k -> b o").bind([(4, 6), (10, 6)], [(4, 10)])
    lookup = Call(
        aten.embedding.default,
        (info(4, 6), info(3)),
        (info(3, 6),),
        {"scale_grad_by_freq": False, "sparse": False},
    )
    rows = Rule.parse("v h, n -> n h").bind([(4, 6), (3,)], [(3, 6)])
    assert bandwidth(OpRule("a b -> a b"), pointwise, hardware) == 1e9
    assert bandwidth(OpRule("a b -> a b", flops=100), pointwise, hardware) == 2e9, "as a convolution says"
    assert bandwidth(OpRule("b k, o k -> b o"), product, hardware) == 2e9
    assert bandwidth(rule_of(lookup) or PLAIN, rows, hardware) == 1e9


def test_attention_reaches_the_share_of_a_matmul_that_the_hardware_states() -> None:
    hardware = replace(load("cpu"), attention_efficiency=0.25)
    call = attention(8, 8)
    assert peak_flops(call, rule_of(call) or PLAIN, hardware) == 0.25 * hardware.flops_of(torch.float32)
    assert peak_flops(linear(), PLAIN, hardware) == hardware.flops_of(torch.float32)


def test_products_and_attention_reach_the_share_of_the_peak_that_the_hardware_states() -> None:
    hardware = replace(load("cpu"), product_efficiency=0.5, attention_efficiency=0.25)
    call = attention(8, 8)
    assert peak_flops(linear(), PLAIN, hardware) == 0.5 * hardware.flops_of(torch.float32)
    assert peak_flops(call, rule_of(call) or PLAIN, hardware) == 0.125 * hardware.flops_of(torch.float32)


def attention(queries: int, keys: int, mask: TensorInfo | None = None, **specified: Any) -> Call:
    q, k, v = info(2, 4, queries, 16), info(2, 4, keys, 16), info(2, 4, keys, 8)
    given = {"query": q, "key": k, "value": v, "attn_mask": mask, "dropout_p": 0.0, "is_causal": False}
    tensors = (q, k, v) if mask is None else (q, k, v, mask)
    out = (info(2, 4, queries, 8),)
    return Call(aten.scaled_dot_product_attention.default, tensors, out, {**given, "enable_gqa": False, **specified})


@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (3, 8), (8, 3), (1, 1)])
def test_a_causal_call_computes_what_its_queries_see(queries: int, keys: int) -> None:
    """Check the FLOPs of causal attention: the kernels' mask begins at the first query and the first key."""
    seen = int(torch.ones(queries, keys).tril().sum())
    for causal, pairs in ((True, seen), (False, queries * keys)):
        op = rule_of(attention(queries, keys, is_causal=causal))
        assert op is not None and op.flops == 2 * 2 * 4 * pairs * (16 + 8)
    op = rule_of(attention(queries, keys, is_causal=True, dropout_p=0.5))
    assert op is not None and op.flops == 2 * 2 * 4 * seen * (16 + 8), "with dropout, too"


def test_the_busiest_device_has_the_last_queries_in_order_and_an_equal_share_by_zigzag() -> None:
    call = attention(8, 8, is_causal=True)
    op = rule_of(call)
    assert op is not None
    by_blocks, _ = op.implementations
    assert by_blocks.flops is not None
    bound = Rule.parse(op.rule).bind([each.shape for each in call.inputs], [each.shape for each in call.outputs])
    sizes = {**bound.sizes, "s": 2}
    seen = [sum(key <= query for key in range(8)) for query in range(8)]
    features = 2 * 4 * 2 * (16 + 8)
    assert by_blocks.flops(call, sizes) == sum(seen[6:]) * features
    assert by_blocks.flops(call, {**sizes, "h": 1}) == sum(seen[6:]) * features // 4
    assert by_blocks.flops(call, {**sizes, ZIGZAG + "s": 1}) == sum(seen) // 4 * features
    full = attention(8, 8)
    assert by_blocks.flops(full, {**sizes, "t": 2, TOGETHER + "t": 4}) == 2 * 8 * features


def test_under_a_mask_of_positions_the_share_that_may_be_seen_is_priced() -> None:
    q, places = info(2, 4, 8, 16), (info(8, 1), info(8))

    def flops(sizes: dict[str, int], **specified: Any) -> int:
        given = {
            "query": q,
            "key": q,
            "value": q,
            "vectors": list(places),
            "mask": "le(v1, v0)",
            "dropout_p": 0.0,
            "sinks": None,
            **specified,
        }
        call = Call(ATTENTION_BY_MASK, (q, q, q, *places), (q,), given)
        op = rule_of(call)
        assert op is not None and op.flops == round(specified["seen"] * 2 * 2 * 4 * 8 * 8 * (16 + 16))
        (by_blocks,) = op.implementations
        found = by_blocks.flops(call, {"a0": 2, "h": 4, "s": 8, "t": 8, **sizes})
        assert found is not None
        return found

    of_all = 2 * 2 * 4 * 2 * 8 * (16 + 16)  # two queries
    assert flops({"s": 2}, seen=0.5, rising=False) == of_all // 2
    assert flops({"s": 2}, seen=0.5, rising=True) == of_all * 7 // 8  # the last two of eight queries
    assert flops({"s": 2, ZIGZAG + "s": 1}, seen=0.5, rising=True) == of_all // 2
    assert flops({"s": 2, "t": 2, TOGETHER + "t": 4}, seen=0.5, rising=False) == of_all // 2


def test_the_backward_of_fused_attention_is_two_and_a_half_forwards() -> None:
    def share(**specified: Any) -> float:
        call = attention(8, 8, **specified)
        return backward_share(call, rule_of(call) or PLAIN)

    assert share() == share(is_causal=True) == 2.5
    assert share(mask=info(8, 8, requires_grad=False)) == 2.5
    assert share(dropout_p=0.1) == 2.5, "by blocks"
    numbers = info(8, 8, requires_grad=False)
    assert share(mask=info(8, 8)) == share(mask=numbers, dropout_p=0.1) == 2.0, "probabilities are made"
    frozen = replace(attention(8, 8), inputs=tuple(info(2, 4, 8, 16, requires_grad=False) for _ in range(3)))
    assert (
        backward_share(replace(frozen, outputs=(info(2, 4, 8, 8, requires_grad=False),)), rule_of(frozen) or PLAIN) == 0
    )


def test_a_bias_has_no_product_in_the_backward_but_a_launch() -> None:
    op = OpRule("~b k, ~o k, +o -> b o")
    call = replace(linear(), inputs=(*linear().inputs, info(10)))
    assert backward_share(call, op) == backward_share(linear(), OpRule("~b k, ~o k -> b o")) == 1
    assert backward_launches(call, op) == 2
    added = replace(linear(), inputs=(info(4, 10), info(4, 10)))
    assert backward_share(added, OpRule("+b o, +b o -> b o")) == 0, "a sum passes its gradient on"


def test_a_loss_writes_probabilities_as_large_as_its_logits() -> None:
    logits, labels, loss = info(4, 6), info(4), info()
    specified = {
        "self": logits,
        "target": TensorInfo((4,), torch.int64),
        "weight": None,
        "reduction": 1,
        "label_smoothing": 0.0,
    }
    op = rule_of(Call(aten.cross_entropy_loss.default, (logits, labels), (loss,), specified))
    assert op is not None
    read, written = 4 * 24 + 4 * 4, 4
    assert op.moved_bytes(read, written) == 2 * read + written


def test_a_sum_passes_its_gradient_on_unless_an_input_was_broadcast() -> None:
    rule, row = OpRule("+a b, +a b -> a b"), info(4, 6)
    assert backward_share(Call(aten.add.Tensor, (row, row), (row,), {}), rule) == 0
    assert backward_share(Call(aten.add.Tensor, (row, info(1, 6)), (row,), {}), rule) == 1
    assert backward_launches(Call(aten.add.Tensor, (row, row), (row,), {}), rule) == 2, "nodes of autograd"


def test_the_backward_of_what_is_not_linear_reads_its_input_again() -> None:
    row = info(4, 6)
    call, scaled = Call(aten.gelu.default, (row,), (row,), {}), Call(aten.mul.Scalar, (row,), (row,), {})
    assert backward_share(call, OpRule("a b -> a b")) == 1.5
    assert backward_share(scaled, OpRule("~a b -> a b")) == 1
    assert backward_share(call, OpRule("a b -> a b", flops=7)) == 1, "as a convolution"


class _UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x.sin() + x


def test_the_gradients_of_a_tensor_of_two_uses_are_summed_once() -> None:
    space = space_of(_UsedTwice(), (torch.ones(4, 6),), BANDWIDTH_BOUND, dp=1)
    candidate_lists = {
        each.candidates.call.name: each.candidates for each in space.decisions if each.candidates.call is not None
    }
    assert {name: candidates.summed for name, candidates in candidate_lists.items()} == {
        "linear": (),
        "sin": (0,),
        "add": (),
    }
    forward, whole = candidate_lists["sin"].forward_seconds[0], candidate_lists["sin"].seconds[0]
    assert whole == pytest.approx(2.5 * forward + 3 * 24 * 4 / 8.0), "two gradients are read, one is written"
