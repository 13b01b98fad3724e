"""Sample calls of matrix products, attention and convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK
from autopar.ir.program.operators.attention.cached import CACHED_ATTENTION, WRITE_CACHE
from autopar.ir.program.operators.mlp_in_tiles import MLP_IN_TILES
from tests.support.simulation.samples.draw import Draw, Sample, Samples, sample

aten = torch.ops.aten


def cached_attention(d: Draw) -> list[Sample]:
    def call(heads: int, key_heads: int, *window: int) -> Sample:
        query, key = d.constant(4, heads, 1, 10), d.constant(4, key_heads, 12, 10)
        return sample(query, key, d.constant(4, key_heads, 12, 10), torch.tensor([0, 3, 7, 11]), 0.3, *window)

    return [call(6, 6), call(12, 6, 5)]


def write_cache(d: Draw) -> list[Sample]:
    def call(size: int, *positions: int) -> Sample:
        return sample(d.constant(4, 6, 12, 10), d.constant(4, 6, size, 10), torch.tensor(positions))

    return [call(1, 0, 11, 5, 6), call(5, 0, 0, 0, 0), call(4, 2, 8, 5, 0)]


def linear(d: Draw) -> list[Sample]:
    a, b, c, e = d.sizes(4)
    return [
        sample(d.x(a, b), d.x(c, b)),
        sample(d.x(a, b), d.x(c, b), d.x(c)),
        sample(d.x(a, e, b), d.x(c, b), d.x(c)),
        sample(d.x(2, a, e, b), d.x(c, b)),
        sample(d.x(b), d.x(c, b), d.x(c)),
        sample(d.x(a, e, b), d.constant(c, b), d.constant(c)),
        sample(d.constant(a, e, b), d.x(c, b), d.x(c)),
    ]


def mlp_in_tiles(d: Draw) -> list[Sample]:
    a, b, c, e = d.sizes(4)

    def weights(gated: bool, biased: bool) -> tuple[Tensor | None, ...]:
        gate = (d.x(e, c), d.x(e) if biased else None) if gated else (None, None)
        return (d.x(e, c), d.x(e) if biased else None, *gate, d.x(c, e), d.x(c) if biased else None)

    return [
        sample(d.x(a, c), *weights(True, False), "silu", 2),
        sample(d.x(a, b, c), *weights(True, True), "gelu", 3),
        sample(d.x(a, b, c), *weights(False, True), "relu", 2),
        sample(d.x(a, b, c), *weights(False, False), "gelu_tanh", 1),
    ]


def mm(d: Draw) -> list[Sample]:
    a, b, c = d.sizes(3)
    return [sample(d.x(a, b), d.x(b, c)), sample(d.x(a, b), d.x(c, b).t())]


def bmm(d: Draw) -> list[Sample]:
    a, b, c, e = d.sizes(4)
    return [sample(d.x(a, b, c), d.x(a, c, e))]


def mv(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b), d.x(b))]


def dot(d: Draw) -> list[Sample]:
    (a,) = d.sizes(1)
    return [sample(d.x(a), d.x(a))]


def addmm(d: Draw) -> list[Sample]:
    a, b, c = d.sizes(3)
    return [
        sample(d.x(c), d.x(a, b), d.x(b, c)),
        sample(d.x(a, c), d.x(a, b), d.x(b, c)),
        sample(d.x(1, c), d.x(a, b), d.x(b, c), beta=2, alpha=0.5),
        sample(d.x(a, 1), d.x(a, b), d.x(b, c)),
    ]


def baddbmm(d: Draw) -> list[Sample]:
    a, b, c, e = d.sizes(4)
    return [
        sample(d.x(a, b, e), d.x(a, b, c), d.x(a, c, e)),
        sample(d.x(a, 1, e), d.x(a, b, c), d.x(a, c, e), beta=0.5),
        sample(d.x(e), d.x(a, b, c), d.x(a, c, e)),
    ]


def matmul(d: Draw) -> list[Sample]:
    a, b, c, e = d.sizes(4)
    return [
        sample(d.x(a, b), d.x(b, c)),
        sample(d.x(a, b, c), d.x(a, c, e)),
        sample(d.x(a, b, c), d.x(c, e)),
        sample(d.x(2, a, b, c), d.x(2, a, c, e)),
        sample(d.x(2, a, b, c), d.x(a, c, e)),
        sample(d.x(2, 1, b, c), d.x(a, c, e)),
        sample(d.x(a, b), d.x(b)),
        sample(d.x(b), d.x(b, c)),
        sample(d.x(b), d.x(b)),
        sample(d.x(a, b, c), d.x(c)),
        sample(d.x(b, c), d.x(a, c, e)),
        sample(d.x(c), d.x(a, c, e)),
    ]


def einsum(d: Draw) -> list[Sample]:
    a, b, c, e = d.sizes(4)
    return [
        sample("ij,jk->ik", [d.x(a, b), d.x(b, c)]),
        sample("bhqd, bhkd -> bhqk", [d.x(2, a, b, c), d.x(2, a, e, c)]),
        sample("...i,oi->...o", [d.x(a, b, c), d.x(e, c)]),
        sample("bij,bjk,bk->bi", [d.x(a, b, c), d.x(a, c, e), d.x(a, e)]),
        sample("ij->ji", [d.x(a, b)]),
        sample("i,j->ij", [d.x(a), d.x(b)]),
        sample("ij,jk", [d.x(a, b), d.x(b, c)]),
    ]


def attention(d: Draw) -> list[Sample]:
    a, b, c, e = d.sizes(4)
    q = lambda: d.x(2, a, b, c)  # noqa: E731
    return [
        sample(q(), q(), q()),
        sample(q(), d.x(2, a, e, c), d.x(2, a, e, c)),
        sample(q(), q(), q(), is_causal=True),
        sample(q(), q(), q(), scale=0.3),
        sample(q(), d.x(2, a, e, c), d.x(2, a, e, c), d.constant(b, e)),
        sample(q(), d.x(2, a, e, c), d.x(2, a, e, c), d.constant(2, 1, b, e)),
        sample(q(), d.x(2, a, e, c), d.x(2, a, e, c), d.constant(2, a, 1, e)),
        sample(q(), d.x(2, a, e, c), d.x(2, a, e, c), d.constant(1, 1, b, e) > -1),
        sample(q(), d.x(2, a, e, c), d.x(2, a, e, c), d.x(1, a, b, e)),
        sample(d.x(2, 8, b, c), d.x(2, 4, e, c), d.x(2, 4, e, c), enable_gqa=True),
        sample(d.x(2, 8, b, c), d.x(2, 4, b, c), d.x(2, 4, b, c), is_causal=True, enable_gqa=True),
        sample(d.x(2, 8, b, c), d.x(2, 2, e, c), d.x(2, 2, e, c), d.constant(2, 1, b, e), enable_gqa=True),
        sample(d.x(2, 6, b, c), d.x(2, 3, e, c), d.x(2, 3, e, c), d.constant(2, 6, b, e), enable_gqa=True),
        sample(d.x(a, b, c), d.x(a, e, c), d.x(a, e, c)),
        sample(d.x(2, a, b, c), d.x(2, 1, b, c), d.x(2, 1, b, c), is_causal=True),
        sample(d.x(2, a, b, c), d.x(2, 1, b, c), d.x(2, 1, b, c), d.constant(2, a, b, b), enable_gqa=True),
    ]


def attention_by_mask(d: Draw) -> list[Sample]:
    a, b, c, e = d.sizes(4)
    k, others = lambda: d.x(2, 4, b, c), lambda: d.x(2, a, e, c)
    return [
        sample(d.x(2, a, b, c), others(), others(), [d.constant(2, 1, b, 1), d.constant(e)], "le(v1, v0)"),
        sample(d.x(2, 8, b, c), k(), k(), [d.constant(8, b, 1), d.constant(1, b)], "le(v1, v0)", 0.3),
        sample(
            *(d.x(2, 8, b, c), k(), k(), [d.constant(b, 1), d.constant(b)], "le(v1, v0)", 0.3),
            sinks=d.x(1, 8, 1, 1),
        ),
    ]


def convolution(num_dims: int) -> Samples:
    """Strides, padding, dilation, groups, with and without bias; batched."""

    def samples(d: Draw) -> list[Sample]:
        n, i, o, size = d.sizes(4)
        spatial = (size, *(size + 1 + j for j in range(num_dims - 1)))

        def image(channels: int = i) -> Tensor:
            return d.x(n, channels, *spatial)

        def kernel(out: int, channels: int, width: int = 3) -> Tensor:
            return d.x(out, channels, *(width,) * num_dims)

        ones, twos = [1] * num_dims, [2] * num_dims
        return [
            sample(image(), kernel(o, i), d.x(o), ones, ones),
            sample(image(), kernel(o, i), None, ones, ones),
            sample(image(), kernel(o, i, 2), d.x(o), twos),
            sample(image(), kernel(o, i), d.x(o), ones, twos, twos),
            sample(image(4), kernel(8, 2), d.x(8), ones, ones, ones, 2),
            sample(image(4), kernel(4, 1), d.x(4), ones, ones, ones, 4),
            sample(image(), kernel(o, i, 1), d.x(o)),
        ]

    return samples


def transposed_convolution(num_dims: int) -> Samples:
    def samples(d: Draw) -> list[Sample]:
        n, i, o, size = d.sizes(4)
        twos = [2] * num_dims
        x, weight = d.x(n, i, *(size,) * num_dims), d.x(i, o, *(2,) * num_dims)
        return [sample(x, weight, d.x(o), twos), sample(x, weight, None, twos)]

    return samples


def padded_convolution(d: Draw) -> list[Sample]:
    n, i, o, size = d.sizes(4)
    return [sample(d.x(n, i, size, size + 1), d.x(o, i, 3, 3), d.x(o), [1, 1], "same")]


def any_convolution(d: Draw) -> list[Sample]:
    """`convolution`: an ordinary and a transposed one."""
    n, i, o, size = d.sizes(4)
    x = d.x(n, i, size, size + 1)
    return [
        sample(x, d.x(o, i, 3, 3), d.x(o), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        sample(x, d.x(o, i, 3, 3), None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1),
        sample(x, d.x(i, o, 2, 2), d.x(o), [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
    ]


def pooling(d: Draw) -> list[Sample]:
    n, c, h = d.sizes(3)
    return [sample(d.x(n, c, h, h + 2), [2, 2]), sample(d.x(n, c, h, h + 2), [3, 3], [2, 2], [1, 1])]


def adaptive_pooling(*sizes: int) -> Samples:
    def samples(d: Draw) -> list[Sample]:
        n, c, h = d.sizes(3)
        return [
            sample(d.x(n, c, *(h,) * len(sizes)), list(sizes)),
            sample(d.x(n, c, *(h,) * len(sizes)), [1] * len(sizes)),
        ]

    return samples


SAMPLES: dict[Any, Samples] = {
    MLP_IN_TILES: mlp_in_tiles,
    aten.linear.default: linear,
    aten.mm.default: mm,
    aten.bmm.default: bmm,
    aten.mv.default: mv,
    aten.dot.default: dot,
    aten.outer.default: lambda d: [sample(d.x(4), d.x(6))],
    aten.addmm.default: addmm,
    aten.baddbmm.default: baddbmm,
    aten.matmul.default: matmul,
    aten.einsum.default: einsum,
    aten.bilinear.default: lambda d: [sample(d.x(4, 6), d.x(4, 8), d.x(10, 6, 8), d.x(10))],
    aten.scaled_dot_product_attention.default: attention,
    ATTENTION_BY_MASK: attention_by_mask,
    CACHED_ATTENTION: cached_attention,
    WRITE_CACHE: write_cache,
    aten.conv1d.default: convolution(1),
    aten.conv2d.default: convolution(2),
    aten.conv3d.default: lambda d: convolution(3)(d)[:2],
    aten.conv2d.padding: padded_convolution,
    aten.conv1d.padding: lambda d: [sample(d.x(4, 6, 10), d.x(8, 6, 3), d.x(8), [1], "same")],
    aten.convolution.default: any_convolution,
    aten.conv_transpose1d.default: transposed_convolution(1),
    aten.conv_transpose2d.input: transposed_convolution(2),
    **dict.fromkeys([aten.max_pool2d.default, aten.avg_pool2d.default, aten.max_pool2d_with_indices.default], pooling),
    **dict.fromkeys(
        [aten.max_pool1d.default, aten.avg_pool1d.default, aten.max_pool1d_with_indices.default],
        lambda d: [sample(d.x(4, 6, 8), [2]), sample(d.x(4, 6, 8), [3], [2], [1])],
    ),
    **dict.fromkeys([aten.adaptive_avg_pool2d.default, aten.adaptive_max_pool2d.default], adaptive_pooling(3, 2)),
    aten._adaptive_avg_pool2d.default: adaptive_pooling(3, 2),
    aten.adaptive_avg_pool1d.default: adaptive_pooling(3),
    **dict.fromkeys(
        [aten.upsample_nearest2d.vec, aten._upsample_nearest_exact2d.vec],
        lambda d: [sample(d.x(4, 6, 8, 10), None, [2.0, 2.0]), sample(d.x(4, 6, 8, 10), [12, 12], None)],
    ),
    **dict.fromkeys(
        [aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec],
        lambda d: [sample(d.x(4, 6, 8, 10), None, False, [2.0, 2.0]), sample(d.x(4, 6, 8, 10), [12, 12], True, None)],
    ),
    aten.upsample_nearest1d.vec: lambda d: [sample(d.x(4, 6, 8), None, [2.0])],
    aten.upsample_linear1d.vec: lambda d: [sample(d.x(4, 6, 8), None, False, [2.0])],
    aten.pixel_shuffle.default: lambda d: [sample(d.x(6, 16, 8, 10), 2)],
    aten.pixel_unshuffle.default: lambda d: [sample(d.x(6, 4, 8, 12), 2)],
    aten._upsample_nearest_exact1d.vec: lambda d: [sample(d.x(4, 6, 8), None, [2.0])],
    aten.upsample_nearest3d.vec: lambda d: [sample(d.x(4, 6, 2, 3, 4), None, [2.0, 2.0, 2.0])],
    aten.upsample_trilinear3d.vec: lambda d: [sample(d.x(4, 6, 2, 3, 4), None, False, [2.0, 2.0, 2.0])],
    aten.adaptive_avg_pool3d.default: adaptive_pooling(3, 2, 1),
    aten.adaptive_max_pool1d.default: adaptive_pooling(3),
    **dict.fromkeys(
        [aten.avg_pool3d.default, aten.max_pool3d.default], lambda d: [sample(d.x(4, 6, 8, 4, 2), [2, 2, 2])]
    ),
    aten.conv3d.padding: lambda d: [sample(d.x(4, 6, 3, 4, 5), d.x(8, 6, 3, 3, 3), None, [1, 1, 1], "same")],
    aten.conv_transpose3d.input: lambda d: transposed_convolution(3)(d)[:1],
    aten.im2col.default: lambda d: [sample(d.x(4, 6, 8, 10), [3, 3], [1, 1], [1, 1], [1, 1])],
}
