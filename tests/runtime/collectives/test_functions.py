"""Every move between layouts carries value and gradient as the table of placements says, and the bytes it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import MeshError
from autopar.ir.sharding.layout import I, P, Placement, R, S
from autopar.runtime.collectives import layout_moves as functions
from autopar.runtime.collectives.gradient_buckets import gather_parameters
from autopar.runtime.collectives.mesh_axes import record_traffic, use_mesh
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.simulate import from_ranks, local_values, simulate

Parts = list[Tensor]
MESHES = (((4,), ("a",), "a"), ((2, 2), ("a", "b"), "a"), ((2, 2), ("a", "b"), "b"), ((4, 1), ("a", "b"), "b"))
KINDS = {
    "all_reduce": "P I",
    "all_reduce_gradient": "I R",
    "all_gather": "S R",
    "all_gather_invariant": "S I",
    "reduce_scatter": "P S",
    "split": "I S",
    "split_replicated": "R S",
    "all_to_all": "S S",
    "keep_on_first": "I P",
    "keep_on_first_both": "R P",
    "replicated_to_invariant": "R I",
}


@dataclass(frozen=True, slots=True)
class MoveCase:
    """A move of a tensor of `shape`; `dims` are those that its source and target placements split."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[int, int]

    @property
    def placements(self) -> tuple[Placement, Placement]:
        source, target = KINDS[self.name].split()
        plain = {"I": I, "R": R, "P": P}
        return plain.get(source) or S(self.dims[0]), plain.get(target) or S(self.dims[1])

    @property
    def function(self) -> Callable[..., Tensor]:
        return getattr(functions, self.name)

    @property
    def arguments(self) -> tuple[Any, ...]:
        source, target = self.placements
        dims = (*([source.dim] if source.is_split else []), *([target.dim] if target.is_split else []))
        return (*dims, self.shape[source.dim]) if source.is_split else dims


@st.composite
def move_cases(draw: st.DrawFn) -> MoveCase:
    name = draw(st.sampled_from(sorted(KINDS)))
    least = 2 if name == "all_to_all" else 1
    shape = draw(st.lists(st.integers(1, 6), min_size=least, max_size=3))
    dims = draw(st.permutations(range(len(shape))))
    return MoveCase(name, tuple(shape), (dims[0], dims[1 if name == "all_to_all" else 0]))


def padded_shape(shape: tuple[int, ...], dim: int, k: int) -> list[int]:
    return [-(-size // k) * k if d == dim else size for d, size in enumerate(shape)]


def parts_of(x: Tensor, placement: Placement, k: int, filling: int = 7) -> Parts:
    """Return the parts of `x` on `k` ranks, with `filling` in the padding."""
    if placement.is_split:
        whole = torch.full(padded_shape(tuple(x.shape), placement.dim, k), filling).to(x.dtype)
        whole.narrow(placement.dim, 0, x.shape[placement.dim]).copy_(x)
        return list(whole.chunk(k, placement.dim))
    if placement is P:
        parts = [torch.randint_like(x, -9, 9) for _ in range(k - 1)]
        return [x - sum(parts), *parts]
    return [x.clone() for _ in range(k)]


def assert_holds(parts: Parts, placement: Placement, expected: Tensor) -> None:
    """The parts are `expected` by the placement, with zeros in the padding."""
    if placement is P:
        torch.testing.assert_close(torch.stack(parts).sum(0).to(expected.dtype), expected)
        return
    torch.testing.assert_close(parts, parts_of(expected, placement, len(parts), filling=0))


def on_fibers(fibers: list[Parts], sizes: tuple[int, ...], position: int) -> Parts:
    """The parts of independent tensors, one per fiber of the axis at `position`, in the order of the ranks."""
    ranks = torch.arange(math.prod(sizes)).view(sizes).movedim(position, -1).reshape(-1, sizes[position])
    found = {int(rank): parts[i] for row, parts in zip(ranks, fibers, strict=True) for i, rank in enumerate(row)}
    return [found[rank] for rank in range(len(found))]


def fibers_of(values: Parts, sizes: tuple[int, ...], position: int) -> list[Parts]:
    ranks = torch.arange(math.prod(sizes)).view(sizes).movedim(position, -1).reshape(-1, sizes[position])
    return [[values[int(rank)] for rank in row] for row in ranks]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=move_cases(), where=st.sampled_from(MESHES), seed=st.integers(0, 99))
def test_a_move_carries_value_and_gradient(case: MoveCase, where: Any, seed: int) -> None:
    torch.manual_seed(seed)
    sizes, names, axis = where
    position = names.index(axis)
    k = sizes[position]
    source, target = case.placements
    # Whole numbers, so that sums are exact in any order.
    values = [torch.randint(-9, 9, case.shape).double() for _ in range(4 // k)]
    gradients = [torch.randint(-9, 9, case.shape).double() for _ in range(4 // k)]
    given_parts = on_fibers([parts_of(x, source, k) for x in values], sizes, position)
    cotangents = on_fibers([parts_of(g, target.transposed, k) for g in gradients], sizes, position)
    with simulate(4), use_mesh(init_device_mesh("cpu", sizes, mesh_dim_names=names)):
        x = from_ranks(given_parts, requires_grad=True)
        y = case.function(x, axis, *case.arguments)
        (gradient,) = torch.autograd.grad(y, x, from_ranks(cotangents))
        found, found_gradient = local_values(y), local_values(gradient)
    for parts, expected in zip(fibers_of(found, sizes, position), values, strict=True):
        if k > 1:
            assert_holds(parts, target, expected)
    for parts, expected in zip(fibers_of(found_gradient, sizes, position), gradients, strict=True):
        if k > 1:
            assert_holds(parts, source.transposed, expected)
    if k == 1:
        assert all(map(torch.equal, found, given_parts))
        assert all(map(torch.equal, found_gradient, cotangents))


CASES = [
    MoveCase("all_reduce", (3,), (0, 0)),
    MoveCase("all_reduce_gradient", (3,), (0, 0)),
    MoveCase("all_gather", (3, 5), (0, 0)),
    MoveCase("all_gather", (3, 5), (1, 1)),
    MoveCase("all_gather_invariant", (4, 5), (1, 1)),
    MoveCase("reduce_scatter", (5, 3), (0, 0)),
    MoveCase("reduce_scatter", (4, 3), (1, 1)),
    MoveCase("split", (5, 3), (0, 0)),
    MoveCase("split_replicated", (5, 3), (1, 1)),
    MoveCase("all_to_all", (5, 3), (0, 1)),
    MoveCase("all_to_all", (2, 3, 4), (2, 1)),
    MoveCase("keep_on_first", (3,), (0, 0)),
    MoveCase("keep_on_first_both", (3,), (0, 0)),
    MoveCase("replicated_to_invariant", (3,), (0, 0)),
]
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def _wholes(case: MoveCase, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A value and a gradient, equal in every process."""
    generator = torch.Generator().manual_seed(CASES.index(case))
    value, gradient = (torch.randint(0, 2, case.shape, generator=generator).to(dtype) for _ in range(2))
    return value, gradient


def _parts(x: Tensor, placement: Placement) -> Parts:
    """Return the parts of `x` on two ranks; random partial values are equal in every process."""
    if x.dtype == torch.bool and placement is P:
        return [x, torch.zeros_like(x)]
    torch.manual_seed(0)
    return parts_of(x, placement, 2)


def _run_cases() -> list[tuple[Tensor, Tensor | None]]:
    """Every case in every dtype over axis b of a (2, 2) mesh, on this rank: value and gradient."""
    grid = mesh((2, 2), ("a", "b"))
    rank = grid.get_local_rank("b")
    found = []
    with use_mesh(grid):
        for case in CASES:
            for dtype in DTYPES:
                source, target = case.placements
                value, gradient = _wholes(case, dtype)
                x = _parts(value, source)[rank].requires_grad_(dtype.is_floating_point)
                # Not contiguous, as a graph may well give it.
                y = case.function(torch.stack([x, x], -1)[..., 0], "b", *case.arguments)
                cotangent = _parts(gradient, target.transposed)[rank]
                found.append((y, torch.autograd.grad(y, x, cotangent)[0] if y.requires_grad else None))
    return found


def test_moves_on_real_ranks_in_every_dtype(ranks: Ranks) -> None:
    found = ranks.run(_run_cases, world_size=4)
    wanted = [(case, dtype) for case in CASES for dtype in DTYPES]
    for first in (0, 2):
        for number, (case, dtype) in enumerate(wanted):
            source, target = case.placements
            value, gradient = _wholes(case, dtype)
            values = [found[first + i][number] for i in range(2)]
            assert_holds([y for y, _ in values], target, value)
            backs = [g for _, g in values if g is not None]
            assert len(backs) == (2 if dtype.is_floating_point else 0)
            if backs:
                assert_holds(backs, source.transposed, gradient)


def _many_moves(a: Tensor, b: Tensor) -> Tensor:
    y = functions.all_gather(a, "x", 0, 7)
    y = functions.all_reduce(functions.reduce_scatter(y * 2, "x", 1).sin(), "x")
    y = functions.all_reduce_gradient(y, "x")
    z = functions.split(b, "x", 0) * functions.split_replicated(b, "x", 0)
    z = functions.all_to_all(z, "x", 0, 1, 7)
    z = functions.all_gather_invariant(z, "x", 1, b.shape[1])
    w = functions.keep_on_first(b, "x") + functions.keep_on_first_both(b * 2, "x")
    return y.sum() + (z * z).sum() + (w + functions.replicated_to_invariant(b, "x")).pow(2).sum()


def _compiled_and_eager(backend: str) -> list[list[Tensor]]:
    found = []
    for function in (_many_moves, torch.compile(_many_moves, fullgraph=True, backend=backend)):
        torch.manual_seed(0)
        inputs = [torch.randn(4, 6, requires_grad=True), torch.randn(7, 5, requires_grad=True)]
        with use_mesh(mesh((2,), ("x",))):
            loss = function(*inputs)
        found.append([loss, *torch.autograd.grad(loss, inputs)])
    return found


class _Dispatched(TorchDispatchMode):
    """Remembers every operation between ranks by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def _operations_between_ranks() -> set[str]:
    a, b = torch.randn(4, 6, requires_grad=True), torch.randn(7, 5, requires_grad=True)
    with use_mesh(mesh((2,), ("x",))), _Dispatched() as dispatched:
        whole, _ = gather_parameters("x", (0, 1), (8, 10), a, b)
        (_many_moves(a, b) + whole.sum()).backward()
    return dispatched.names


def test_no_collective_on_gloo_has_a_name_that_its_threads_corrupt_the_heap_with(ranks: Ranks) -> None:
    for names in ranks.run(_operations_between_ranks):
        assert "all_gather_into_tensor_out" in names
        assert "all_gather_into_tensor" not in names  # "ALLGATHER_COALESCED", see `rows_in_flight`


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_moves_compile_into_one_graph(ranks: Ranks, backend: str) -> None:
    for eager, compiled in ranks.run(_compiled_and_eager, backend, timeout=300):
        torch.testing.assert_close(eager, compiled)


def traffic_of(case: MoveCase, k: int) -> dict[tuple[str, str], int]:
    """Bytes that a move causes forward and backward, from its shapes, in float64."""
    source, target = case.placements
    whole = 8 * math.prod(case.shape)
    padded = list(case.shape)
    for placement in (source, target):
        if placement.is_split:
            padded = padded_shape(tuple(padded), placement.dim, k)
    num_bytes = 8 * math.prod(padded)
    return {
        "all_reduce": {("all_reduce", "a"): whole},
        "all_reduce_gradient": {("all_reduce", "a"): whole},
        "all_gather": {("all_gather", "a"): num_bytes, ("reduce_scatter", "a"): num_bytes},
        "all_gather_invariant": {("all_gather", "a"): num_bytes},
        "reduce_scatter": {("all_gather", "a"): num_bytes, ("reduce_scatter", "a"): num_bytes},
        "split": {("all_gather", "a"): num_bytes},
        "all_to_all": {("all_to_all", "a"): 2 * num_bytes // k},
    }.get(case.name, {})


@settings(max_examples=25, deadline=None, derandomize=True)
@given(case=move_cases())
def test_a_move_causes_the_traffic_that_its_shapes_say(case: MoveCase) -> None:
    source, target = case.placements
    x = torch.zeros(case.shape, dtype=torch.float64)
    parts, cotangents = parts_of(x, source, 3), parts_of(x, target.transposed, 3)
    with simulate(3), use_mesh(init_device_mesh("cpu", (3,), mesh_dim_names=("a",))), record_traffic() as traffic:
        local = from_ranks(parts, requires_grad=True)
        y = case.function(local, "a", *case.arguments)
        torch.autograd.grad(y, local, from_ranks(cotangents))
    assert traffic.num_bytes == traffic_of(case, 3)
    assert sum(traffic.num_bytes.values()) == sum(traffic_of(case, 3).values())


def test_traffic_is_counted_only_inside_the_block() -> None:
    with simulate(2), use_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("a",))):
        x = from_ranks([torch.ones(3), torch.ones(3)])
        with record_traffic() as outer:
            functions.all_reduce(x, "a")
            with record_traffic() as inner:
                functions.all_reduce(x, "a")
        functions.all_reduce(x, "a")
    assert outer.num_bytes == {("all_reduce", "a"): 24}
    assert inner.num_bytes == {("all_reduce", "a"): 12}
    assert outer.calls["all_reduce", "a"] == 2


def test_an_axis_that_the_mesh_lacks_is_an_error() -> None:
    with pytest.raises(MeshError, match=r"no axis 'tp'.*use_mesh"):
        functions.all_reduce(torch.ones(2), "tp")
    with simulate(2), use_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))):  # noqa: SIM117
        with pytest.raises(MeshError, match=r"no axis 'tp' on the current mesh \(axes: dp\)"):
            functions.all_reduce(torch.ones(2), "tp")


def test_the_backward_uses_the_mesh_of_its_forward() -> None:
    with simulate(4):
        x = from_ranks([torch.ones(1) for _ in range(4)], requires_grad=True)
        with use_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))):
            y = functions.all_reduce_gradient(x, "a")
        with use_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("a",))):
            (gradient,) = torch.autograd.grad(y, x, from_ranks([torch.tensor([float(r)]) for r in range(4)]))
        assert [float(g) for g in local_values(gradient)] == [2.0, 4.0, 2.0, 4.0]


class _Without(torch.autograd.Function):
    """Its input, without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None


@settings(max_examples=25, deadline=None, derandomize=True)
@given(case=move_cases())
def test_a_move_whose_result_gets_no_gradient_gives_none(case: MoveCase) -> None:
    parts = parts_of(torch.zeros(case.shape, dtype=torch.float64), case.placements[0], 3)
    with simulate(3), use_mesh(init_device_mesh("cpu", (3,), mesh_dim_names=("a",))), record_traffic() as traffic:
        local = from_ranks(parts, requires_grad=True)
        y = case.function(local, "a", *case.arguments)
        sent = dict(traffic.num_bytes)
        assert torch.autograd.grad(_Without.apply(y).sum(), local, allow_unused=True) == (None,)
        assert traffic.num_bytes == sent, "nothing goes back"


def test_a_second_derivative_is_refused() -> None:
    with simulate(2), use_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("a",))):
        x = from_ranks([torch.ones(2), torch.ones(2)], requires_grad=True)
        y = functions.all_reduce_gradient(x, "a") ** 2
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"a derivative of a derivative was requested .* without create_graph"):
            gradient.sum().backward()


COMPLEX_CASES = (
    ("all_reduce", ()),
    ("all_reduce_gradient", ()),
    ("all_gather", (1, 8)),
    ("all_gather_invariant", (0, 5)),
    ("reduce_scatter", (0,)),
    ("split", (1,)),
    ("split_replicated", (0,)),
    ("scatter", (0, 6)),
    ("all_to_all", (0, 1, 5)),
    ("all_to_all", (1, 0, 8)),
    ("keep_on_first_both", ()),
)


def _complex_moves(dtype: torch.dtype) -> list[tuple[str, Tensor, Tensor]]:
    """Return each move of a complex tensor and its gradient that differs from that of its real numbers."""
    wrong = []
    own = torch.arange(24.0).reshape(3, 4, 2) * (1 + dist.get_rank())
    x = torch.view_as_complex(own.to(torch.float16 if dtype is torch.complex32 else dtype.to_real())).conj()
    with use_mesh(mesh((2,), ("a",))):
        for name, arguments in COMPLEX_CASES:
            move = getattr(functions, name)
            found = move(leaf := x.clone().requires_grad_(), "a", *arguments)
            found.backward(found.detach() * 2)
            pairs = torch.view_as_real(x.resolve_conj()).clone().requires_grad_()
            expected = move(pairs, "a", *arguments)
            expected.backward(expected.detach() * 2)
            assert leaf.grad is not None and pairs.grad is not None
            for ours, real in ((found, expected), (leaf.grad, pairs.grad)):
                theirs = torch.view_as_complex(real.detach().contiguous())
                if ours.dtype != dtype or not torch.equal(torch.view_as_real(ours.detach().resolve_conj()), real):
                    wrong.append((name, ours.detach(), theirs))
    return wrong


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_move_as_pairs_of_real_ones_between_real_ranks(ranks: Ranks, dtype: torch.dtype) -> None:
    assert ranks.run(_complex_moves, dtype) == [[], []]


def _complex_halves() -> Tensor:
    """complex32, which few operations know, from one split to another."""
    x = torch.view_as_complex((torch.arange(16.0) + 16 * dist.get_rank()).reshape(2, 4, 2).half())
    with use_mesh(mesh((2,), ("a",))):
        return torch.view_as_real(functions.all_to_all(x, "a", 0, 1, 4))


def test_complex_halves_move_too(ranks: Ranks) -> None:
    whole = torch.arange(32.0).reshape(4, 4, 2).half()
    for found, part in zip(ranks.run(_complex_halves), whole.chunk(2, 1), strict=True):
        assert torch.equal(found, part)
