"""Ranks on this host: one process each, in one process group, started for one task and ended with it.

A fork server imports once and forks every rank, as imports take longer than small models train.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.errors import AutoparError

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
FAILED = 2  # exit status of a rank whose error is written down
PATIENCE = timedelta(minutes=10)  # time that a collective waits for the other ranks
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
PRELOADED = ["autopar", "transformers.models.llama.modeling_llama", "torch.export", "networkx"]


class RankError(AutoparError, RuntimeError):
    """A rank failed; the message is that of the rank."""


@dataclass(frozen=True, slots=True)
class World:
    """Number of ranks and their device; in a fake world only rank 0 runs, and collectives do nothing."""

    num_ranks: int
    device: str = "cpu"
    fake: bool = False


def on_ranks(world: World, work: Callable[..., Any], arguments: Sequence[Any], preload: Sequence[str] = ()) -> Any:
    """Run `work(*arguments)`, a function of a module, on all ranks, and return the result of rank 0.

    Raises RankError if a rank fails, with the message of that rank, after ending the others.
    """
    multiprocessing.set_forkserver_preload([*preload, *PRELOADED])
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="autopar-ranks-") as name:
        folder = Path(name)
        started = 1 if world.fake else world.num_ranks
        try:
            start_processes(_rank, (world, work, arguments, folder), started, daemon=True, start_method="forkserver")
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise _reported(error, folder, started) from None
        return pickle.loads(Path(folder, "result").read_bytes())


def _reported(error: ProcessRaisedException | ProcessExitedException, folder: Path, num_ranks: int) -> RankError:
    """Return the error of the first rank that wrote one down, else what is known of the one that died."""
    specified = sorted(folder.glob("error.*"))
    if specified:
        rank, reason = int(specified[0].suffix[1:]), specified[0].read_text()
    else:
        rank, reason = error.error_index, f"{str(error).strip()}; it may have been killed for its memory"
    return RankError(f"rank {rank} of {num_ranks} failed: {reason}")


def _rank(rank: int, world: World, work: Callable[..., Any], arguments: Sequence[Any], folder: Path) -> None:
    torch.set_num_threads(1)  # ranks share the cores
    run_collectives_in_one_thread()
    if world.device == "cuda":
        torch.cuda.set_device(rank)
    try:
        _join(rank, world, folder)
        result = work(*arguments)
    except AutoparError as error:
        _fail(rank, folder, str(error))
    except Exception:
        _fail(rank, folder, traceback.format_exc())
    else:
        if rank == 0:
            Path(folder, "result").write_bytes(pickle.dumps(result))
        dist.destroy_process_group()


def run_collectives_in_one_thread() -> None:
    """Give every gloo group that this process makes from now on one thread that runs its collectives, instead of two.

    Two can corrupt the heap: after a collective, `ProcessGroupGloo::runLoop` of torch 2.13 assigns the std::string
    `pgStatus_->lastCompletedWorkName` without a lock. "ALLGATHER_COALESCED" (a functional all-gather) is too long to
    lie inside the string: where two collectives end at once, its memory is freed twice, and the rank dies later.
    """
    gloo: Any = dist.ProcessGroupGloo
    made_with_options = gloo.__init__

    def init(self: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = gloo._Options()
        options._devices = [gloo.create_device(interface=LOOPBACK)]
        options._threads = 1
        options._timeout = timeout
        made_with_options(self, store, rank, size, options)

    # torch.distributed hands no options to gloo.
    gloo.__init__ = init


def _join(rank: int, world: World, folder: Path) -> None:
    if world.fake:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world.num_ranks)
        return
    dist.init_process_group(
        BACKENDS[world.device],
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world.num_ranks,
        timeout=PATIENCE,
    )


def _fail(rank: int, folder: Path, message: str) -> None:
    """Write the error down, complete before it has its name, and end the rank."""
    draft = Path(folder, f"draft.{rank}")
    draft.write_text(message)
    draft.rename(Path(folder, f"error.{rank}"))
    sys.exit(FAILED)
