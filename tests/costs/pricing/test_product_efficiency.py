"""Efficiency that devices lose to the shape of products and to the length of attention, against the formula."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costs.hardware.load import load
from autopar.costs.pricing.product_efficiency import WITHOUT_MASK, full_rate_flops, sides_of
from autopar.ir.sharding.operation import Implementation, OpRule
from autopar.ir.sharding.rule import BoundRule, Rule
from autopar.strategies import rule_of
from tests.costs.pricing.test_operations import attention

WAVES = replace(load("cpu"), product_wave=300.0, attention_length=64.0)
LINEAR = "... k, o k, +o -> ... o"


def bound(text: str, *shapes: tuple[int, ...]) -> BoundRule:
    return Rule.parse(text).bind(shapes[:-1], shapes[-1:])


def flops_at_full_rate(found: BoundRule, num_flops: float = 0.0, **local: int) -> float:
    op = OpRule(str(found.rule))
    return full_rate_flops(num_flops, op, sides_of(op, found), {**found.sizes, **local}, WAVES)


def test_a_product_waits_for_half_a_wave_in_each_of_its_three_orientations() -> None:
    linear = bound(LINEAR, (2, 8, 16), (32, 16), (32,), (2, 8, 32))
    m, n, k = 2 * 8, 32, 16
    passes = [2 * (a * b + 300 / 2) * c for a, b, c in ((m, n, k), (m, k, n), (k, n, m))]
    assert 3 * flops_at_full_rate(linear, 2 * m * n * k) == pytest.approx(sum(passes))


def test_what_is_split_over_devices_waits_as_long_for_less() -> None:
    linear = bound(LINEAR, (2, 8, 16), (32, 16), (32,), (2, 8, 32))
    assert flops_at_full_rate(linear, o=4) == 100 * (16 + 4 + 16)


def test_a_batch_of_products_fills_waves_together() -> None:
    assert flops_at_full_rate(bound("b m k, b k n -> b m n", (7, 8, 16), (7, 16, 32), (7, 8, 32))) == 100 * (
        8 + 32 + 16
    )


def test_what_is_no_single_product_has_no_waves() -> None:
    elementwise = bound("a b -> a b", (4, 6), (4, 6))
    assert sides_of(OpRule("a b -> a b"), elementwise) == ()
    linear = bound(LINEAR, (2, 8, 16), (32, 16), (32,), (2, 8, 32))
    assert sides_of(OpRule(LINEAR, flops=100), linear) == (), "as a convolution says"
    assert flops_at_full_rate(elementwise, 24) == 24


def test_attention_reaches_half_of_its_rate_at_the_length_that_the_hardware_states() -> None:
    op = rule_of(attention(64, 64, is_causal=True))
    assert op is not None
    for queries, slower in ((64, 2.0), (16, 5.0), (1024, 1.0625)):
        assert full_rate_flops(10.0, op, (), {"s": queries}, WAVES) == 10.0 * slower
    as_matmul = Implementation("somewhere:one", None, efficiency="matmul")
    assert full_rate_flops(10.0, op, (), {"s": 64}, WAVES, as_matmul) == 10.0, "as what runs it says"
    assert full_rate_flops(10.0, op, (), {"s": 64}, load("cpu")) == 10.0


def test_attention_without_a_mask_fills_its_tiles_at_fewer_queries() -> None:
    op = rule_of(attention(64, 64))
    assert op is not None
    assert full_rate_flops(10.0, op, (), {"s": 64}, WAVES) == 10.0 * (1 + WITHOUT_MASK)


def test_attention_reaches_half_of_its_rate_at_the_head_that_the_hardware_states() -> None:
    call = attention(64, 64)
    op, hardware = rule_of(call), replace(load("cpu"), attention_head=24.0)
    assert op is not None and op.head_size == call.inputs[0].shape[-1]
    assert full_rate_flops(10.0, op, (), {"s": 64}, hardware) == 10.0 * (1 + 24 / op.head_size)
    as_matmul = Implementation("somewhere:one", None, efficiency="matmul")
    assert full_rate_flops(10.0, op, (), {"s": 64}, hardware, as_matmul) == 10.0


def test_a_batch_of_products_of_unaligned_rows_reaches_the_share_that_the_hardware_states() -> None:
    hardware = replace(load("cpu"), product_wave=0.0, product_unaligned=0.25)
    scores, plain = "b m k, b k n -> b m n", "m k, k n -> m n"
    for size, rate in ((16, 1.0), (24, 1.0), (20, 0.25)):
        batch = bound(scores, (7, 9, size), (7, size, 32), (7, 9, 32))
        op = OpRule(scores)
        assert full_rate_flops(10.0, op, sides_of(op, batch), batch.sizes, hardware) == 10.0 / rate
        one = bound(plain, (9, size), (size, 32), (9, 32))
        op = OpRule(plain)
        assert full_rate_flops(10.0, op, sides_of(op, one), one.sizes, hardware) == 10.0
