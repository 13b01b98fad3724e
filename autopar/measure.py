"""Timings of this machine on the ranks that call them together: matmuls, copies, collectives, and both at once.

The best of several repetitions counts, as a roofline asks for what the machine can do. Repetitions are interleaved over
the sizes, so that a disturbance does not hit all those of one. Every rank computes at the same time, as in training,
and a number is that of the slowest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tqdm import tqdm

MOST_CALLS = 20_000  # of one timing
Start = Callable[[], dist.Work | None]
"""Starts a collective on buffers of its own."""
ENOUGH_SECONDS = 0.3  # of a matmul: one that would take longer says no more
CALL_SECONDS = 5e-3  # a timing repeats short collectives until about here,
COMPUTE_SECONDS = 5e-2  # and what a rank computes alone: ranks that share a core take turns of milliseconds


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured; the sizes of messages are in bytes, those of matmuls in rows."""

    message_bytes: tuple[int, ...] = tuple(1 << power for power in range(10, 27, 2))
    matmul_sizes: tuple[int, ...] = (512, 1024, 2048)
    copy_bytes: int = 1 << 28  # well beyond the caches
    repetitions: int = 10


CUDA = Effort(tuple(1 << power for power in range(10, 29, 2)), (2048, 4096, 8192), 1 << 30, 20)
BRIEF = Effort(tuple(1 << power for power in range(10, 25, 2)), (512,), 1 << 26, 5)
QUICK = Effort((1 << 10, 1 << 14, 1 << 18, 1 << 22), (256, 512), 1 << 25, 3)


class Timer:
    """Times calls on one device; all ranks take part in each of its methods."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device = device
        self.effort = effort
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def seconds(self, call: Callable[[], object], inner: int = 1) -> float:
        """Seconds of one call, over `inner` of them."""
        self._wait()
        start = time.perf_counter()
        for _ in range(inner):
            call()
        self._wait()
        return (time.perf_counter() - start) / inner

    def best_seconds(
        self, calls: Sequence[Callable[[], object]], what: str, repeated_for: float = CALL_SECONDS
    ) -> list[float]:
        """The least seconds of each call: over the repetitions, those of the rank that took longest."""
        for call in calls:
            call()
        inner = [
            max(1, min(MOST_CALLS, int(repeated_for / each)))
            for each in self._slowest([self.seconds(c) for c in calls])
        ]
        times = []
        silent = None if dist.get_rank() == 0 else True
        for _ in tqdm(range(self.effort.repetitions), desc=what, delay=1, disable=silent, leave=False):
            for call, count in zip(calls, inner, strict=True):
                dist.barrier()
                times.append(self.seconds(call, count))
        slowest = torch.tensor(self._slowest(times)).reshape(self.effort.repetitions, len(calls))
        return slowest.amin(dim=0).tolist()

    def _slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks' values, one by one."""
        slowest = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.tolist()

    def matmul_flops(self, dtype: torch.dtype) -> tuple[float, int]:
        """FLOP/s of the square matmul of the best size, and its rows."""
        best = (0.0, 0)
        for size in self.effort.matmul_sizes:
            if best[0] and 2 * size**3 / best[0] > ENOUGH_SECONDS:
                break
            a, b = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
            (seconds,) = self.best_seconds([lambda a=a, b=b: a @ b], f"matmul {_name(dtype)} {size}", COMPUTE_SECONDS)
            best = max(best, (2 * size**3 / seconds, size))
        return best

    def copy_bytes_per_s(self) -> float:
        """Bytes read plus bytes written per second of a large copy."""
        source = torch.zeros(self.effort.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        (seconds,) = self.best_seconds([lambda: target.copy_(source)], "copy", COMPUTE_SECONDS)
        return 2 * self.effort.copy_bytes / seconds

    def op_latency_s(self) -> float:
        """Seconds of an addition of one element, one after the other."""
        x = torch.ones(1, device=self.device)
        (seconds,) = self.best_seconds([lambda: x + x], "operation", COMPUTE_SECONDS)
        return seconds

    def collectives(self, group: dist.ProcessGroup, what: str) -> dict[tuple[str, int], float]:
        """(collective, bytes in NCCL's convention) → seconds, on the groups of all ranks at the same time."""
        sizes = [_fitting(num_bytes, group.size()) for num_bytes in self.effort.message_bytes]
        cases = [(name, num_bytes) for name in COLLECTIVES for num_bytes in sizes]
        calls = [_waiting(COLLECTIVES[name](num_bytes, group, self.device)) for name, num_bytes in cases]
        return dict(zip(cases, self.best_seconds(calls, what), strict=True))

    def hidden_share(self, collective: str, group: dist.ProcessGroup) -> float:
        """Which share of a large collective hides behind matmuls that take about as long."""
        start = COLLECTIVES[collective](_fitting(self.effort.message_bytes[-1], group.size()), group, self.device)
        move = _waiting(start)
        size = self.effort.matmul_sizes[0]
        x, product = (torch.randn(size, size, device=self.device) for _ in range(2))
        moving, one = self.best_seconds(
            [move, lambda: torch.mm(x, x, out=product)], f"{collective} alone", COMPUTE_SECONDS
        )
        count = max(1, round(moving / one))

        def compute() -> None:
            for _ in range(count):
                torch.mm(x, x, out=product)

        def both() -> None:
            work = start()
            compute()
            assert work is not None
            work.wait()

        moving, computing, together = self.best_seconds([move, compute, both], f"{collective} beside matmuls")
        return min(1.0, max(0.0, (moving + computing - together) / min(moving, computing)))


def _fitting(num_bytes: int, size: int) -> int:
    """The next number of bytes that makes a whole number of float32 elements for each of `size` ranks."""
    return -(-num_bytes // (4 * size)) * 4 * size


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _buffers(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of `num_bytes`, and one rank's part of it."""
    whole = torch.zeros(num_bytes // 4, device=device)
    return whole, torch.zeros(len(whole) // group.size(), device=device)


def _all_reduce(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> Start:
    whole, _ = _buffers(num_bytes, group, device)
    return lambda: dist.all_reduce(whole, group=group, async_op=True)


def _all_gather(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> Start:
    whole, part = _buffers(num_bytes, group, device)
    return lambda: dist.all_gather_single(whole, part, group=group, async_op=True)


def _reduce_scatter(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> Start:
    whole, part = _buffers(num_bytes, group, device)
    return lambda: dist.reduce_scatter_single(part, whole, group=group, async_op=True)


def _all_to_all(num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> Start:
    whole, _ = _buffers(num_bytes, group, device)
    received = torch.zeros_like(whole)
    return lambda: dist.all_to_all_single(received, whole, group=group, async_op=True)


def _waiting(start: Start) -> Callable[[], None]:
    """A call that starts the collective and waits for it."""

    def call() -> None:
        work = start()
        assert work is not None, "a rank outside of the group takes no part in its collectives"
        work.wait()

    return call


COLLECTIVES: Mapping[str, Callable[[int, dist.ProcessGroup, torch.device], Start]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
