"""Dropout that draws the same mask for the same part of a tensor, wherever it lies, and once more in the backward.

Each draw has a seed of its own (see `randomness`), and that is all that is saved of it for the backward. The
deterministic mode draws the mask of the whole tensor from the default generator, exactly as one device would, and keeps
its part, a byte for each element: slower, for tests. Nothing here communicates.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, autograd

from autopar.runtime.collectives.layout_moves import local_slice
from autopar.runtime.collectives.mesh_axes import IN_ORDER, Axes, Axis, axes_of, part_of
from autopar.runtime.implementations.each_rank import Ranks, on_each_rank
from autopar.runtime.implementations.randomness import Draw, randomness, step_draws


def dropout(
    x: Tensor, p: float, train: bool, *, key: int, axes: Axes, sizes: Mapping[str, int], zigzag: Axes = IN_ORDER
) -> Tensor:
    """Compute `aten.dropout.default`; the factors of `sizes` are the dims of `x` in order.

    Moves nothing.
    """
    if p == 0 or not train:
        return x
    split = [axes_of(axes.get(factor, ())) for factor in sizes]
    if randomness().deterministic:
        drawn = kept_of_whole(x, list(sizes.values()), p, split, [zigzag.get(factor, ()) for factor in sizes])
    else:
        drawn = _draw_of_part(key, [axis for axes in split for axis in axes])
    return _Dropout.apply(x, p, drawn)


class _Dropout(autograd.Function):
    """Zero with probability `p`, else scaled; `drawn` is a draw or its seed, or (truth values) what it has kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, drawn: Tensor | Draw) -> Tensor:
        ctx.p = p
        if isinstance(drawn, Tensor) and (drawn.dtype is torch.bool or torch.compiler.is_compiling()):
            ctx.drawn = None
            ctx.save_for_backward(drawn)
        else:
            ctx.drawn = drawn  # a number: not worth computing anything again for
        return _multiplied(x, p, drawn)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        drawn = ctx.drawn if ctx.drawn is not None else ctx.saved_tensors[0]
        return _Dropout.apply(grad, ctx.p, drawn), None, None


def _multiplied(x: Tensor, p: float, drawn: Tensor | Draw) -> Tensor:
    """Multiply by a mask of zeros and 1 / (1 - p), bit by bit as PyTorch does."""
    if isinstance(drawn, Draw) or drawn.dtype is not torch.bool:
        drawn = _kept(list(x.shape), p, drawn, x.device)
    return x * (drawn.to(x.dtype).div_(1 - p) if p < 1 else drawn.to(x.dtype))


def kept_of_whole(
    x: Tensor, shape: list[int], p: float, split: Sequence[tuple[Axis, ...]], zigzag: Sequence[Sequence[str]]
) -> Tensor:
    """Return this rank's part of the mask of a whole of that shape, of the dtype and device of `x`.

    Nothing of padding is kept. `split` and `zigzag` have the axes that split each dim, and that zigzag-shard it.
    """
    kept = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p)
    for dim, axes in enumerate(split):
        for axis in axes:
            kept = local_slice(kept, axis, dim, axis.name in zigzag[dim])
    return kept.to(torch.bool)


def _draw_of_part(key: int, axes: Sequence[Axis]) -> Tensor | Draw:
    """Return this rank's part of a draw in a step that becomes a CUDA graph, else its seed."""
    if torch.compiler.is_compiling():
        return torch.ops.autopar_runtime.seed(key, part_of(axes))
    step = step_draws()
    return seed_of_part(key, axes) if step is None else step.draw(key, part_of(axes))


def seed_of_part(key: int, axes: Sequence[Axis]) -> Tensor:
    """Return the seed of this rank's part of a draw, of a tensor that the axes split: a number [], on the CPU."""

    def compute(ranks: Ranks) -> list[Tensor]:
        part = 0
        for axis, rank in zip(axes, ranks, strict=True):
            part = part * axis.size + rank
        return [torch.tensor(randomness().seed_of(key, part))]

    (seed,) = on_each_rank(compute, axes, ())
    return seed


def seed_on_device(key: int, device: torch.device) -> Tensor:
    """Return the seed of a draw that all ranks do alike: a number [] that kernels of the device read."""
    if torch.compiler.is_compiling():
        return torch.ops.autopar_runtime.seed_on_device(key, device)
    step = step_draws()
    return seed_of_part(key, ()) if step is None else step.draw(key, 0).seed(device)


def _kept(shape: list[int], p: float, drawn: Tensor | Draw, device: torch.device) -> Tensor:
    """Return a mask that is true with probability 1 - p."""
    if isinstance(drawn, Draw):
        return _mask(shape, p, drawn.generator(device))
    if torch.compiler.is_compiling():
        return torch.ops.autopar_runtime.kept(shape, p, drawn, device)
    (kept,) = on_each_rank(lambda _, seed: [_draw(shape, p, seed, device)], (), (drawn,))
    return kept


def _draw(shape: list[int], p: float, seed: Tensor, device: torch.device) -> Tensor:
    return _mask(shape, p, _generator(device, threading.get_ident()).manual_seed(int(seed)))


def _mask(shape: list[int], p: float, generator: torch.Generator) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=generator.device).bernoulli_(1 - p, generator=generator)


@functools.cache
def _generator(device: torch.device, thread: int) -> torch.Generator:
    """Return the generator of a device and thread; a backward may run in another thread than its forward.

    It is seeded for each draw.
    """
    return torch.Generator(device)


@torch.library.custom_op("autopar_runtime::seed", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _seed_op(key: int, part: int) -> Tensor:
    """Run `_draw_of_part` as a node of a compiled graph, which reads seed and step at run time.

    In a step that becomes a CUDA graph, a number stands for the draw.
    """
    step = step_draws()
    return torch.tensor(randomness().seed_of(key, part) if step is None else step.number_of(step.draw(key, part)))


@_seed_op.register_fake
def _(key: int, part: int) -> Tensor:
    return torch.empty((), dtype=torch.int64)


@torch.library.custom_op("autopar_runtime::seed_on_device", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _seed_on_device_op(key: int, device: torch.device) -> Tensor:
    """Run `seed_on_device` as a node of a compiled graph."""
    step = step_draws()
    if step is None:
        return torch.full((), randomness().seed_of(key, 0), dtype=torch.int64, device=device)
    return step.draw(key, 0).seed(device).clone()  # an operator returns no tensor that others read


@_seed_on_device_op.register_fake
def _(key: int, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


@torch.library.custom_op("autopar_runtime::kept", mutates_args=())
def _kept_op(shape: Sequence[int], p: float, seed: Tensor, device: torch.device) -> Tensor:
    """Run `_kept` as a node of a compiled graph."""
    step = step_draws()
    if step is None:
        return _draw(list(shape), p, seed, device)
    return _mask(list(shape), p, step.numbered(int(seed)).generator(device))


@_kept_op.register_fake
def _(shape: Sequence[int], p: float, seed: Tensor, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=device)
