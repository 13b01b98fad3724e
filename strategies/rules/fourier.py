"""Fourier transforms: the transformed dims stay whole, all others are free; linear, also between real and complex."""

from __future__ import annotations

import torch

from autopar.ir.sharding.operation import Call
from autopar.ir.sharding.rule import WHOLE
from autopar.strategies.notation import Entry, along_dims, dims_of, names, rule, term, whole_at

aten = torch.ops.aten


def transform(call: Call) -> str:
    """Along one dim, or several; where none are named, along all, or as many of the last as have a stated size."""
    ndim, dims, sizes = len(call.inputs[0].shape), call["dim"], call.arguments.get("s")
    whole = range(ndim - len(sizes), ndim) if dims is None and sizes else dims_of(dims, ndim)
    kept = term(whole_at(names(ndim), whole))
    return rule([f"~{kept}"], [kept])


def short_time(call: Call) -> str:
    """A signal (…, t) → its spectra (…, frequencies, frames), and a last dim of two where it is not complex."""
    batch = ["b"] if len(call["self"].shape) == 2 else []
    num_new = len(call.outputs[0].shape) - len(batch)
    window = [term([WHOLE], "~")] if call["window"] is not None else []
    return rule([term([*batch, WHOLE], "~"), *window], [term([*batch, *[WHOLE] * num_new])])


RULES: dict[torch._ops.OpOverload, Entry] = {
    **dict.fromkeys(
        (
            aten.fft_fft.default,
            aten.fft_fft2.default,
            aten.fft_fftn.default,
            aten.fft_hfft.default,
            aten.fft_hfft2.default,
            aten.fft_hfftn.default,
            aten.fft_ifft.default,
            aten.fft_ifft2.default,
            aten.fft_ifftn.default,
            aten.fft_ihfft.default,
            aten.fft_ihfft2.default,
            aten.fft_ihfftn.default,
            aten.fft_irfft.default,
            aten.fft_irfft2.default,
            aten.fft_irfftn.default,
            aten.fft_rfft.default,
            aten.fft_rfft2.default,
            aten.fft_rfftn.default,
        ),
        transform,
    ),
    **dict.fromkeys((aten.fft_fftshift.default, aten.fft_ifftshift.default), along_dims(mark="~")),
    aten.stft.default: short_time,
    aten.stft.center: short_time,
}
