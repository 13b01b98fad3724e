"""Every operator and module of PyTorch's databases that runs alone is equal on ranks, or refused clearly."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

databases = pytest.importorskip("tests.fuzz.databases", reason="PyTorch's test databases need packages of their own")

UNSET = "it gives memory as it was found, which is another in each process"
BEYOND = "a number beyond `minlength` gives more counts, and is met when it runs, by an error of PyTorch's scatter_add"
EXPECTED: Mapping[str, str] = {
    **dict.fromkeys(
        ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"), UNSET
    ),
    "bincount": BEYOND,
}
"""Operator or module → why it is neither equal nor refused; each is known and out of reach."""


def hold(name: str, samples: Iterable[Any]) -> None:
    try:
        found = list(samples)
    except databases.UnusableError as error:
        pytest.skip(f"one process trains no sample: {error}")
    for number, sample in enumerate(found):
        for chance in (None, random.Random(name)):
            outcome = databases.judge_sample(sample, chance)
            if outcome.is_bad and name in EXPECTED:
                pytest.xfail(EXPECTED[name])
            how = "at random" if chance else "auto"
            assert not outcome.is_bad, f"sample {number}, {how}: {outcome.kind}: {outcome.text}\n{outcome.details}"


def test_an_operator_of_the_database_runs_split() -> None:
    (sample, *_) = databases.samples_of_operator(databases.operators()["nn.functional.linear"])
    outcome = databases.judge_sample(sample)
    assert (outcome.kind, outcome.split > 0) == ("equal", True), outcome


def test_a_module_of_the_database_runs_split() -> None:
    (sample, *_) = databases.samples_of_module(databases.modules()["nn.Linear"])
    outcome = databases.judge_sample(sample, random.Random(0))
    assert (outcome.kind, outcome.split > 0) == ("equal", True), outcome


@pytest.mark.slow
@pytest.mark.parametrize("name", databases.operators())
def test_an_operator_alone_is_equal_or_refused(name: str) -> None:
    hold(name, databases.samples_of_operator(databases.operators()[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", databases.modules())
def test_a_module_alone_is_equal_or_refused(name: str) -> None:
    hold(name, databases.samples_of_module(databases.modules()[name]))
