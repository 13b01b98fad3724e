"""The fuzzer finds nothing in what it draws, and finds what is broken on purpose."""

from __future__ import annotations

import random
from collections import Counter
from unittest import mock

import pytest
import torch

from autopar import strategies
from autopar.runtime.collectives import layout_moves
from autopar.strategies.ruled import ruled
from autopar.strategies.rules import pointwise
from tests.fuzz.case import Case, draw_case
from tests.fuzz.draw import draw_program, trains
from tests.fuzz.found import FOUND
from tests.fuzz.program import Program
from tests.fuzz.shrink import shrink
from tests.fuzz.trial import judge
from tests.support.slow_cases import slow_where

CASES, PARTS = 48, 6
"""Number of cases, and of the parts they are split into.

`make test` runs the first part; `make fuzz` runs as many cases as are requested.
"""


@pytest.mark.parametrize("part", slow_where(range(PARTS), *map(str, range(1, PARTS))))
def test_random_programs_train_on_ranks_as_on_one_process_or_are_refused(part: int) -> None:
    kinds = Counter()
    for seed in range(part, CASES, PARTS):
        outcome = judge(draw_case(seed, max_lines=5))
        assert not outcome.is_bad, f"seed {seed}: {outcome.kind}: {outcome.text}\n{outcome.details}"
        kinds[outcome.kind] += 1
    assert kinds["equal"] >= kinds.total() / 2, f"too few cases run: {kinds}"


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_stays_mended(name: str) -> None:
    case, kind = FOUND[name]
    outcome = judge(case)
    assert outcome.kind == kind, f"{outcome.kind}: {outcome.text}\n{outcome.details}"


def first_bad(num_cases: int) -> int | None:
    """The first seed of so many whose case is bad."""
    return next((seed for seed in range(num_cases) if judge(draw_case(seed, max_lines=5)).is_bad), None)


def test_a_broken_rule_is_found() -> None:
    """A rule that lets partial values through what is not linear."""
    aten, linear = torch.ops.aten, pointwise.RULES[torch.ops.aten.neg.default]
    broken = dict.fromkeys((aten.sin.default, aten.tanh.default, aten.square.default), linear)
    ruled.cache_clear()
    try:
        with mock.patch.dict(strategies.RULES, broken):
            assert first_bad(20) is not None
    finally:
        ruled.cache_clear()


def test_a_broken_collective_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-reduce whose gradient is twice what it should be."""
    doubled = staticmethod(lambda ctx, grad: (2 * grad, None))
    monkeypatch.setattr(layout_moves._AllReduce, "backward", doubled)
    assert first_bad(20) is not None


def test_a_failing_case_shrinks_to_what_makes_it_fail() -> None:
    lines = ("v0 = x0*2", "v1 = F.linear(v0, w0)", "v2 = v1.relu()", "v3 = v0.cos()", "loss = v2.sum() + v3.mean()")
    case = Case(Program((lines,), {"x0": (4, 8)}, {"w0": (4, 8)}), (2, 2), options={"strategy": "zero3"}, forced=0.5)
    small = shrink(case, lambda each: "F.linear" in repr(each.program) and trains(each.program))
    assert small.program.blocks == (("v1 = F.linear(x0, w0)", "loss = v1.sum()"),)
    assert (small.options, small.forced, small.mesh) == ({}, 0.0, (2,))


def test_a_seed_gives_the_same_case_each_time() -> None:
    assert [draw_case(seed) for seed in range(20)] == [draw_case(seed) for seed in range(20)]
    assert len({repr(draw_case(seed)) for seed in range(20)}) == 20


def test_a_program_has_the_same_values_each_time_it_is_built() -> None:
    program = draw_program(random.Random(3))
    for one, other in zip(program.build().parameters(), program.build().parameters(), strict=True):
        assert torch.equal(one, other)
        assert one is not other


def test_a_case_is_its_own_reproduction() -> None:
    case = draw_case(8)
    assert eval(repr(case), {"Case": Case, "Program": Program}) == case
