"""The operators of experts on ranks: which rows a rank has, and how they travel.

Legend in `ir.program.operators.expert_operators`.

Experts lie in blocks, one for each combination of ranks on the axes that split them, outer axis first. On axes that
split experts alone every rank sees the same tokens, and keeps the rows of its own experts. Over axes that split tokens
as well, rows go to the rank of their expert's block and come home by one uneven all-to-all over all of them, joined.

Rows arrive by rank and, of one rank, by expert; a second stable sort puts those of one expert together. How many rows
go where is read on the host, once for each dispatch, where rows travel or a rank keeps some of them.

Rows that are `padded` are equally many for all ranks, and the host reads nothing. A message is filled up with rows of
other tokens: they count as the last expert's and come home to nobody, so that their gradients are zero.

A dispatch and a combine run whole, or in halves, between which other calls run while rows travel. torch.compile leaves
halves as they are: its graphs end where the host reads, anyway.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.program.operators.capacity import padded_rows
from autopar.ir.program.operators.derivatives import called_directly, once_differentiable
from autopar.ir.program.operators.expert_operators import (
    GroupedProduct,
    Home,
    PaddedHome,
    PaddedTake,
    PartHome,
    all_rows,
    count_rows,
    some_rows,
    sorted_slots,
)
from autopar.ir.sharding.mesh import joined_name
from autopar.runtime.collectives.direct import applied, applied_eagerly
from autopar.runtime.collectives.mesh_axes import Axes, Axis, axis_of, num_parts_of
from autopar.runtime.implementations.exchanges import Travelling, Way, arrived, exchanged, leaving
from autopar.runtime.ranks.uncompiled import uncompiled

_SIZE = operator.attrgetter("size")
EXPERTS = "x"
FEATURES = "d"
_Dispatched = tuple[Any, Tensor | None, Tensor, Tensor, Tensor, Tensor]
"""Rows, or rows on their way; their order where they have come by rank; and what `dispatch` returns besides."""
_Exchange = Callable[[Tensor, Way], Any]
_TOO_MANY = (
    "more than {} rows go from one device to another's experts, the most that Experts(padded=…) gives room for; give a "
    "larger number, or leave padded out"
)


@dataclass(frozen=True, slots=True)
class _Experts:
    """Split of experts by a mesh: the axes that split them, and those of them over which rows travel."""

    axes: tuple[Axis, ...]
    travelled: tuple[Axis, ...]
    kept: tuple[Axis, ...]
    """The axes that split experts alone: of their ranks, each keeps the rows of its own."""
    num_experts: int
    per_block: int
    """Number of experts of a block."""
    num_copies: int
    """Number of ranks that see the same tokens."""

    @classmethod
    def of(cls, axes: Axes, num_experts: int) -> _Experts:
        of_experts, travelled, kept = (), (), ()
        num_blocks = num_copies = 1
        for each in axes.get(EXPERTS, ()):  # loops, because every layer does this, and comprehensions are calls
            axis = axis_of(each)
            if axis.size == 1:
                continue
            of_experts += (axis,)
            num_blocks *= axis.size
            for factor, names in axes.items():
                if factor not in (EXPERTS, FEATURES) and axis.name in names:
                    travelled += (axis,)
                    break
            else:
                kept += (axis,)
                num_copies *= axis.size
        return cls(of_experts, travelled, kept, num_experts, num_experts // num_blocks, num_copies)

    def pads(self, padded: float | None, dropping: bool) -> bool:
        """Return whether rows are padded: those of whole experts are as many as slots, unless some are dropped."""
        return padded is not None and (bool(self.axes) or dropping)

    @property
    def link(self) -> Axis:
        """The axes over which rows travel, as one."""
        if len(self.travelled) == 1:
            return self.travelled[0]
        names = [axis.name for axis in self.travelled]
        return axis_of(joined_name(names, range(len(names))))

    def is_reached(self, expert: Tensor) -> Tensor:
        """Return a mask of the rows whose expert shares this rank's place on the axes that split experts alone.

        Dropped rows go nowhere.
        """
        block, found = expert // self.per_block, expert < self.num_experts
        for axis in reversed(self.axes):
            if axis in self.kept:
                found = found & (block % axis.size == axis.rank)
            block = block // axis.size
        return found

    def reached(self, counts_E: Tensor) -> Tensor:
        """Select from the counts of all experts those that this rank's rows may go to: one row per destination."""
        blocks = counts_E.view(*map(_SIZE, self.axes), self.per_block)
        for dim, axis in enumerate(self.axes):
            if axis in self.kept:
                mine = torch.zeros(1, dtype=torch.int64, device=counts_E.device) + axis.rank
                blocks = blocks.index_select(dim, mine)
        return blocks.reshape(-1, self.per_block)


def dispatch(
    x: Tensor,
    index: Tensor,
    num_experts: int,
    dropping: bool = False,
    padded: float | None = None,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `autopar.dispatch` for this rank's tokens: return the rows of its experts.

    Counts are of this rank's experts, one row for each rank that has sent some; ids are numbers of these experts. Route
    has the row of every slot before rows travel, -1 if it is another rank's or dropped. Splits, on the CPU, are the
    numbers of rows that have gone to and come from each rank.

    Moves, if rows travel over n ranks: 8 · (experts reached) bytes of counts and T · K · D of rows forward, the latter
    backward, by all-to-all; fewer rows if some are dropped.
    """
    return _ordered(_dispatched(x, index, num_experts, dropping, padded, axes, exchanged))


@uncompiled
def start_dispatch(
    x: Tensor,
    index: Tensor,
    num_experts: int,
    dropping: bool = False,
    padded: float | None = None,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
) -> _Dispatched:
    """Begin `dispatch`: rows travel until `end_dispatch`."""
    return _dispatched(x, index, num_experts, dropping, padded, axes, leaving)


@uncompiled
def end_dispatch(started: _Dispatched) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the result of `dispatch`, once rows have arrived."""
    return _ordered(started)


def _ordered(started: _Dispatched) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    travelling, order, *others = started
    rows = arrived(travelling)
    return (rows if order is None else applied(_Reorder, rows, order, False), *others)  # type: ignore[return-value]


def _dispatched(
    x: Tensor,
    index: Tensor,
    num_experts: int,
    dropping: bool,
    padded: float | None,
    axes: Axes,
    exchange: _Exchange,
) -> _Dispatched:
    experts = _Experts.of(axes, num_experts)
    if padded is not None and experts.pads(padded, dropping):
        return _padded(x, index, experts, padded, exchange)
    if experts.kept or dropping:
        kept = experts.is_reached(index)
        rows, ids, route = some_rows(x, index, num_experts, kept, kept.sum().item())
    else:
        rows, ids, route = all_rows(x, index, applied)
    sent = experts.reached(count_rows(ids, num_experts))
    if not experts.travelled:
        return rows, None, sent, ids % experts.per_block, route, torch.zeros(2, 1, dtype=torch.int64)
    link, num_bytes = experts.link, index.numel() * x.shape[-1] * x.itemsize // experts.num_copies
    ones = [1] * link.size
    got = Way(ones, ones, link, sent.numel() * sent.itemsize).take(sent)
    splits = torch.stack([sent.sum(1), got.sum(1)]).cpu()
    sent_to, got_from = _host(splits)
    rows = exchange(rows, Way(sent_to, got_from, link, num_bytes))
    ids, order = _sorted(got, sum(got_from))
    return rows, order, got, ids, route, splits


def _padded(x: Tensor, index: Tensor, experts: _Experts, padded: float, exchange: _Exchange) -> _Dispatched:
    size = padded_rows(index.numel(), num_parts_of(experts.axes), padded)
    rows, sent, route = _in_messages(x, index, experts, size)
    num_ranks = sent.shape[0]
    splits = torch.zeros(2, num_ranks, dtype=torch.int64)
    if not experts.travelled:
        return rows, None, sent, _senders_ids(sent, size), route, splits
    ones, sizes = [1] * num_ranks, [size] * num_ranks
    got = Way(ones, ones, experts.link, sent.numel() * sent.itemsize).take(sent)
    rows = exchange(rows, Way(sizes, sizes, experts.link, rows.numel() * rows.itemsize))
    ids, order = _sorted(got, num_ranks * size)
    return rows, order, got, ids, route, splits


def _in_messages(x: Tensor, index: Tensor, experts: _Experts, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return messages of `size` rows for each rank, the counts of each rank's experts, and the row of every slot."""
    last = index.numel() - 1
    ids, slots = sorted_slots(torch.where(experts.is_reached(index), index, experts.num_experts))
    counts = experts.reached(count_rows(ids, experts.num_experts + 1)[:-1])
    ends = counts.sum(1).cumsum(0)
    begins = ends - counts.sum(1)
    torch.ops.aten._assert_async.msg((ends - begins <= size).all(), _TOO_MANY.format(size))
    inside = torch.arange(size, device=x.device)
    in_messages = slots[(begins.unsqueeze(1) + inside).clamp(max=last).flatten()]
    places = torch.arange(last + 1, device=x.device)
    rank = torch.searchsorted(ends, places, right=True)
    shift = torch.arange(len(ends), device=x.device) * size - begins
    places = torch.where(rank < len(ends), places + shift[rank.clamp(max=len(ends) - 1)], -1)
    route = torch.empty_like(slots).scatter_(0, slots, places).view(index.shape)
    rows = applied(PaddedTake, x.reshape(-1, x.shape[-1]), in_messages, route.flatten(0, -2))
    more = (size - counts.sum(1)).unsqueeze(1)
    return rows, torch.cat([counts[:, :-1], counts[:, -1:] + more], 1), route


def grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor, *, axes: Axes, sizes: Mapping[str, int]) -> Tensor:
    """Compute `autopar.grouped_mm` for this rank's rows, experts and features.

    Moves nothing.
    """
    counts = counts.view(-1, weight.shape[0]).sum(0)
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.autopar.grouped_mm(rows, weight, counts)
    return applied_eagerly(GroupedProduct, rows, weight, counts)


def of_expert(values: Tensor, ids: Tensor, counts: Tensor, *, axes: Axes, sizes: Mapping[str, int]) -> Tensor:
    """Compute `autopar.of_expert` for this rank's rows and experts.

    Moves nothing.
    """
    return values[ids]


def combine(
    rows: Tensor,
    weights: Tensor | None,
    route: Tensor,
    counts: Tensor,
    splits: Tensor,
    dropping: bool = False,
    padded: float | None = None,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
) -> Tensor:
    """Compute `autopar.combine` for this rank's tokens; sums are partial if an axis splits experts alone.

    Moves, if rows travel, T · K · D bytes forward and backward by all-to-all.
    """
    experts = _Experts.of(axes, sizes[EXPERTS])
    rows = _sent_home(rows, route, counts, splits, padded, experts, exchanged)
    return _added(rows, weights, route, dropping, padded, experts)


@uncompiled
def start_combine(
    rows: Tensor,
    weights: Tensor | None,
    route: Tensor,
    counts: Tensor,
    splits: Tensor,
    dropping: bool = False,
    padded: float | None = None,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
) -> Travelling | Tensor:
    """Begin `combine`: rows travel until `end_combine`."""
    return _sent_home(rows, route, counts, splits, padded, _Experts.of(axes, sizes[EXPERTS]), leaving)


@uncompiled
def end_combine(
    started: Travelling | Tensor,
    weights: Tensor | None,
    route: Tensor,
    dropping: bool = False,
    padded: float | None = None,
    *,
    axes: Axes,
    sizes: Mapping[str, int],
) -> Tensor:
    """Return the result of `combine`, once rows have arrived."""
    return _added(started, weights, route, dropping, padded, _Experts.of(axes, sizes[EXPERTS]))


def _added(
    started: Travelling | Tensor,
    weights: Tensor | None,
    route: Tensor,
    dropping: bool,
    padded: float | None,
    experts: _Experts,
) -> Tensor:
    home = PaddedHome if experts.pads(padded, dropping) else PartHome if experts.kept or dropping else Home
    given = arrived(started), None if weights is None else weights.flatten(0, -2), route.flatten(0, -2)
    y = applied(home, *given)
    return y.view(*route.shape[:-1], y.shape[-1])


def _sent_home(
    rows: Tensor,
    route: Tensor,
    counts: Tensor,
    splits: Tensor,
    padded: float | None,
    experts: _Experts,
    exchange: _Exchange,
) -> Any:
    if not experts.travelled:
        return rows
    order = getattr(counts, "order", None)
    if order is None:
        _, order = _sorted(counts, rows.shape[0])
    if padded is None:
        num_bytes = route.numel() * rows.shape[-1] * rows.itemsize // experts.num_copies
        sent, got = _host(splits)
    else:
        num_bytes = rows.numel() * rows.itemsize
        sent = got = [rows.shape[0] // experts.link.size] * experts.link.size
    return exchange(applied(_Reorder, rows, order, True), Way(got, sent, experts.link, num_bytes))


def _senders_ids(counts: Tensor, num_rows: Any) -> Tensor:
    """Return the expert of every row in the order of ranks that have sent them: counts are (ranks, experts)."""
    num_ranks, per_block = counts.shape
    ids = torch.arange(per_block, device=counts.device).repeat(num_ranks)
    return torch.repeat_interleave(ids, counts.flatten(), output_size=num_rows)


def _sorted(counts: Tensor, num_rows: Any) -> tuple[Tensor, Tensor]:
    """Return the experts of all rows in order, and the place from which each row comes.

    What a backward saves is left with the counts, for the rows' way home.
    """
    ids, order = torch.sort(_senders_ids(counts, num_rows), stable=True)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        counts.order = order  # pyright: ignore[reportAttributeAccessIssue]
    return ids, order


def _host(splits: Tensor) -> Iterable[list[Any]]:
    return map(list, splits.tolist())


@called_directly
class _Reorder(torch.autograd.Function):
    """Rows in another order: `order` has the place of each before, or with `back` the place of each behind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(order)
        ctx.back = back
        return _placed(x, order) if back else x[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return grad[order] if ctx.back else _placed(grad, order), None, None


def _placed(x: Tensor, places: Tensor) -> Tensor:
    return torch.empty_like(x).index_copy_(0, places, x)
