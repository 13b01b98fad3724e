"""Progress on a terminal for work that takes over a second; shorter work, and output to a file, show nothing."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, TypeVar

from tqdm import tqdm

Item = TypeVar("Item")

DELAY_SECONDS = 1.0
MIN_INTERVAL_SECONDS = 0.1
LATE_SECONDS = 0.05
TICK_SECONDS = 0.5


def progress(items: Iterable[Item], description: str) -> Iterator[Item]:
    """Yield the items; show a bar on stderr if they take over a second."""
    yield from tqdm(items, **_options(description))


def counter(description: str) -> Callable[[str], None]:
    """Return a function that shows what it is called with, for work of which nobody knows how much there is.

    >>> say = counter("estimates")
    >>> say("12 looked at, best 6.93 s")
    """
    bar = tqdm(bar_format="{desc}{postfix} [{elapsed}]", **_options(description))

    def say(text: str) -> None:
        bar.set_postfix_str(text, refresh=False)
        bar.update()

    return say


@contextmanager
def stages(description: str, num_stages: int) -> Iterator[Callable[[str], None]]:
    """Show the progress of named steps: call the yielded function with each step's name as it begins.

    The seconds go on while a step runs: no step says how far it is, but each is seen to work.

    >>> with stages("planning", 2) as step:
    ...     step("capture")
    ...     step("solve")
    """
    shape = {"bar_format": "{desc}: step {n_fmt} of {total_fmt}{postfix} [{elapsed}]"}
    with tqdm(total=num_stages, **shape, **_options(description)) as bar:
        begun = itertools.count(1)

        def step(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update(next(begun) - bar.n)

        over = Event()
        ticking = Thread(target=_tick, args=(bar, over), daemon=True)
        if not bar.disable:
            ticking.start()
        try:
            yield step
        finally:
            over.set()
            if ticking.is_alive():
                ticking.join()


def _tick(bar: tqdm, over: Event) -> None:
    """Draw the bar again and again until the work is over: first just behind tqdm's own delay."""
    wait = DELAY_SECONDS + LATE_SECONDS
    while not over.wait(wait):
        bar.refresh()
        wait = TICK_SECONDS


def _options(description: str) -> dict[str, Any]:
    """Return the options of all progress bars; `disable=None` turns them off if stderr is no terminal."""
    times = {"delay": DELAY_SECONDS, "mininterval": MIN_INTERVAL_SECONDS}
    return {"desc": description, "leave": False, "disable": None, "file": sys.stderr, **times}
