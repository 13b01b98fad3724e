"""Convolutions, pooling and resampling: the batch is free, channels are rows and columns as in a matrix product.

A spatial dim is free only where windows do not overlap (kernel size = stride, no padding), as in a ViT's patches:
input (h p), output h.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from autopar.ir.sharding.operation import Call, OpRule
from autopar.ir.sharding.rule import WHOLE
from autopar.strategies.notation import Entry, rule, term

aten = torch.ops.aten

SPATIAL = ("h", "w", "z")


def each(value: int | Sequence[int], num_dims: int) -> list[int]:
    """One number per spatial dim, as PyTorch broadcasts a single one."""
    values = [value] if isinstance(value, int) else list(value)
    return values * num_dims if len(values) == 1 else values


def windows(call: Call, kernel: Sequence[int], num_dims: int) -> tuple[list[str], list[str]]:
    """The spatial dims of input and output: split along the windows where these neither overlap nor leave a rest."""
    image, padding = call.inputs[0].shape[-num_dims:], call.arguments.get("padding", 0)
    strides = each(call["stride"] or list(kernel), num_dims)
    dilations = each(call.arguments.get("dilation", 1), num_dims)
    paddings = [1] * num_dims if isinstance(padding, str) else each(padding, num_dims)
    left, right = [], []
    for name, size, width, stride, pad, dilation in zip(
        SPATIAL, image, kernel, strides, paddings, dilations, strict=False
    ):
        free = width == stride and pad == 0 and dilation == 1 and size % stride == 0
        left.append((name if width == 1 else f"({name} {name}0)") if free else WHOLE)
        right.append(name if free else WHOLE)
    return left, right


def convolution(num_dims: int | None = None) -> Callable[[Call], OpRule]:
    """`input` with `weight` (out, in / groups, kernel), or (in, out / groups, kernel) when transposed."""

    def entry(call: Call) -> OpRule:
        weight = call["weight"].shape
        count = num_dims or len(weight) - 2
        transposed = call.arguments.get("transposed", "output_padding" in call.arguments)
        # Split groups would need another `groups` argument on each rank: the channels of a grouped one stay whole.
        rows, columns = ("k", "o") if call["groups"] == 1 else (WHOLE, WHOLE)
        kernel = weight[2:]
        if transposed:
            right, left = _upsampled(call, kernel, count)
            channels = [rows, columns]
        else:
            left, right = windows(call, kernel, count)
            channels = [columns, rows]
        batch = ["n"] if len(call.inputs[0].shape) == count + 2 else []
        terms = [term([*batch, rows, *left], "~"), term([*channels, *[WHOLE] * count], "~")]
        if call["bias"] is not None:
            terms.append(term([columns], "+"))
        text = rule(terms, [term([*batch, columns, *right])])
        return OpRule(text, flops=_flops(call, transposed))

    return entry


def _upsampled(call: Call, kernel: Sequence[int], num_dims: int) -> tuple[list[str], list[str]]:
    """Spatial dims of output and input of a transposed convolution whose windows do not overlap."""
    strides, paddings = each(call["stride"], num_dims), each(call["padding"], num_dims)
    extra, dilations = each(call["output_padding"], num_dims), each(call["dilation"], num_dims)
    free = [
        width == stride and pad == 0 and more == 0 and dilation == 1
        for width, stride, pad, more, dilation in zip(kernel, strides, paddings, extra, dilations, strict=True)
    ]
    small = [name if one else WHOLE for name, one in zip(SPATIAL, free, strict=False)]
    large = [f"({name} {name}0)" if one else WHOLE for name, one in zip(SPATIAL, free, strict=False)]
    return large, small


def _flops(call: Call, transposed: bool) -> int:
    """A multiplication and an addition per weight and place: of the output, or of the input when transposed."""
    weight, image = call["weight"].shape, call.inputs[0] if transposed else call.outputs[0]
    return 2 * image.num_elements * math.prod(weight[1:])


def pool(num_dims: int, mark: str = "") -> Callable[[Call], str]:
    """A window slides over the last dims."""

    def entry(call: Call) -> str:
        kernel = each(call["kernel_size"], num_dims)
        whole = [WHOLE] * num_dims
        # With indices, an output counts in the whole image.
        left, right = windows(call, kernel, num_dims) if len(call.outputs) == 1 else (whole, whole)
        return rule([term(["...", *left], mark)], [term(["...", *right])] * len(call.outputs))

    return entry


def adaptive_pool(num_dims: int, mark: str = "") -> Callable[[Call], str]:
    """The last dims become dims of a stated size."""

    def entry(call: Call) -> str:
        dims = ["...", *[WHOLE] * num_dims]
        return rule([term(dims, mark)], [term(dims)] * len(call.outputs))

    return entry


def nearest(num_dims: int) -> Callable[[Call], str]:
    """Every element several times, where the factor (not the size) is stated and whole."""

    def entry(call: Call) -> str:
        factors = call["scale_factors"] or [0.5] * num_dims
        free = [factor == int(factor) and factor >= 1 for factor in factors]
        left = [name if one else WHOLE for name, one in zip(SPATIAL, free, strict=False)]
        right = [f"({name} {name}0)" if one else WHOLE for name, one in zip(SPATIAL, free, strict=False)]
        return rule([term(["...", *left], "~")], [term(["...", *right])])

    return entry


def grid_sampler(call: Call) -> str:
    """`input` (n, c, image) read at the places of `grid` (n, spatial, coordinates)."""
    places = SPATIAL[: len(call["grid"].shape) - 2]
    return rule(
        [term(["n", "c", *[WHOLE] * len(places)], "~"), term(["n", *places, WHOLE])], [term(["n", "c", *places])]
    )


def channel_shuffle(call: Call) -> str:
    """Channels in another order."""
    dims = term(["n", WHOLE, *SPATIAL[: len(call.inputs[0].shape) - 2]])
    return rule([f"~{dims}"], [dims])


RULES: dict[torch._ops.OpOverload, Entry] = {
    aten.conv1d.default: convolution(1),
    aten.conv2d.default: convolution(2),
    aten.conv3d.default: convolution(3),
    aten.conv1d.padding: convolution(1),
    aten.conv2d.padding: convolution(2),
    aten.conv3d.padding: convolution(3),
    aten.conv_transpose1d.default: convolution(1),
    aten.conv_transpose2d.input: convolution(2),
    aten.conv_transpose3d.input: convolution(3),
    aten.convolution.default: convolution(),
    aten.max_pool1d.default: pool(1),
    aten.max_pool2d.default: pool(2),
    aten.max_pool3d.default: pool(3),
    aten.max_pool1d_with_indices.default: pool(1),
    aten.max_pool2d_with_indices.default: pool(2),
    aten.avg_pool1d.default: pool(1, "~"),
    aten.avg_pool2d.default: pool(2, "~"),
    aten.avg_pool3d.default: pool(3, "~"),
    aten.adaptive_avg_pool1d.default: adaptive_pool(1, "~"),
    aten.adaptive_avg_pool2d.default: adaptive_pool(2, "~"),
    aten._adaptive_avg_pool2d.default: adaptive_pool(2, "~"),
    aten.adaptive_avg_pool3d.default: adaptive_pool(3, "~"),
    aten.adaptive_max_pool1d.default: adaptive_pool(1),
    aten.adaptive_max_pool2d.default: adaptive_pool(2),
    aten.upsample_nearest1d.vec: nearest(1),
    aten.upsample_nearest2d.vec: nearest(2),
    aten.upsample_nearest3d.vec: nearest(3),
    aten._upsample_nearest_exact1d.vec: nearest(1),
    aten._upsample_nearest_exact2d.vec: nearest(2),
    aten.upsample_linear1d.vec: adaptive_pool(1, "~"),
    aten.upsample_bilinear2d.vec: adaptive_pool(2, "~"),
    aten.upsample_bicubic2d.vec: adaptive_pool(2, "~"),
    aten.upsample_trilinear3d.vec: adaptive_pool(3, "~"),
    # i counts the places in a window; the others are inner factors of their own.
    aten.pixel_shuffle.default: "~... (c i) h w -> ... c (h r) (w q)",
    aten.pixel_unshuffle.default: "~... c (h r) (w q) -> ... (c i) h w",
    aten.channel_shuffle.default: channel_shuffle,
    aten.grid_sampler.default: grid_sampler,
    aten.col2im.default: "~... (c i) _ -> ... c _ _",
    aten.im2col.default: "~... c _ _ -> ... (c i) _",
}
