"""Sample calls of operations that move, cut, join and repeat elements, and of those that make tensors from nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ir.sharding.constraint import CONSTRAIN
from tests.support.simulation.samples.draw import Draw, Sample, Samples, sample

aten = torch.ops.aten


def reshape(d: Draw) -> list[Sample]:
    a, b, c = d.sizes(3)
    return [
        sample(d.x(a, b, c), [a, b * c]),
        sample(d.x(a, b, c), [-1, c]),
        sample(d.x(a * b, c), [a, b, c]),
        sample(d.x(a, b * c), [a, b, c]),
        sample(d.x(a, b * c), [a, -1, b, c]),
        sample(d.x(a, b), [-1]),
        sample(d.x(a * b), [a, b]),
        sample(d.x(a, b), [a, 1, b]),
        sample(d.x(1, a, 1, b), [a, b, 1]),
        sample(d.x(a, b), [a, b]),
        sample(d.x(1, 1), []),
        sample(d.x(), [1, 1]),
        sample(d.index(9, a, b), [a * b]),
    ]


def expand(d: Draw) -> list[Sample]:
    a, b, c = d.sizes(3)
    return [
        sample(d.x(1, b), [a, b]),
        sample(d.x(b), [a, b]),
        sample(d.x(a, 1, c), [-1, b, -1]),
        sample(d.x(a, b), [a, b]),
        sample(d.x(1, 1, b), [a, 1, b]),
        sample(d.x(), [a, b]),
        sample(d.mask(1, b), [a, b]),
    ]


def transpose(d: Draw) -> list[Sample]:
    return [sample(d.x(*d.sizes(3)), *dims) for dims in ((0, 1), (-1, -2), (0, 2), (1, 1))]


def permute(d: Draw) -> list[Sample]:
    return [sample(d.x(*d.sizes(len(dims))), list(dims)) for dims in ((1, 0), (2, 0, 1), (0, -1, 1), (0, 2, 1, 3))]


def unsqueeze(d: Draw) -> list[Sample]:
    return [sample(d.x(*d.sizes(2)), dim) for dim in (0, 1, 2, -1, -3)]


def squeeze_dim(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, 1, b), 1), sample(d.x(a, 1, b), -2), sample(d.x(a, 1, b), 0), sample(d.x(1, b), 0)]


def squeeze_dims(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, 1, b, 1), [1, 3]), sample(d.x(a, 1, b), [0, 1])]


def squeeze(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, 1, b)), sample(d.x(1, a)), sample(d.x(a, b))]


def flatten(d: Draw) -> list[Sample]:
    a, b, c = d.sizes(3)
    return [sample(d.x(a, b, c), *dims) for dims in ((0, 1), (1, 2), (0, -1), (1, 1), ())]


def unflatten(d: Draw) -> list[Sample]:
    a, b, c = d.sizes(3)
    return [sample(d.x(a, b * c), 1, [b, c]), sample(d.x(a * b, c), 0, [a, -1]), sample(d.x(a, b * c), -1, [-1, c])]


def cut(d: Draw) -> list[Sample]:
    """slice: a part, a stride, all of a dim."""
    a, b = d.sizes(2)
    return [
        sample(d.x(a, b), 1, 1, 3),
        sample(d.x(a, b), 0, 0, 2**63 - 1),
        sample(d.x(a, b), -1, -2, 2**63 - 1),
        sample(d.x(a, b), 1, 0, b, 2),
    ]


def select(d: Draw) -> list[Sample]:
    return [sample(d.x(*d.sizes(3)), dim, index) for dim, index in ((0, 1), (1, -1), (-1, 0))]


def narrow(d: Draw) -> list[Sample]:
    return [sample(d.x(*d.sizes(2)), dim, 1, 2) for dim in (0, -1)]


def chunk(d: Draw) -> list[Sample]:
    return [sample(d.x(*d.sizes(2)), 2), sample(d.x(*d.sizes(3)), 2, 1), sample(d.x(*d.sizes(2)), 3, -1)]


def split_sizes(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b), [2, b - 2], 1), sample(d.x(a, b), [a - 2, 2]), sample(d.x(a, b), [1, 1, b - 2], -1)]


def split_size(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b), 2, 1), sample(d.x(a, b), 2), sample(d.x(a, b), 3, -1)]


def unbind(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b)), sample(d.x(a, b, 3), 2), sample(d.x(a, 3, b), -2)]


def cat(d: Draw) -> list[Sample]:
    a, b, c = d.sizes(3)
    return [
        sample([d.x(a, b), d.x(a, c)], 1),
        sample([d.x(a, b), d.x(c, b)]),
        sample([d.x(a, b), d.x(a, 2), d.x(a, c)], -1),
    ]


def stack(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample([d.x(a, b) for _ in range(3)], dim) for dim in (0, 1, -1)]


def pad(d: Draw) -> list[Sample]:
    a, b, c = d.sizes(3)
    return [sample(d.x(a, b, c), [1, 2]), sample(d.x(a, b, c), [0, 0, 1, -1], 0.0), sample(d.x(a, b), [0, 1], 3.0)]


def pad_mode(d: Draw) -> list[Sample]:
    a, b, c = d.sizes(3)
    return [
        sample(d.x(a, b, c), [1, 2]),
        sample(d.x(a, b, c), [1, 2], "constant", 2.0),
        sample(d.x(a, b, c), [1, 2], "reflect"),
        sample(d.x(a, b, c), [0, 0, 1, 0]),
    ]


def flip(d: Draw) -> list[Sample]:
    return [sample(d.x(*d.sizes(3)), dims) for dims in ([0], [-1, 1])]


def roll(d: Draw) -> list[Sample]:
    return [sample(d.x(*d.sizes(3)), [1], [1]), sample(d.x(*d.sizes(2)), [1, -2], [0, -1]), sample(d.x(4, 6), [1])]


def triangle(d: Draw) -> list[Sample]:
    return [sample(d.x(*d.sizes(2))), sample(d.x(*d.sizes(3)), 1), sample(d.x(*d.sizes(3)), -1)]


def repeat(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b), [1, 2]), sample(d.x(b), [a, 1]), sample(d.x(a, b), [1, 1]), sample(d.x(a, b), [2, 1, 3])]


def repeat_interleave(d: Draw) -> list[Sample]:
    return [*(sample(d.x(*d.sizes(3)), 3, dim) for dim in (0, 1, -1)), sample(d.x(*d.sizes(2)), 3)]


def diagonal(d: Draw) -> list[Sample]:
    return [sample(d.x(*d.sizes(3)), 0, 1, 2), sample(d.x(*d.sizes(3)), 1, -3, -1)]


def gather(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [
        sample(d.x(a, b), 1, d.index(b, a, 3)),
        sample(d.x(a, b), 0, d.index(a, 3, b)),
        sample(d.x(b), -1, d.index(b, 4)),
    ]


def index(d: Draw) -> list[Sample]:
    a, b, c = d.sizes(3)
    return [
        sample(d.x(a, b), [d.index(a, c)]),
        sample(d.x(a, b, c), [None, d.index(b, 10)]),
        sample(d.x(a, b), [d.index(a, c, 2)]),
        sample(d.x(a, b, c), [d.index(a, 8, 1), d.index(b, 6)]),
        sample(d.x(a, b, c), [None, d.index(b, 4, 6), d.index(c, 6)]),
        sample(d.x(a, b, c), [d.index(a, 10), None, d.index(c, 10)]),
    ]


def index_select(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b), 0, d.index(a, 8)), sample(d.x(a, b), -1, d.index(b, 10))]


def index_put(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [
        sample(d.x(a, b), [torch.randperm(a)[:2]], d.x(2, b)),
        sample(d.x(a, b), [None, torch.randperm(b)[:2]], d.x(a, 2), True),
        sample(d.x(a, b, 3), [torch.randperm(a)[:4], torch.randperm(b)[:4]], d.x(4, 1)),
        sample(d.x(a, b, 6), [torch.randperm(a)[:4], None, torch.randperm(6)[:4]], d.x(4, b), True),
        sample(d.x(a, b), [torch.tensor([[0], [2]]), torch.randperm(b)[:4]], d.x()),
    ]


def index_add(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b), 0, d.index(a, 10), d.x(10, b)), sample(d.x(a, b), -1, d.index(b, 8), d.x(a, 8))]


def distinct(rows: int, size: int, num: int) -> Tensor:
    return torch.stack([torch.randperm(size)[:num] for _ in range(rows)])


def scatter_source(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b), 1, distinct(a, b, 4), d.x(a, 4)), sample(d.x(a, b), 0, distinct(b, a, 2).t(), d.x(2, b))]


def scatter_value(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b), 1, distinct(a, b, 2), 1.5), sample(d.x(a, b), 0, distinct(b, a, 2).t(), 1.5)]


def select_scatter(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b), d.x(b), 0, 1), sample(d.x(a, b), d.x(a), -1, 1)]


def slice_scatter(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b), d.x(2, b), 0, 1, 3), sample(d.x(a, b), d.x(a, 2), -1, 0, 2)]


def broadcast(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample([d.x(a, 1), d.x(b)]), sample([d.x(a, b), d.x(1, b)])]


def shape_only(*arguments: Any) -> Samples:
    return lambda d: [sample(list(d.sizes(n)), *arguments) for n in (1, 2, 3)]


SAMPLES: dict[Any, Samples] = {
    **dict.fromkeys(
        [aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten._reshape_copy.default], reshape
    ),
    aten.expand.default: expand,
    aten.broadcast_to.default: expand,
    aten.expand_as.default: lambda d: [sample(d.x(1, 6), d.x(4, 6)), sample(d.x(6), d.x(4, 6))],
    CONSTRAIN: lambda d: [sample(d.x(4, 6), ["x"], [0])],
    aten.view_as.default: lambda d: [sample(d.x(24), d.x(4, 6)), sample(d.x(4, 6), d.x(4, 6))],
    **dict.fromkeys([aten.transpose.int, aten.swapaxes.default, aten.swapdims.default], transpose),
    aten.t.default: lambda d: [sample(d.x(*d.sizes(2))), sample(d.x(*d.sizes(1)))],
    aten.numpy_T.default: lambda d: [sample(d.x(*d.sizes(2)))],
    **dict.fromkeys([aten.mT.default, aten.adjoint.default], lambda d: [sample(d.x(*d.sizes(n))) for n in (2, 3)]),
    aten.permute.default: permute,
    aten.movedim.int: lambda d: [sample(d.x(*d.sizes(3)), *dims) for dims in ((0, 2), (-1, 0), (1, 2))],
    aten.unsqueeze.default: unsqueeze,
    aten.squeeze.dim: squeeze_dim,
    aten.squeeze.dims: squeeze_dims,
    aten.squeeze.default: squeeze,
    aten.flatten.using_ints: flatten,
    aten.unflatten.int: unflatten,
    aten.slice.Tensor: cut,
    aten.select.int: select,
    aten.narrow.default: narrow,
    aten.chunk.default: chunk,
    aten.split_with_sizes.default: split_sizes,
    aten.split.sizes: split_sizes,
    aten.split.Tensor: split_size,
    aten.unbind.int: unbind,
    aten.cat.default: cat,
    aten.concat.default: cat,
    aten.stack.default: stack,
    aten.constant_pad_nd.default: pad,
    aten.pad.default: pad_mode,
    aten.flip.default: flip,
    aten.roll.default: roll,
    aten.tril.default: triangle,
    aten.triu.default: triangle,
    aten.repeat.default: repeat,
    aten.repeat_interleave.self_int: repeat_interleave,
    aten.diagonal.default: diagonal,
    aten.unsafe_split.Tensor: lambda d: [sample(d.x(4, 6), 2, 1), sample(d.x(4, 6), 3, 1)],
    aten.gather.default: gather,
    aten.index.Tensor: index,
    aten.index_select.default: index_select,
    aten.index_put.default: index_put,
    aten.index_add.default: index_add,
    aten.scatter.src: scatter_source,
    aten.scatter_add.default: scatter_source,
    aten.scatter.value: scatter_value,
    aten.select_scatter.default: select_scatter,
    aten.slice_scatter.default: slice_scatter,
    aten.broadcast_tensors.default: broadcast,
    aten.meshgrid.indexing: lambda d: [sample([d.x(4), d.x(6)], indexing=way) for way in ("ij", "xy")],
    aten.unfold.default: lambda d: [sample(d.x(4, 8), 1, 3, 1), sample(d.x(6, 8), 0, 3, 1)],
    aten.view_as_real.default: lambda d: [sample(torch.view_as_complex(d.constant(4, 6, 2)))],
    aten.masked_scatter.default: lambda d: [sample(d.x(4, 6), d.mask(4, 6), d.x(4, 6))],
    **dict.fromkeys([aten.zeros.default, aten.ones.default], shape_only()),
    **dict.fromkeys([aten.full.default], shape_only(2.5)),
    aten.arange.default: lambda d: [sample(8)],
    aten.arange.start: lambda d: [sample(2, 10)],
    aten.arange.start_step: lambda d: [sample(2, 18, 2)],
    aten.linspace.default: lambda d: [sample(0.0, 1.0, 8)],
    aten.empty.memory_format: shape_only(),
    aten.reshape_as.default: lambda d: [sample(d.x(24), d.x(4, 6)), sample(d.x(4, 6), d.x(4, 6))],
    aten.movedim.intlist: lambda d: [sample(d.x(*d.sizes(3)), [0, 2], [1, 0])],
    aten.meshgrid.default: lambda d: [sample([d.x(4), d.x(6)])],
    aten.eye.default: lambda d: [sample(6)],
    aten.eye.m: lambda d: [sample(6, 8)],
    aten.scalar_tensor.default: lambda d: [sample(2.5)],
}
