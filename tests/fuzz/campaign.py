"""Many cases in a row, on processes that are ended when they hang."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from tests.fuzz.case import draw_case
from tests.fuzz.trial import judge
from tests.support.simulation.outcome import Outcome

GRACE_SECONDS = 30.0
"""Seconds past a case's deadline after which a process that has not answered is killed."""
CASES_PER_PROCESS = 500
"""After which it is started anew, so that what torch keeps of old graphs is let go."""


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    num_cases: int = 0
    seed: int = 0
    deadline: float = 0.0


def run_campaign(seeds: range, jobs: int = 2, seconds: float = 120.0) -> Iterator[tuple[int, Outcome]]:
    """(seed, outcome) of the case of each seed, as they come; a case that takes longer than `seconds` hangs."""
    context = multiprocessing.get_context("spawn")
    left = iter(seeds)
    busy: dict[Connection, _Worker] = {}

    def started() -> _Worker:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, seconds), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def give(worker: _Worker | None) -> None:
        seed = next(left, None)
        if worker is not None and (seed is None or worker.num_cases >= CASES_PER_PROCESS):
            _end(worker)
            worker = None
        if seed is None:
            return
        worker = worker or started()
        worker.seed, worker.num_cases = seed, worker.num_cases + 1
        worker.deadline = time.monotonic() + seconds + GRACE_SECONDS
        worker.pipe.send(seed)
        busy[worker.pipe] = worker

    for _ in range(jobs):
        give(None)
    try:
        while busy:
            ready = wait(list(busy), timeout=1.0)
            for pipe in [pipe for pipe in busy if pipe in ready]:
                worker = busy.pop(pipe)
                try:
                    outcome = pipe.recv()
                except EOFError:
                    yield worker.seed, Outcome("internal", f"the process died with {_end(worker)}")
                    give(None)
                    continue
                yield worker.seed, outcome
                give(worker)
            for pipe, worker in list(busy.items()):
                if time.monotonic() > worker.deadline:
                    del busy[pipe]
                    _end(worker)
                    yield worker.seed, Outcome("hang", f"no answer in {seconds + GRACE_SECONDS:g} s; killed")
                    give(None)
    finally:
        for worker in busy.values():
            _end(worker)


def _end(worker: _Worker) -> int | None:
    worker.pipe.close()
    worker.process.kill()
    worker.process.join()
    return worker.process.exitcode


def _serve(pipe: Connection, seconds: float) -> None:
    """Judge the cases of the seeds that arrive."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    while True:
        try:
            seed = pipe.recv()
        except EOFError:
            return
        pipe.send(judge(draw_case(seed), seconds))
