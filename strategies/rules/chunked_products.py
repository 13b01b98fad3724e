"""Products beside whose collectives a rank computes: async tensor parallelism, offered where it is asked for.

    rows + o    rows of the input are gathered in chunks, each multiplied by columns of the weight while the next arrives
    rows + k    of what rows of the weight give, each chunk is reduced in parts while the next is multiplied

as between blocks of which positions are split (Korthikanti et al., "Reducing Activation Recomputation", 2022; Wang et
al., "Overlap Communication with Dependent Computation via Decomposition", 2023; PyTorch's async tensor parallelism).
Rows are those of the last dim before the features: positions. Collectives and bytes are those of the plain gather, or
reduction, and of its backward: gathered rows are kept for that, as there. Calls that share an input gather each for
itself, where plain products gather once.
"""

from __future__ import annotations

import math

import torch

from autopar.sharding.layout import Placement, R, S
from autopar.sharding.operation import Call, Collective, Implementation, LocalSizes
from autopar.sharding.rule import TOGETHER, Choice
from autopar.strategies.notation import batch_names

aten = torch.ops.aten

NAME = "async_tensor_parallel"
NUM_CHUNKS = 4
"""Into how many chunks a rank's rows are taken: of what travels, one part in so many has nothing to hide behind."""
COLUMN, ROW = "o", "k"


def leading_factors(call: Call) -> list[str]:
    """The factors of the input before its features; the last of them are the rows."""
    num_leading = len(call.inputs[0].shape) - 1
    if call.target is aten.linear.default:
        return [f"...{number}" for number in range(num_leading)]
    return [*batch_names(num_leading - 1), "m"]


def rows_of_chunks(num_rows: int) -> list[int]:
    """How many rows each chunk has, of those of one rank: as equal as they can be, and none without any."""
    count = num_chunks(num_rows)
    ends = [num_rows * number // count for number in range(count + 1)]
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


def num_chunks(num_rows: int) -> int:
    """Into how many chunks so many rows of a rank are taken."""
    return min(NUM_CHUNKS, int(num_rows))


def together(call: Call, factor: str) -> str:
    """The choice that splits rows together with columns or rows of the weight."""
    return f"{leading_factors(call)[-1]}{TOGETHER}{factor}"


def in_chunks(call: Call) -> tuple[Implementation, ...]:
    """The implementation of a product by a matrix; none where the input is a vector."""
    x, weight = call.inputs[:2]
    if len(x.shape) < 2 or len(weight.shape) != 2:
        return ()
    rows, features = S(len(x.shape) - 2), S(len(x.shape) - 1)
    transposed = call.target is aten.linear.default
    column, row = (S(0), S(1)) if transposed else (S(1), S(0))
    with_bias = len(call.inputs) > 2

    def choice(factor: str, inputs: tuple[Placement, Placement], output: Placement, bias: Placement) -> Choice:
        return Choice(together(call, factor), (*inputs, *((bias,) if with_bias else ())), (output,))

    return (
        Implementation(
            f"chunked_products:{call.name}",
            frozenset(),
            traffic=_traffic,
            zigzag=True,
            name=NAME,
            on_demand=True,
            scratch_bytes=_scratch_bytes,
            saved_bytes=_saved_bytes,
            unkept=_unkept,
            hidden_share=1 - 1 / NUM_CHUNKS,
            hidden_as="ring",
            choices=(choice(COLUMN, (rows, column), features, S(0)), choice(ROW, (features, row), rows, R)),
            launches=_launches,
        ),
    )


def _gathers(sizes: LocalSizes) -> bool:
    """Whether rows are gathered; else they are reduced in parts."""
    return TOGETHER + COLUMN in sizes


def _moved(call: Call, sizes: LocalSizes) -> list[int]:
    """Bytes of each chunk of all ranks that split rows: of the input, or of the output."""
    *leading, rows = (sizes[name] for name in leading_factors(call))
    factor, info = (ROW, call.inputs[0]) if _gathers(sizes) else (COLUMN, call.outputs[0])
    parts = sizes[TOGETHER + COLUMN] if _gathers(sizes) else sizes[TOGETHER + ROW]
    each = math.prod(leading) * sizes[factor] * info.dtype.itemsize * parts
    return [each * count for count in rows_of_chunks(rows)]


def _traffic(call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
    """Rows gathered and their gradients reduced, or results reduced and their gradients gathered, chunk by chunk."""
    if not _splits(sizes):
        return ()
    gathers, chunks = _gathers(sizes), _moved(call, sizes)
    over = TOGETHER + (COLUMN if gathers else ROW)
    ways = ("all_gather", "reduce_scatter") if gathers else ("reduce_scatter", "all_gather")
    learns = call.inputs[0].requires_grad if gathers else call.outputs[0].requires_grad
    passes = (False, True) if learns else (False,)
    return tuple(Collective(ways[backward], over, each, backward) for backward in passes for each in chunks)


def _splits(sizes: LocalSizes) -> bool:
    return TOGETHER + COLUMN in sizes or TOGETHER + ROW in sizes


def _scratch_bytes(call: Call, sizes: LocalSizes) -> int:
    """Rows of other ranks, or results for them; and the weight, which every chunk is multiplied by."""
    *_, rows = leading_factors(call)
    weight = sizes[COLUMN] * sizes[ROW] * call.inputs[1].dtype.itemsize
    return sum(_moved(call, sizes)) + weight * (num_chunks(sizes[rows]) - 1)


def _saved_bytes(call: Call, sizes: LocalSizes) -> int:
    """The rows that were gathered, for the weight's gradient."""
    return sum(_moved(call, sizes)) if _gathers(sizes) and call.inputs[1].requires_grad else 0


def _unkept(call: Call, sizes: LocalSizes) -> frozenset[int]:
    """This rank's rows, which are among those that were gathered."""
    return frozenset({0}) if _gathers(sizes) else frozenset()


def _launches(call: Call, sizes: LocalSizes) -> int:
    """A product for each chunk."""
    return num_chunks(sizes[leading_factors(call)[-1]])
