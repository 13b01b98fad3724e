"""Operations that are taken apart while a model is traced: compositions of others, which have rules.

PyTorch computes such an operation, and its gradient, by calling others; the graph has these in its place. Operations
that are better kept whole, because one rule covers them, are not named here.

Where autocast has a policy of its own for the whole (losses in float32), the whole is recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx.experimental import proxy_tensor
from torch.nn import functional as F

from autopar.capture.passes.autocast import Autocast

aten = torch.ops.aten


def layer_by_layer(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return a recurrent net with dropout between its layers as one call for each layer, and one of dropout between."""

    def run(
        x: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        if not train or dropout == 0 or num_layers == 1:
            return NotImplemented
        single = isinstance(hx, Tensor)
        states = [state.chunk(num_layers) for state in ((hx,) if single else hx)]
        per_layer, last = len(params) // num_layers, []
        for layer in range(num_layers):
            own = [state[layer] for state in states]
            weights = params[layer * per_layer : (layer + 1) * per_layer]
            given = own[0] if single else own
            x, *after = op(x, given, weights, has_biases, 1, 0.0, train, bidirectional, batch_first)
            last.append(after)
            if layer < num_layers - 1:
                x = F.dropout(x, dropout, train)
        return x, *(torch.cat(state) for state in zip(*last, strict=True))

    return run


def affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    """Return the input coordinates for each position of an output of `size` (n, c, spatial).

    The coordinates follow from the affine maps theta (n, d, d + 1).
    """
    along = []
    for number in size[2:]:
        ends = 1.0 if align_corners else (number - 1) / number
        steps = torch.linspace(-ends, ends, number, dtype=theta.dtype, device=theta.device)
        along.append(steps if number > 1 else torch.zeros_like(steps))
    places = torch.meshgrid(*along, indexing="ij")
    base = torch.stack([*reversed(places), torch.ones_like(places[0])], -1).flatten(0, -2)
    return (base @ theta.transpose(-1, -2)).unflatten(1, tuple(size[2:]))


def covariance(
    x: Tensor, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """Return the covariance of the rows of x (variables, observations), or NotImplemented if weights are given.

    PyTorch's own implementation reads the values of the weights even if none are given.
    """
    if fweights is not None or aweights is not None:
        return NotImplemented
    rows = x if x.ndim > 1 else x.unsqueeze(0)
    centred = rows - rows.mean(1, keepdim=True)
    return (centred @ centred.mH / max(rows.shape[1] - correction, 0)).squeeze()


def correlation(x: Tensor) -> Tensor:
    """Return the covariance of the rows of x, divided by their deviations."""
    found = covariance(x)
    if not found.ndim:
        return found / found
    deviations = found.diagonal().sqrt()
    return (found / deviations.unsqueeze(-1) / deviations.unsqueeze(0)).clamp(-1, 1)


def counted(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Return the count of each number in x, or the sum of its weights; no number may exceed `minlength` - 1.

    PyTorch's own returns more counts for a larger number, so that its shape depends on values; this one raises at run
    time. Return NotImplemented if `minlength` is 0.
    """
    if not minlength:
        return NotImplemented
    if weights is None:
        weights = torch.ones_like(x, dtype=torch.int64)
    elif weights.dtype is not torch.float32:
        weights = weights.double()
    return torch.zeros(minlength, dtype=weights.dtype, device=x.device).scatter_add(0, x.long(), weights)


OTHER_NAMES = """
    absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh clip clip.Tensor concatenate conj det
    divide.Scalar divide.Scalar_mode divide.Tensor divide.Tensor_mode fix float_power.Scalar
    float_power.Tensor_Scalar float_power.Tensor_Tensor ger greater.Scalar greater.Tensor greater_equal.Scalar
    greater_equal.Tensor inverse less.Scalar less.Tensor less_equal.Scalar less_equal.Tensor linalg_matmul mH
    matrix_H matrix_exp matrix_power moveaxis.int moveaxis.intlist msort multiply.Scalar multiply.Tensor negative
    not_equal.Scalar not_equal.Tensor orgqr qr ravel row_stack slogdet special_digamma special_erf special_erfc
    special_erfinv special_exp2 special_expm1 special_gammainc special_gammaincc special_gammaln special_i0
    special_log1p special_log_softmax special_logit special_logsumexp special_polygamma special_psi special_round
    special_sinc special_softmax special_xlogy special_xlogy.other_scalar special_xlogy.self_scalar subtract.Scalar
    subtract.Tensor svd true_divide.Scalar true_divide.Tensor
"""
SHAPES = """
    atleast_1d atleast_1d.Sequence atleast_2d atleast_2d.Sequence atleast_3d atleast_3d.Sequence cartesian_prod
    column_stack diag diagflat dsplit.array dsplit.int dstack fliplr flipud hsplit.array hsplit.int hstack kron
    linalg_diagonal sum_to_size take_along_dim tensor_split.indices tensor_split.sections tile unsafe_chunk
    vsplit.array vsplit.int vstack
"""
SUMS = """
    chain_matmul cross cumulative_trapezoid.dx cumulative_trapezoid.x gradient.array gradient.scalararray
    gradient.scalarint gradient.scalarrayarray gradient.scalarrayint gradient.tensorarray gradient.tensorarrayint
    linalg_matrix_norm linalg_matrix_norm.str_ord linalg_matrix_power linalg_multi_dot linalg_norm linalg_norm.ord_str
    linalg_vander linalg_vecdot nanmean norm_except_dim nuclear_norm nuclear_norm.dim logdet pairwise_distance std_mean
    std_mean.dim trapezoid.dx trapezoid.x trapz.dx trapz.x vander var var_mean
"""


def _overload(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


COMPOSITES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    **{op: op.decompose for op in map(_overload, f"{OTHER_NAMES} {SHAPES} {SUMS}".split())},
    **{op: layer_by_layer(op) for op in (aten.lstm.input, aten.gru.input, aten.rnn_relu.input, aten.rnn_tanh.input)},
    aten.affine_grid_generator.default: affine_grid,
    aten.cov.default: covariance,
    aten.corrcoef.default: correlation,
    aten.bincount.default: counted,
}
"""Operation → the function that computes it by others, with the same arguments (NotImplemented: it is kept whole)."""


@contextlib.contextmanager
def composites_taken_apart(device: str | None = None) -> Iterator[None]:
    """Let a trace for a type of device record, of every operation in COMPOSITES, the calls that it consists of."""
    handle = proxy_tensor.maybe_handle_decomp

    def take_apart(mode: Any, op: Any, args: Any, kwargs: Any) -> object:
        if op not in COMPOSITES or _casts_as_one(op, device):
            return handle(mode, op, args, kwargs)
        with mode:
            found = COMPOSITES[op](*args, **kwargs)
        return handle(mode, op, args, kwargs) if found is NotImplemented else found

    with mock.patch.object(proxy_tensor, "maybe_handle_decomp", take_apart):
        yield


def _casts_as_one(op: torch._ops.OpOverload, device: str | None) -> bool:
    """Return whether autocast is on and casts a composite's inputs as a whole, on the device type of the trace."""
    on = Autocast.around("cpu") or Autocast.around("cuda")
    return on is not None and Autocast(device or on.device, on.dtype).casts_whole(op)
