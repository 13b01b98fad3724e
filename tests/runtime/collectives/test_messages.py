"""Messages hold what a plain reference says, for any shapes, dims, ranks and dtypes; more ranks copy no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Link, Protocol
from autopar.runtime.collectives.gradient_buckets import reduce_gradients
from autopar.runtime.collectives.mesh_axes import use_mesh
from autopar.runtime.collectives.packed_messages import joined, packed, unpacked
from tests.support.simulation.fake_mesh import fake_mesh

MACHINE = replace(load("h100"), links=(Link("network", None, 0.0, 450e9, (Protocol("messages", "ring", 20e-6),)),))
"""A network whose latency is the same for any number of ranks, so that the collectives of a plan are, too."""
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@st.composite
def _wholes(draw: st.DrawFn) -> tuple[list[Tensor], list[int]]:
    """Tensors of one dtype, some of them not contiguous, and the dims that are split."""
    dtype = draw(st.sampled_from(DTYPES))
    shapes = draw(st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=4))
    first = draw(st.booleans())
    wholes, dims = [], []
    for shape in shapes:
        whole = torch.randn(shape).to(dtype)
        wholes.append(whole.T if len(shape) == 2 and draw(st.booleans()) else whole)
        dims.append(0 if first else draw(st.integers(0, len(shape) - 1)))
    return wholes, dims


def _part_of(shape: Sequence[int], dim: int, num_ranks: int) -> torch.Size:
    """The shape of a rank's part, with its padding."""
    return torch.Size([-(-size // num_ranks) if d == dim else size for d, size in enumerate(shape)])


def _parts(whole: Tensor, dim: int, num_ranks: int) -> list[Tensor]:
    """Each rank's part, with zeros at the end of the whole: the plain reference."""
    shape = _part_of(whole.shape, dim, num_ranks)
    parts = []
    for rank in range(num_ranks):
        part = torch.zeros(shape, dtype=whole.dtype)
        begin = min(rank * shape[dim], whole.shape[dim])
        there = whole.narrow(dim, begin, min(shape[dim], whole.shape[dim] - begin))
        part.narrow(dim, 0, there.shape[dim]).copy_(there)
        parts.append(part)
    return parts


def _reference(wholes: Sequence[Tensor], dims: Sequence[int], num_ranks: int, dtype: torch.dtype) -> Tensor:
    of_all = [_parts(whole, dim, num_ranks) for whole, dim in zip(wholes, dims, strict=True)]
    return torch.cat([parts[rank].reshape(-1).to(dtype) for rank in range(num_ranks) for parts in of_all])


@settings(max_examples=60, deadline=None)
@given(_wholes(), st.integers(1, 9), st.sampled_from(DTYPES))
def test_a_packed_message_has_the_parts_of_each_rank_one_behind_the_other(
    given_wholes: tuple[list[Tensor], list[int]], num_ranks: int, dtype: torch.dtype
) -> None:
    wholes, dims = given_wholes
    shapes = [_part_of(whole.shape, dim, num_ranks) for whole, dim in zip(wholes, dims, strict=True)]
    message = packed(wholes, shapes, dims, num_ranks, dtype)
    assert torch.equal(message, _reference(wholes, dims, num_ranks, dtype)) and message.dtype == dtype


@settings(max_examples=60, deadline=None)
@given(_wholes(), st.integers(1, 9))
def test_what_is_unpacked_is_what_was_packed(given_wholes: tuple[list[Tensor], list[int]], num_ranks: int) -> None:
    wholes, dims = given_wholes
    shapes = [_part_of(whole.shape, dim, num_ranks) for whole, dim in zip(wholes, dims, strict=True)]
    sizes = [whole.shape[dim] for whole, dim in zip(wholes, dims, strict=True)]
    message = _reference(wholes, dims, num_ranks, wholes[0].dtype)
    found = unpacked(message, shapes, dims, sizes, num_ranks)
    assert all(map(torch.equal, found, wholes)) and all(each.is_contiguous() for each in found)
    assert len({each.untyped_storage().data_ptr() for each in found}) == len(found)
    lying = unpacked(message, shapes, dims, sizes, num_ranks, shaped=False)
    for whole, each in zip(wholes, lying, strict=True):
        assert torch.equal(each.as_strided(whole.shape, whole.contiguous().stride()), whole)


@settings(max_examples=40, deadline=None)
@given(_wholes(), st.sampled_from(DTYPES))
def test_joined_tensors_lie_one_behind_the_other(
    given_wholes: tuple[list[Tensor], list[int]], dtype: torch.dtype
) -> None:
    wholes, _ = given_wholes
    expected = torch.cat([each.reshape(-1).to(dtype) for each in wholes])
    assert torch.equal(joined(wholes, dtype, writes=False), expected)


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dims", [[0, 0, 0], [0, 1, 0]], ids=str)
@pytest.mark.parametrize("size", [64, 60], ids=["even", "padded"])
def test_as_many_operations_run_for_any_number_of_ranks(dims: list[int], size: int) -> None:
    counts = []
    for num_ranks in (8, 32):
        wholes = [torch.randn(size, size).bfloat16() for _ in dims]
        shapes = [_part_of(each.shape, dim, num_ranks) for each, dim in zip(wholes, dims, strict=True)]
        with _Operations() as operations:
            message = packed(wholes, shapes, dims, num_ranks, torch.float32)
            unpacked(message, shapes, dims, [size] * len(dims), num_ranks)
        counts.append(operations.names)
    assert counts[0] == counts[1]
    assert ("aten::_chunk_cat.out" in counts[0]) == (not any(dims))


def test_tensors_are_joined_by_one_call() -> None:
    tensors = [torch.ones(2, 3), torch.ones(4), torch.ones(3, 2)]
    with _Operations() as operations:
        joined(tensors, torch.float32, writes=False)
    assert operations.names == {"aten::flatten_dense_tensors": 1}


def test_gradients_that_lie_as_they_are_sent_are_summed_where_they_lie() -> None:
    parameters = [torch.ones(2, 3, requires_grad=True), torch.ones(4, requires_grad=True)]
    gradients = torch.ones(10)
    with fake_mesh({"x": 8}) as mesh, use_mesh(mesh):
        reduced = reduce_gradients("x", *parameters, in_place=True)
        with _Operations() as operations:
            found = torch.autograd.grad(reduced, parameters, [gradients[:6].view(2, 3), gradients[6:]])
    assert operations.names["_c10d_functional::all_reduce_"] == operations.names["aten::as_strided"] == 1
    assert operations.names["aten::split_with_sizes"] == operations.names["aten::cat"] == 0
    assert [each.data_ptr() - gradients.data_ptr() for each in found] == [0, 24]


def _kernels_of_a_backward(num_ranks: int, strategy: Any, precision: Any) -> Counter[str]:
    """Return the operations that the backward of a second step runs on one of `num_ranks` ranks, with their counts.

    The collectives of these ranks move nothing.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Tanh(), nn.Linear(128, 64, bias=False))
    x = torch.randn(num_ranks, 64)
    axes = {"dp": num_ranks} if strategy != "hsdp" else {"dp": 2, "fsdp": num_ranks // 2}
    with fake_mesh(axes) as mesh:
        compiled = autopar.compile(model, mesh, (x,), strategy=strategy, precision=precision, hardware=MACHINE)
        compiled(x).square().mean().backward()
        loss = compiled(x).square().mean()
        with _Operations() as operations:
            loss.backward()
    return operations.names


@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "hsdp"])
def test_a_backward_runs_as_many_operations_on_64_ranks_as_on_8(strategy: str, precision: str | None) -> None:
    few, many = (_kernels_of_a_backward(num_ranks, strategy, precision) for num_ranks in (8, 64))
    assert few == many and few["_c10d_functional::reduce_scatter_tensor"]
