"""Timings of this machine as a training step meets it: on the ranks that call them together, and in medians.

A step does not get a machine's best speed. A collective comes between computations: the other ranks are
not there yet, the library's threads sleep, the caches hold something else, and ranks that share cores wait for each
other. So a collective is timed as the runtime runs it, copies included, after some computation on every rank:

    seconds of a collective = median over repetitions of (computation and collective) - (the computation alone)

and no less than the standard error of that: what it cannot tell from nothing may take so long.

Every number is that of the slowest rank over several calls in a row, which begin together as a step does: of single
calls the slowest ranks would be different ones, whose seconds add up to more than any rank takes. It is the median of
repetitions in turns over all that is timed together, so that a disturbance does not hit all repetitions of one.

Device compute is timed there without the host, which launches it: on CUDA a step is recorded as a graph and replayed.
The host's seconds for each call have a number of their own (`launch_s`), since a busy device does not wait for it.

Groups that do not hold all ranks are kept in step by a reduction of a few numbers over the other axes, after a second
computation, as the axes of a mesh take turns in a training step: else one group would compute while another waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from autopar.costs.hardware.profile import dtype_name
from autopar.costs.pricing.optimizer import Optimizer
from autopar.ir.program.program import TensorInfo
from autopar.runtime.collectives.layout_moves import raw_all_gather, raw_all_reduce, raw_all_to_all, raw_reduce_scatter
from autopar.runtime.collectives.mesh_axes import Axis
from autopar.strategies.rules.layers.attention import FUSED_BACKWARD
from autopar.tools.calibration.medians import standard_error
from autopar.tools.calibration.norms import FEATURES, counted_bytes, norm

MOST_CALLS = 20_000  # calls per timing
ENOUGH_SECONDS = 0.1  # seconds of the longest matmul that is timed
PIECE_SECONDS = 4e-3  # seconds of computation before a collective, as in a step of a small model
COMPUTE_SECONDS = 5e-2  # a timing repeats short calls until about here: ranks that share a core take turns of ms
SHORTEST = 1e-6  # seconds of a collective: it cannot be measured to cost less than nothing
FEW_BYTES = 16  # sum and count of a mean loss: too few for every step of a ring to have something to send
SHORTER = 4  # times as few queries tell what attention loses to short sequences
CHAIN = 64  # small operations in a row,
LAYERS = 8  # and large ones


@dataclass(frozen=True, slots=True)
class Effort:
    """Amount of measuring; the sizes of messages are in bytes, those of matmuls in rows."""

    message_bytes: tuple[int, ...] = tuple(1 << power for power in range(10, 27, 2))
    matmul_sizes: tuple[int, ...] = (512, 1024, 2048)
    repetitions: int = 20
    elementwise_bytes: int = 1 << 20  # one tensor, as large as the hidden states of a small model
    product: tuple[int, int] = (8, 1024)  # rows of a product that is bound by its matrix, and those of the matrix,
    # also the parameters of the optimizer step
    attention: tuple[int, int, int, int] = (8, 4, 64, 32)  # batch, heads, sequence and features, of a small model, too
    dtype: torch.dtype = torch.float32  # training dtype: of attention and of the optimizer step's parameters
    causal: bool = False  # attention
    fused: bool = False  # AdamW on DTensors; else it is torch's default of the device


CUDA = Effort(
    *(tuple(1 << power for power in range(10, 29, 2)), (2048, 4096, 8192), 20, 1 << 28),
    *((8, 8192), (2, 8, 4096, 128), torch.bfloat16, True),  # a rank's texts and heads: few, and long
)
BRIEF = Effort(tuple(1 << power for power in range(12, 23, 2)), (256, 512), 10, fused=True)
QUICK = Effort((1 << 12, 1 << 16, 1 << 20, 1 << 22), (256, 512), 5)


class Timer:
    """Times calls on one device; all ranks take part in each of its methods."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device = device
        self.effort = effort
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def seconds(self, call: Callable[[], object], inner: int = 1) -> float:
        """Return the seconds of one call, over `inner` of them."""
        self._wait()
        start = time.perf_counter()
        for _ in range(inner):
            call()
        self._wait()
        return (time.perf_counter() - start) / inner

    def median_seconds(
        self, calls: Sequence[Callable[[], object]], what: str, repeated_for: float = COMPUTE_SECONDS
    ) -> list[float]:
        """Return the median seconds of each call: over the repetitions, those of the rank that took longest."""
        return self._repeated(calls, what, repeated_for).quantile(0.5, dim=0).tolist()

    def _repeated(
        self, calls: Sequence[Callable[[], object]], what: str, repeated_for: float = COMPUTE_SECONDS
    ) -> Tensor:
        """Return [repetitions, calls]: the seconds of each call on the rank that took longest."""
        for call in calls:
            call()
        inner = [
            max(1, min(MOST_CALLS, int(repeated_for / each)))
            for each in self._slowest([self.seconds(c) for c in calls])
        ]

        silent = None if dist.get_rank() == 0 else True
        times = []
        for _ in tqdm(range(self.effort.repetitions), desc=what, delay=1, disable=silent, leave=False):
            for call, count in zip(calls, inner, strict=True):
                dist.barrier()
                times.append(self.seconds(call, count))
        return torch.tensor(self._slowest(times), dtype=torch.float64).reshape(-1, len(calls))

    def _slowest(self, values: Sequence[float]) -> list[float]:
        slowest = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.tolist()

    def on_device(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return the call as a device computes it: on CUDA a graph of its kernels, which the host launches at once."""
        if self.device.type != "cuda":
            return call
        stream, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            call()  # a graph must not contain the first call's setup
        # Another thread may ask for events meanwhile, as the one that watches NCCL does.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph.replay

    def matmul_flops(self, dtype: torch.dtype) -> dict[int, float]:
        """Measure the FLOP/s of square matmuls by their rows, until one takes long."""
        found: dict[int, float] = {}
        for size in self.effort.matmul_sizes:
            if found and 2 * size**3 / max(found.values()) > ENOUGH_SECONDS:
                break
            x, *weights = (
                torch.randn(size, size, device=self.device).to(dtype).requires_grad_() for _ in range(1 + LAYERS)
            )
            # Differentiated, as in a step: a product forward and two backward, which slow dtypes need not repeat.
            (one,) = self._slowest([self.seconds(_trained([x, weights[0]], [weights[0].mm]))])
            used = weights[: max(1, int(COMPUTE_SECONDS / one))]
            layers = self.on_device(_trained([x, *used], [weight.mm for weight in used]))
            (seconds,) = self.median_seconds([layers], f"matmul {dtype_name(dtype)} {size}")
            found[size] = 3 * len(used) * 2 * size**3 / seconds
        return found

    def elementwise_bytes_per_s(self) -> tuple[float, str]:
        """Return the bytes read plus bytes written per second by what makes no products, forward and backward, and of
        what.

        Counted as `cost.forward_seconds` does: inputs and output of each, once more for each input with a gradient.
        """
        if self.effort.dtype.itemsize < torch.float32.itemsize:
            return self._norm_bytes_per_s(), f"norms in {dtype_name(self.effort.dtype)}"
        x, y = (torch.randn(self.effort.elementwise_bytes // 4, device=self.device).requires_grad_() for _ in range(2))
        calls = [*(y.mul, y.add), torch.nn.functional.gelu, torch.nn.functional.silu] * (LAYERS // 4)
        (seconds,) = self.median_seconds([self.on_device(_trained([x, y], calls))], "elementwise")
        counted = LAYERS // 4 * (2 * 3 * 3 + 2 * 2 * 2)
        return counted * self.effort.elementwise_bytes / seconds, "products, sums and activations"

    def _norm_bytes_per_s(self) -> float:
        rows = max(1, self.effort.elementwise_bytes // (torch.float32.itemsize * FEATURES))
        x, weight = (
            torch.randn(shape, device=self.device).to(self.effort.dtype).requires_grad_()
            for shape in ((rows, FEATURES), (FEATURES,))
        )
        calls = [partial(norm, weight_D=weight)] * 2
        (seconds,) = self.median_seconds([self.on_device(_trained([x, weight], calls))], "norms")
        return len(calls) * counted_bytes(x) / seconds

    def product_bytes_per_s(self) -> float:
        """Return the bytes read plus bytes written per second of products of few rows, forward and backward."""
        rows, size = self.effort.product
        x, *weights = (
            torch.randn(each, size, device=self.device).requires_grad_() for each in (rows, *LAYERS * [size])
        )
        calls = [lambda x, weight=weight: torch.nn.functional.linear(x, weight) for weight in weights]
        step = self.on_device(_trained([x, *weights], calls))
        (seconds,) = self.median_seconds([step], "products of few rows")
        return LAYERS * 3 * 4 * (size * size + 2 * rows * size) / seconds

    def attention_flops(self) -> dict[int, float]:
        """Measure the FLOP/s of fused attention by its queries, forward and backward, at equal total work.

        They are those of the effort, and SHORTER times as few.
        """
        batch, heads, whole, features = self.effort.attention
        calls = []
        for times in (1, SHORTER):
            shape, dtype = (batch * times, heads, whole // times, features), self.effort.dtype
            q, k, v = (torch.randn(shape, device=self.device).to(dtype).requires_grad_() for _ in range(3))
            causal = self.effort.causal
            attend = partial(torch.nn.functional.scaled_dot_product_attention, key=k, value=v, is_causal=causal)
            calls.append(self.on_device(_trained([q, k, v], [attend] * LAYERS)))
        each = dict(zip((whole, whole // SHORTER), self.median_seconds(calls, "attention"), strict=True))
        scores = batch * heads * whole * (0.5 if self.effort.causal else 1)
        rows = (1 + FUSED_BACKWARD) * LAYERS * 4 * scores * features
        return {length: rows * length / seconds for length, seconds in each.items()}

    def _matmul(self, size: int, dtype: torch.dtype = torch.float32) -> Callable[[], object]:
        a, b = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
        return lambda: a @ b

    def _piece(self) -> Callable[[], object]:
        """Return a computation of about PIECE_SECONDS on a rank of its own."""
        matmul = self._matmul(self.effort.matmul_sizes[0])
        (seconds,) = self.median_seconds([matmul], "computation", PIECE_SECONDS)
        count = max(1, round(PIECE_SECONDS / seconds))

        def compute() -> None:
            for _ in range(count):
                matmul()

        return compute

    def host_link_bytes_per_s(self) -> float:
        """Return the bytes per second between the device and its host, in the slower direction."""
        count = self.effort.message_bytes[-1] // torch.float32.itemsize
        there = torch.empty(count, pin_memory=self.device.type == "cuda")
        here = torch.empty(count, device=self.device)
        calls = [partial(there.copy_, here, non_blocking=True), partial(here.copy_, there, non_blocking=True)]
        return count * torch.float32.itemsize / max(self.median_seconds(calls, "link to the host"))

    def optimizer_bytes_per_s(self, device: torch.device | None = None) -> float:
        """Return the bytes read plus bytes written per second of a fused step of AdamW, counted as `cost` does.

        It is on the own device of each rank, or on the host, all ranks at once.
        """
        _, size = self.effort.product
        dtype = self.effort.dtype if device is None else torch.float32
        place = device or self.device
        weights = [torch.randn(size, size, device=place).to(dtype).requires_grad_() for _ in range(LAYERS)]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer = torch.optim.AdamW(weights, fused=True)
        (seconds,) = self.median_seconds([optimizer.step], "optimizer")
        info = TensorInfo((size, size), dtype, requires_grad=True)
        return LAYERS * size**2 * Optimizer("adamw").step_bytes(info) / seconds

    def op_latency_s(self) -> tuple[float, float]:
        """Return the seconds of a product of two numbers in a graph that is differentiated, its backward being two
        more.

        Those of the device, and those until the host is done: the same where it is the device.
        """
        x = torch.ones(1, device=self.device, requires_grad=True)

        def chain() -> None:
            y = x
            for _ in range(CHAIN):
                y = y * x
            torch.autograd.grad(y, x)

        calls = [chain] if self.device.type == "cpu" else [self.on_device(chain), chain]
        seconds = [each / (3 * CHAIN) for each in self.median_seconds(calls, "operation")]
        return seconds[0], seconds[-1]

    def collectives(self, axis: Axis, others: Axis | None = None) -> dict[tuple[str, int], float]:
        """Measure seconds by (collective, bytes in NCCL's convention), on the groups of all ranks at once.

        Of every collective in the sizes of the effort, and of an all-reduce of FEW_BYTES. `others` are the other axes
        of the mesh.
        """
        sizes = [_fitting(num_bytes, axis.size) for num_bytes in self.effort.message_bytes]
        cases = [(name, num_bytes) for name in COLLECTIVES for num_bytes in sizes]
        moves = [COLLECTIVES[name](num_bytes, axis, self.device) for name, num_bytes in cases]
        cases.append(("all_reduce", FEW_BYTES))
        few = torch.zeros(FEW_BYTES // 8, dtype=torch.float64, device=self.device)
        moves.append(_all_reduce_of(few, axis))
        compute = self._piece()
        keep_step = _in_order([] if others is None else [compute, _all_reduce_of(few, others)])
        calls = [_in_order([compute, *move, keep_step]) for move in ([], *([move] for move in moves))]
        quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
        seconds = self._repeated(calls, f"collectives over {axis.name}")
        low, median, high = (seconds[:, 1:] - seconds[:, :1]).quantile(quartiles, dim=0)
        error = standard_error(high - low, len(seconds))
        return dict(zip(cases, median.maximum(error).clamp(min=SHORTEST).tolist(), strict=True))

    def hidden_share(self, group: dist.ProcessGroup) -> float:
        """Measure the share of a large all-reduce that overlaps with matmuls taking about as long."""
        num_bytes = _fitting(self.effort.message_bytes[-1], group.size())
        whole = torch.zeros(num_bytes // 4, device=self.device)

        def start() -> dist.Work:
            work = dist.all_reduce(whole, group=group, async_op=True)
            assert work is not None, "a rank outside of the group takes no part in its collectives"
            return work

        def move() -> None:
            start().wait()

        one_matmul = self._matmul(self.effort.matmul_sizes[0])
        moving, one = self.median_seconds([move, one_matmul], "reduction alone")
        count = max(1, round(moving / one))

        def compute() -> None:
            for _ in range(count):
                one_matmul()

        def both() -> None:
            work = start()
            compute()
            work.wait()

        moving, computing, together = self.median_seconds(
            [move, compute, both], "reduction overlapped with matmuls", 0.0
        )
        return min(1.0, max(0.0, (moving + computing - together) / min(moving, computing)))


def _in_order(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Return one call that makes all of these calls in order."""

    def run() -> None:
        for call in calls:
            call()

    return run


def _fitting(num_bytes: int, size: int) -> int:
    """Return the next number of bytes that is a whole number of float32 elements for each of `size` ranks."""
    return -(-num_bytes // (4 * size)) * 4 * size


def _trained(leaves: Sequence[Tensor], calls: Sequence[Callable[[Tensor], Tensor]]) -> Callable[[], object]:
    """Return a call that runs forward and backward of each of these on the first of the leaves.

    Not one call on what another made: numbers that grow or vanish take a processor longer than others.
    """
    ones = torch.ones_like(leaves[0])

    def step() -> None:
        for y in [call(leaves[0]) for call in calls]:
            torch.autograd.grad(y, leaves, ones, allow_unused=True)

    return step


Move = Callable[[], object]
"""A collective on buffers of its own, as the runtime runs it where nothing is rearranged: copies are priced apart."""


def _whole(num_bytes: int, device: torch.device) -> Tensor:
    return torch.zeros(1, num_bytes // 4, device=device)


def _all_reduce_of(whole: Tensor, axis: Axis) -> Move:
    return lambda: raw_all_reduce(whole, axis)


def _all_reduce(num_bytes: int, axis: Axis, device: torch.device) -> Move:
    return _all_reduce_of(_whole(num_bytes, device), axis)


def _all_gather(num_bytes: int, axis: Axis, device: torch.device) -> Move:
    part, size = _whole(num_bytes // axis.size, device), num_bytes // 4
    return lambda: raw_all_gather(part, axis, 1, size)


def _reduce_scatter(num_bytes: int, axis: Axis, device: torch.device) -> Move:
    whole = _whole(num_bytes, device)
    return lambda: raw_reduce_scatter(whole, axis, 1)


def _all_to_all(num_bytes: int, axis: Axis, device: torch.device) -> Move:
    part = _whole(num_bytes, device)
    return lambda: raw_all_to_all(part, axis, 0, 1, axis.size)


COLLECTIVES: Mapping[str, Callable[[int, Axis, torch.device], Move]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
