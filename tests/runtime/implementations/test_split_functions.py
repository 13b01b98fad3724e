"""Functions that run on parts of their tensors give what PyTorch gives on the whole, forward and backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from autopar.ir.sharding.layout import I, Layout, P, R, S
from autopar.runtime.collectives.layout_moves import all_gather_invariant, split_replicated
from autopar.runtime.collectives.mesh_axes import join_axes, record_traffic, use_mesh
from autopar.runtime.implementations import mean as means
from autopar.runtime.implementations.attention.by_blocks import attention
from autopar.runtime.implementations.attention.explicit import attention_with_dropout
from autopar.runtime.implementations.dropout import dropout
from autopar.runtime.implementations.embedding import vocabulary_parallel_embedding
from autopar.runtime.implementations.loss import cross_entropy, start_count
from autopar.runtime.implementations.normalization import batch_norm
from autopar.runtime.implementations.randomness import use_randomness
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.simulate import from_ranks, local_values, simulate

aten = torch.ops.aten
SIZES, AXES = (2, 2), ("a", "b")
GARBAGE = 7


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@contextmanager
def grid() -> Iterator[None]:
    """Four simulated ranks on two axes of two."""
    with simulate(4):
        on_axes = init_device_mesh("cpu", SIZES, mesh_dim_names=AXES)
        with use_mesh(on_axes, join_axes(on_axes, ["a_b"])):
            yield


def parts_of(x: Tensor, layout: Layout, filling: float = GARBAGE) -> list[Tensor]:
    """Return each rank's part of `x`: padding filled, partial values random."""
    parts: dict[tuple[int, ...], Tensor] = {(): x.detach()}
    for axis, size in enumerate(SIZES):
        placement = layout[axis]
        split: dict[tuple[int, ...], Tensor] = {}
        for place, part in parts.items():
            if placement.is_split:
                shape = list(part.shape)
                shape[placement.dim] = -shape[placement.dim] % size
                part = torch.cat([part, torch.full(shape, filling, dtype=part.dtype)], placement.dim)
                pieces = part.chunk(size, placement.dim)
            elif placement is P:
                pieces = [torch.randn_like(part) for _ in range(size - 1)]
                pieces = [part - sum(pieces), *pieces]
            else:
                pieces = [part] * size
            split |= {(*place, i): piece.contiguous() for i, piece in enumerate(pieces)}
        parts = split
    return [parts[place] for place in itertools.product(*map(range, SIZES))]


def joined(parts: Sequence[Tensor], layout: Layout, shape: Sequence[int]) -> Tensor:
    """The whole tensor of `shape`; asserts that replicated parts are equal."""
    left = list(parts)
    for placement in reversed(layout):
        pairs = list(zip(left[::2], left[1::2], strict=True))
        if placement.is_split:
            left = [torch.cat(pair, placement.dim) for pair in pairs]
        elif placement is P:
            left = [first + second for first, second in pairs]
        else:
            for first, second in pairs:
                torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
            left = [first for first, _ in pairs]
    (whole,) = left
    for dim, size in enumerate(shape):
        assert not whole.narrow(dim, size, whole.shape[dim] - size).any(), "something in the padding"
        whole = whole.narrow(dim, 0, size)
    return whole


def check(
    reference: Callable[..., Tensor],
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    layouts: Sequence[Layout],
    output: Layout,
    **keywords: Any,
) -> dict[tuple[str, str], int]:
    """Hold a function on parts against `reference` on the whole; returns the bytes moved."""
    whole = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    expected = reference(*whole)
    grad = torch.randn_like(expected)
    learning = [x for x in whole if x.requires_grad]
    expected_grads = torch.autograd.grad(expected, learning, grad) if learning else ()
    # Made outside of the simulation, in which every new tensor has four values.
    parts = [parts_of(x, at) for x, at in zip(inputs, layouts, strict=True)]
    cotangents = parts_of(grad, output.transposed)
    with grid(), record_traffic() as traffic:
        local = [from_ranks(each, x.requires_grad) for each, x in zip(parts, inputs, strict=True)]
        found = function(*local, **keywords)
        torch.testing.assert_close(joined(local_values(found), output, expected.shape), expected)
        if learning:
            given = from_ranks(cotangents)
            found_grads = torch.autograd.grad(found, [x for x in local if x.requires_grad], given)
            at_grads = [at.transposed for x, at in zip(inputs, layouts, strict=True) if x.requires_grad]
            for g, at, wanted in zip(found_grads, at_grads, expected_grads, strict=True):
                torch.testing.assert_close(joined(local_values(g), at, wanted.shape), wanted, equal_nan=True)
    return dict(traffic.num_bytes)


def on(a: Any, b: Any = I) -> Layout:
    return Layout((a, b))


def wants_grad(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("padding_idx", [-1, 3])
@pytest.mark.parametrize("num_rows", [8, 7])
def test_an_embedding_with_split_rows(num_rows: int, padding_idx: int) -> None:
    indices = torch.randint(num_rows, (3, 5))
    indices[0, 0] = 3

    def function(weight: Tensor, where: Tensor) -> Tensor:
        return vocabulary_parallel_embedding(weight, where, padding_idx, axes={"k": ("a",)}, sizes={"k": num_rows})

    inputs = wants_grad(num_rows, 4), indices
    reference = lambda weight, where: aten.embedding.default(weight, where, padding_idx)  # noqa: E731
    assert check(reference, function, inputs, (on(S(0)), on(I)), on(P)) == {}


def test_an_embedding_whose_rows_two_axes_split() -> None:
    def function(weight: Tensor, where: Tensor) -> Tensor:
        return vocabulary_parallel_embedding(weight, where, axes={"k": ("a", "b")}, sizes={"k": 8})

    inputs = wants_grad(8, 4), torch.randint(8, (6,))
    assert check(aten.embedding.default, function, inputs, (on(S(0), S(0)), on(I)), on(P, P)) == {}


ROWS, CLASSES = 8, 6
SPLITS: dict[str, tuple[Layout, dict[str, tuple[str, ...]]]] = {
    "rows": (on(S(0)), {"n": ("a",)}),
    "rows on both axes": (on(S(0), S(0)), {"n": ("a", "b")}),
    "classes": (on(S(1)), {"v": ("a",)}),
    "classes on both axes": (on(S(1), S(1)), {"v": ("a", "b")}),
    "rows and classes": (on(S(0), S(1)), {"n": ("a",), "v": ("b",)}),
}


def loss_layouts(logits: Layout, reduction: int) -> tuple[Layout, Layout, Layout]:
    """The layouts of target, class weight and loss."""
    target = Layout(p if p is S(0) else I for p in logits)
    weight = Layout(S(0) if p is S(1) else I for p in logits)
    return target, weight, target if reduction == 0 else Layout(P if p is S(0) else I for p in logits)


@pytest.mark.sample(15)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    ("reduction", "weighted", "smoothing"),
    [(1, False, 0.0), (1, True, 0.0), (1, False, 0.1), (1, True, 0.1), (0, True, 0.1), (2, True, 0.1)],
)
def test_cross_entropy(split: str, reduction: int, weighted: bool, smoothing: float) -> None:
    layout, axes = SPLITS[split]
    num_classes = 8 if split == "classes on both axes" else 5 if "classes" in split else CLASSES
    target = torch.randint(num_classes, (ROWS,))
    target[1] = target[6] = -100
    at_target, at_weight, at_loss = loss_layouts(layout, reduction)
    inputs = [wants_grad(ROWS, num_classes), target]
    layouts = [layout, at_target]
    if weighted:
        inputs.append(torch.rand(num_classes, dtype=torch.float64) + 0.5)
        layouts.append(at_weight)

    def function(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        sizes = {"n": ROWS, "v": num_classes}
        return cross_entropy(logits, target, weight, reduction, -100, smoothing, axes=axes, sizes=sizes)

    def reference(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        return aten.cross_entropy_loss.default(logits, target, weight, reduction, -100, smoothing)

    moved = check(reference, function, inputs, layouts, at_loss)
    rows = ROWS // 2 if split == "rows and classes" else ROWS
    per_row = 8 * rows * (3 + weighted + bool(smoothing) + (weighted and bool(smoothing)))
    expected = {("all_reduce", axis): per_row for axis in axes.get("v", ())}
    if reduction == 1:
        expected |= {("all_reduce", "_".join(axes["n"])): 8 for _ in axes.get("n", ())[:1]}
    assert moved == expected


@pytest.mark.parametrize("axes", [{"n": ("a",)}, {"n": ("a",), "v": ("b",)}])
def test_a_mean_cross_entropy_takes_a_divisor_that_is_on_its_way(axes: dict[str, tuple[str, ...]]) -> None:
    logits, target = wants_grad(4, 6), torch.tensor([1, 5, -100, 0])
    expected = aten.cross_entropy_loss.default(logits, target)
    parts = parts_of(logits, on(S(0), S(1) if "v" in axes else I))
    targets = parts_of(target, on(S(0)))
    with grid(), record_traffic() as traffic:
        local = from_ranks(targets)
        divisor = start_count(local, -100, axes={"n": ("a",)}, classes="v")
        assert dict(traffic.calls) == {("all_reduce", "a"): 1}
        loss = cross_entropy(from_ranks(parts), local, axes=axes, sizes={"n": 4, "v": 6}, divisor=divisor)
        torch.testing.assert_close(joined(local_values(loss), on(P), ()), expected)
    assert traffic.calls["all_reduce", "a"] == 1


def test_cross_entropy_of_many_places_splits_any_of_them() -> None:
    inputs = wants_grad(4, 6, 2), torch.randint(6, (4, 2))
    axes, sizes = {"n": ("a",), "v": ("b",)}, {"n": 4, "v": 6, "a": 2}
    function = lambda x, t: cross_entropy(x, t, axes=axes, sizes=sizes)  # noqa: E731
    check(aten.cross_entropy_loss.default, function, inputs, (on(S(0), S(1)), on(S(0))), on(P))
    axes = {"a": ("a",)}
    check(aten.cross_entropy_loss.default, function, inputs, (on(S(2)), on(S(1))), on(P))


def test_cross_entropy_of_one_row() -> None:
    function = lambda x, t: cross_entropy(x, t, axes={"v": ("a",)}, sizes={"v": 5})  # noqa: E731
    check(aten.cross_entropy_loss.default, function, (wants_grad(5), torch.tensor(3)), (on(S(0)), on(I)), on(I))


def test_cross_entropy_in_half_precision_is_computed_in_float32() -> None:
    logits = (20 * torch.randn(ROWS, 64)).bfloat16().requires_grad_()
    target = torch.randint(64, (ROWS,))
    function = lambda x, t: cross_entropy(x, t, axes={"v": ("a",)}, sizes={"v": 64})  # noqa: E731
    moved = check(aten.cross_entropy_loss.default, function, (logits, target), (on(S(1)), on(I)), on(I))
    assert moved == {("all_reduce", "a"): 4 * 3 * ROWS}


def test_cross_entropy_with_nothing_but_ignored_targets() -> None:
    logits, target = wants_grad(4, 6), torch.full((4,), -100)
    function = lambda x, t: cross_entropy(x, t, axes={"n": ("a",)}, sizes={"n": 4, "v": 6})  # noqa: E731
    parts, targets = parts_of(logits, on(S(0))), parts_of(target, on(S(0)))
    with grid():
        x = from_ranks(parts, requires_grad=True)
        loss = function(x, from_ranks(targets))
        assert all(map(torch.isnan, local_values(loss)))
        (gradient,) = torch.autograd.grad(loss, x)
        assert not any(g.any() for g in local_values(gradient))


def test_cross_entropy_of_large_logits_does_not_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0, 9e3]], dtype=torch.float32).repeat(2, 1).requires_grad_()
    function = lambda x, t: cross_entropy(x, t, axes={"v": ("a",)}, sizes={"v": 4})  # noqa: E731
    check(aten.cross_entropy_loss.default, function, (logits, torch.tensor([1, 3])), (on(S(1)), on(I)), on(I))


@pytest.mark.parametrize("dim", [None, 0, [1], [0, 2], -1])
@pytest.mark.parametrize("keepdim", [False, True])
def test_a_mean_over_split_dims(dim: Any, keepdim: bool) -> None:
    x = wants_grad(4, 6, 2)
    averaged = range(3) if dim is None else [d % 3 for d in ([dim] if isinstance(dim, int) else dim)]
    if dim is None and keepdim:
        return

    def placement(split: int) -> Any:
        return P if split in averaged else S(split if keepdim else split - sum(d < split for d in averaged))

    def function(x: Tensor) -> Tensor:
        return means.mean(x, dim, keepdim, axes={"p": ("a",), "q": ("b",)}, sizes={"p": 4, "q": 6, "r": 2})

    reference = (lambda x: x.mean()) if dim is None else lambda x: x.mean(dim, keepdim)
    assert check(reference, function, (x,), (on(S(0), S(1)),), on(placement(0), placement(1))) == {}


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"])
def test_a_loss_that_is_a_mean(name: str) -> None:
    function: Callable[..., Tensor] = getattr(means, name)
    assert function.__name__ == name
    inputs = wants_grad(4, 6), torch.rand(4, 6, dtype=torch.float64)
    axes: Mapping[str, tuple[str, ...]] = {"a": ("a",), "b": ("b",)}
    at = on(S(0), S(1))
    found = check(getattr(aten, name).default, function, inputs, (at, at), on(P, P), axes=axes, sizes={"a": 4, "b": 6})
    assert found == {}


@pytest.mark.parametrize("name", ["binary_cross_entropy", "binary_cross_entropy_with_logits"])
def test_a_binary_cross_entropy_that_is_a_mean(name: str) -> None:
    inputs = torch.rand(4, 6, dtype=torch.float64, requires_grad=True), torch.rand(4, 6, dtype=torch.float64)
    axes = {"a": ("a",), "b": ("b",)}
    at = on(S(0), S(1))
    check(getattr(aten, name).default, getattr(means, name), inputs, (at, at), on(P, P), axes=axes, sizes={})


@pytest.mark.parametrize("axes", [("a",), ("a", "b")])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(8, 3), (4, 3, 5), (4, 3, 2, 2)])
def test_batch_norm_over_a_split_batch(axes: tuple[str, ...], affine: bool, shape: tuple[int, ...]) -> None:
    at = on(S(0), S(0) if len(axes) == 2 else I)
    over = on(R, R if len(axes) == 2 else I)
    # Far from zero, where sums of squares cancel.
    x = (torch.randn(shape) + 30).requires_grad_()
    inputs = [x, *([wants_grad(3, dtype=torch.float32), wants_grad(3, dtype=torch.float32)] if affine else [])]
    running = [torch.randn(3), torch.rand(3)]
    expected = [each.clone() for each in running]

    def reference(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return F.batch_norm(x, expected[0], expected[1], weight, bias, True, 0.3, 1e-5)

    def function(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        local = [from_ranks([each.clone() for _ in range(4)]) for each in running]
        y = batch_norm(x, weight, bias, local[0], local[1], True, 0.3, 1e-5, axes={"n": axes}, sizes={"n": shape[0]})
        for ours, theirs in zip(local, expected, strict=True):
            torch.testing.assert_close(joined(local_values(ours), on(I), (3,)), theirs)
        return y

    moved = check(reference, function, inputs, [at, *[over] * (len(inputs) - 1)], at)
    assert moved == {("all_reduce", axis): 2 * 3 * 8 + 2 * 3 * 4 for axis in axes}


def test_batch_norm_by_running_statistics_moves_nothing() -> None:
    x, running = wants_grad(4, 3), (torch.randn(3).double(), torch.rand(3).double())
    reference = lambda x, m, v: F.batch_norm(x, m, v)  # noqa: E731
    function = lambda x, m, v: batch_norm(  # noqa: E731
        x, None, None, m, v, False, 0.1, 1e-5, axes={"n": ("a",)}, sizes={"n": 4}
    )
    assert check(reference, function, (x, *running), (on(S(0)), on(I), on(I)), on(S(0))) == {}


def drawn(seed: int, step: int, key: int, axes: Mapping[str, tuple[str, ...]]) -> list[Tensor]:
    """The masks of four ranks whose local shape is (8, 8)."""
    ones = [torch.ones(8, 8)] * 4
    with grid(), use_randomness(seed, step):
        x = from_ranks(ones)
        return [y > 0 for y in local_values(dropout(x, 0.5, True, key=key, axes=axes, sizes={"p": 8, "q": 8}))]


def test_ranks_that_hold_the_same_piece_drop_the_same() -> None:
    masks = drawn(0, 0, 0, {"p": ("a",)})
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])
    assert all(torch.equal(mask, masks[0]) for mask in drawn(0, 0, 0, {})[:1])
    assert len({tuple(mask.flatten().tolist()) for mask in drawn(0, 0, 0, {"p": ("a",), "q": ("b",)})}) == 4


def test_a_draw_depends_on_seed_step_and_call() -> None:
    draws = [drawn(*numbers, {})[0] for numbers in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0))]
    assert torch.equal(draws[0], draws[-1])
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == 4


def test_dropout_keeps_the_mean() -> None:
    y = dropout(torch.ones(100, 1000), 0.2, True, key=0, axes={}, sizes={"p": 100, "q": 1000})
    assert set(y.unique().tolist()) == {0.0, 1.25}
    assert abs(float(y.mean()) - 1) < 0.01


@pytest.mark.parametrize(("p", "train"), [(0.3, False), (0.0, True), (1.0, True)])
def test_dropout_at_its_limits(p: float, train: bool) -> None:
    x = torch.randn(4, 4)
    found = dropout(x, p, train, key=0, axes={}, sizes={"p": 4, "q": 4})
    torch.testing.assert_close(found, F.dropout(x, p, train), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("layout", "shape"), [(on(S(0)), (4, 8)), (on(S(0), S(1)), (4, 8)), (on(S(1), S(1)), (4, 8)), (on(S(1)), (4, 7))]
)
def test_deterministic_dropout_equals_one_device(layout: Layout, shape: tuple[int, ...]) -> None:
    axes = {"pq"[dim]: tuple(AXES[i] for i in layout.axes_of(dim)) for dim in (0, 1)}
    sizes = dict(zip("pq", shape, strict=True))

    def reference(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return F.dropout(F.dropout(x, 0.3), 0.4)

    def function(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        with use_randomness(0, 0, True):
            x = dropout(x, 0.3, True, key=0, axes=axes, sizes=sizes)
            return dropout(x, 0.4, True, key=1, axes=axes, sizes=sizes)

    assert check(reference, function, (wants_grad(*shape),), (layout,), layout) == {}


ATTENTION = {
    "plain": ((4, 4, 6, 8), (4, 4, 5, 8), {}),
    "causal": ((4, 4, 6, 8), (4, 4, 6, 8), {"is_causal": True}),
    "grouped": ((4, 4, 6, 8), (4, 2, 5, 8), {"enable_gqa": True, "scale": 0.5}),
}


@pytest.mark.parametrize(("kind", "heads"), [*((kind, "h") for kind in ATTENTION), ("grouped", "q")])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_deterministic_attention_with_dropout_equals_one_device(kind: str, heads: str, p: float) -> None:
    query, key, further = ATTENTION[kind]
    causal = further.get("is_causal", False)
    keywords = {name: value for name, value in further.items() if name != "is_causal"}

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(5)
        return F.scaled_dot_product_attention(q, k, v, None, p, causal, **keywords)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(5)
        axes = {"a0": ("a",), heads: ("b",)}
        sizes = {"a0": 4, "h": key[1], "r": query[1] // key[1], "s": query[2], "t": key[2]}
        if heads == "q":  # those of queries alone
            sizes["q"] = query[1]
        with use_randomness(0, 0, True):
            return attention(q, k, v, None, p, causal, key=0, axes=axes, sizes=sizes, **keywords)

    at, keys = on(S(0), S(1)), on(S(0), S(1) if heads == "h" else R)
    inputs = wants_grad(*query), wants_grad(*key), wants_grad(*key)
    assert check(reference, function, inputs, (at, keys, keys), at) == {}


def test_deterministic_attention_draws_nothing_for_queries_that_are_padding() -> None:
    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(5)
        return F.scaled_dot_product_attention(q, k, v, None, 0.3)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(5)
        with use_randomness(0, 0, True):
            outputs = attention(q, k, v, None, 0.3, key=0, axes={"s": ("a",)}, sizes={"h": 2, "s": 5, "t": 4})
            return split_replicated(all_gather_invariant(outputs, "a", 1, 5), "a", 1)  # no padding

    inputs = wants_grad(2, 5, 8), wants_grad(2, 4, 8), wants_grad(2, 4, 8)
    check(reference, function, inputs, (on(S(1)), on(R), on(R)), on(S(1)))


@pytest.mark.parametrize("boolean", [True, False])
def test_attention_with_a_mask_and_split_queries(boolean: bool) -> None:
    mask = torch.randn(4, 5, dtype=torch.float64)
    mask = mask > 0 if boolean else mask.masked_fill(mask > 1, -math.inf)
    mask[2] = False if boolean else -math.inf
    inputs = wants_grad(2, 4, 8), wants_grad(2, 5, 8), wants_grad(2, 5, 8), mask

    def reference(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        torch.manual_seed(5)
        return F.scaled_dot_product_attention(q, k, v, m, 0.3)

    def function(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        torch.manual_seed(5)
        with use_randomness(0, 0, True):
            way = attention if boolean else attention_with_dropout
            return way(q, k, v, m, 0.3, key=0, axes={"h": ("a",), "s": ("b",)}, sizes={"h": 2, "s": 4, "t": 5})

    at = on(S(0), S(1))
    check(reference, function, inputs, (at, on(S(0), R), on(S(0), R), on(I, S(0))), at)


def _real_losses() -> list[Tensor]:
    """Cross-entropy, embedding, batch norm and dropout on this rank of (2, 2), eager or compiled."""
    torch.manual_seed(0)
    grid_mesh = mesh(SIZES, AXES)
    weight, bias = torch.randn(10, requires_grad=True), torch.randn(10, requires_grad=True)
    table, head, ids = torch.randn(6, 10), torch.randn(10, 12), torch.randint(12, (8,))
    i, j = (grid_mesh.get_local_rank(name) for name in AXES)
    table = (table + j).requires_grad_()

    def step(table: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        local = ids.chunk(2)[i]
        x = vocabulary_parallel_embedding(table, local, axes={"k": ("b",)}, sizes={"k": 12})
        x = batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5, axes={"n": ("a",)}, sizes={"n": 8})
        x = dropout(x, 0.3, True, key=3, axes={"p": ("a",)}, sizes={"p": 8, "q": 10})
        logits = x @ head.chunk(2, 1)[j]
        return cross_entropy(logits, local, axes={"n": ("a",), "v": ("b",)}, sizes={"n": 8, "v": 12})

    found: list[Tensor] = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        with use_mesh(grid_mesh), use_randomness(1, 2):
            loss = function(table, weight, bias)
            found += [loss, *torch.autograd.grad(loss, (table, weight, bias))]
    return found


def test_the_functions_on_real_ranks_eager_and_compiled(ranks: Ranks) -> None:
    for found in ranks.run(_real_losses, world_size=4, timeout=300):
        torch.testing.assert_close(found[:4], found[4:])
        assert all(torch.isfinite(x).all() and x.abs().sum() > 0 for x in found)


def test_causal_attention_with_dropout_and_split_queries_sees_what_one_device_sees() -> None:
    inputs = wants_grad(2, 8, 4), wants_grad(2, 8, 4), wants_grad(2, 8, 4)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(5)
        return F.scaled_dot_product_attention(q, k, v, None, 0.3, True)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(5)
        with use_randomness(0, 0, True):
            return attention(q, k, v, None, 0.3, True, key=0, axes={"s": ("a", "b")}, sizes={"h": 2, "s": 8, "t": 8})

    at = on(S(1), S(1))
    assert check(reference, function, inputs, (at, on(R, R), on(R, R)), at) == {}
