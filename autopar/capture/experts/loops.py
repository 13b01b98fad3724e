"""Experts of libraries that loop over those which are hit, a number that data decide, captured as sorted rows instead.

Transformers' other experts have such a form of their own, "grouped_mm". Legend in
`ir.program.operators.expert_operators`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import CaptureError

Product = Callable[..., Tensor]
"""rows (R, D), matrices (E, D, F), biases (E, F) or none → rows (R, F), each by its expert."""
Through = Callable[[Tensor, Product], Tensor]
"""Rows of experts and a product → rows."""


def sorted_slots(expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Product]:
    """Return the slot of each row, in the order of experts, and the product of such rows with a matrix of each
    expert.
    """
    ids_R, slots_R = torch.sort(expert_TK.reshape(-1), stable=True)
    ends_E = torch.histc(ids_R.float(), num_experts, 0, num_experts - 1).cumsum(0, dtype=torch.int32)

    def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found = torch.ops.transformers.grouped_mm_fallback(rows, weight, ends_E)
        return found if bias is None else found + bias[ids_R]

    return slots_R, product


def sorted_rows(x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, num_experts: int, through: Through) -> Tensor:
    """Return the weighted sum of what every token's experts make of it."""
    slots_R, product = sorted_slots(expert_TK, num_experts)
    token_R = slots_R // expert_TK.shape[-1]
    rows_RD = through(x_TD[token_R], product) * weight_TK.reshape(-1)[slots_R].unsqueeze(-1)
    return torch.zeros_like(x_TD).index_add(0, token_R, rows_RD.to(x_TD.dtype))


def switch_transformers(experts: Any, x_TD: Tensor, one_hot_T1E: Tensor, weight_T1: Tensor) -> Tensor:
    """Compute one expert per token, each a module of its own; tokens beyond an expert's capacity get weight zero."""
    each = list(experts.values())

    def through(rows: Tensor, product: Product) -> Tensor:
        up, down = (torch.stack([getattr(one, name).weight.t() for one in each]) for name in ("wi", "wo"))
        return product(each[0].dropout(each[0].act(product(rows, up))).to(down.dtype), down)

    weight_T1 = weight_T1 * one_hot_T1E.sum(-1)
    return sorted_rows(x_TD, one_hot_T1E.argmax(-1), weight_T1, len(each), through)


def nllb_moe(experts: Any, x_TD: Tensor, number_TE: Tensor, weight_TE: Tensor) -> Tensor:
    """Run the experts of NLLB-MoE as sorted rows, with as many slots per token as there are experts.

    Their expert numbers are a mask of zeros and ones, so that only the first two experts run, as transformers reads it.
    """
    each = list(experts.values())[:2]

    def through(rows: Tensor, product: Product) -> Tensor:
        up, down = (torch.stack([getattr(one, name).weight.t() for one in each]) for name in ("fc1", "fc2"))
        bias_up, bias_down = (torch.stack([getattr(one, name).bias for one in each]) for name in ("fc1", "fc2"))
        return product(each[0].dropout(each[0].act(product(rows, up, bias_up))).to(down.dtype), down, bias_down)

    if experts.moe_token_dropout and experts.training:
        raise CaptureError(
            f"experts of NLLB-MoE drop rows at random (moe_token_dropout={experts.moe_token_dropout:g}), each expert "
            "those that it has, a number that data decide. Set moe_token_dropout=0.0 in the configuration; "
            "Experts(capacity_factor=…) bounds how many rows an expert takes."
        )
    kept = 1 - experts.moe_token_dropout
    return sorted_rows(x_TD, number_TE, weight_TE * kept, len(each), through)


def dbrx(experts: Any, x_BSD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Compute gated experts whose matrices are stacked along dim 0."""
    mlp, x_TD = experts.mlp, x_BSD.reshape(-1, experts.hidden_size)
    sizes = (experts.num_experts, experts.ffn_hidden_size, experts.hidden_size)

    def through(rows: Tensor, product: Product) -> Tensor:
        gate, up, down = (each.view(sizes) for each in (mlp.w1, mlp.v1, mlp.w2))
        return product(mlp.activation_fn(product(rows, gate.mT)) * product(rows, up.mT), down)

    return sorted_rows(x_TD, expert_TK, weight_TK, experts.num_experts, through).view(x_BSD.shape)


def longcat_flash(experts: Any, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Compute gated experts, and identity experts whose rows go to another expert with weight zero."""
    num_experts = experts.num_routed_experts
    gives_back = expert_TK >= num_experts
    same_TD = x_TD * torch.where(gives_back, weight_TK, 0).sum(-1, keepdim=True)

    def through(rows: Tensor, product: Product) -> Tensor:
        gate, up = product(rows, experts.gate_up_proj[:num_experts].transpose(1, 2)).chunk(2, -1)
        return product(experts.act_fn(gate) * up, experts.down_proj.transpose(1, 2))

    made_TD = sorted_rows(x_TD, expert_TK % num_experts, weight_TK.masked_fill(gives_back, 0), num_experts, through)
    return made_TD + same_TD.to(x_TD.dtype)


def jetmoe_router(router: Any, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the experts and gates of every token, placeholders for the loops' other values, and the logits last."""
    logits_TE = router.layer(x_TD).float()
    logits_TK, expert_TK = logits_TE.topk(router.top_k, dim=1)
    gates_TK = logits_TK.softmax(1).type_as(x_TD)
    return expert_TK, expert_TK, gates_TK, gates_TK, logits_TE


def jetmoe(block: Any, x_BSD: Tensor) -> Tensor:
    """Compute gated experts with one bias for all."""
    x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
    expert_TK, _, gates_TK, _, _ = block.router(x_TD)

    def through(rows: Tensor, product: Product) -> Tensor:
        gate, up = product(rows, block.input_linear.weight.transpose(1, 2)).chunk(2, -1)
        return product(block.activation(gate) * up, block.output_linear.weight.transpose(1, 2))

    y_TD = sorted_rows(x_TD, expert_TK, gates_TK, block.input_linear.num_experts, through)
    return y_TD.view(x_BSD.shape) + block.bias


def jetmoe_queries(block: Any, x_BSD: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Compute an attention's queries by experts, one per slot of a token, in the order of slots."""
    x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
    expert_TK, _, gates_TK, _, logits = block.router(x_TD)
    slots_R, product = sorted_slots(expert_TK, block.num_experts)
    rows = product(x_TD[slots_R // block.top_k], block.input_linear.weight.transpose(1, 2))
    slots = torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device).index_add(0, slots_R, rows)
    return slots.view(*x_BSD.shape[:2], block.top_k, -1), logits, (expert_TK, gates_TK)


def jetmoe_outputs(block: Any, h_BSKH: Tensor, chosen: tuple[Tensor, Tensor]) -> Tensor:
    """Return the same experts of what attention makes of the queries, summed for every token."""
    expert_TK, gates_TK = chosen
    slots_R, product = sorted_slots(expert_TK, block.num_experts)
    rows = product(h_BSKH.reshape(-1, h_BSKH.shape[-1])[slots_R], block.output_linear.weight.transpose(1, 2))
    rows = rows * gates_TK.reshape(-1)[slots_R].unsqueeze(-1)
    slots = torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device).index_add(0, slots_R, rows)
    y_TD = slots.view(-1, block.top_k, block.input_size).sum(1)
    return y_TD.view(*h_BSKH.shape[:2], block.input_size) + block.bias


MODELS = "transformers.models"
SORTED: dict[str, Mapping[str, Callable[..., Any]]] = {
    f"{MODELS}.switch_transformers.modeling_switch_transformers.SwitchTransformersExperts": {
        "forward": switch_transformers
    },
    f"{MODELS}.nllb_moe.modeling_nllb_moe.NllbMoeExperts": {"forward": nllb_moe},
    f"{MODELS}.dbrx.modeling_dbrx.DbrxExperts": {"forward": dbrx},
    f"{MODELS}.longcat_flash.modeling_longcat_flash.LongcatFlashExperts": {"forward": longcat_flash},
    f"{MODELS}.jetmoe.modeling_jetmoe.JetMoeTopKGating": {"forward": jetmoe_router},
    f"{MODELS}.jetmoe.modeling_jetmoe.JetMoeMoE": {"forward": jetmoe},
    f"{MODELS}.jetmoe.modeling_jetmoe.JetMoeMoA": {"map": jetmoe_queries, "reduce": jetmoe_outputs},
}
"""Classes by name, which need not be there → their methods in sorted rows."""


def without_loops(model: nn.Module) -> None:
    """Give a copy of a model, made to be captured, the form in sorted rows of all experts that have one."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", "grouped_mm") != "grouped_mm":
            config._experts_implementation = "grouped_mm"  # type: ignore[union-attr]
        kind = type(module)
        methods = SORTED.get(f"{kind.__module__}.{kind.__qualname__}", {})
        if methods and "forward" not in vars(module):
            import transformers.integrations.moe  # noqa: F401  which defines the grouped product of any dtype

            vars(module).update({name: functools.partial(made, module) for name, made in methods.items()})
