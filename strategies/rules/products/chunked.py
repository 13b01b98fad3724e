"""Matmuls overlapped with their collectives: async tensor parallelism, offered on request.

    rows + o    the input is gathered in chunks, each multiplied by columns of the weight while the next arrives
    rows + k    of what rows of the weight give, each chunk is reduced in parts while the next is multiplied

as between blocks of which positions are split (Korthikanti et al., "Reducing Activation Recomputation", 2022; Wang et
al., "Overlap Communication with Dependent Computation via Decomposition", 2023; PyTorch's async tensor parallelism).
Rows are those of the last dim before the features: positions. Collectives and bytes are those of the plain gather, or
reduction, and of its backward: gathered rows are saved for that, as there. Calls that share an input, as queries,
keys and values do, gather it once, all of them or none: its traffic and what is saved of it are the first one's.

    rows + o, again    the input is gathered whole; a rank saves its own rows, and gathers the others again in the
                       backward, overlapped with the input's gradient, whose reduction overlaps with the weight's

as Megatron-LM has it (Korthikanti et al.): one more collective for less memory, offered under a name of its own. In a
segment that gathers again (`Memory(recompute="selective")`) gathers in chunks do the same in the backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autopar.ir.sharding.layout import Placement, R, S
from autopar.ir.sharding.operation import Call, Collective, Implementation, LocalSizes, OpRule
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

    function, shared = f"products.chunked:{call.name}", frozenset({together(call, COLUMN)})
    columns, rows_reduced = choice(COLUMN, (rows, column), features, S(0)), choice(ROW, (features, row), rows, R)
    return (
        InChunks(function, choices=(columns, rows_reduced), shared=shared),
        GatheredAgain(function, choices=(columns,), shared=shared),
    )


@dataclass(frozen=True, slots=True)
class InChunks(Implementation):
    """A product whose input is gathered in chunks, or whose output is reduced in chunks."""

    factors: frozenset[str] | None = frozenset()
    ordered: frozenset[str] | None = frozenset()
    name: str = NAME
    on_demand: bool = True
    regathers: bool = False
    """True if gathered rows are gathered again in the backward."""
    follows: bool = False
    """True if the gathered input comes with that of another call, which saves it."""

    @property
    def keywords(self) -> Mapping[str, int]:
        return {"again": 1} if self.regathers else {}

    @property
    def follower(self) -> Implementation:
        return replace(self, follows=True)

    @property
    def regathering(self) -> Implementation | None:
        return replace(self, regathers=True)

    def traffic(self, call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
        """Return gathers of rows and reductions of their gradients, or the reverse for results, in chunks."""
        if not _splits(sizes) or (self.follows and _gathers(sizes)):
            return ()
        chunks, over = _chunk_bytes(call, sizes), TOGETHER + (COLUMN if _gathers(sizes) else ROW)
        ways = ("all_gather", "reduce_scatter") if _gathers(sizes) else ("reduce_scatter", "all_gather")
        forward = [Collective(ways[0], over, each) for each in chunks]
        if self.regathers and _gathers(sizes):
            return (*forward, *_backward_traffic(call, sizes))
        backward = (
            [Collective(ways[1], over, each, True) for each in chunks] if _backward_communicates(call, sizes) else []
        )
        return (*forward, *backward)

    def hidden_share(self, call: Call, sizes: LocalSizes) -> float:
        """Return the share of all but one chunk, and of what the backward moves next to a second product."""
        hidden, learns, weighs = (
            1 - 1 / len(_chunk_bytes(call, sizes)),
            _backward_communicates(call, sizes),
            call.inputs[1].requires_grad,
        )
        if self.regathers and _gathers(sizes):
            return (hidden + 2 * (learns and weighs)) / (1 + learns + weighs)
        return (hidden + 1) / 2 if _gathers(sizes) and learns and weighs else hidden

    def launches(self, call: Call, sizes: LocalSizes) -> int:
        """Count the chunks, each of which has a product."""
        return len(_chunk_bytes(call, sizes))

    def moved_bytes(self, op: OpRule, call: Call, sizes: LocalSizes, inputs: int, outputs: int) -> int:
        """Return the bytes read and written, with rows of all ranks, or results for them; chunks read the weight."""
        moved = _chunk_bytes(call, sizes)
        weight = sizes[COLUMN] * sizes[ROW] * call.inputs[1].dtype.itemsize
        return op.moved_bytes(inputs, outputs) + sum(moved) + weight * (len(moved) - 1)

    def saved_bytes(self, call: Call, sizes: LocalSizes) -> int:
        """Return the bytes of gathered rows, for the weight's gradient, if this call gathers and saves them."""
        if self.follows or self.regathers:
            return 0
        return sum(_chunk_bytes(call, sizes)) if _gathers(sizes) and call.inputs[1].requires_grad else 0

    def unkept(self, call: Call, sizes: LocalSizes) -> frozenset[int]:
        """Return the position of this rank's rows, if the gathered rows, which contain them, are saved."""
        return frozenset({0}) if _gathers(sizes) and not self.regathers else frozenset()

    def backward_bytes(self, call: Call, sizes: LocalSizes) -> int:
        """Return the bytes of gathered rows, or of gradients of all results, which are gathered for the weight's."""
        if self.regathers and _gathers(sizes):
            return _travelling_bytes(call, sizes)
        return sum(_chunk_bytes(call, sizes)) if call.inputs[1].requires_grad else 0


@dataclass(frozen=True, slots=True)
class GatheredAgain(InChunks):
    """A product whose input is gathered whole, and again in the backward."""

    name: str = AGAIN

    @property
    def keywords(self) -> Mapping[str, int]:
        return {"again": 1, "whole": 1}

    def traffic(self, call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
        """Return gathers of rows, once more for the weight's gradient, and the reduction of their own gradients."""
        if not _splits(sizes) or self.follows:
            return ()
        return (
            Collective("all_gather", TOGETHER + COLUMN, sum(_chunk_bytes(call, sizes))),
            *_backward_traffic(call, sizes),
        )

    def hidden_share(self, call: Call, sizes: LocalSizes) -> float:
        """Return the share of the traffic that overlaps with products: that of the backward, if it has two products.

        The backward then has two of three collectives.
        """
        return 2 / 3 if _backward_communicates(call, sizes) and call.inputs[1].requires_grad else 0.0

    def launches(self, call: Call, sizes: LocalSizes) -> int:
        return 1

    def moved_bytes(self, op: OpRule, call: Call, sizes: LocalSizes, inputs: int, outputs: int) -> int:
        """Return the bytes read and written, with the rows of all ranks."""
        return op.moved_bytes(inputs, outputs) + sum(_chunk_bytes(call, sizes))

    def saved_bytes(self, call: Call, sizes: LocalSizes) -> int:
        """Return the bytes of this rank's rows, from which all are gathered again for the weight's gradient."""
        if self.follows or self.regathers or not call.inputs[1].requires_grad:
            return 0
        return sum(_chunk_bytes(call, sizes)) // sizes[TOGETHER + COLUMN]

    def backward_bytes(self, call: Call, sizes: LocalSizes) -> int:
        return _travelling_bytes(call, sizes)


def _gathers(sizes: LocalSizes) -> bool:
    """Return whether rows are gathered; otherwise they are reduced in parts."""
    return TOGETHER + COLUMN in sizes


def _chunk_bytes(call: Call, sizes: LocalSizes) -> list[int]:
    """Bytes of each chunk of all ranks that split rows: of the input, or of the output."""
    leading = [sizes[name] for name in leading_factors(call)]
    factor, info = (ROW, call.inputs[0]) if _gathers(sizes) else (COLUMN, call.outputs[0])
    each = sizes[factor] * info.dtype.itemsize * sizes[TOGETHER + (COLUMN if _gathers(sizes) else ROW)]
    along, counts = chunks_of(leading, math.prod(leading) * each)
    others = math.prod(size for dim, size in enumerate(leading) if dim != along)
    return [count * others * each for count in counts]


def _backward_communicates(call: Call, sizes: LocalSizes) -> bool:
    return (call.inputs[0] if _gathers(sizes) else call.outputs[0]).requires_grad


def _splits(sizes: LocalSizes) -> bool:
    """Return whether an axis of several ranks splits rows together with columns or rows of the weight."""
    return TOGETHER + COLUMN in sizes or TOGETHER + ROW in sizes


def _backward_traffic(call: Call, sizes: LocalSizes) -> list[Collective]:
    """Return the collectives of a backward: rows again for the weight's gradient, and their own gradients."""
    over, whole = TOGETHER + COLUMN, sum(_chunk_bytes(call, sizes))
    found = [Collective("all_gather", over, whole, True)] if call.inputs[1].requires_grad else []
    return [*found, Collective("reduce_scatter", over, whole, True)] if _backward_communicates(call, sizes) else found


def _travelling_bytes(call: Call, sizes: LocalSizes) -> int:
    """Return the bytes of all ranks' rows as they arrive and as they are used, and of their gradients in transit."""
    whole = sum(_chunk_bytes(call, sizes))
    return 2 * whole * call.inputs[1].requires_grad + whole * _backward_communicates(call, sizes)
