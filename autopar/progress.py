"""Progress on a terminal for work that takes over a second; shorter work, and output to a file, show nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any, TypeVar

from tqdm import tqdm

Item = TypeVar("Item")

DELAY_SECONDS = 1.0
MIN_INTERVAL_SECONDS = 0.1
LATE_SECONDS = 0.05


def progress(items: Iterable[Item], description: str) -> Iterator[Item]:
    """The items, with a bar on stderr while they are gone through, where that takes over a second."""
    yield from tqdm(items, **_options(description))


@contextmanager
def stages(description: str, num_stages: int) -> Iterator[Callable[[str], None]]:
    """Progress of a few named steps of work: call what this yields with the name of each step as it begins.

    >>> with stages("planning", 2) as step:
    ...     step("capture")
    ...     step("solve")
    """
    with tqdm(total=num_stages, **_options(description)) as bar:
        begun = 0

        def step(name: str) -> None:
            nonlocal begun
            bar.set_postfix_str(name, refresh=False)
            bar.update(min(begun, 1))  # a step that begins ends the one before
            begun += 1

        # A long step calls nothing that would show the bar, so that a timer does, just behind tqdm's own delay.
        timer = Timer(DELAY_SECONDS + LATE_SECONDS, bar.update, (0,))
        timer.daemon = True
        timer.start()
        try:
            yield step
        finally:
            timer.cancel()
            timer.join()


def _options(description: str) -> dict[str, Any]:
    """How all bars look; `disable=None` is off where stderr is no terminal."""
    times = {"delay": DELAY_SECONDS, "mininterval": MIN_INTERVAL_SECONDS}
    return {"desc": description, "leave": False, "disable": None, "file": sys.stderr, **times}
