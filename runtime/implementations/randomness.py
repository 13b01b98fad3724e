"""State on which the random draws of a step depend, and the seed of each draw.

A draw is seeded by (seed, step, key of the call, number of this rank's part of the tensor): ranks that hold the same
part draw the same numbers, whatever their own generators are seeded with. In the deterministic mode all draws come from
the default generator, in order, as on one device.

A CUDA graph replays kernels with the arguments that they had, and no seed that the host counts. So each draw of a step
that becomes one has a generator or a seed on the device of its own, which the host sets before each run (`StepDraws`).
The numbers are the same. PyTorch's generators for CUDA graphs read their seed from the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor


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


Source = TypeVar("Source", torch.Generator, Tensor)
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


@dataclass(frozen=True, slots=True)
class Draw:
    """A draw of a step that becomes a CUDA graph. Its numbers may be drawn again, by another generator."""

    steps: int
    """Steps since the run began."""
    key: int
    part: int
    of: StepDraws = field(compare=False, repr=False)

    def generator(self, device: torch.device) -> torch.Generator:
        """Return a generator that is seeded for this draw, for one use in a run."""
        return self.of.next_source(self, torch.Generator, device)

    def seed(self, device: torch.device) -> Tensor:
        """Return the seed of this draw, a number [] on the device."""
        return self.of.next_source(self, _number_on, device)


class StepDraws:
    """Draws of a step that becomes a CUDA graph, in order, with what gives each its seed.

    All runs of a step draw in the same order. What a run finds first is made and seeded then, in its first runs.
    """

    def __init__(self) -> None:
        self._sources: list[tuple[object, Draw, torch.Generator | Tensor]] = []
        self._draws: list[Draw] = []
        self._at = Randomness()
        self._used = 0

    @contextlib.contextmanager
    def run(self, at: Randomness) -> Iterator[None]:
        """Let draws inside the block be those of a run that begins with a step."""
        global _step_draws
        self.begin(at)
        before, _step_draws = _step_draws, self
        try:
            yield
        finally:
            _step_draws = before

    def begin(self, at: Randomness) -> None:
        """Seed all draws of the run that begins with a step."""
        self._at, self._used = at, 0
        self._draws.clear()
        for _, draw, source in self._sources:
            self._set(source, draw)

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators that a graph of the step reads."""
        return [source for *_, source in self._sources if isinstance(source, torch.Generator)]

    def draw(self, key: int, part: int) -> Draw:
        """Return the draw of a call in the running step."""
        return Draw(_randomness.step - self._at.step, _randomness.first_key + key, part, self)

    def number_of(self, draw: Draw) -> int:
        """Return a number that stands for a draw in compiled code until the run ends."""
        self._draws.append(draw)
        return len(self._draws) - 1

    def numbered(self, number: int) -> Draw:
        """Return the draw that a number stands for."""
        return self._draws[number]

    def next_source(self, draw: Draw, make: Callable[[torch.device], Source], device: torch.device) -> Source:
        """Return what gives the next draw of this run its seed."""
        key = draw, make, device
        if self._used == len(self._sources) or self._sources[self._used][0] != key:
            del self._sources[self._used :]
            made = make(device)
            self._set(made, draw)
            self._sources.append((key, draw, made))
        source = self._sources[self._used][-1]
        self._used += 1
        return source  # pyright: ignore[reportReturnType] - of the type that `make` returns

    def _set(self, source: torch.Generator | Tensor, draw: Draw) -> None:
        at = dataclasses.replace(self._at, step=self._at.step + draw.steps)
        seed = at.seed_of(draw.key, draw.part)
        source.fill_(seed) if isinstance(source, Tensor) else source.manual_seed(seed)


_step_draws: StepDraws | None = None


def step_draws() -> StepDraws | None:
    """Return the draws of the step that runs now and becomes a CUDA graph; None if it becomes none."""
    return _step_draws


def _number_on(device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)
