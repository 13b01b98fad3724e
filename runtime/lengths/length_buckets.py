"""Buckets: the few lengths and batch sizes to which inputs are padded, so that a few programs serve all calls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autopar.errors import InputError
from autopar.ir.sharding.mesh import Mesh

POWERS, LARGEST = "powers of two", "largest"
COMMON: Mapping[str, float] = {
    "input_ids": 0,
    "attention_mask": 0,
    "labels": -100,
    "position_ids": 0,
    "token_type_ids": 0,
}
"""Name of an input in transformers → the value with which it is padded."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Lengths and batch sizes to which inputs are padded, and the values of the padding.

    Raises InputError for settings that make no sense.

    >>> Buckets((128, 256)).length_for(130, unit=4), Buckets().length_for(130, unit=4)
    (256, 256)
    """

    lengths: tuple[int, ...] | Literal["powers of two"] | None = POWERS
    """Positions of a padded sequence: the next one up is taken. None: lengths are not padded."""
    batches: tuple[int, ...] | Literal["largest"] | None = None
    """Samples of a padded batch (with `inputs="local"`, of a rank's part); "largest": as many as the largest batch so
    far. None: batches are not padded."""
    padding: Mapping[str, float] = field(default_factory=lambda: dict(COMMON))
    """Input → its value at padded places. Inputs that are not named have no positions."""
    dims: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict)
    """Input → which of its dims count positions; dim 1 of those that are not named, if they have one."""
    check: bool = True
    """True if outputs of a padded call are compared, on small sizes, with those of an unpadded one."""
    check_lengths: tuple[int, int] = (8, 16)
    """These sizes: a length, and the one to which it is padded."""

    def __post_init__(self) -> None:
        _check_sizes("lengths", self.lengths, POWERS)
        _check_sizes("batches", self.batches, LARGEST)
        if self.lengths is None and self.batches is None:
            raise InputError("Buckets(lengths=None, batches=None) pads nothing; give one of them, or no buckets.")
        for name, value in self.padding.items():
            if not isinstance(value, int | float) or math.isnan(value):
                raise InputError(f"padding[{name!r}]={value!r}; give the number that stands at padded places.")
        unknown = sorted(self.dims.keys() - self.padding.keys())
        if unknown:
            raise InputError(
                f"dims names {unknown[0]!r}, for which padding has no value; it has {', '.join(self.padding)}."
            )
        short, long = self.check_lengths
        if not 0 < short < long:
            raise InputError(f"check_lengths={self.check_lengths!r}; give a length and a longer one.")

    @classmethod
    def of(cls, specified: Buckets | str | None) -> Buckets | None:
        """Return the buckets that `Run(buckets=…)` stands for; raise InputError for an unknown word."""
        if specified is None or specified == "none":
            return None
        if isinstance(specified, Buckets):
            return specified
        if specified == "auto":
            return cls()
        raise InputError(f'Run(buckets={specified!r}); give "auto", "none" or autopar.Buckets(…).')

    def length_for(self, length: int, unit: int) -> int:
        """Return the length to which a sequence is padded; raise InputError if it is longer than all buckets.

        All lengths are multiples of `unit`, so that a plan can shard them.
        """
        if self.lengths is None:
            return length
        if isinstance(self.lengths, str):
            return unit << max(0, math.ceil(math.log2(length / unit)))
        known = self.multiples_of(unit)
        fitting = next((each for each in known if each >= length), None)
        if fitting is None:
            raise InputError(
                f"a sequence of {length} positions is longer than the longest bucket, {known[-1]}; add one to "
                'Buckets(lengths=…), cut the sequence, or use lengths="powers of two".'
            )
        return fitting

    def multiples_of(self, unit: int) -> tuple[int, ...]:
        """Return the stated lengths, rounded up to multiples of `unit`, ascending; InputError where none are stated."""
        if not isinstance(self.lengths, tuple):
            raise InputError(
                f"Buckets(lengths={self.lengths!r}) states no lengths to prepare; give them, as lengths=(128, 256)."
            )
        return tuple(sorted({-(-each // unit) * unit for each in self.lengths}))

    def batch_for(self, batch: int, largest: int) -> int:
        """Return the number of samples to which a batch is padded, given the largest batch so far.

        Raises InputError if the batch is larger than all buckets.
        """
        if self.batches is None:
            return batch
        if isinstance(self.batches, str):
            return max(batch, largest)
        fitting = next((each for each in sorted(self.batches) if each >= batch), None)
        if fitting is None:
            raise InputError(
                f"a batch of {batch} samples is larger than the largest bucket, {max(self.batches)}; add one to "
                'Buckets(batches=…), or use batches="largest".'
            )
        return fitting

    def positions_of(self, name: str, num_dims: int) -> tuple[int, ...]:
        """Return the dims of an input that count positions; raise InputError if it has fewer dims."""
        specified = self.dims.get(name, () if num_dims < 2 else 1)
        found = specified if isinstance(specified, tuple) else (specified,)
        if any(not -num_dims <= each < num_dims for each in found):
            raise InputError(f"dims[{name!r}]={specified!r}, and {name} has {num_dims} dims; count them from 0.")
        return tuple(each % num_dims for each in found)


def unit_of(mesh: Mesh) -> int:
    """Return the unit of bucket lengths on a mesh: twice its longest axis, for zigzag sharding; 1 on one device."""
    longest = max(mesh.sizes)
    return 1 if longest == 1 else 2 * longest


def _check_sizes(name: str, specified: Any, word: str) -> None:
    if specified is None or (isinstance(specified, str) and specified == word):
        return
    if (
        not isinstance(specified, tuple)
        or not specified
        or any(type(each) is not int or each < 1 for each in specified)
    ):
        raise InputError(f'Buckets({name}={specified!r}); give whole numbers above 0, as (128, 256), "{word}" or None.')
