"""Users' operations on real ranks: custom operators and autograd.Functions, split by rules that the user registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.own_operations import Own, trained, trained_on_ranks
from tests.support.ranks import Ranks


def _assert_trains_as_alone(found: list[tuple[dict[str, Tensor], set[str]]]) -> set[str]:
    expected = trained(Own())
    for values, _ in found:
        assert values.keys() == expected.keys()
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)
    return {each.split(": ")[1] for each in found[0][1] if "shared_reshard" not in each}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "splits"),
    [
        ({}, {"o o", "k k", "d d"}),
        ({"strategy": "megatron"}, {"...0 o", "...0 k", "...0 d"}),
        ({"strategy": "zero3", "recompute": "full"}, {"...0 ...0"}),
        ({"strategy": "data_parallel", "recompute": "selective"}, {"...0 ...0"}),
    ],
    ids=["auto", "megatron", "zero3", "data_parallel"],
)
def test_own_operations_are_split_by_their_rules(ranks: Ranks, options: dict[str, Any], splits: set[str]) -> None:
    assert splits <= _assert_trains_as_alone(ranks.run(trained_on_ranks, (2, 2), options, world_size=4))


def test_own_operations_without_a_rule_run_whole(ranks: Ranks) -> None:
    found = ranks.run(trained_on_ranks, (2,), {}, False)
    assert _assert_trains_as_alone(found) == {"-"}


@pytest.mark.slow  # 20 s of compiling
def test_own_operations_run_under_torch_compile(ranks: Ranks) -> None:
    found = ranks.run(trained_on_ranks, (2,), {"strategy": "megatron"}, True, True, timeout=120)
    assert "o" in _assert_trains_as_alone(found)
