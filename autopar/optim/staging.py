"""Pieces of parameters on their way through host memory: down, worked on there, and up again, several at once.

    down    the gradient, and where the host has no copy of it the weight, device → staging
    host    what `Piece.update` makes of both, in place
    up      the weight, staging → device

On a GPU the copies run on streams of their own, out of and into pinned memory: while the host works on one block, the
next one comes down, and the one before goes up. Elsewhere they are ordinary copies, one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

PIECE = 2**22  # elements: 16 MB of float32, far beyond the bytes from which on a link reaches its bandwidth
SLOTS = 3  # one block comes down, one is worked on, one goes up


@dataclass(frozen=True, slots=True)
class Staged:
    """Staged elements of a parameter, bytes per element, and whether the host works on them in float32."""

    elements: int
    itemsize: int
    widened: bool = False


def staging_bytes(parameters: Iterable[Staged]) -> int:
    """Return the bytes of host memory through which parameters pass: a gradient and a weight of a block per slot."""
    passing, widened = _largest(parameters)
    return SLOTS * 2 * passing + widened * torch.float32.itemsize


def _largest(parameters: Iterable[Staged]) -> tuple[int, int]:
    """Return the bytes of the largest block, and elements of the largest that is worked on in float32."""
    pieces = [(min(each.elements, PIECE), each) for each in parameters]
    passing = max((count * each.itemsize for count, each in pieces), default=0)
    return passing, max((count for count, each in pieces if each.widened), default=0)


def ranges(elements: int) -> Iterator[slice]:
    """Yield the blocks of a flat tensor."""
    return (slice(start, min(start + PIECE, elements)) for start in range(0, elements, PIECE))


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a parameter and of its gradient, both flat and on the device."""

    gradient: torch.Tensor
    weight: torch.Tensor
    needs_weight: bool
    """True if the host needs the weight as it is on the device."""
    update: Callable[[torch.Tensor, torch.Tensor], None]
    """Turns a weight in host memory into the new one, by its gradient there."""
    on_host: bool = False
    """True if the gradient is in host memory, or will be once `arrived` is reached."""
    arrived: torch.Event | None = None


class Link:
    """The way between a device and the host: of a GPU two streams, and marks that say how far they are."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_cuda = device, device.type == "cuda"
        self.down = torch.cuda.Stream(device) if self.is_cuda else None
        self.up = torch.cuda.Stream(device) if self.is_cuda else None

    def memory(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory to or from which copies may overlap with everything else."""
        return torch.empty(elements, dtype=dtype, pin_memory=self.is_cuda)

    def begin(self) -> None:
        """Copy nothing before the device has finished the work queued so far."""
        for stream in (self.down, self.up):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self.device))

    def end(self) -> None:
        """Let the device compute nothing further before all that goes up is there."""
        if self.up is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.up)

    @staticmethod
    def copy(target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        """Copy on a stream of the link."""
        with _issued_on(stream):
            target.copy_(source, non_blocking=stream is not None)
        if stream is not None and source.is_cuda:
            source.record_stream(stream)

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Add a tensor of the device to one of the host on the stream that goes down; the device adds."""
        with _issued_on(self.down):
            before = target.to(self.device, non_blocking=True)
            target.copy_(before.add_(source), non_blocking=True)
        if self.down is not None:
            source.record_stream(self.down)

    @staticmethod
    def mark(stream: torch.cuda.Stream | None) -> torch.Event | None:
        """Return a mark behind all that a stream was given so far."""
        return None if stream is None else stream.record_event()

    @staticmethod
    def wait(mark: torch.Event | None) -> None:
        """Have the host wait until a mark is reached."""
        if mark is not None:
            mark.synchronize()


class Staging:
    """Host memory for blocks on their way over a link."""

    def __init__(self, link: Link, parameters: Iterable[Staged]) -> None:
        every = tuple(parameters)
        passing, widened = _largest(every)
        self.num_bytes = staging_bytes(every)
        self._link = link
        self._slots = [_Slot(link, passing) for _ in range(SLOTS)]
        self._widened = torch.empty(widened)

    def widened(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a block in float32, in memory that the next one takes again."""
        return self._widened[: tensor.numel()].copy_(tensor)

    def run(self, pieces: Iterable[Piece]) -> None:
        """Copy every block down, have it updated, and copy it up; the device goes on once all are there."""
        self._link.begin()
        on_their_way: deque[tuple[_Slot, Piece]] = deque()
        for number, piece in enumerate(pieces):
            slot = self._slots[number % SLOTS]
            slot.take_down(piece)
            on_their_way.append((slot, piece))
            if len(on_their_way) == SLOTS - 1:
                first, own = on_their_way.popleft()
                first.finish(own)
        for slot, piece in on_their_way:
            slot.finish(piece)
        self._link.end()


class _Slot:
    """Memory for one block, which is reused when that has gone up."""

    def __init__(self, link: Link, num_bytes: int) -> None:
        self._link = link
        self._gradient, self._weight = (link.memory(num_bytes, torch.uint8) for _ in range(2))
        self._come_down: torch.Event | None = None
        self._gone_up: torch.Event | None = None
        self.gradient = self.weight = torch.empty(0)

    def take_down(self, piece: Piece) -> None:
        """Begin to copy a block into this memory."""
        link = self._link
        link.wait(self._gone_up)
        self.weight = _view_like(piece.weight, self._weight)
        if piece.needs_weight:
            link.copy(self.weight, piece.weight, link.down)
        if piece.on_host:
            self.gradient = piece.gradient
        else:
            self.gradient = _view_like(piece.gradient, self._gradient)
            link.copy(self.gradient, piece.gradient, link.down)
        self._come_down = link.mark(link.down)

    def finish(self, piece: Piece) -> None:
        """Update a block that was copied down, and begin to copy it up."""
        link = self._link
        link.wait(self._come_down)
        link.wait(piece.arrived)
        piece.update(self.gradient, self.weight)
        link.copy(piece.weight, self.weight, link.up)
        self._gone_up = link.mark(link.up)


def _issued_on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """Return a context in which work is issued on `stream`; it changes nothing if `stream` is None."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _view_like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return a view of byte memory with as many elements, of the same dtype, as a tensor."""
    return memory[: tensor.numel() * tensor.itemsize].view(tensor.dtype)
