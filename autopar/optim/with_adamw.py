"""An optimizer of matrices that updates all other parameters by AdamW, as one `torch.optim.Optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw
from torch.utils.hooks import RemovableHandle

from autopar.errors import InputError

MATRICES, OTHERS = "matrices", "adamw"
NamedParameters = Iterable[tuple[str, torch.Tensor]]


class MatrixOptimizer(torch.optim.Optimizer):
    """Updates matrices by `step_matrix` of a subclass, and what else there is by AdamW.

    Its first group has the matrices, its second the others, each with hyperparameters of its own under "lr" and so on;
    a group without parameters is left out. Raises InputError for parameters without names.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        defaults: dict[str, Any],
        adamw: dict[str, Any],
        takes: Callable[[str, torch.Size], bool],
    ) -> None:
        named = list(named_parameters)
        if not all(isinstance(each, tuple) and isinstance(each[0], str) for each in named):
            raise InputError(
                f"{type(self).__name__} was given parameters without names, by which it tells matrices from what AdamW "
                "updates; give it model.named_parameters()."
            )
        trained = [(name, each) for name, each in named if each.requires_grad]
        kinds = {MATRICES: defaults, OTHERS: adamw}
        groups = [
            {"params": params, "kind": kind, **settings}
            for kind, settings in kinds.items()
            if (params := [(n, p) for n, p in trained if takes(n, p.shape) == (kind == MATRICES)])
        ]
        super().__init__(groups, {})

    def step_matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Update one matrix."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Return a step of all parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step([each for each in group["params"] if each.grad is not None], group)
        return loss

    def step_in_backward(self) -> list[RemovableHandle]:
        """Update each parameter in the backward as soon as its gradient is there, which is then freed.

        Whole gradients of a model are never there at once, and `step` has nothing left to do. Not for gradients that
        add up over several backwards, are clipped by their norm over all parameters, or are scaled. Returns handles,
        of which `remove()` ends it.
        """

        def hook_of(group: dict[str, Any]) -> Callable[[torch.Tensor], None]:
            @torch.no_grad()
            def update(parameter: torch.Tensor) -> None:
                self._step([parameter], group)
                parameter.grad = None

            return update

        return [
            each.register_post_accumulate_grad_hook(hook_of(group))
            for group in self.param_groups
            for each in group["params"]
        ]

    def _step(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        if group["kind"] == OTHERS:
            self._step_others(parameters, group)
            return
        for parameter in parameters:
            assert parameter.grad is not None
            self.step_matrix(parameter, parameter.grad, group)

    def _step_others(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        for each in parameters:
            state = self.state[each]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(each), torch.zeros_like(each)
        states = [self.state[each] for each in parameters]
        gradients = [each.grad for each in parameters if each.grad is not None]
        named = {name: [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")}
        adamw(
            parameters,
            gradients,
            named["exp_avg"],
            named["exp_avg_sq"],
            [],
            named["step"],
            amsgrad=False,
            maximize=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )


def adamw_settings(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> dict[str, Any]:
    """Return the hyperparameters of AdamW; raise InputError if one is out of its range."""
    if not lr >= 0 or not eps >= 0 or not weight_decay >= 0 or not all(0 <= beta < 1 for beta in betas):
        raise InputError(
            f"AdamW was given lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}; give numbers of at least "
            "0, betas below 1."
        )
    return {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
