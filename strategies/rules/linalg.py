"""Matrices taken as wholes: inverses, factorisations, distances. The last two dims are whole, batches are free."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from autopar.ir.sharding.operation import Call, OpRule
from autopar.ir.sharding.rule import WHOLE
from autopar.strategies.notation import Answer, Entry, batch_names, broadcast, names, positive, rule, term

aten = torch.ops.aten

MATRIX = "... _ _ -> ... _ _"
NUMBER = "... _ _ -> ..."
VECTOR = "... _ _ -> ... _"


def solve(matrix: str, right: str) -> Callable[[Call], str]:
    """The solution for each column (or, from the other side, row) of `right`: those are free, and linear."""

    def entry(call: Call) -> str:
        shapes = {name: call[name].shape for name in (matrix, right)}
        output = call.outputs[0].shape
        own, one = shapes[matrix], shapes[right]
        vector = call.target is aten.linalg_solve.default and (len(one) == 1 or one == own[:-1])
        columns = [] if vector else ["n"]
        dims = [WHOLE, *columns] if call.arguments.get("left", True) else [*columns, WHOLE]
        batch = batch_names(len(output) - len(dims))
        terms = {
            matrix: term([*broadcast(own[:-2], output[: len(batch)], batch), WHOLE, WHOLE]),
            right: term([*broadcast(one[: len(one) - len(dims)], output[: len(batch)], batch), *dims], "~"),
        }
        order = [name for name in call.arguments if name in terms]
        return rule([terms[name] for name in order], [term([*batch, *dims])])

    return entry


def cross(call: Call) -> str:
    """The product of vectors of three."""
    output = call.outputs[0].shape
    dims = names(len(output))
    dims[positive(call["dim"], len(output))] = WHOLE
    return rule([term(broadcast(info.shape, output, dims), "~") for info in call.inputs], [term(dims)])


def cdist(call: Call) -> OpRule:
    """The distance of each of m vectors to each of n."""
    left, right, output = call["x1"].shape, call["x2"].shape, call.outputs[0].shape
    batch = batch_names(len(output) - 2)
    first, second = (broadcast(shape[:-2], output[:-2], batch) for shape in (left, right))
    text = rule([term([*first, "m", WHOLE]), term([*second, "n", WHOLE])], [term([*batch, "m", "n"])])
    return OpRule(text, flops=3 * math.prod(output) * left[-1])  # a difference, a power and a sum of each


def pseudo_inverse(call: Call) -> Answer:
    """Tolerances that are tensors may be one for each matrix."""
    return MATRIX if len(call.inputs) == 1 else None


RULES: dict[torch._ops.OpOverload, Entry] = {
    aten.cholesky_inverse.default: MATRIX,
    aten.linalg_cholesky.default: MATRIX,
    aten.linalg_inv.default: MATRIX,
    aten.linalg_matrix_exp.default: MATRIX,
    aten.linalg_pinv.default: MATRIX,
    aten.linalg_pinv.atol_rtol_float: MATRIX,
    aten.linalg_pinv.atol_rtol_tensor: pseudo_inverse,
    aten.linalg_det.default: NUMBER,
    aten.linalg_eigvalsh.default: VECTOR,
    aten.linalg_svdvals.default: VECTOR,
    aten.linalg_slogdet.default: "... _ _ -> ..., ...",
    aten.linalg_eigh.default: "... _ _ -> ... _, ... _ _",
    aten.linalg_householder_product.default: "... _ _, ... _ -> ... _ _",
    aten.linalg_lu_factor.default: "... _ _ -> ... _ _, ... _",
    aten.linalg_qr.default: "... _ _ -> ... _ _, ... _ _",
    aten.linalg_svd.default: "... _ _ -> ... _ _, ... _, ... _ _",
    aten.linalg_solve.default: solve("A", "B"),
    aten.linalg_solve_triangular.default: solve("self", "B"),
    aten.cholesky_solve.default: solve("input2", "self"),
    aten.linalg_cross.default: cross,
    aten.cdist.default: cdist,
}
