"""The operators of experts on ranks: which rows a rank has, and how they travel.

Legend in `ir.program.operators.expert_operators`.

Experts lie in blocks, one for each combination of ranks on the axes that split them, outer axis first. On axes that
split experts alone every rank sees the same tokens, and keeps the rows of its own experts. Over axes that split tokens
as well, rows go to the rank of their expert's block and come home by one uneven all-to-all over all of them, joined.

Rows arrive by rank and, of one rank, by expert; a second stable sort puts those of one expert together. How many rows
go where is read on the host, once for each dispatch, where rows travel or a rank keeps some of them.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.program.operators.derivatives import once_differentiable
from autopar.ir.program.operators.expert_operators import Home, PartHome, all_rows, count_rows, inverted, some_rows
from autopar.ir.sharding.mesh import joined_name
from autopar.runtime.collectives.mesh_axes import Axes, Axis, axes_of, axis_of, count, num_parts_of

EXPERTS = "x"
FEATURES = "d"
_c10d = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class _Experts:
    """Split of experts by a mesh: the axes that split them, and those of them over which rows travel."""

    axes: tuple[Axis, ...]
    travelled: tuple[Axis, ...]
    num_experts: int

    @classmethod
    def of(cls, axes: Axes, num_experts: int) -> _Experts:
        of_experts = axes_of(axes.get(EXPERTS, ()))
        of_tokens = {name for factor, names in axes.items() if factor not in (EXPERTS, FEATURES) for name in names}
        return cls(of_experts, tuple(axis for axis in of_experts if axis.name in of_tokens), num_experts)

    @property
    def kept(self) -> tuple[Axis, ...]:
        """The axes that split experts alone: of their ranks, each keeps the rows of its own."""
        return tuple(axis for axis in self.axes if axis not in self.travelled)

    @property
    def per_block(self) -> int:
        return self.num_experts // num_parts_of(self.axes)

    @property
    def link(self) -> Axis:
        """The axes over which rows travel, as one."""
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
        blocks = counts_E.view(*(axis.size for axis in self.axes), self.per_block)
        for dim, axis in enumerate(self.axes):
            if axis in self.kept:
                mine = torch.zeros(1, dtype=torch.int64, device=counts_E.device) + axis.rank
                blocks = blocks.index_select(dim, mine)
        return blocks.reshape(-1, self.per_block)


def dispatch(
    x: Tensor, index: Tensor, num_experts: int, dropping: bool = False, *, axes: Axes, sizes: Mapping[str, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `autopar.dispatch` for this rank's tokens: return the rows of its experts.

    Counts are of this rank's experts, one row for each rank that has sent some; ids are numbers of these experts. Route
    has the row of every slot before rows travel, -1 if it is another rank's or dropped. Splits, on the CPU, are the
    numbers of rows that have gone to and come from each rank.

    Moves, if rows travel over n ranks: 8 · (experts reached) bytes of counts and T · K · D of rows forward, the latter
    backward, by all-to-all; fewer rows if some are dropped.
    """
    experts = _Experts.of(axes, num_experts)
    if experts.kept or dropping:
        kept = experts.is_reached(index)
        rows, ids, route = some_rows(x, index, num_experts, kept, kept.sum().item())
    else:
        rows, ids, route = all_rows(x, index)
    sent = experts.reached(count_rows(ids, num_experts))
    if not experts.travelled:
        return rows, sent, ids % experts.per_block, route, torch.zeros(2, 1, dtype=torch.int64)
    link, num_bytes = experts.link, index.numel() * x.shape[-1] * x.itemsize // num_parts_of(experts.kept)
    ones = [1] * link.size
    got = _exchanged(sent, ones, ones, link, sent.numel() * sent.itemsize)
    splits = torch.stack([sent.sum(1), got.sum(1)]).cpu()
    rows = _Exchange.apply(rows, *_host(splits), link, num_bytes)
    ids, order = torch.sort(_senders_ids(got, rows.shape[0]), stable=True)
    return _Reorder.apply(rows, order), got, ids, route, splits


def grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor, *, axes: Axes, sizes: Mapping[str, int]) -> Tensor:
    """Compute `autopar.grouped_mm` for this rank's rows, experts and features.

    Moves nothing.
    """
    return torch.ops.autopar.grouped_mm(rows, weight, counts.view(-1, weight.shape[0]).sum(0))


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
    *,
    axes: Axes,
    sizes: Mapping[str, int],
) -> Tensor:
    """Compute `autopar.combine` for this rank's tokens; sums are partial if an axis splits experts alone.

    Moves, if rows travel, T · K · D bytes forward and backward by all-to-all.
    """
    experts, features = _Experts.of(axes, sizes[EXPERTS]), rows.shape[-1]
    if experts.travelled:
        order = torch.argsort(_senders_ids(counts, rows.shape[0]), stable=True)
        num_bytes = route.numel() * features * rows.itemsize // num_parts_of(experts.kept)
        sent, got = _host(splits)
        rows = _Exchange.apply(_Reorder.apply(rows, inverted(order)), got, sent, experts.link, num_bytes)
    home = PartHome if experts.kept or dropping else Home
    y = home.apply(rows, None if weights is None else weights.flatten(0, -2), route.flatten(0, -2))
    return y.view(*route.shape[:-1], features)


def _senders_ids(counts: Tensor, num_rows: Any) -> Tensor:
    """Return the expert of every row in the order of ranks that have sent them: counts are (ranks, experts)."""
    num_ranks, per_block = counts.shape
    ids = torch.arange(per_block, device=counts.device).repeat(num_ranks)
    return torch.repeat_interleave(ids, counts.flatten(), output_size=num_rows)


def _host(splits: Tensor) -> list[list[Any]]:
    return [list(each) for each in splits.tolist()]


def _exchanged(x: Tensor, sent: Sequence[Any], got: Sequence[Any], axis: Axis, num_bytes: int) -> Tensor:
    """Return the rows from all ranks of the axis; counted as `num_bytes`."""
    count("all_to_all", axis, num_bytes)
    return _c10d.wait_tensor(_c10d.all_to_all_single(x.contiguous(), list(got), list(sent), axis.group))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[Any], got: Sequence[Any], axis: Axis, num_bytes: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.way = sent, got, axis, num_bytes
        return _exchanged(x, sent, got, axis, num_bytes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        sent, got, axis, num_bytes = ctx.way
        return _exchanged(grad, got, sent, axis, num_bytes), None, None, None, None


class _Reorder(torch.autograd.Function):
    """Rows in another order: `order` has the place of each before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(order)
        return x[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return torch.empty_like(grad).index_copy_(0, order, grad), None
