"""Placements and layouts: printing, reading, transposes, local shapes."""

import copy
import doctest
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar.ir.sharding.layout
from autopar.errors import LayoutError
from autopar.ir.sharding.layout import I, Layout, P, Placement, R, S, Z, parse_placement, replicated

placements = st.one_of(st.sampled_from([I, R, P]), st.integers(0, 4).map(S), st.integers(0, 4).map(Z))
layouts = st.lists(placements, max_size=4).map(Layout)


@pytest.mark.parametrize("placement", [I, R, P, S(0), S(12), Z(0), Z(12)])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copied_placement_is_the_same_object(placement: Placement, copied: Any) -> None:
    assert copied(placement) is placement


@settings(deadline=None)
@given(layouts)
def test_copied_layouts_keep_type_and_identity(layout: Layout) -> None:
    for copied in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert type(copied) is Layout
        assert all(ours is theirs for ours, theirs in zip(copied, layout, strict=True))


def test_a_split_of_a_dim_is_unique() -> None:
    assert S(1) is S(1)
    assert S(1) is not S(0)


@settings(deadline=None)
@given(placements)
def test_a_placement_is_read_as_printed(placement: Placement) -> None:
    assert parse_placement(repr(placement)) is placement


@settings(deadline=None)
@given(layouts)
def test_a_layout_is_read_as_printed(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


def test_a_layout_prints_its_placements() -> None:
    layout = Layout((S(1), I, R, P))
    assert str(layout) == "S(1) I R P"
    assert repr(layout) == "Layout('S(1) I R P')"


@pytest.mark.parametrize("text", ["", "Q", "S", "S()", "S(-1)", "S(1", " I", "S(a)", "i"])
def test_a_text_that_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(LayoutError) as caught:
        parse_placement(text)
    assert str(caught.value) == f"{text!r} is no placement; a placement is S(dim), Z(dim), I, R or P."


@pytest.mark.parametrize("placed", [S, Z])
def test_a_negative_dim_is_refused(placed: Any) -> None:
    with pytest.raises(LayoutError) as caught:
        placed(-1)
    assert str(caught.value) == f"{placed.__name__}(-1): the dim of a split counts from 0."


def test_the_gradient_of_a_replicated_value_is_partial_and_the_other_way_round() -> None:
    assert Layout((S(1), I, R, P)).transposed == Layout((S(1), I, P, I))


@settings(deadline=None)
@given(layouts)
def test_splits_stay_where_they_are_in_the_gradient(layout: Layout) -> None:
    for dim in range(5):
        assert layout.transposed.axes_of(dim) == layout.axes_of(dim)


@settings(deadline=None)
@given(layouts)
def test_without_gradient_nothing_waits_for_one(layout: Layout) -> None:
    found = layout.without_gradient
    assert R not in found
    assert [p for p in found if p is not I] == [p for p in layout if p not in (I, R)]


def test_only_splits_are_split() -> None:
    assert [p.is_split for p in (S(0), I, R, P)] == [True, False, False, False]


def test_the_axes_of_a_dim_are_listed_outermost_first() -> None:
    layout = Layout((S(1), S(0), S(1)))
    assert (layout.axes_of(1), layout.axes_of(0), layout.axes_of(2)) == ((0, 2), (1,), ())


def test_one_placement_is_replaced() -> None:
    assert Layout((S(1), S(0), P)).replace(1, R) == Layout((S(1), R, P))
    assert type(Layout((I,)).replace(0, R)) is Layout


def test_axes_on_one_dim_multiply() -> None:
    layout = Layout((S(1), S(0), S(1)))
    assert [layout.num_parts(dim, (2, 3, 4)) for dim in range(3)] == [3, 8, 1]
    assert layout.local_shape((6, 16, 5), (2, 3, 4)) == (2, 2, 5)
    assert layout.divides((6, 16, 5), (2, 3, 4))


def test_a_dim_that_does_not_divide_is_padded() -> None:
    layout = Layout((S(0), S(0)))
    assert layout.local_shape((9, 3), (2, 2)) == (3, 3)
    assert not layout.divides((9, 3), (2, 2))
    assert not layout.divides((6, 3), (2, 2))
    assert layout.divides((8, 3), (2, 2))


def test_placements_that_do_not_split_leave_the_shape() -> None:
    layout = Layout((I, R, P))
    assert layout.local_shape((3, 5), (2, 2, 2)) == (3, 5)
    assert layout.divides((3, 5), (2, 2, 2))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2).map(S) | st.just(I), min_size=2, max_size=2).map(Layout),
    st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_local_parts_hold_all_elements_and_nothing_else_when_they_divide(
    layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    local = layout.local_shape(shape, sizes)
    for dim, (part, size) in enumerate(zip(local, shape, strict=True)):
        num_parts = layout.num_parts(dim, sizes)
        assert part * num_parts >= size
        assert (part - 1) * num_parts < size
        if layout.divides(shape, sizes):
            assert part * num_parts == size


def test_the_outer_axis_takes_the_outer_chunks() -> None:
    layout, x = Layout((S(0), S(0))), torch.arange(12)
    parts = [x.chunk(2)[outer].chunk(3)[inner] for outer, inner in itertools.product(range(2), range(3))]
    assert torch.equal(torch.cat(parts), x)
    assert {part.shape for part in parts} == {layout.local_shape((12,), (2, 3))}


def test_replicated_is_invariant_on_every_axis() -> None:
    assert [str(replicated(ndim)) for ndim in range(3)] == ["", "I", "I I"]
    assert math.prod(replicated(2).local_shape((3, 5), (2, 2))) == 15


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(autopar.ir.sharding.layout) == (0, 3)
