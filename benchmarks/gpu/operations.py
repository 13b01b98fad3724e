"""The products, the attention and the optimizer's step of one rank of Llama-3-8B, compared with the profile.

The shapes are those of one of 8 ranks of tensor parallelism, the predictions those of autopar's plan for them: seconds
forward and backward, with the profile that was measured before. Both are the device's, without launches of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

import autopar
from autopar.console.units import format_seconds
from autopar.costs.plans.plan import Plan
from autopar.tools.calibration.timing import Timer
from benchmarks.gpu.setting import Draft, Finding, Row, Setting, stubbed

NUM_RANKS = 8
TOLERANCE = 0.05
OPTIMIZER = "optimizer"
Step = Callable[[], object]


def against_profile(setting: Setting, draft: Draft) -> Finding:
    """Each operation measured, and by how much it differs from its prediction; of those that the draft lacks."""
    mesh = autopar.Mesh({"tp": NUM_RANKS})
    model, inputs = setting.whole_model(1, device="meta"), setting.batch(1, device="meta")
    plan = autopar.plan(
        model, mesh, inputs, strategy="megatron", hardware=setting.profile, memory=autopar.Memory(recompute="none")
    )
    with stubbed(setting.device, {"alone": 1}):
        timer = Timer(torch.device(setting.device), setting.effort)
        for name, step, predicted in list(_cases(setting, plan))[len(draft.read().rows) :]:
            # The optimizer's step is one launch as it is, and is no graph.
            timed = step if name == OPTIMIZER else timer.on_device(step)
            seconds = timer.median_seconds([timed], name)[0]
            ratio = seconds / predicted
            found = f"{ratio:.3f} ({format_seconds(seconds)}, predicted {format_seconds(predicted)})"
            row = Row(name, found, f"1 ± {TOLERANCE}", setting.judged(abs(ratio - 1) <= TOLERANCE))
            draft.add(row, **{name: [seconds, predicted]})
    return draft.read()


def _cases(setting: Setting, plan: Plan) -> Iterator[tuple[str, Step, float]]:
    """Name, what to time, and the seconds that the plan has for it."""
    config = setting.config(1)
    hidden, inner = config.hidden_size, config.intermediate_size // NUM_RANKS
    queries, keys = (each // NUM_RANKS for each in (config.num_attention_heads, config.num_key_value_heads))
    dim = config.head_dim or hidden // config.num_attention_heads
    products = {
        "q_proj": (hidden, queries * dim),
        "k_proj": (hidden, keys * dim),
        "o_proj": (queries * dim, hidden),
        "gate_proj": (hidden, inner),
        "down_proj": (inner, hidden),
        "lm_head": (hidden, config.vocab_size // NUM_RANKS),
    }
    for name, (inputs, outputs) in products.items():
        x, weight = _random(setting, 1, setting.sequence, inputs), _random(setting, outputs, inputs)
        yield f"matmul {name}", _trained([x, weight], F.linear), _seconds_of(plan, name, "linear")
    q, k, v = (_random(setting, 1, heads, setting.sequence, dim) for heads in (queries, keys, keys))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    yield "attention", _trained([q, k, v], attention), _seconds_of(plan, "self_attn", "attention")
    yield OPTIMIZER, *_optimizer(setting, plan)


def _optimizer(setting: Setting, plan: Plan) -> tuple[Step, float]:
    shapes = {name: tuple(each.shape) for name, each in setting.whole_model(1, "meta").named_parameters()}
    rows = [row for row in plan.rows if row.kind == "parameter"]
    weights = [
        _random(setting, *plan.layout_of(row.name).local_shape(shapes[row.module], plan.mesh.sizes)) for row in rows
    ]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return torch.optim.AdamW(weights, fused=True).step, sum(row.seconds for row in rows)


def _seconds_of(plan: Plan, module: str, operation: str) -> float:
    (row,) = (
        row
        for row in plan.rows
        if row.kind == "call" and row.module.rpartition(".")[2] == module and operation in row.operation
    )
    return row.forward_seconds + row.backward_seconds


def _random(setting: Setting, *shape: int) -> Tensor:
    return torch.randn(shape, device=setting.device).to(setting.dtype).requires_grad_()


def _trained(leaves: list[Tensor], call: Callable[..., Tensor]) -> Step:
    grad = torch.ones_like(call(*leaves))
    return lambda: torch.autograd.grad(call(*leaves), leaves, grad)
