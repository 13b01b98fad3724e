"""Slots whose expert is full, counted sample by sample as a loop counts them."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.program.operators.capacity import WITHIN_CAPACITY, capacity
from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH
from tests.support.capped_experts import within

DRAWN = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("num_samples", "length", "top_k", "num_experts", "factor"),
    [(3, 5, 2, 4, 1.0), (1, 7, 1, 3, 0.5), (4, 6, 4, 4, 0.7), (2, 9, 3, 8, 1e-9), (2, 3, 2, 4, 100)],
)
def test_the_earliest_slots_of_each_sample_are_kept(
    num_samples: int, length: int, top_k: int, num_experts: int, factor: float
) -> None:
    scores_BSE = torch.rand(num_samples, length, num_experts, generator=DRAWN)
    index_BSK = scores_BSE.topk(top_k).indices
    found_BSK = WITHIN_CAPACITY(index_BSK, num_experts, factor)
    limit = capacity(length * top_k, num_experts, factor)
    kept_BSK = within(index_BSK.flatten(0, 1), num_samples, limit).view(index_BSK.shape)
    assert torch.equal(found_BSK, torch.where(kept_BSK, index_BSK, num_experts))
    for sample_SK in found_BSK:
        assert torch.bincount(sample_SK.flatten(), minlength=num_experts)[:num_experts].max() <= limit


@pytest.mark.parametrize(("factor", "limit"), [(1, 2), (1.25, 3), (1.5, 3), (1e-12, 1), (0.5, 1), (1e300, 2 * 10**300)])
def test_a_capacity_is_rounded_up(factor: float, limit: int) -> None:
    assert capacity(8, 4, factor) == limit


def test_what_is_dropped_has_no_row_and_no_gradient() -> None:
    x_BSD = torch.randn(2, 3, 4, generator=DRAWN, dtype=torch.float64, requires_grad=True)
    weights_BSK = torch.rand(2, 3, 2, generator=DRAWN, dtype=torch.float64, requires_grad=True)
    index_BSK = torch.tensor([[[0, 1], [0, 2], [1, 0]], [[3, 3], [2, 3], [3, 1]]])  # of 3 experts: 3 is dropped
    rows, counts, ids, route, splits = DISPATCH(x_BSD, index_BSK, 3, True)
    assert counts.tolist() == [3, 3, 2] and ids.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert torch.equal(route == -1, index_BSK == 3)
    y_BSD = COMBINE(rows.sin(), weights_BSK, route, counts, splits, True)
    kept_BSK = (index_BSK < 3).double()
    found = torch.autograd.grad(y_BSD.square().sum(), (x_BSD, weights_BSK))
    expected_BSD = x_BSD.sin() * (weights_BSK * kept_BSK).sum(-1, keepdim=True)
    torch.testing.assert_close(y_BSD, expected_BSD)
    torch.testing.assert_close(found, torch.autograd.grad(expected_BSD.square().sum(), (x_BSD, weights_BSK)))
    assert not found[1][index_BSK == 3].any()
