"""State on which the random draws of a step depend, and the seed of each draw.

A draw is seeded by (seed, step, key of the call, number of this rank's part of the tensor): ranks that hold the same
part draw the same numbers, whatever their own generators are seeded with. In the deterministic mode all draws come from
the default generator, in order, as on one device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Randomness:
    """State on which the draws of one step depend."""

    seed: int = 0
    step: int = 0
    deterministic: bool = False
    first_key: int = 0
    """Number that is added to the keys of calls."""

    def seed_of(self, key: int, part: int) -> int:
        """Return the seed of a call's draw for one part of its tensor, below 2^63."""
        digest = hashlib.blake2b(
            repr((self.seed, self.step, self.first_key + key, part)).encode(), digest_size=8
        ).digest()
        return int.from_bytes(digest, "big") >> 1


_randomness = Randomness()


@contextlib.contextmanager
def use_randomness(seed: int, step: int, deterministic: bool = False) -> Iterator[None]:
    """Seed the draws inside the block."""
    with _use(Randomness(seed, step, deterministic)):
        yield


@contextlib.contextmanager
def keys_from(first_key: int) -> Iterator[None]:
    """Number the calls inside the block from `first_key` on."""
    with _use(dataclasses.replace(_randomness, first_key=first_key)):
        yield


@contextlib.contextmanager
def _use(new: Randomness) -> Iterator[None]:
    before = put_randomness(new)
    try:
        yield
    finally:
        put_randomness(before)


def put_randomness(new: Randomness) -> Randomness:
    """Let draws depend on this from now on; return what they depended on before."""
    global _randomness
    before, _randomness = _randomness, new
    return before


def randomness() -> Randomness:
    """Return the state on which draws depend now."""
    return _randomness
