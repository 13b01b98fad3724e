"""Ranks that end: processes of their own, each of which writes down what it raised and leaves as a script does."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.runtime.ranks import failure
from autopar.runtime.ranks.launch import run_collectives_in_one_thread
from tests.support.ranks import PRELOADED, spare_the_collector

LIMIT_SECONDS = 60.0
START_SECONDS = 120.0  # imports and compiling, on a busy machine


@dataclass(frozen=True, slots=True)
class End:
    """End of a rank: its exit status, what it raised (or nothing), and what it printed."""

    status: int | None
    raised: str
    printed: str

    @property
    def specified(self) -> str:
        return self.raised or self.printed


def ends_of(work: Callable[[int], None], folder: Path, num_ranks: int, left: tuple[int, ...] = ()) -> list[End]:
    """Run `work` on every rank, and return how each of them ended.

    All ranks but those in `left` must end by themselves.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_life, args=(rank, num_ranks, work, folder)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + START_SECONDS + LIMIT_SECONDS
        for rank, process in enumerate(processes):
            if rank not in left:
                process.join(max(0.0, deadline - time.monotonic()))
        running = [rank for rank, process in enumerate(processes) if process.is_alive()]
        assert running == list(left), f"ranks {running} hang"
        return [
            End(process.exitcode, (folder / f"raised.{rank}").read_text(), (folder / f"stderr.{rank}").read_text())
            for rank, process in enumerate(processes)
        ]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _life(rank: int, num_ranks: int, work: Callable[[int], None], folder: Path) -> None:
    spare_the_collector()
    torch.set_num_threads(1)
    run_collectives_in_one_thread()
    failure.POLL_SECONDS, failure.ANSWER_SECONDS = 0.2, 3.0  # to be done sooner
    (folder / f"raised.{rank}").touch()
    sys.stderr = open(folder / f"stderr.{rank}", "w")  # noqa: SIM115
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    try:
        work(rank)
    except Exception as error:
        (folder / f"raised.{rank}").write_text(f"{type(error).__name__}: {error}")
        raise
