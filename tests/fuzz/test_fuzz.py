"""The fuzzer finds nothing in what it draws, and finds what is broken on purpose."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.fuzz.case import Case, draw_case
from tests.fuzz.draw import draw_program
from tests.fuzz.found import FOUND
from tests.fuzz.program import Program
from tests.fuzz.shrink import shrink
from tests.fuzz.trial import judge

CASES, PARTS = 200, 8
"""Of `make test`; `make fuzz` runs as many as are asked for."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """DTensor warns of every gather that simulated ranks make."""
    logging.disable(logging.WARNING)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs_train_on_ranks_as_on_one_process_or_are_refused(part: int) -> None:
    kinds = Counter()
    for seed in range(part, CASES, PARTS):
        outcome = judge(draw_case(seed, max_lines=6))
        assert not outcome.is_bad, f"seed {seed}: {outcome.kind}: {outcome.text}\n{outcome.details}"
        kinds[outcome.kind] += 1
    assert kinds["equal"] >= kinds.total() / 2, f"too few cases run: {kinds}"


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_stays_mended(name: str) -> None:
    case, kind = FOUND[name]
    outcome = judge(case)
    assert outcome.kind == kind, f"{outcome.kind}: {outcome.text}\n{outcome.details}"


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
