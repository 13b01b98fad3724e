"""Attention over split positions on gloo ranks, compared with one process and torch's ring.

Causal, with grouped heads, forward and backward, by

    one process     flash attention on the whole
    ulysses         heads by all-to-all
    gather          keys and values gathered, by blocks; positions in order, and zigzag-sharded
    ring            keys and values travel; positions in order, and zigzag-sharded
    whole rows      ring self-attention: scores of whole rows are saved; up to 4096 positions, as long as they fit
    torch's ring    the ring template of torch.distributed.tensor.experimental, its zigzag, with the CPU's kernel
    mask            keys and values gathered, and a mask: what autopar did before it had blocks

Counted is the processor time of the slowest rank (two cores serve all ranks here, so that clocks tell little), and the
peak of the memory that a rank takes, its inputs excluded. All take turns in one run.

    python -m benchmarks.long_sequences
    python -m benchmarks.long_sequences --ranks 2 4 --positions 4096 16384

target: ring by zigzag at most 1.05 of torch's ring, gather by zigzag at most 0.6 of mask. A model whose positions are
split is measured by `benchmarks/long_llama.py`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as of_torch
from torch.nn import functional as F

from autopar.runtime.collectives import layout_moves
from autopar.runtime.collectives.mesh_axes import Axis, axis_of, use_mesh
from autopar.runtime.collectives.rank_parts import by_rank
from autopar.runtime.implementations.attention import ring_self_attention
from autopar.runtime.implementations.attention.by_blocks import attention
from autopar.runtime.ranks.launch import World, on_ranks
from autopar.tools.benchmarking.meters import LiveBytes
from benchmarks.timed_training import of_every_rank

AXIS = "cp"
MOST_WHOLE_ROWS = 4096  # positions: 16384 of 8 heads have 4 GiB of scores on each of 2 ranks
POSITIONS_DIM, HEADS_DIM = 2, 1
TORCH_RING = "torch's ring"
aten = torch.ops.aten
Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run, passed to each rank."""

    positions: int
    num_ranks: int
    heads: int
    key_heads: int
    features: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Line:
    """A contestant: processor seconds of the slowest rank, peak bytes without inputs, and the error of its result."""

    name: str
    seconds: float
    peak_bytes: int
    apart: float


def inputs_of(options: Options) -> tuple[Tensor, ...]:
    """Queries, keys, values [1, heads, positions, features], and the gradient of the result; the same everywhere."""
    torch.manual_seed(0)
    heads = (options.heads, options.key_heads, options.key_heads, options.heads)
    return tuple(torch.randn(1, each, options.positions, options.features) for each in heads)


def on_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Flash attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def by_blocks(options: Options, ring: bool, zigzag: bool) -> Callable[..., Tensor]:
    """autopar's own, which gathers keys and values or lets them travel."""
    sizes = {"s": options.positions, "t": options.positions}
    axes = {"s": (AXIS,), **({"t": (AXIS,)} if ring else {})}
    zigzag_dims = {"s": (AXIS,), "t": (AXIS,)} if zigzag else {}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not ring:
            k, v = (layout_moves.all_gather(x, AXIS, POSITIONS_DIM, options.positions, zigzag) for x in (k, v))
        return attention(q, k, v, None, 0.0, True, axes=axes, sizes=sizes, zigzag=zigzag_dims, enable_gqa=True)

    return run


def whole_rows(options: Options) -> Callable[..., Tensor]:
    """Keys travel for the scores, then values for the results."""
    sizes, axes = {"s": options.positions, "t": options.positions}, {"s": (AXIS,), "t": (AXIS,)}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_self_attention.attention(q, k, v, None, 0.0, True, axes=axes, sizes=sizes, enable_gqa=True)

    return run


def by_mask(options: Options, axis: Axis) -> Callable[..., Tensor]:
    """Gathered keys, and a mask of this rank's queries."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (layout_moves.all_gather(x, AXIS, POSITIONS_DIM, options.positions) for x in (k, v))
        mine = torch.arange(q.shape[2]) + axis.rank * q.shape[2]
        seen = torch.arange(options.positions) <= mine.unsqueeze(-1)
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)

    return run


def ulysses(options: Options) -> Callable[..., Tensor]:
    """Heads in place of positions, and back."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (layout_moves.all_to_all(x, AXIS, POSITIONS_DIM, HEADS_DIM, options.positions) for x in (q, k, v))
        return layout_moves.all_to_all(on_one(q, k, v), AXIS, HEADS_DIM, POSITIONS_DIM, options.heads)

    return run


class TorchRing(torch.autograd.Function):
    """Torch's ring template around the CPU's kernel, which it has no entry for."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        def op(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, **_: Any) -> tuple[Tensor, ...]:
            return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)

        out, lse, *_ = of_torch._templated_ring_attention(group, 2, op, query=q, key=k, value=v, is_causal=True)  # type: ignore[arg-type]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors

        def op(
            grad_out: Tensor,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            out: Tensor,
            logsumexp: Tensor,
            is_causal: bool,
            **_: Any,
        ) -> tuple[Tensor, ...]:
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, query, key, value, out, logsumexp, 0.0, is_causal
            )

        found = of_torch._templated_ring_attention_backward(
            ctx.group,
            2,
            op,  # type: ignore[arg-type]
            grad_out=grad.contiguous(),
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=lse,
            is_causal=True,
        )
        return (*found[:3], None)


def torch_ring(mesh: DeviceMesh) -> Callable[..., Tensor]:
    """Return PyTorch's ring attention over the mesh, as `context_parallel` would run it if it supported CPUs."""
    group = mesh.get_group()
    return lambda q, k, v: TorchRing.apply(q, k, v, group)


@dataclass(slots=True)
class Contestant:
    """An attention implementation on this rank's shard of the inputs, with its measurements."""

    run: Callable[..., Tensor]
    given: Tensors
    grad: Tensor
    expected: tuple[Tensor, ...]
    seconds: list[float]
    peak_bytes: int = 0
    apart: float = 0.0

    def step(self) -> None:
        """Forward and backward."""
        given = [x.detach().requires_grad_() for x in self.given]
        dist.barrier()
        start = time.process_time()
        out = self.run(*given)
        grads = torch.autograd.grad(out, given, self.grad)
        self.seconds.append(time.process_time() - start)
        self.apart = max(float((a - b).abs().max()) for a, b in zip((out.detach(), *grads), self.expected, strict=True))

    def measure(self) -> None:
        """The peak of one more step."""
        given = [x.detach().requires_grad_() for x in self.given]
        with LiveBytes(()) as live:
            torch.autograd.grad(self.run(*given), given, self.grad)
        self.peak_bytes = live.highest


def _attention(options: Options) -> list[Line]:
    """Every contestant in turns (runs on every rank; the lines are the same on all)."""
    mesh = init_device_mesh("cpu", (options.num_ranks,), mesh_dim_names=(AXIS,))
    of_torch._cp_options.enable_load_balance = True
    rank, whole = mesh.get_local_rank(), inputs_of(options)
    leaves = [x.requires_grad_() for x in whole[:3]]
    out = on_one(*leaves)
    expected = (out.detach(), *torch.autograd.grad(out, leaves, whole[3]))
    whole = tuple(x.detach() for x in whole)

    def contestant(run: Callable[..., Tensor], zigzag: bool) -> Contestant:
        mine = [by_rank(x, POSITIONS_DIM, options.num_ranks, zigzag)[rank].contiguous() for x in (*whole, *expected)]
        return Contestant(run, (mine[0], mine[1], mine[2]), mine[3], tuple(mine[4:]), [])

    with use_mesh(mesh):
        found = {
            "one process": Contestant(on_one, (whole[0], whole[1], whole[2]), whole[3], expected, []),
            "mask": contestant(by_mask(options, axis_of(AXIS)), False),
            TORCH_RING: contestant(torch_ring(mesh), True),
        }
        if options.key_heads % options.num_ranks == 0:
            found["ulysses"] = contestant(ulysses(options), False)
        for (name, ring), (order, zigzag) in itertools.product(
            (("gather", False), ("ring", True)), (("in order", False), ("zigzag", True))
        ):
            found[f"{name}, {order}"] = contestant(by_blocks(options, ring, zigzag), zigzag)
        if options.positions <= MOST_WHOLE_ROWS:
            found["whole rows"] = contestant(whole_rows(options), False)
        order = list(found.values())
        for turn in range(1 + options.rounds):
            for each in (*order[turn % len(order) :], *order[: turn % len(order)]):
                each.step()
        for each in order:
            each.measure()
    return [_line(name, each) for name, each in found.items()]


def _line(name: str, contestant: Contestant) -> Line:
    ranks = of_every_rank((contestant.seconds[1:], contestant.peak_bytes, contestant.apart))
    seconds = [max(each) for each in zip(*(rank[0] for rank in ranks), strict=True)]
    return Line(name, statistics.median(seconds), max(rank[1] for rank in ranks), max(rank[2] for rank in ranks))


def _facts() -> str:
    return (
        f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"torch {torch.__version__}, {datetime.date.today().isoformat()}; gloo, a thread a rank, float32"
    )


def table(lines: Sequence[Line]) -> str:
    """Return a table of each contestant, compared with one process, with the required ratios."""
    by_name = {line.name: line for line in lines}
    alone = by_name["one process"]
    rows = [
        (
            line.name,
            f"{line.seconds:.3f}",
            f"{line.seconds / alone.seconds:.2f}",
            f"{line.peak_bytes / 2**20:.0f}",
            f"{line.apart:.0e}",
        )
        for line in lines
    ]
    headers = ("contestant", "processor s, slowest rank", "of one process", "peak MiB", "apart")
    ring = by_name["ring, zigzag"].seconds / by_name[TORCH_RING].seconds
    gather = by_name["gather, zigzag"].seconds / by_name["mask"].seconds
    return (
        tabulate(rows, headers, disable_numparse=True)
        + f"\nring, zigzag / torch's ring: {ring:.2f}\ngather, zigzag / mask: {gather:.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--positions", type=int, nargs="*", default=[4096, 16384])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=4)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    print(_facts(), flush=True)
    for num_ranks, positions in itertools.product(given.ranks, given.positions):
        options = Options(positions, num_ranks, given.heads, given.key_heads, given.features, given.rounds)
        lines = on_ranks(World(num_ranks), _attention, (options,))
        print(f"\n{num_ranks} ranks, {positions} positions, heads {given.heads}/{given.key_heads}", flush=True)
        print(table(lines), flush=True)


if __name__ == "__main__":
    main()
