"""Messages of several tensors: packed into one buffer, and unpacked, by as many kernels for any number of ranks.

A message to all ranks has a row for each, [n, m]: the rank's part of every whole, one behind the other. Casts happen on
the way into the buffer. Wholes that are split in dim 0 are packed by one `_chunk_cat` and unpacked by one
`split_with_sizes_copy`; for other dims, and in graphs that torch.compile or simulated ranks run, views of the wholes
are copied to or from views of the buffer by one foreach operation.

Legend: n ranks, m elements of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed._local_tensor import local_tensor_mode

from autopar.runtime.collectives.functions import padded
from autopar.runtime.collectives.parts import by_rank


def joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return all elements one behind the other, in a dtype; of one tensor a view, where it may be."""
    flat = [each.reshape(-1) for each in tensors]
    if len(flat) == 1:
        return flat[0].to(dtype)
    if all(each.dtype == dtype for each in flat):
        return torch.cat(flat)
    sizes = [each.numel() for each in flat]
    message = flat[0].new_empty(sum(sizes), dtype=dtype)
    torch._foreach_copy_(message.split(sizes), flat)  # pyright: ignore[reportPrivateImportUsage]
    return message


def packed(
    wholes: Sequence[Tensor], parts: Sequence[torch.Size], dims: Sequence[int], num_ranks: int, dtype: torch.dtype
) -> Tensor:
    """Return the message [n * m] of every rank's parts, of these shapes, of wholes that are split along `dims`.

    Parts are padded with zeros. Of one tensor the message is a view, where its parts lie as they are sent.
    """
    if len(wholes) == 1 and dims[0] == 0 and wholes[0].dtype == dtype:
        return padded(wholes[0], 0, num_ranks).reshape(-1)
    sizes = [part.numel() for part in parts]
    rows = wholes[0].new_empty((num_ranks, sum(sizes)), dtype=dtype)
    if _may_fuse() and not any(dims) and all(each.is_contiguous() for each in wholes):
        torch._chunk_cat(wholes, 0, num_ranks, out=rows)  # type: ignore[call-overload]
        return rows.view(-1)
    sources = [by_rank(padded(x, dim, num_ranks), dim, num_ranks) for x, dim in zip(wholes, dims, strict=True)]
    targets = [row.view(x.shape) for row, x in zip(rows.split(sizes, 1), sources, strict=True)]
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
    return rows.view(-1)


def unpacked(
    message: Tensor, parts: Sequence[torch.Size], dims: Sequence[int], sizes: Sequence[int], num_ranks: int
) -> list[Tensor]:
    """Return the wholes whose parts have these shapes, `sizes` long in their split dims, each in its own storage.

    The storage of one that is split in dim 0 is that of the message.
    """
    rows = message.view(num_ranks, -1)
    if len(parts) == 1 and dims[0] == 0:
        return [rows.view(-1, *parts[0][1:]).narrow(0, 0, sizes[0])]
    shapes = [_whole_shape(part, dim, num_ranks) for part, dim in zip(parts, dims, strict=True)]
    wholes = [rows.new_empty(shape) for shape in shapes]
    numbers = [part.numel() for part in parts]
    if _may_fuse() and not any(dims):
        torch.split_with_sizes_copy(rows, numbers, 1, out=[each.view(num_ranks, -1) for each in wholes])
    else:
        targets = [by_rank(each, dim, num_ranks) for each, dim in zip(wholes, dims, strict=True)]
        sources = [row.view(x.shape) for row, x in zip(rows.split(numbers, 1), targets, strict=True)]
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
    return [
        each if each.shape[dim] == size else each.narrow(dim, 0, size).contiguous()
        for each, dim, size in zip(wholes, dims, sizes, strict=True)
    ]


def _whole_shape(part: torch.Size, dim: int, num_ranks: int) -> list[int]:
    return [size * num_ranks if d == dim else size for d, size in enumerate(part)]


def _may_fuse() -> bool:
    """Return whether operations that write into given tensors run as they are."""
    return not torch.compiler.is_compiling() and local_tensor_mode() is None
