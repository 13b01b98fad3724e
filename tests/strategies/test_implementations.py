"""Every implementation of the tables against the ATen call run whole, on simulated ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.ir.sharding.operation import OpRule
from autopar.ir.sharding.rule import Choice
from autopar.strategies import RULES, rule_of
from autopar.strategies.rules import random
from autopar.tools.validation.sharded_values import Parts, local_shape, split
from autopar.tools.validation.whole_call import Whole, show
from tests.support.simulation.samples import SAMPLES
from tests.support.simulation.samples.draw import Draw, Sample
from tests.support.simulation.validate import only_implementation
from tests.support.simulation.validate_implementations import (
    check_implementation,
    implemented_choices,
    paddable_choices,
    padded_fault,
    random_fault,
    run_implementation,
)

SEED = 0


def implemented_samples(target: Any) -> list[Sample]:
    """The sample calls for which the rule names an implementation that draws no random numbers."""
    found = []
    for each in SAMPLES[target](Draw(SEED)):
        op = rule_of(Whole.of(target, each.args, each.kwargs).call)
        if op is not None and (one := only_implementation(op)) is not None and not one.random:
            found.append(each)
    return found


def random_samples(target: Any) -> list[tuple[Sample, OpRule]]:
    """The sample calls that draw random numbers."""
    found = []
    for each in SAMPLES[target](Draw(SEED)):
        op = rule_of(Whole.of(target, each.args, each.kwargs).call)
        if op is not None and (one := only_implementation(op)) is not None and one.random:
            found.append((each, op))
    return found


def drawn(whole: Whole, op: OpRule, choice: Choice, num_ranks: int) -> Parts:
    """Run a choice on equal inputs on all ranks, so that outputs differ only by the random numbers."""
    inputs = [split(x, placement, num_ranks) for x, placement in zip(whole.inputs, choice.inputs, strict=True)]
    inputs = [[parts[0]] * num_ranks for parts in inputs]
    (outputs, *_), _ = run_implementation(whole, op, whole.bind(op), choice, inputs, [None] * len(whole.outputs))
    return outputs


TARGETS = sorted((target for target in RULES if target in SAMPLES and implemented_samples(target)), key=str)


@pytest.mark.sample(9)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_implementation_gives_the_values_and_gradients_of_the_whole(target: Any, num_ranks: int) -> None:
    faults = []
    for each in implemented_samples(target):
        op = rule_of(Whole.of(target, each.args, each.kwargs).call)
        assert op is not None
        for one in op.offering(()).implementations:
            alone = replace(op, implementations=(one,))
            faults.extend(check_implementation(target, each.args, each.kwargs, alone, num_ranks))
    assert not faults, "\n" + "\n".join(faults)


def test_there_are_implementations() -> None:
    assert torch.ops.aten.embedding.default in TARGETS
    assert torch.ops.aten.cross_entropy_loss.default in TARGETS


@pytest.mark.sample(14)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_padding_does_not_matter(target: Any) -> None:
    faults = []
    for each in implemented_samples(target):
        whole = Whole.of(target, each.args, each.kwargs)
        op = rule_of(whole.call)
        assert op is not None
        for choice in paddable_choices(whole, op, num_ranks=4):
            fault = padded_fault(whole, op, choice, num_ranks=4)
            if fault:
                faults.append(f'{whole}: "{op.rule}", {choice.name}: {fault}')
    assert not faults, "\n" + "\n".join(faults)


def test_a_vocabulary_of_six_may_be_padded_for_four_ranks() -> None:
    arguments = torch.randn(6, 8), torch.randint(6, (4, 10))
    whole = Whole.of(torch.ops.aten.embedding.default, arguments, {})
    op = rule_of(whole.call)
    assert op is not None
    assert [show(choice) for choice in paddable_choices(whole, op, num_ranks=4)] == ["S(0), R -> P"]


def test_queries_of_causal_attention_may_be_padded_and_a_batch_of_statistics_may_not() -> None:
    calls = (
        (torch.ops.aten.scaled_dot_product_attention.default, (*[torch.randn(2, 6, 4)] * 3, None, 0.0, True)),
        (torch.ops.aten.batch_norm.default, (torch.randn(6, 5), *[None] * 4, True, 0.1, 1e-5, False)),
    )
    found = []
    for target, arguments in calls:
        whole = Whole.of(target, arguments, {})
        op = rule_of(whole.call)
        assert op is not None
        found.append([show(choice) for choice in paddable_choices(whole, op, num_ranks=4)])
    assert found == [["S(1), R, R -> S(1)"], []]


RANDOM = sorted((target for target in random.RULES if random_samples(target)), key=str)


@pytest.mark.sample(10)
@pytest.mark.parametrize("target", RANDOM, ids=str)
def test_a_deterministic_draw_is_that_of_one_device(target: Any) -> None:
    faults = []
    for each, op in random_samples(target):
        faults.extend(check_implementation(target, each.args, each.kwargs, op, seed=5))
    assert not faults, "\n" + "\n".join(faults)


@pytest.mark.sample(16)
@pytest.mark.parametrize("target", RANDOM, ids=str)
def test_ranks_draw_the_same_where_they_hold_the_same(target: Any) -> None:
    for each, op in random_samples(target):
        whole = Whole.of(target, each.args, each.kwargs)
        for choice in implemented_choices(op, whole.bind(op)):
            first, second = drawn(whole, op, choice, num_ranks=2)
            assert torch.equal(first, second) is not choice.outputs[0].is_split, f"{whole}: {show(choice)}"
            assert first.shape == second.shape == local_shape(whole.outputs[0], choice.outputs[0], 2)


def test_every_operation_that_draws_is_compared() -> None:
    assert set(RANDOM) == set(random.RULES)


@pytest.mark.parametrize("probability", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_dropout_drops_at_its_rate_and_scales_the_rest(probability: float, num_ranks: int) -> None:
    x = torch.randn(80, 90, dtype=torch.float64, requires_grad=True)
    assert random_fault((x, probability, True), probability, num_ranks) == ""
