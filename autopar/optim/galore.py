"""GaLore (Zhao et al., ICML 2024): AdamW in a subspace of rank r of the gradients of each matrix.

    G m×n, m ≥ n:   R = G Q        Q n×r, the first r right singular vectors of G, renewed every `update_proj_gap` steps
                    N = M̂ / (√V̂ + ε)              moments M and V of R, m×r, with AdamW's bias corrections
                    W ← (1 - lr · λ) W - lr · scale · N Qᵀ           and transposed, Q m×r and moments r×n, where m < n

Singular vectors are in the order of their singular values, each with its largest entry positive, so that ranks and
layouts agree on them.

Where W is split, all of this is: moments as W on axes that split its long dim, by r on those that split its short one;
Q by its rows on those that split the short dim, and by r on those that split the long one. A step gathers Q over the
latter; over the former it adds up R (reduce-scatter), and gathers N. Only a renewal gathers G, one matrix at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.errors import InputError
from autopar.optim.matrices import is_projected
from autopar.optim.subspace import as_used, basis_of, projected, projected_back, tall
from autopar.optim.with_adamw import MatrixOptimizer, NamedParameters, adamw_settings


class GaLoreAdamW(MatrixOptimizer):
    """GaLore's AdamW of the matrices of hidden layers, and AdamW of all other parameters.

    named_parameters: `model.named_parameters()`, whole or in parts
    rank, update_proj_gap, scale: of the projection, as in GaLore; a matrix with a dim no larger than the rank is one of
        the others
    lr, betas, eps, weight_decay: of all parameters
    matrices: patterns of names that are matrices, as in ("*.mlp.*",); by default those in numbered layers

    Raises InputError for parameters without names, and hyperparameters out of range.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        matrices: Sequence[str] | None = None,
    ) -> None:
        if rank < 1 or update_proj_gap < 1:
            raise InputError(
                f"GaLoreAdamW was given rank={rank}, update_proj_gap={update_proj_gap}; give at least 1 for both."
            )
        others = adamw_settings(lr, betas, eps, weight_decay)
        settings = others | {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale}
        super().__init__(
            named_parameters, settings, others, lambda name, shape: is_projected(name, shape, rank, matrices)
        )

    def step_matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Update one matrix by AdamW in the subspace of its gradient; both tensors are this rank's parts."""
        state, (first, second) = self.state[parameter], group["betas"]
        gradient, stored = tall(gradient), tall(parameter)
        count = int(state.setdefault("step", torch.tensor(0.0)))
        if count % group["update_proj_gap"] == 0:
            state["basis"] = basis_of(gradient, group["rank"])
        basis = as_used(state["basis"], gradient)
        inside = projected(gradient, basis)
        if not count:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(inside), torch.zeros_like(inside)
        state["step"] += 1
        mean = state["exp_avg"].lerp_(inside, 1 - first)
        square = state["exp_avg_sq"].mul_(second).addcmul_(inside, inside, value=1 - second)
        corrections = 1 - first ** (count + 1), 1 - second ** (count + 1)
        normed = (mean / corrections[0]) / ((square / corrections[1]).sqrt() + group["eps"])
        stored.mul_(1 - group["lr"] * group["weight_decay"])
        stored.add_(projected_back(normed, basis, stored), alpha=-group["lr"] * group["scale"])
