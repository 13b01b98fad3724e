"""Products fused with their collective give what those in chunks give, as far as a CPU can show.

torch has the fused kernels for CUDA alone. Here its own fallbacks stand in for them on a CPU, which run the collective
and then the product: they hold arguments, dims and the backward to account, not the kernels.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from autopar.runtime.collectives.mesh_axes import axis_of, record_traffic, use_mesh
from autopar.runtime.implementations.products import fused
from autopar.runtime.implementations.products.chunked import linear, linears, matmul
from tests.support.ranks import Ranks, mesh

FALLBACKS = {
    "fused_all_gather_matmul": symmetric_memory._fused_all_gather_matmul_fallback,
    "fused_matmul_reduce_scatter": symmetric_memory._fused_matmul_reduce_scatter_fallback,
}


@contextlib.contextmanager
def _fused_on(device: str) -> Iterator[Counter[str]]:
    """Fuse products on a device; counts the calls that a CPU runs."""
    calls: Counter[str] = Counter()
    library = torch.library.Library("symm_mem", "IMPL")

    def counted(name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return FALLBACKS[name](*args, **kwargs)

        return run

    for name in FALLBACKS:
        library.impl(name, counted(name), "CPU")
    try:
        with symmetric_memory._test_mode(), mock.patch.object(fused, "FUSED_ON", (device,)):
            yield calls
    finally:
        library._destroy()


def _given(device: str, *leading: int) -> list[Tensor]:
    """The rows of a rank, three weights of its columns, one of its features, and a bias."""
    torch.manual_seed(0)
    shapes = [(*leading, 8), (6, 8), (6, 8), (6, 8), (8, 6), (6,)]
    return [torch.randn(shape, dtype=torch.float64).to(device).requires_grad_() for shape in shapes]


def _step(x: Tensor, first: Tensor, second: Tensor, third: Tensor, back: Tensor, bias: Tensor) -> Tensor:
    """Three products of rows that are gathered once, one alone, and two that are reduced."""
    rows = f"...{x.ndim - 2}"
    gathers: Any = {"axes": {rows: ("tp",), "o": ("tp",)}, "sizes": {}}
    reduces: Any = {"axes": {rows: ("tp",), "k": ("tp",)}, "sizes": {}}
    q, k, v = linears(x, first, bias, second, None, third, None, **gathers)
    h = linear((q * k).tanh() * v, back, **reduces)
    up = matmul(h, first.mT, axes={"m": ("tp",), "o": ("tp",)}, sizes={})
    return linear(up.relu(), back, bias.new_ones(8), **reduces)


def _results(leading: tuple[int, ...]) -> list[Any]:
    """Return the results of products in chunks and of fused ones: outputs, gradients, and bytes moved.

    The last element holds the calls of the fused products.
    """
    found: list[Any] = []
    with use_mesh(mesh((2,), ("tp",))), _fused_on("cpu") as calls:
        for devices in ((), ("cpu",)):
            given = _given("cpu", *leading)
            with mock.patch.object(fused, "FUSED_ON", devices), record_traffic() as traffic:
                out = _step(*given)
                gradients = torch.autograd.grad(out.square().sum(), given)
            assert out.is_contiguous()
            found.append(([out.detach(), *gradients], dict(traffic.num_bytes)))
    return [*found, dict(calls)]


@pytest.mark.parametrize("leading", [(4, 6), (1, 6), (5,), (2, 3, 4)], ids=str)
def test_they_are_the_products_in_chunks_with_the_same_bytes(ranks: Ranks, leading: tuple[int, ...]) -> None:
    for (in_chunks, moved), (in_one, moved_in_one), calls in ranks.run(_results, leading):
        torch.testing.assert_close(in_one, in_chunks)
        assert moved == moved_in_one
        # Two gather and two reduce, each with the other in its backward.
        assert calls == {"fused_all_gather_matmul": 4, "fused_matmul_reduce_scatter": 4}
        assert all(x.abs().sum() > 0 for x in in_one)


def _shapes() -> list[list[tuple[Any, ...]]]:
    """Shapes, strides and dtypes of the same on the meta device, by torch's own rules for the kernels."""
    found = []
    with use_mesh(mesh((2,), ("tp",))), _fused_on("meta") as calls:
        for devices in ((), ("meta",)):
            given = _given("meta", 4, 6)
            with mock.patch.object(fused, "FUSED_ON", devices):
                out = _step(*given)
                results = [out, *torch.autograd.grad(out.square().sum(), given)]
            found.append([(x.shape, x.stride(), x.dtype) for x in results])
    assert not calls
    return found


def test_shapes_follow_without_data(ranks: Ranks) -> None:
    for in_chunks, in_one in ranks.run(_shapes):
        assert in_chunks == in_one


def _fuses() -> list[bool]:
    x = torch.ones(2, 4)
    with use_mesh(mesh((2,), ("tp",))):
        axis = axis_of("tp")
        requested = [fused.is_fused(x, axis, False)]
        with mock.patch.object(fused, "FUSED_ON", ("cpu",)):
            requested.append(fused.is_fused(x, axis, False))
            with symmetric_memory._test_mode({str(axis.group)}):
                requested += [fused.is_fused(x, axis, zigzag) for zigzag in (False, True)]
        with symmetric_memory._test_mode():
            requested.append(fused.is_fused(x, axis, False))
    return requested


def test_they_are_fused_on_gpus_whose_group_has_symmetric_memory_but_for_zigzag_rows(ranks: Ranks) -> None:
    assert ranks.run(_fuses) == [[False, False, True, False, False]] * 2
