"""Matmuls overlapped with their collectives: async tensor parallelism, offered on request.

    rows + o    the input is gathered in chunks, each multiplied by columns of the weight while the next arrives
    rows + k    of what rows of the weight give, each chunk is reduced in parts while the next is multiplied

as between blocks of which positions are split (Korthikanti et al., "Reducing Activation Recomputation", 2022; Wang et
al., "Overlap Communication with Dependent Computation via Decomposition", 2023; PyTorch's async tensor parallelism).
Rows are those of the last dim before the features: positions. Collectives and bytes are those of the plain gather, or
reduction, and of its backward: gathered rows are kept for that, as there. Calls that share an input, as queries,
keys and values do, gather it once, all of them or none: its traffic and what is kept of it are the first one's.

    rows + o, again    the input is gathered whole; a rank keeps its own rows, and gathers the others again in the
                       backward, overlapped with the input's gradient, whose reduction overlaps with the weight's

as Megatron-LM has it (Korthikanti et al.): one more collective for less memory, requested by a name of its own. In a
segment that gathers again (`recompute="selective"`) gathers in chunks do the same in the backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from autopar.ir.sharding.layout import Placement, R, S
from autopar.ir.sharding.operation import Call, Collective, Implementation, LocalSizes
from autopar.ir.sharding.rule import TOGETHER, Choice
from autopar.strategies.notation import batch_names

aten = torch.ops.aten

NAME = "async_tensor_parallel"
AGAIN = "megatron_regather"
MOST_CHUNKS = 4
"""Maximum number of chunks; one part in so many of the traffic overlaps with no product."""
LEAST_BYTES = 2**22  # assumed: NVLink moves as much in about the latency of a collective
COLUMN, ROW = "o", "k"


def leading_factors(call: Call) -> list[str]:
    """The factors of the input before its features; the last of them are the rows."""
    num_leading = len(call.inputs[0].shape) - 1
    if call.target is aten.linear.default:
        return [f"...{number}" for number in range(num_leading)]
    return [*batch_names(num_leading - 1), "m"]


def chunks_of(leading: Sequence[int], num_bytes: int) -> tuple[int, tuple[int, ...]]:
    """The dim along which a rank's samples and rows are taken in chunks, and the size of each, as equal as they can be.

    `leading` are the sizes of its dims before the features, `num_bytes` what travels of all ranks. Chunks of samples
    lie in memory as their products do; there are chunks of rows where samples are too few.
    """
    wanted = max(1, min(MOST_CHUNKS, int(num_bytes) // LEAST_BYTES))
    along = 0 if leading[0] >= wanted else len(leading) - 1
    size, count = leading[along], min(wanted, int(leading[along]))
    ends = [size * number // count for number in range(count + 1)]
    return along, tuple(end - start for start, end in itertools.pairwise(ends))


def together(call: Call, factor: str) -> str:
    """The choice that splits rows together with columns or rows of the weight."""
    return f"{leading_factors(call)[-1]}{TOGETHER}{factor}"


def in_chunks(call: Call) -> tuple[Implementation, ...]:
    """The implementations of a product by a matrix; none where the input is a vector."""
    x, weight = call.inputs[:2]
    if len(x.shape) < 2 or len(weight.shape) != 2:
        return ()
    rows, features = S(len(x.shape) - 2), S(len(x.shape) - 1)
    transposed = call.target is aten.linear.default
    column, row = (S(0), S(1)) if transposed else (S(1), S(0))
    with_bias = len(call.inputs) > 2

    def choice(factor: str, inputs: tuple[Placement, Placement], output: Placement, bias: Placement) -> Choice:
        return Choice(together(call, factor), (*inputs, *((bias,) if with_bias else ())), (output,))

    first = Implementation(
        f"products.chunked:{call.name}",
        frozenset(),
        traffic=_traffic,
        zigzag=True,
        name=NAME,
        on_demand=True,
        scratch_bytes=_scratch_bytes,
        saved_bytes=_saved_bytes,
        backward_bytes=_backward_bytes,
        unkept=_unkept,
        hidden_share=_hidden_share,
        choices=(choice(COLUMN, (rows, column), features, S(0)), choice(ROW, (features, row), rows, R)),
        launches=_launches,
        shared=frozenset({together(call, COLUMN)}),
    )
    regathering = replace(
        first,
        traffic=_traffic_regathering,
        keywords=(("again", 1),),
        saved_bytes=_nothing,
        unkept=None,
        backward_bytes=_regathered_bytes,
        hidden_share=_hidden_share_regathering,
    )
    again = replace(
        first,
        traffic=_traffic_again,
        keywords=(("again", 1), ("whole", 1)),
        name=AGAIN,
        scratch_bytes=_gathered_bytes,
        saved_bytes=_own_rows,
        backward_bytes=_travelling_bytes,
        hidden_share=_hidden_share_again,
        choices=first.choices[:1],
        launches=None,
    )
    return tuple(
        replace(each, regathering=other, follower=replace(_follower(each), regathering=_follower(other)))
        for each, other in ((first, regathering), (again, replace(again, saved_bytes=_nothing, unkept=None)))
    )


def _follower(implementation: Implementation) -> Implementation:
    """Return what runs a call whose input comes with that of another call."""
    return replace(implementation, traffic=_of_scattered, saved_bytes=_nothing)


def _of_scattered(call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
    """The traffic of a call whose input comes with that of another."""
    return () if _gathers(sizes) else _traffic(call, sizes)


def _nothing(call: Call, sizes: LocalSizes) -> int:
    """No bytes: another call keeps them, or they count as those of an input."""
    return 0


def _gathers(sizes: LocalSizes) -> bool:
    """Return whether rows are gathered; otherwise they are reduced in parts."""
    return TOGETHER + COLUMN in sizes


def _moved(call: Call, sizes: LocalSizes) -> list[int]:
    """Bytes of each chunk of all ranks that split rows: of the input, or of the output."""
    leading = [sizes[name] for name in leading_factors(call)]
    factor, info = (ROW, call.inputs[0]) if _gathers(sizes) else (COLUMN, call.outputs[0])
    each = sizes[factor] * info.dtype.itemsize * sizes[TOGETHER + (COLUMN if _gathers(sizes) else ROW)]
    along, counts = chunks_of(leading, math.prod(leading) * each)
    others = math.prod(size for dim, size in enumerate(leading) if dim != along)
    return [count * others * each for count in counts]


def _learns(call: Call, sizes: LocalSizes) -> bool:
    """Return whether the backward has a collective, too."""
    return (call.inputs[0] if _gathers(sizes) else call.outputs[0]).requires_grad


def _traffic(call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
    """Rows gathered and their gradients reduced, or results reduced and their gradients gathered, chunk by chunk."""
    if not _splits(sizes):
        return ()
    chunks, over = _moved(call, sizes), TOGETHER + (COLUMN if _gathers(sizes) else ROW)
    ways = ("all_gather", "reduce_scatter") if _gathers(sizes) else ("reduce_scatter", "all_gather")
    passes = (False, True) if _learns(call, sizes) else (False,)
    return tuple(Collective(ways[backward], over, each, backward) for backward in passes for each in chunks)


def _splits(sizes: LocalSizes) -> bool:
    """Return whether an axis of several ranks splits rows together with columns or rows of the weight."""
    return TOGETHER + COLUMN in sizes or TOGETHER + ROW in sizes


def _hidden_share(call: Call, sizes: LocalSizes) -> float:
    """Return the share of all but one chunk; reductions of rows' gradients overlap with the weight's, too."""
    beside = 1 - 1 / len(_moved(call, sizes))
    if not (_gathers(sizes) and _learns(call, sizes) and call.inputs[1].requires_grad):
        return beside
    return (beside + 1) / 2


def _scratch_bytes(call: Call, sizes: LocalSizes) -> int:
    """Rows of other ranks, or results for them; and the weight, which every chunk is multiplied by."""
    moved = _moved(call, sizes)
    return sum(moved) + sizes[COLUMN] * sizes[ROW] * call.inputs[1].dtype.itemsize * (len(moved) - 1)


def _saved_bytes(call: Call, sizes: LocalSizes) -> int:
    """The rows that were gathered, for the weight's gradient."""
    return sum(_moved(call, sizes)) if _gathers(sizes) and call.inputs[1].requires_grad else 0


def _backward_bytes(call: Call, sizes: LocalSizes) -> int:
    """The rows that were gathered; or gradients of all results, which are gathered for the weight's."""
    return sum(_moved(call, sizes)) if call.inputs[1].requires_grad else 0


def _unkept(call: Call, sizes: LocalSizes) -> frozenset[int]:
    """This rank's rows, which are among those that were gathered."""
    return frozenset({0}) if _gathers(sizes) else frozenset()


def _launches(call: Call, sizes: LocalSizes) -> int:
    """A product for each chunk."""
    return len(_moved(call, sizes))


def _gathered_bytes(call: Call, sizes: LocalSizes) -> int:
    """The rows of all ranks."""
    return sum(_moved(call, sizes))


def _travelling_bytes(call: Call, sizes: LocalSizes) -> int:
    """The rows of all ranks as they arrive and as they are used, and their gradients on their way."""
    whole = _gathered_bytes(call, sizes)
    return 2 * whole * call.inputs[1].requires_grad + whole * _learns(call, sizes)


def _own_rows(call: Call, sizes: LocalSizes) -> int:
    """This rank's rows, of which those of all are gathered again for the weight's gradient."""
    return _gathered_bytes(call, sizes) // sizes[TOGETHER + COLUMN] if call.inputs[1].requires_grad else 0


def _traffic_again(call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
    """Rows gathered, gathered again for the weight's gradient, and their own gradients reduced."""
    if not _splits(sizes):
        return ()
    over, whole = TOGETHER + COLUMN, _gathered_bytes(call, sizes)
    found = [Collective("all_gather", over, whole)]
    if call.inputs[1].requires_grad:
        found.append(Collective("all_gather", over, whole, True))
    if _learns(call, sizes):
        found.append(Collective("reduce_scatter", over, whole, True))
    return tuple(found)


def _hidden_share_again(call: Call, sizes: LocalSizes) -> float:
    """Return the share of the traffic that overlaps with products: that of the backward, if it has two products.

    The backward then has two of three collectives.
    """
    return 2 / 3 if _learns(call, sizes) and call.inputs[1].requires_grad else 0.0


def _traffic_regathering(call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
    """Rows gathered in chunks, and in the backward as by `_traffic_again`; results reduced as by `_traffic`."""
    if not _gathers(sizes) or not _splits(sizes):
        return _traffic(call, sizes)
    forward = (each for each in _traffic(call, sizes) if not each.backward)
    return (*forward, *(each for each in _traffic_again(call, sizes) if each.backward))


def _regathered_bytes(call: Call, sizes: LocalSizes) -> int:
    return (_travelling_bytes if _gathers(sizes) else _backward_bytes)(call, sizes)


def _hidden_share_regathering(call: Call, sizes: LocalSizes) -> float:
    """All but one chunk of the forward, and what travels in the backward if there are two products."""
    if not _gathers(sizes):
        return _hidden_share(call, sizes)
    beside, learns, weighs = 1 - 1 / len(_moved(call, sizes)), _learns(call, sizes), call.inputs[1].requires_grad
    return (beside + 2 * (learns and weighs)) / (1 + learns + weighs)
