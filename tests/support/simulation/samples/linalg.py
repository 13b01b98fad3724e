"""Sample calls of what takes matrices and signals as wholes: factorisations, distances, Fourier transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.simulation.samples.draw import Draw, Sample, Samples, sample

aten = torch.ops.aten


def definite(d: Draw, *shape: int) -> Tensor:
    """Symmetric positive definite matrices."""
    x = d.constant(*shape, shape[-1])
    return (x @ x.mT + 3 * torch.eye(shape[-1], dtype=x.dtype)).requires_grad_()


def of_matrices(d: Draw) -> list[Sample]:
    return [sample(definite(d, 3)), sample(definite(d, 4, 6)), sample(definite(d, 4, 6, 3))]


def solve(d: Draw) -> list[Sample]:
    return [
        sample(definite(d, 4, 3), d.x(4, 3, 6)),
        sample(definite(d, 4, 3), d.x(4, 3)),
        sample(definite(d, 3), d.x(3)),
        sample(definite(d, 3), d.x(6, 3, 4)),
        sample(definite(d, 4, 3), d.x(4, 6, 3), left=False),
    ]


def solve_triangular(d: Draw) -> list[Sample]:
    return [
        sample(definite(d, 4, 3), d.x(4, 3, 6), upper=False),
        sample(definite(d, 3), d.x(4, 6, 3), upper=True, left=False),
    ]


def cholesky_solve(d: Draw) -> list[Sample]:
    return [sample(d.x(4, 3, 6), definite(d, 4, 3)), sample(d.x(3, 4), definite(d, 3))]


def cross(d: Draw) -> list[Sample]:
    return [sample(d.x(4, 3), d.x(4, 3)), sample(d.x(3, 6), d.x(3, 1), dim=0)]


def cdist(d: Draw) -> list[Sample]:
    a, b, c = d.sizes(3)
    return [
        sample(d.x(a, 3), d.x(b, 3)),
        sample(d.x(c, a, 3), d.x(c, b, 3), 1.0),
        sample(d.x(a, 3), d.x(c, b, 3), 2.0, 2),
    ]


def tensordot(d: Draw) -> list[Sample]:
    a, b, c, e = d.sizes(4)
    return [
        sample(d.x(a, b, c), d.x(c, e), [2], [0]),
        sample(d.x(a, b, c), d.x(b, c), [1, -1], [0, 1]),
        sample(d.x(a, b), d.x(c, e, b), [1], [2]),
        sample(d.x(a, b), d.x(c, e), [], []),
        sample(d.x(a, b), d.x(1, e), [1], [0]),
    ]


def inner(d: Draw) -> list[Sample]:
    a, b, c = d.sizes(3)
    return [
        sample(d.x(a, c), d.x(b, c)),
        sample(d.x(c), d.x(c)),
        sample(d.x(a, c), d.x()),
        sample(d.x(c), d.x(a, b, c)),
    ]


def along_one(d: Draw) -> list[Sample]:
    return [sample(d.x(4, 6)), sample(d.x(4, 6, 8), 4, 1), sample(d.x(4, 6), 10, 0)]


def along_two(d: Draw) -> list[Sample]:
    return [sample(d.x(4, 6, 8)), sample(d.x(4, 6, 8), None, [0, 2]), sample(d.x(4, 6, 8), [4, 4])]


def along_some(d: Draw) -> list[Sample]:
    return [sample(d.x(4, 6)), sample(d.x(4, 6, 8), [4]), sample(d.x(4, 6, 8), None, [1])]


def complex_numbers(samples: Samples) -> Samples:
    """The same calls on complex numbers."""

    def found(d: Draw) -> list[Sample]:
        return [
            sample(
                torch.complex(each.args[0].detach(), d.constant(*each.args[0].shape)).requires_grad_(), *each.args[1:]
            )
            for each in samples(d)
        ]

    return found


def shift(d: Draw) -> list[Sample]:
    return [sample(d.x(4, 6)), sample(d.x(4, 6, 8), [1])]


def short_time(d: Draw) -> list[Sample]:
    return [
        sample(d.x(4, 32), 8, 4, 8, d.x(8), return_complex=True),
        sample(d.x(4, 32), 8, return_complex=False),
        sample(d.x(32), 8, 4, return_complex=True),
    ]


SAMPLES: dict[Any, Samples] = {
    **dict.fromkeys(
        [
            aten.cholesky_inverse.default,
            aten.linalg_cholesky.default,
            aten.linalg_det.default,
            aten.linalg_eigh.default,
            aten.linalg_eigvalsh.default,
            aten.linalg_inv.default,
            aten.linalg_matrix_exp.default,
            aten.linalg_pinv.atol_rtol_float,
            aten.linalg_pinv.atol_rtol_tensor,
            aten.linalg_qr.default,
            aten.linalg_slogdet.default,
            aten.linalg_svd.default,
            aten.linalg_svdvals.default,
        ],
        of_matrices,
    ),
    aten.linalg_pinv.default: lambda d: [sample(definite(d, 4, 3), 1e-9)],
    aten.linalg_solve.default: solve,
    aten.linalg_solve_triangular.default: solve_triangular,
    aten.cholesky_solve.default: cholesky_solve,
    aten.linalg_cross.default: cross,
    aten.cdist.default: cdist,
    aten.tensordot.default: tensordot,
    aten.inner.default: inner,
    aten.vdot.default: lambda d: [sample(d.x(4), d.x(4))],
    aten.addbmm.default: lambda d: [
        sample(d.x(6, 8), d.x(4, 6, 10), d.x(4, 10, 8)),
        sample(d.x(8), d.x(4, 6, 2), d.x(4, 2, 8)),
    ],
    aten.addmv.default: lambda d: [sample(d.x(6), d.x(6, 4), d.x(4))],
    aten.addr.default: lambda d: [sample(d.x(6, 4), d.x(6), d.x(4), beta=0.5)],
    aten.linalg_lu_factor.default: of_matrices,
    aten.linalg_householder_product.default: lambda d: [sample(d.x(4, 6, 3), d.x(4, 3))],
    **dict.fromkeys([aten.fft_fft.default, aten.fft_ifft.default, aten.fft_rfft.default], along_one),
    **dict.fromkeys([aten.fft_ihfft.default], along_one),
    **dict.fromkeys([aten.fft_irfft.default, aten.fft_hfft.default], complex_numbers(along_one)),
    **dict.fromkeys(
        [aten.fft_fft2.default, aten.fft_ifft2.default, aten.fft_rfft2.default, aten.fft_ihfft2.default], along_two
    ),
    **dict.fromkeys([aten.fft_irfft2.default, aten.fft_hfft2.default], complex_numbers(along_two)),
    **dict.fromkeys(
        [aten.fft_fftn.default, aten.fft_ifftn.default, aten.fft_rfftn.default, aten.fft_ihfftn.default], along_some
    ),
    **dict.fromkeys([aten.fft_irfftn.default, aten.fft_hfftn.default], complex_numbers(along_some)),
    **dict.fromkeys([aten.fft_fftshift.default, aten.fft_ifftshift.default], shift),
    aten.stft.default: short_time,
    aten.stft.center: short_time,
}
