"""Messages of several tensors: packed into one buffer, and unpacked, by as many kernels for any number of ranks.

A message to all ranks has a row for each, [n, m]: the rank's part of every whole, one behind the other. Casts happen on
the way into the buffer. Wholes that are split in dim 0 are packed by one `_chunk_cat` and unpacked by one
`split_with_sizes_copy`; so are those whose parts have the split dim outermost in memory (`Part`). For others, and in
graphs that torch.compile or simulated ranks run, views of the wholes are copied to or from views of the buffer by one
foreach operation.

Legend: n ranks, m elements of a rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.collectives.layout_moves import is_eager, padded
from autopar.runtime.collectives.rank_parts import by_rank
from autopar.runtime.collectives.reused_weights import ReusedWeight

_flatten_dense_tensors = torch._C._nn.flatten_dense_tensors  # pyright: ignore[reportAttributeAccessIssue]
_unflatten_dense_tensors = torch._C._nn.unflatten_dense_tensors  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True, slots=True)
class Part:
    """Form in which a rank's part of a whole is sent: as it is, or with the split dim `first` moved to the front.

    The latter if the part lies in memory that way: the parts of all ranks, one behind the other, are then the whole.
    """

    shape: torch.Size
    """The message in the order in which it is sent."""
    dim: int
    """The split dim of what is sent."""
    first: int

    def sent(self, x: Tensor) -> Tensor:
        """Return a view of a part, or of a whole, as it is sent."""
        return x.movedim(self.first, 0) if self.first else x

    def received(self, x: Tensor) -> Tensor:
        """Return what was sent, with its dims in order."""
        return x.movedim(0, self.first) if self.first else x


def sent(parts: Sequence[Tensor], dims: Sequence[int]) -> list[Part]:
    """Return how parts that are split along `dims` are sent."""
    found = _part if torch.compiler.is_compiling() else _known_part
    return [found(part.shape, part.stride(), dim) for part, dim in zip(parts, dims, strict=True)]


def _part(shape: torch.Size, stride: tuple[int, ...], dim: int) -> Part:
    order = (dim, *(each for each in range(len(shape)) if each != dim))
    moved = torch.Size([shape[each] for each in order])
    if _is_contiguous(shape, stride) or not _is_contiguous(moved, [stride[each] for each in order]):
        return Part(shape, dim, 0)
    return Part(moved, 0, dim)


_known_part = functools.cache(_part)


def _is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def joined(tensors: Sequence[Tensor], dtype: torch.dtype, *, writes: bool) -> Tensor:
    """Return all elements one behind the other, in a dtype.

    `writes`: whether the message will be written to, as eager backwards do. If not, it is a view of tensors that lie as
    they are sent.
    """
    if len(tensors) == 1:
        return tensors[0].reshape(-1).to(dtype, copy=writes)
    eager, is_cast = writes or is_eager(), False
    for each in tensors:  # a loop, because this runs for every bucket, and comprehensions are calls of Python
        is_cast = is_cast or each.dtype != dtype
    if eager and not writes and (message := _as_they_lie(tensors, dtype)) is not None:
        return message
    if eager and not is_cast:
        with torch._C._AutoDispatchBelowAutograd():  # one call in the place of a view for each
            return _flatten_dense_tensors(tensors)
    if not is_cast:
        return torch.cat([each.reshape(-1) for each in tensors])
    message = tensors[0].new_empty(sum(each.numel() for each in tensors), dtype=dtype)
    if eager:
        with torch._C._AutoDispatchBelowAutograd():
            targets = _unflatten_dense_tensors(message, tensors)
    else:
        parts = message.split([each.numel() for each in tensors])
        targets = [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]
    torch._foreach_copy_(list(targets), list(tensors))  # pyright: ignore[reportPrivateImportUsage]
    return message


def _as_they_lie(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Return a view of tensors that lie one behind the other in one storage; None if they do not."""
    first, start = tensors[0], tensors[0].storage_offset()
    storage, place = first.untyped_storage()._cdata, start
    for each in tensors:
        lies = each.storage_offset() == place and each.is_contiguous()
        if not lies or each.dtype != dtype or each.untyped_storage()._cdata != storage:
            return None
        place += each.numel()
    return first.as_strided((place - start,), (1,), start)


def packed(
    wholes: Sequence[Tensor], parts: Sequence[torch.Size], dims: Sequence[int], num_ranks: int, dtype: torch.dtype
) -> Tensor:
    """Return the message [n * m] of every rank's parts, of these shapes, of wholes that are split along `dims`.

    Parts are padded with zeros. The message of a single tensor is a view, if its parts lie as they are sent.
    """
    if len(wholes) == 1 and dims[0] == 0 and wholes[0].dtype == dtype:
        return padded(wholes[0], 0, num_ranks).reshape(-1)
    sizes = [part.numel() for part in parts]
    rows = wholes[0].new_empty((num_ranks, sum(sizes)), dtype=dtype)
    if is_eager() and not any(dims):
        torch._chunk_cat([each.contiguous() for each in wholes], 0, num_ranks, out=rows)  # type: ignore[call-overload]
        return rows.view(-1)
    sources = [by_rank(padded(x, dim, num_ranks), dim, num_ranks) for x, dim in zip(wholes, dims, strict=True)]
    targets = [row.view(x.shape) for row, x in zip(rows.split(sizes, 1), sources, strict=True)]
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
    return rows.view(-1)


def unpacked(
    message: Tensor,
    parts: Sequence[torch.Size],
    dims: Sequence[int],
    sizes: Sequence[int],
    num_ranks: int,
    shaped: bool = True,
    into: Sequence[ReusedWeight | None] | None = None,
) -> list[Tensor]:
    """Return the wholes whose parts have these shapes, `sizes` long in their split dims, each in its own storage.

    The storage of one that is split in dim 0 is that of the message. Without `shaped`, the wholes may have any shape
    and be longer: their elements lie in their storages as they would otherwise. Wholes split in dim 0 may be copied
    `into` tensors that are there.
    """
    if len(parts) == 1 and dims[0] == 0:
        if not shaped:
            return [message]
        whole = message.view(-1, *parts[0][1:])
        return [whole if whole.shape[0] == sizes[0] else whole.narrow(0, 0, sizes[0])]
    rows = message.view(num_ranks, -1)
    numbers = [part.numel() for part in parts]
    eager = is_eager() and not any(dims)
    if eager and (not shaped or into is not None):
        return _copied(rows, parts, numbers, sizes, shaped, into or [None] * len(parts))
    wholes = [
        rows.new_empty((*part[:dim], part[dim] * num_ranks, *part[dim + 1 :]))
        for part, dim in zip(parts, dims, strict=True)
    ]
    if eager:
        torch.split_with_sizes_copy(rows, numbers, 1, out=[each.view(num_ranks, -1) for each in wholes])
    else:
        targets = [by_rank(each, dim, num_ranks) for each, dim in zip(wholes, dims, strict=True)]
        sources = [row.view(x.shape) for row, x in zip(rows.split(numbers, 1), targets, strict=True)]
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
    return [
        each if each.shape[dim] == size else each.narrow(dim, 0, size).contiguous()
        for each, dim, size in zip(wholes, dims, sizes, strict=True)
    ]


def _copied(
    rows: Tensor,
    parts: Sequence[torch.Size],
    numbers: Sequence[int],
    sizes: Sequence[int],
    shaped: bool,
    into: Sequence[ReusedWeight | None],
) -> list[Tensor]:
    """Return wholes that are split in dim 0, in tensors that are there or in new ones."""
    wholes: list[Tensor] = []
    targets: list[Tensor] = []
    for part, number, size, there in zip(parts, numbers, sizes, into, strict=True):
        if there is not None:
            target, whole = there.rows, there.weight if shaped else there.rows
        elif shaped:
            whole = rows.new_empty((part[0] * rows.shape[0], *part[1:]))
            target = whole.view(rows.shape[0], -1)
            whole = whole if whole.shape[0] == size else whole.narrow(0, 0, size)
        else:
            target = whole = rows.new_empty((rows.shape[0], number))
        targets.append(target)
        wholes.append(whole)
    torch.split_with_sizes_copy(rows, numbers, 1, out=targets)
    return wholes
