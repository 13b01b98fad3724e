"""A rank of a pipeline that raises or dies ends all four, each with the message of the first; nothing hangs.

The ranks are processes of their own, as they end: each writes down what it raised, and leaves as a script does.
"""

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import InputError
from autopar.runtime.module.executable import Surroundings
from autopar.runtime.module.stage import Stage
from autopar.runtime.pipeline import evaluation
from autopar.runtime.ranks import failure, heartbeats
from tests.support.ending_ranks import LIMIT_SECONDS, ends_of
from tests.support.ranks import Ranks

NUM_RANKS = 4
Work = Callable[[Any, int], None]


class _Layers(nn.Module):
    """One layer per rank, and a loss; H is the hidden size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(NUM_RANKS)))

    def forward(self, x_BH: Tensor) -> Tensor:
        return self.layers(x_BH).square().mean()


def _compiled(num_ranks: int = NUM_RANKS) -> Any:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("pp",))
    return autopar.compile(_Layers(), mesh, (_batch(),), pipeline=autopar.Pipeline(schedule="gpipe"), microbatches=4)


def _batch(size: int = 8) -> Tensor:
    return torch.ones(size, 8)


def _failing_stage(act: Callable[[], None]) -> Any:
    """Have the stage of this rank `act` in its forward."""
    whole = Stage.forward

    def forward(stage: Stage, *received: Tensor) -> Any:
        act()
        return whole(stage, *received)

    return mock.patch.object(Stage, "forward", forward)


def _raise() -> None:
    raise ValueError("the data of this rank are broken")


def _raise_on_rank_2(model: Any, rank: int) -> None:
    model.train_step(_batch())
    with _failing_stage(_raise if rank == 2 else lambda: None):
        model.train_step(_batch())


def _die_on_rank_2(model: Any, rank: int) -> None:
    model.train_step(_batch())
    with _failing_stage(lambda: os.kill(os.getpid(), signal.SIGKILL) if rank == 2 else None):
        model.train_step(_batch())


def _leave_before_the_last_step(model: Any, rank: int) -> None:
    model.train_step(_batch())
    if rank == 1:
        sys.exit("out of data")
    model.train_step(_batch())


def _give_rank_3_another_batch(model: Any, rank: int) -> None:
    model.train_step(_batch())
    model.train_step(_batch(7 if rank == 3 else 8))


def _raise_on_rank_1_in_an_evaluation(model: Any, rank: int) -> None:
    model.eval()
    model(_batch())
    with _failing_surroundings() if rank == 1 else contextlib.nullcontext():
        model(_batch())


def _failing_surroundings() -> Any:
    return mock.patch.object(evaluation, Surroundings.__name__, side_effect=ValueError("no such place"))


def _raise_and_stay(model: Any, rank: int) -> None:
    try:
        _raise_on_rank_2(model, rank)
    except RuntimeError:
        time.sleep(3600)


def _go_on_after_a_failure(model: Any, rank: int) -> None:
    with contextlib.suppress(RuntimeError):
        _raise_on_rank_2(model, rank)
    model.train_step(_batch())


def _live(work: Work, rank: int) -> None:
    work(_compiled(), rank)


def _ended(work: Work, folder: Path, left: tuple[int, ...] = ()) -> dict[int, str]:
    """Run `work` on all ranks, and return what each of them raised or printed when it ended.

    All ranks but those in `left` must end by themselves.
    """
    ends = ends_of(functools.partial(_live, work), folder, NUM_RANKS, left)
    return {rank: end.specified for rank, end in enumerate(ends)}


def test_all_ranks_end_within_a_minute() -> None:
    waits = heartbeats.SILENT_SECONDS, 2 * failure.POLL_SECONDS, failure.GRACE_SECONDS
    assert sum(waits) < LIMIT_SECONDS


def test_an_exception_on_one_rank_is_raised_by_all(tmp_path: Path) -> None:
    specified = _ended(_raise_on_rank_2, tmp_path)
    assert specified[2].startswith("RuntimeError: ")  # PyTorch's, which says on which stage
    reason = "PeerError: rank 2 failed: ValueError: the data of this rank are broken"
    assert [specified[rank] for rank in (0, 1, 3)] == [reason] * 3


def test_a_rank_that_has_left_or_is_silent_will_not_come_to_a_step() -> None:
    for beat, silent_seconds, gone in (
        ("", 100.0, False),  # has not begun
        ("7 3 0", 1.0, False),
        ("7 3 0", 100.0, True),
        ("7 3 1", 1.0, True),
        ("7 4 1", 100.0, False),  # left after this step
    ):
        assert heartbeats.is_gone(beat, 3, silent_seconds) is gone


@pytest.mark.slow
def test_an_exception_in_an_evaluation_is_raised_by_all(tmp_path: Path) -> None:
    specified = _ended(_raise_on_rank_1_in_an_evaluation, tmp_path)
    assert specified[1] == "ValueError: no such place"
    assert [specified[rank] for rank in (0, 2, 3)] == ["PeerError: rank 1 failed: ValueError: no such place"] * 3


def test_a_killed_rank_is_named_by_all_others(tmp_path: Path) -> None:
    specified = _ended(_die_on_rank_2, tmp_path)
    for rank in (0, 1, 3):
        assert specified[rank].startswith("PeerError: rank 2 ended without a message, perhaps killed for its memory")


@pytest.mark.slow
def test_a_rank_that_leaves_early_is_named_by_all_others(tmp_path: Path) -> None:
    specified = _ended(_leave_before_the_last_step, tmp_path)
    for rank in (0, 2, 3):
        assert "rank 1 ended without a message" in specified[rank]


@pytest.mark.slow
def test_an_input_refused_by_one_rank_ends_all(tmp_path: Path) -> None:
    specified = _ended(_give_rank_3_another_batch, tmp_path)
    assert specified[3].startswith("InputError: a batch of 7 samples does not divide into 4 micro-batches")
    for rank in range(3):
        assert specified[rank].startswith("PeerError: rank 3 failed: InputError: a batch of 7 samples")


@pytest.mark.slow
def test_ranks_end_though_the_one_that_failed_stays(tmp_path: Path) -> None:
    specified = _ended(_raise_and_stay, tmp_path, left=(2,))
    for rank in (0, 1, 3):
        assert "rank 2 failed: ValueError: the data of this rank are broken" in specified[rank]


def _step_after_a_refusal() -> float:
    model = _compiled(2)
    with pytest.raises(InputError, match="does not divide into 4 micro-batches"):
        model.train_step(_batch(7))
    return float(model.train_step(_batch()))


@pytest.mark.slow
def test_a_step_after_a_failure_is_refused(tmp_path: Path) -> None:
    specified = _ended(_go_on_after_a_failure, tmp_path)
    assert specified[2].startswith("PeerError: rank 2 failed: ValueError: the data of this rank are broken\n")
    assert "start all of them again" in specified[2]


def test_ranks_that_all_refuse_an_input_go_on(ranks: Ranks) -> None:
    first, second = ranks.run(_step_after_a_refusal)
    assert first == second
