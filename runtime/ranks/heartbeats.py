"""Heartbeats of ranks in their common store, and conclusions from them.

A heartbeat says that a rank lives, how many of its events have ended and begun, and whether it has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

SILENT_SECONDS = 40.0  # after which a rank counts as dead though no connection broke (NCCL between GPUs of one host)
STORE_SECONDS = 10.0


def store_for(prefix: str) -> Store:
    """Return the store of the ranks, over a connection of its own: who waits for a key blocks no other."""
    store: Any = _get_default_store()
    store = PrefixStore(prefix, store.clone())
    store.set_timeout(timedelta(seconds=STORE_SECONDS))
    return store


def read(store: Store, key: str) -> str:
    """Return the value of a key, or nothing; does not wait for it."""
    return store.get(key).decode() if store.check([key]) else ""


def is_gone(beat: str, event: int, silent_seconds: float) -> bool:
    """Return whether the rank that wrote `beat` will never reach an event: it has left, or its heartbeats stopped."""
    if not beat:
        return False  # it may not have been called yet
    _, ended, left, *_ = map(int, beat.split())
    return ended <= event and (bool(left) or silent_seconds > SILENT_SECONDS)


def events_of(beat: str) -> int:
    """Return the number of events that have begun on the rank that wrote `beat`."""
    return int(beat.split()[3]) if beat else 0


def has_left(beat: str) -> bool:
    """Return whether the rank that wrote `beat` takes part in no further step."""
    return bool(beat) and bool(int(beat.split()[2]))


def obituary(ranks: Sequence[int], evidence: str) -> str:
    if not ranks:
        return f"a rank ended without a message ({evidence})"
    return f"{named(ranks)} ended without a message, perhaps killed for its memory ({evidence})"


def named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
