"""Any random call of ATen, drawing the same numbers for the same part of its result, wherever that lies.

The default generator is seeded for the call and set back behind it (see `randomness`). In a step that becomes a CUDA
graph, the call takes a generator of its own. The deterministic mode gathers the inputs, draws the whole result from the
default generator as one device would, and takes its part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensorMode, local_tensor_mode
from torch.utils import _pytree as pytree

from autopar.errors import InputError
from autopar.runtime.collectives.layout_moves import all_gather_invariant, split_replicated
from autopar.runtime.collectives.mesh_axes import IN_ORDER, Axes, axes_of, on_rank, part_of
from autopar.runtime.implementations.randomness import randomness, step_draws
from autopar.strategies.notation import names

GENERATOR = "generator"
SIZE = "size"
"""Name of ATen's argument that states the shape of a new tensor."""


@torch.compiler.disable
def seeded(
    *args: Any,
    op: torch._ops.OpOverload,
    key: int,
    axes: Axes,
    sizes: Mapping[str, int],
    zigzag: Axes = IN_ORDER,
    **kwargs: Any,
) -> Any:
    """Compute `op`, a draw, whose factors are called a, b, c … after the dims of its result.

    Moves nothing outside tests. Under torch.compile it stands between compiled regions.
    """
    if randomness().deterministic:
        return _of_whole(op, args, kwargs, axes, sizes, zigzag) if axes else op(*args, **kwargs)
    split = [axis for factor in sizes for axis in axes_of(axes.get(factor, ()))]
    step, device = step_draws(), _device_of(args, kwargs)
    if step is not None and (drawing := taking_generator(op)) is not None:
        return drawing(*args, generator=step.draw(key, part_of(split)).generator(device), **kwargs)
    with _seeded_generator(device, key, part_of(split)):
        return op(*args, **kwargs)


def taking_generator(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the overload of a draw that takes a generator in addition; None if there is none."""

    def arguments(each: torch._ops.OpOverload) -> list[str]:
        return [argument.name for argument in each._schema.arguments]

    packet = op.overloadpacket
    others = (getattr(packet, name) for name in packet.overloads())
    expected = {*arguments(op), GENERATOR}
    return next((each for each in (op, *others) if set(arguments(each)) == expected), None)


def _of_whole(
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    axes: Axes,
    sizes: Mapping[str, int],
    zigzag: Axes,
) -> Any:
    """Return this rank's part of what one device would draw; raise InputError if factors and dims do not match."""
    if op.namespace != "aten":
        over = ", ".join(dict.fromkeys(axis for each in axes.values() for axis in each))
        raise InputError(
            f"Run(deterministic=True) draws whole tensors, as one device does; found {op}, whose numbers are drawn by "
            f"a rule that splits it over {over}. Leave deterministic out, or register no rule for it."
        )
    position = next((i for i, each in enumerate(op._schema.arguments) if each.name == SIZE), None)
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    shape = torch.broadcast_shapes(*(x.shape for x in tensors)) if position is None else args[position]
    factors = names(len(shape))
    split = [
        (dim, sizes[factor], axes_of(axes[factor]), zigzag.get(factor, ()))
        for dim, factor in enumerate(factors)
        if factor in axes
    ]

    def gathered(x: Tensor) -> Tensor:
        for dim, size, over, in_zigzag in split:
            place = dim - len(shape) + x.ndim  # inputs are broadcast to the result
            if place >= 0 and x.shape[place] == shape[dim]:
                for axis in reversed(over):  # one device draws nothing for padding, which only one axis splits
                    local = min(x.shape[place] * axis.size, size)
                    x = all_gather_invariant(x, axis.name, place, local, axis.name in in_zigzag)
        return x

    args, kwargs = pytree.tree_map_only(Tensor, gathered, (tuple(args), dict(kwargs)))
    if position is not None:
        whole = list(shape)
        for dim, size, *_ in split:
            whole[dim] = size
        args = (*args[:position], whole, *args[position + 1 :])
    result = op(*args, **kwargs)
    for dim, _, over, in_zigzag in split:
        for axis in over:
            result = split_replicated(result, axis.name, dim, axis.name in in_zigzag)
    return result


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor | torch.device):
            return leaf.device if isinstance(leaf, Tensor) else leaf
    return torch.device("cpu")


@contextlib.contextmanager
def _seeded_generator(device: torch.device, key: int, part: Any) -> Iterator[None]:
    """Seed the default generator for the block, and set it back behind it."""
    mode = local_tensor_mode()
    if mode is not None:
        with _seeded_on_each_rank(mode, key, part):
            yield
        return
    generator = torch.default_generator
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[number]
    before = generator.get_state()
    generator.manual_seed(randomness().seed_of(key, part))
    try:
        yield
    finally:
        generator.set_state(before)


@contextlib.contextmanager
def _seeded_on_each_rank(mode: LocalTensorMode, key: int, part: Any) -> Iterator[None]:
    """Seed the generators of simulated ranks, as `_seeded_generator` does; `part` may be a number per rank."""
    states = mode._per_rank_rng_states
    before = dict(states)
    with mode.disable():
        for rank in mode.ranks:
            seed = randomness().seed_of(key, on_rank(part, rank))
            states[rank] = (torch.Generator().manual_seed(seed).get_state(), {})
    try:
        yield
    finally:
        states.update(before)
