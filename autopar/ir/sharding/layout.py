"""Layouts: where the value of a tensor lives on a mesh, and where its gradient lives.

A tensor has one placement per mesh axis. Each placement says both, so that the backward follows from the forward
(the varying/invariant types of JAX's shard_map, with their transposes):

    placement   the value on the axis's ranks    its gradient
    S(d)        dim d split                      split the same way
    Z(d)        dim d zigzag-sharded             zigzag-sharded the same way
    I           equal everywhere                 equal everywhere
    R           equal everywhere                 partial: to be summed
    P           partial: to be summed            equal everywhere

When several axes split one dim, the earlier mesh axis is the outer one, as in DTensor.
If zigzag-sharded, rank r of n has chunks r and 2n-1-r of 2n: this balances positions of which later ones do more work.
A dim that does not divide is padded at its end to equal local sizes; only dims that come from a parameter may be.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from autopar.errors import LayoutError


class Placement:
    """One of S(d), Z(d), I, R, P. Instances are unique, so `is` and `==` agree."""

    __slots__ = ("dim", "kind", "zigzag")
    kind: str
    """"S", which Z(d) is as well, "I", "R" or "P"."""
    dim: int
    zigzag: bool

    def __init__(self, kind: str, dim: int = -1, zigzag: bool = False) -> None:
        self.kind = kind
        self.dim = dim
        self.zigzag = zigzag

    def __repr__(self) -> str:
        return f"{'Z' if self.zigzag else 'S'}({self.dim})" if self.kind == "S" else self.kind

    def __reduce__(self) -> tuple[object, ...]:
        return (parse_placement, (repr(self),))

    def __copy__(self) -> Placement:
        return self

    def __deepcopy__(self, memo: object) -> Placement:
        return self

    @property
    def is_split(self) -> bool:
        return self.kind == "S"

    @property
    def transposed(self) -> Placement:
        """The placement of the gradient, read as a value: S(d) → S(d), Z(d) → Z(d), I → I, R → P, P → I."""
        return {"S": self, "I": I, "R": P, "P": I}[self.kind]


I: Final = Placement("I")
R: Final = Placement("R")
P: Final = Placement("P")


@functools.cache
def S(dim: int) -> Placement:
    """Return the placement that splits dim `dim`."""
    if dim < 0:
        raise LayoutError(f"S({dim}): the dim of a split counts from 0.")
    return Placement("S", dim)


@functools.cache
def Z(dim: int) -> Placement:
    """Return the placement that zigzag-shards dim `dim`: never of a parameter, and in equal chunks only."""
    if dim < 0:
        raise LayoutError(f"Z({dim}): the dim of a split counts from 0.")
    return Placement("S", dim, zigzag=True)


def zigzag_in(placement: Placement, dims: Collection[int]) -> Placement:
    """Return Z(d) in place of S(d) for each of the dims."""
    return Z(placement.dim) if placement.is_split and placement.dim in dims else placement


def parse_placement(text: str) -> Placement:
    """Read what `repr` of a placement prints."""
    if text in ("I", "R", "P"):
        return {"I": I, "R": R, "P": P}[text]
    match = re.fullmatch(r"([SZ])\((\d+)\)", text)
    if not match:
        raise LayoutError(f"{text!r} is no placement; a placement is S(dim), Z(dim), I, R or P.")
    return (S if match.group(1) == "S" else Z)(int(match.group(2)))


class Layout(tuple[Placement, ...]):
    """One placement per mesh axis.

    >>> Layout((S(0), I))
    Layout('S(0) I')
    """

    __slots__ = ()

    def __str__(self) -> str:
        return " ".join(map(repr, self))

    def __repr__(self) -> str:
        return f"Layout({str(self)!r})"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read what `str` of a layout prints.

        >>> Layout.parse("S(1) P")
        Layout('S(1) P')
        """
        return cls(map(parse_placement, text.split()))

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """Return mesh axes (by position) that split `dim`, outermost first."""
        return tuple(axis for axis, placement in enumerate(self) if placement.kind == "S" and placement.dim == dim)

    def replace(self, axis: int, placement: Placement) -> Layout:
        """Return the same layout but for one axis."""
        return Layout((*self[:axis], placement, *self[axis + 1 :]))

    @property
    def is_split(self) -> bool:
        """True if any axis splits a dim."""
        return any(placement.kind == "S" for placement in self)

    @property
    def without_gradient(self) -> Layout:
        """The layout of a tensor that needs no gradient, for which I and R are the same: R becomes I."""
        return Layout(I if placement is R else placement for placement in self)

    @property
    def transposed(self) -> Layout:
        """The layout of the gradient, read as a value."""
        return Layout(placement.transposed for placement in self)

    def num_parts(self, dim: int, sizes: Sequence[int]) -> int:
        """Return the number of parts into which `dim` is split on a mesh of these axis sizes."""
        return math.prod(sizes[axis] for axis in self.axes_of(dim))

    def is_zigzag(self, dim: int) -> bool:
        """Return whether some axis zigzag-shards `dim`, so that each rank has two whole chunks."""
        return any(placement.zigzag and placement.dim == dim for placement in self)

    def num_pieces(self, dim: int, sizes: Sequence[int]) -> int:
        """Return the number of equal chunks of `dim`, of which its size is a multiple unless it is padded."""
        return self.num_parts(dim, sizes) * (2 if self.is_zigzag(dim) else 1)

    def local_shape(self, shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the shape each rank holds (padded when a dim does not divide) on a mesh of these axis sizes."""
        local = list(shape)
        for axis, placement in enumerate(self):
            if placement.kind == "S":
                local[placement.dim] = -(-local[placement.dim] // sizes[axis])
        return tuple(local)

    def divides(self, shape: Sequence[int], sizes: Sequence[int]) -> bool:
        """Return whether every split dim divides evenly."""
        return all(shape[dim] % self.num_pieces(dim, sizes) == 0 for dim in {p.dim for p in self if p.kind == "S"})


@functools.cache
def replicated(ndim: int) -> Layout:
    """Return I on every one of `ndim` mesh axes."""
    return Layout((I,) * ndim)


Splits = tuple[frozenset[int], frozenset[int], frozenset[tuple[int, Placement]]]
"""Dims that are split in order, dims that are zigzag-sharded, and splits of the latter that an axis never makes."""


def splits_of(layouts: Iterable[Layout]) -> Splits:
    """Return the splits that some of these layouts make.

    >>> splits_of([Layout((S(0), I)), Layout((Z(1), S(1)))])[2] == {(0, S(1)), (1, Z(1))}
    True
    """
    taken = {each for layout in layouts for each in enumerate(layout) if each[1].is_split}
    axes, zigzag_dims = {axis for axis, _ in taken}, frozenset(each.dim for _, each in taken if each.zigzag)
    of_either_order = {(axis, placed(dim)) for axis in axes for dim in zigzag_dims for placed in (S, Z)}
    in_order = frozenset(each.dim for _, each in taken if not each.zigzag)
    return in_order, zigzag_dims, frozenset(of_either_order - taken)
