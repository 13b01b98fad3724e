"""Experts of libraries that loop over those which are hit, a number that data decide, captured as sorted rows instead.

Transformers' other experts have such a form of their own, "grouped_mm". Legend in `program.operators.experts`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Through = Callable[[Tensor, Callable[[Tensor, Tensor], Tensor]], Tensor]
"""Rows of experts and a grouped product of rows (R, D) with matrices (E, D, F) → rows."""


def sorted_rows(x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, num_experts: int, through: Through) -> Tensor:
    """The weighted sum of what every token's experts make of it."""
    top_k = expert_TK.shape[-1]
    ids_R, slots_R = torch.sort(expert_TK.reshape(-1), stable=True)
    ends_E = torch.histc(ids_R.float(), num_experts, 0, num_experts - 1).cumsum(0, dtype=torch.int32)
    token_R = slots_R // top_k

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.transformers.grouped_mm_fallback(rows, weight, ends_E)

    rows_RD = through(x_TD[token_R], product) * weight_TK.reshape(-1)[slots_R].unsqueeze(-1)
    return torch.zeros_like(x_TD).index_add(0, token_R, rows_RD.to(x_TD.dtype))


def switch_transformers(experts: Any, x_TD: Tensor, one_hot_T1E: Tensor, weight_T1: Tensor) -> Tensor:
    """One expert of a token, in a module of its own; a token beyond its expert's capacity has a row, and no weight."""
    each = list(experts.values())

    def through(rows: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        up, down = (torch.stack([getattr(one, name).weight.t() for one in each]) for name in ("wi", "wo"))
        return product(each[0].dropout(each[0].act(product(rows, up))).to(down.dtype), down)

    weight_T1 = weight_T1 * one_hot_T1E.sum(-1)
    return sorted_rows(x_TD, one_hot_T1E.argmax(-1), weight_T1, len(each), through)


def dbrx(experts: Any, x_BSD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Gated experts whose matrices lie one below the other."""
    mlp, x_TD = experts.mlp, x_BSD.reshape(-1, experts.hidden_size)
    sizes = (experts.num_experts, experts.ffn_hidden_size, experts.hidden_size)

    def through(rows: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        gate, up, down = (each.view(sizes) for each in (mlp.w1, mlp.v1, mlp.w2))
        return product(mlp.activation_fn(product(rows, gate.mT)) * product(rows, up.mT), down)

    return sorted_rows(x_TD, expert_TK, weight_TK, experts.num_experts, through).view(x_BSD.shape)


MODELS = "transformers.models"
SORTED: dict[str, Callable[..., Tensor]] = {
    f"{MODELS}.switch_transformers.modeling_switch_transformers.SwitchTransformersExperts": switch_transformers,
    f"{MODELS}.dbrx.modeling_dbrx.DbrxExperts": dbrx,
}
"""Classes by name, which need not be there → their forward in sorted rows."""


def without_loops(model: nn.Module) -> None:
    """Give a copy of a model, made to be captured, the form in sorted rows of all experts that have one."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", "grouped_mm") != "grouped_mm":
            config._experts_implementation = "grouped_mm"  # type: ignore[union-attr]
        kind = type(module)
        of_rows = SORTED.get(f"{kind.__module__}.{kind.__qualname__}")
        if of_rows is not None and "forward" not in vars(module):
            import transformers.integrations.moe  # noqa: F401  which defines the grouped product of any dtype

            vars(module)["forward"] = functools.partial(of_rows, module)
