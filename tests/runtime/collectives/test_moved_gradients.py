"""Sums of gradients are taken back through the moves of their weights, bucket by bucket, in one order on all ranks."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime.collectives.gradient_buckets import gather_parameters, reduce_gradients
from autopar.runtime.collectives.layout_moves import split_replicated
from autopar.runtime.collectives.mesh_axes import record_traffic, use_mesh
from autopar.runtime.collectives.moved_gradients import MovedGradients
from autopar.runtime.module.stage import leaf_of
from benchmarks.step_counts import Operations
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.fake_mesh import fake_mesh

SIZES = (2, 3, 5)


def _moved(weights: list[Tensor]) -> list[Tensor]:
    """Each weight in a bucket of its own, the last one gathered."""
    first, second, third = weights
    moved = [*reduce_gradients("x", first), *reduce_gradients("x", second)]
    return [*moved, *gather_parameters("x", (0,), (SIZES[2] * 2,), third)]


def _reduced_in_order(orders: list[list[int]], unused: int | None) -> tuple[list[int], list[Tensor]]:
    """Give leaves their gradients in an order of this rank; elements in order of their reductions, and gradients."""
    line = mesh((2,), ("x",))
    weights = [torch.zeros(size, requires_grad=True) for size in SIZES]
    started: list[int] = []
    with use_mesh(line), record_traffic() as traffic:
        moved = _moved(weights)
        leaves = [each.detach().requires_grad_() for each in moved]
        gradients = MovedGradients(moved, leaves, first_uses=(0, 1, 2))
        for is_last in (False, True):
            if is_last:
                gradients.start_in_next_backward()
            for number in orders[line.get_rank()]:
                if number != unused:
                    before = sum(traffic.num_bytes.values())
                    (leaves[number].sum() * (1.0 + line.get_rank())).backward()
                    started.append(sum(traffic.num_bytes.values()) - before)
        gradients.finish()
    return started, [each.grad for each in weights if each.grad is not None]


def test_buckets_start_by_the_first_use_of_their_weights_whatever_comes_first(ranks: Ranks) -> None:
    found = ranks.run(_reduced_in_order, [[2, 1, 0], [0, 1, 2]], None)
    bytes_of = [4 * 2, 4 * 3, 4 * 10]
    assert found[0][0] == [0, 0, 0, *reversed(bytes_of)]
    assert found[1][0] == [0, 0, 0, 0, 0, sum(bytes_of)], "all wait for the weight that is used last"
    for _, gradients in found:
        assert [each.tolist() for each in gradients] == [[6.0] * size for size in SIZES]


def test_a_leaf_without_a_gradient_holds_nothing_up(ranks: Ranks) -> None:
    for started, gradients in ranks.run(_reduced_in_order, [[2, 1, 0]] * 2, 2):
        assert started == [0, 0, 12, 8]
        assert [len(each) for each in gradients] == [2, 3]


def test_a_parameter_takes_its_gradient_as_it_was_reduced_and_adds_a_second_one_to_it() -> None:
    weights = [torch.zeros(size, requires_grad=True) for size in SIZES]
    with fake_mesh({"x": 2}) as devices, use_mesh(devices):
        for step in range(2):
            moved = reduce_gradients("x", *weights)
            leaves = [each.detach().requires_grad_() for each in moved]
            gradients = MovedGradients(moved, leaves, first_uses=(0, 1, 2))
            gradients.start_in_next_backward()
            torch.cat(leaves).sum().backward()
            with Operations() as operations:
                gradients.finish()
            assert operations.kernels.total() == step * len(weights)
    assert [each.grad.tolist() for each in weights if each.grad is not None] == [[2.0] * size for size in SIZES]


def _alive() -> bool:
    line = mesh((2,), ("x",))
    weights = [torch.zeros(size, requires_grad=True) for size in SIZES]
    gc.disable()
    try:
        with use_mesh(line):
            moved = _moved(weights)
            leaves = [each.detach().requires_grad_() for each in moved]
            gradients = MovedGradients(moved, leaves, first_uses=(0, 1, 2))
            gradients.start_in_next_backward()
            torch.cat(leaves).sum().backward()
            gradients.finish()
        known = weakref.ref(leaves[0])
        del gradients, leaves, moved
        return known() is not None
    finally:
        gc.enable()


def _gradient_of_a_weight_and_its_part(dtype: torch.dtype) -> Tensor | None:
    """Give a gathered weight gradients as a whole, and those of this rank's half of it, in two backwards."""
    line = mesh((2,), ("x",))
    weight = torch.zeros(4, dtype=dtype, requires_grad=True)
    with use_mesh(line):
        (whole,) = gather_parameters("x", (0,), (8,), weight)
        moved = [whole, split_replicated(whole, "x", 0)]
        leaves = [leaf_of(each, True, torch.float32) for each in moved]
        gradients = MovedGradients(moved, leaves, first_uses=(0, 1))
        for is_last in (False, True):
            if is_last:
                gradients.start_in_next_backward()
            (leaves[0].sum() + 10 * leaves[1].sum()).backward()
        gradients.finish()
    return weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gathered_weight_of_which_another_is_made_gets_the_gradients_of_both(
    dtype: torch.dtype, ranks: Ranks
) -> None:
    for gradient in ranks.run(_gradient_of_a_weight_and_its_part, dtype):
        assert gradient is not None and gradient.tolist() == [2 * (2 * 1.0 + 10.0)] * 4


def test_leaves_are_let_go_of_with_the_step(ranks: Ranks) -> None:
    assert ranks.run(_alive) == [False, False]


def _calls_for(num_weights: int) -> int:
    """Python calls that find the way back of the gradients of one bucket."""
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    weights = [torch.zeros(4, requires_grad=True) for _ in range(num_weights)]
    with fake_mesh({"x": 2}) as devices, use_mesh(devices):
        moved = reduce_gradients("x", *weights)
        leaves = [each.detach().requires_grad_() for each in moved]
        sys.setprofile(note)
        MovedGradients(moved, leaves, first_uses=range(num_weights))
        sys.setprofile(None)
    return calls


def test_twice_as_many_weights_of_a_bucket_take_twice_the_calls() -> None:
    few, many = _calls_for(32), _calls_for(64)
    assert many < 2.2 * few
