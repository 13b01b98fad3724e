"""The pool of gloo ranks: answers by rank, tracebacks, hanging and dying ranks, and changing worlds."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.ranks import RankError, Ranks, RankTimeoutError, mesh

ROOT = Path(__file__).resolve().parents[2]


def _rank_and_sum(offset: int) -> dict[str, object]:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "sums": [total], "pid": os.getpid()}


def _sums_over_mesh() -> tuple[torch.Tensor, torch.Tensor]:
    two_by_two = mesh((2, 2), ("dp", "tp"))
    assert two_by_two is mesh((2, 2), ("dp", "tp"))
    sums = []
    for axis in ("dp", "tp"):
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total, group=two_by_two.get_group(axis))
        sums.append(total)
    return sums[0], sums[1]


def _threads_of_a_new_group() -> int:
    """Return the number of gloo threads that a new group starts; groups of earlier tests may still exist."""
    gc.collect()
    before = _threads_by_name()
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    return (_threads_by_name() - before)["pt_gloo_runloop"]


def _threads_by_name() -> Counter[str]:
    return Counter(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))


def _row_of_shared(x: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(x, mesh((dist.get_world_size(),), ("tp",)), [Shard(0)]).to_local()


def _dtensor() -> DTensor:
    return distribute_tensor(torch.ones(2), mesh((2,), ("tp",)), [Shard(0)])


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("this rank has had enough")
    dist.barrier()


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    time.sleep(3600)


def _hang_except(rank: int) -> None:
    if dist.get_rank() != rank:
        time.sleep(3600)


def _leaf_with_graph() -> torch.Tensor:
    return torch.ones(1000, requires_grad=True).mul(2)[:3]


def test_every_rank_answers_at_its_place(ranks: Ranks) -> None:
    answers = ranks.run(_rank_and_sum, 10, world_size=3)
    assert [answer["rank"] for answer in answers] == [0, 1, 2]
    assert all(answer["sums"] == [torch.tensor(33)] for answer in answers)


def test_processes_are_reused_by_the_next_call(ranks: Ranks) -> None:
    first, second = (ranks.run(_rank_and_sum, 0) for _ in range(2))
    assert [answer["pid"] for answer in first] == [answer["pid"] for answer in second]


def test_the_world_grows_and_shrinks_between_calls(ranks: Ranks) -> None:
    for world_size in (2, 4, 2, 1):
        x = torch.arange(world_size * 3.0).reshape(world_size, 3)
        rows = ranks.run(_row_of_shared, x, world_size=world_size)
        torch.testing.assert_close(torch.cat(rows), x)


def test_a_mesh_reduces_over_one_axis(ranks: Ranks) -> None:
    assert ranks.run(_sums_over_mesh, world_size=4) == [(2, 1), (4, 1), (2, 5), (4, 5)]


def test_a_mesh_is_made_anew_for_a_new_group(ranks: Ranks) -> None:
    first = ranks.run(_sums_over_mesh, world_size=4)
    ranks.run(_rank_and_sum, 0, world_size=2)
    assert ranks.run(_sums_over_mesh, world_size=4) == first


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted where Linux lists them")
def test_every_group_runs_its_collectives_in_one_thread(ranks: Ranks) -> None:
    assert ranks.run(_threads_of_a_new_group, world_size=4) == [1] * 4


def test_a_world_beyond_the_pool_is_refused(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="world_size=9: this pool has 1 to 8 ranks"):
        ranks.run(_rank_and_sum, 0, world_size=9)


def test_a_result_leaves_its_graph_and_storage_behind(ranks: Ranks) -> None:
    (result,) = ranks.run(_leaf_with_graph, world_size=1)
    assert not result.requires_grad
    assert result.untyped_storage().nbytes() == 3 * 4


def test_random_numbers_are_the_same_in_every_call(ranks: Ranks) -> None:
    first, second = ranks.run(torch.rand, 4), ranks.run(torch.rand, 4)
    assert all(torch.equal(result, first[0]) for result in first + second)


def test_a_dtensor_as_result_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"return its full_tensor\(\) or its to_local\(\)"):
        ranks.run(_dtensor)


def test_an_error_comes_back_with_rank_and_traceback(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed in tests\.support\.test_ranks\._fail_on") as caught:
        ranks.run(_fail_on, 1)
    assert caught.value.rank == 1
    assert "in _fail_on" in str(caught.value)
    assert "ValueError: this rank has had enough" in str(caught.value)
    assert len(ranks.run(_rank_and_sum, 0)) == 2


def test_a_rank_that_dies_is_named_with_its_exit_code(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"rank 2 of 3 died in .*_die_on with exit code 7"):
        ranks.run(_die_on, 2, world_size=3)
    assert len(ranks.run(_rank_and_sum, 0)) == 2


def test_hanging_ranks_are_named_killed_and_replaced(ranks: Ranks) -> None:
    before = ranks.run(_rank_and_sum, 0, world_size=3)
    with pytest.raises(RankTimeoutError, match=r"ranks 0, 2 of 3 had not answered after 0\.5 s") as caught:
        ranks.run(_hang_except, 1, world_size=3, timeout=0.5)
    assert caught.value.ranks == (0, 2)
    assert str(caught.value).count("in _hang_except") == 2
    after = ranks.run(_rank_and_sum, 0, world_size=3)
    assert not {answer["pid"] for answer in before} & {answer["pid"] for answer in after}


def _kill_the_parent_and_hang() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    if dist.get_rank() == 0:
        os.kill(parent.pid, signal.SIGKILL)
    time.sleep(3600)


@pytest.mark.slow
def test_hanging_ranks_die_with_the_process_that_started_them() -> None:
    script = "from tests.support import ranks, test_ranks as t; ranks.Ranks().run(t._kill_the_parent_and_hang)"
    # The ranks hold the write end of the pipe too, so its end is reached only when they are gone.
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, timeout=120)
    assert done.returncode == -signal.SIGKILL
