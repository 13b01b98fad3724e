"""Text that is on every machine: the sources of Python's standard library, byte by byte."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from autopar.errors import InputError

VOCABULARY = 256
MAX_BYTES = 4_000_000


def library_text(max_bytes: int = MAX_BYTES) -> bytes:
    """Return the modules at the top of the standard library, one after the other in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise InputError(
            f"no .py files in {sysconfig.get_path('stdlib')}, the standard library of this Python; "
            "use a Python that is installed with its sources."
        )
    return bytes(text[:max_bytes])


def batches(text: bytes, batch: int, sequence: int, steps: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `steps` pairs (ids, labels) of int64[batch, sequence] cut from random places; a label is the byte that
    follows.

    Equal arguments give equal batches, in every process. Raises InputError where the text is too short.
    """
    if len(text) <= sequence:
        raise InputError(
            f"a text of {len(text)} bytes has no piece of {sequence + 1} (the sequence and its last label); "
            "use a longer text or a shorter sequence."
        )
    generator = torch.Generator().manual_seed(seed)
    bytes_T = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for _ in range(steps):
        starts_B = torch.randint(len(text) - sequence, (batch,), generator=generator)
        pieces_BS = bytes_T[starts_B[:, None] + torch.arange(sequence + 1)].long()
        yield pieces_BS[:, :-1].contiguous(), pieces_BS[:, 1:].contiguous()
