"""Simulated ranks agree with what a collective over one axis of a mesh means."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.simulation.simulate import from_ranks, local_values, simulate

NAMES = ("pp", "dp", "tp")


@pytest.mark.parametrize(("axis", "strides"), [("pp", (0, 4)), ("dp", (0, 2)), ("tp", (0, 1))])
def test_an_all_reduce_over_one_axis_sums_the_ranks_that_differ_on_it(axis: str, strides: tuple[int, int]) -> None:
    values = [torch.tensor([10.0**rank, 1.0]) for rank in range(8)]
    with simulate(8):
        group = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES).get_group(axis).group_name
        total = torch.ops._c10d_functional.all_reduce(from_ranks(values), "sum", group)
        found = local_values(torch.ops._c10d_functional.wait_tensor(total))
    first_of_pair = [rank & ~strides[1] for rank in range(8)]
    expected = [sum((values[first + stride] for stride in strides), torch.zeros(2)) for first in first_of_pair]
    torch.testing.assert_close(found, expected)


def test_gradients_have_one_value_per_rank() -> None:
    with simulate(2):
        x = from_ranks([torch.tensor(3.0), torch.tensor(5.0)], requires_grad=True)
        (x * x).backward()
        assert local_values(x.grad) == [6.0, 10.0]


def test_a_plain_tensor_is_the_same_on_every_rank() -> None:
    with simulate(3):
        assert local_values(torch.tensor(2.0)) == [2.0, 2.0, 2.0]


def test_ranks_may_hold_different_shapes() -> None:
    with simulate(2):
        x = from_ranks([torch.ones(3, 2), torch.ones(1, 2)])
        assert [tuple(value.shape) for value in local_values(x @ torch.ones(2, 5))] == [(3, 5), (1, 5)]


def test_the_process_group_ends_with_the_simulation() -> None:
    with pytest.raises(ZeroDivisionError), simulate(2):
        _ = 1 / 0
    assert not dist.is_initialized()


def test_values_for_the_wrong_number_of_ranks_are_refused() -> None:
    with simulate(4), pytest.raises(AssertionError, match="2 values for 4 ranks"):
        from_ranks([torch.ones(1), torch.ones(1)])
