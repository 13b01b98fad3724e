"""Experts of libraries that loop over those which are hit are captured as sorted rows, and compute the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DbrxConfig,
    DbrxForCausalLM,
    JetMoeConfig,
    JetMoeForCausalLM,
    LongcatFlashConfig,
    LongcatFlashForCausalLM,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

import autopar
from autopar.capture.export import capture
from autopar.errors import CaptureError
from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH, GROUPED_MM
from autopar.ir.program.program import Program
from tests.support.divided_experts import choices, forced
from tests.support.eager import assert_as_eager
from tests.support.simulation.training import Steps, train_alike

IDS_BS = torch.randint(1, 64, (4, 16), generator=torch.Generator().manual_seed(0))
TEXT = {"input_ids": IDS_BS, "labels": IDS_BS}
PAIRS = {**TEXT, "decoder_input_ids": IDS_BS, **dict.fromkeys(("attention_mask", "decoder_attention_mask"), IDS_BS > 0)}
SWITCH: dict[str, Any] = {
    **{"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "num_experts": 4},
    **{"num_decoder_layers": 1, "num_sparse_encoder_layers": 1, "use_cache": False, "pad_token_id": 0},
    **{"expert_capacity": 3, "router_jitter_noise": 0.0, "dropout_rate": 0.0},
}
"""Config of a small Switch Transformer; an expert takes at most 3 tokens of each sample."""


def switch(**changed: Any) -> nn.Module:
    torch.manual_seed(0)
    return SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**{**SWITCH, **changed})).train()


DBRX: dict[str, Any] = {
    **{"vocab_size": 64, "d_model": 32, "n_heads": 2, "n_layers": 1, "max_seq_len": 64},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
}


def dbrx() -> nn.Module:
    torch.manual_seed(0)
    return DbrxForCausalLM(DbrxConfig(**DBRX)).train()


NLLB: dict[str, Any] = {
    **{"vocab_size": 64, "d_model": 32, "num_experts": 4, "expert_capacity": 20, "max_position_embeddings": 64},
    **{f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "sparse_step")},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop"), 0.0),
    **dict.fromkeys(("decoder_layerdrop", "moe_token_dropout", "router_jitter_noise"), 0.0),
    **{"use_cache": False, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
}


def nllb(**changed: Any) -> nn.Module:
    torch.manual_seed(0)
    return NllbMoeForConditionalGeneration(NllbMoeConfig(**{**NLLB, **changed})).train()


LONGCAT: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "num_layers": 1, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "ffn_hidden_size": 48, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 8},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16, "max_position_embeddings": 64},
    **{"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 24},
}
"""Config of a small LongCat-Flash with six experts, two of which return a token unchanged."""


def longcat() -> nn.Module:
    torch.manual_seed(0)
    return LongcatFlashForCausalLM(LongcatFlashConfig(**LONGCAT)).train()


JETMOE: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 8},
    **{"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64},
    **{"output_router_logits": True, "use_cache": False},
}


def jetmoe() -> nn.Module:
    torch.manual_seed(0)
    model = JetMoeForCausalLM(JetMoeConfig(**JETMOE)).train()
    for parameter in model.parameters():  # some are made without values
        nn.init.normal_(parameter, std=0.2)
    return model


class Experts(nn.Module):
    """A block of Switch Transformers alone, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = SwitchTransformersSparseMLP(SwitchTransformersConfig(**SWITCH))
        self.block.router.dtype = torch.float64

    def forward(self, h_BSD: Tensor) -> Tensor:
        return (h_BSD + self.block(h_BSD)).square().mean()


def experts_of(program: Program) -> dict[object, int]:
    counted = Counter(node.target for node in program.graph.nodes)
    return {target: counted[target] for target in (DISPATCH, GROUPED_MM, COMBINE)}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "inputs", "blocks", "products"),
    [
        (switch, PAIRS, 1, 2),
        (dbrx, TEXT, 1, 3),
        (nllb, PAIRS, 2, 4),
        (longcat, TEXT, 1, 3),
        (jetmoe, TEXT, 3, 5),  # queries, outputs of attention, and the gated ones
    ],
    ids=["switch", "dbrx", "nllb", "longcat", "jetmoe"],
)
def test_a_loop_over_the_experts_that_are_hit_is_captured_in_sorted_rows(
    model: type[nn.Module], inputs: dict[str, Tensor], blocks: int, products: int
) -> None:
    made = model()
    forwards = {type(module): type(module).forward for module in made.modules()}
    program = assert_as_eager(made, (), inputs, loss=lambda output: output.loss)
    assert experts_of(program) == {DISPATCH: blocks, GROUPED_MM: products, COMBINE: blocks}
    assert all(kind.forward is forward for kind, forward in forwards.items())
    assert not any("forward" in vars(module) for module in made.modules())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["expert_data", pytest.param("data_parallel", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("model", "inputs"), [(nllb, PAIRS), (longcat, TEXT), (jetmoe, TEXT)], ids=["nllb", "longcat", "jetmoe"]
)
def test_their_experts_train_on_ranks_as_on_one_process(
    model: Callable[[], nn.Module], inputs: dict[str, Tensor], strategy: str
) -> None:
    steps = Steps([inputs] * 2)
    train_alike(model(), steps, {"ep": 2}, {"strategy": strategy})


def test_rows_that_experts_drop_at_random_are_refused_by_name() -> None:
    with pytest.raises(
        CaptureError, match=r"drop rows at random \(moe_token_dropout=0\.2\).* Set moe_token_dropout=0\.0"
    ):
        capture(nllb(moe_token_dropout=0.2), (), PAIRS, training=True)


def test_tokens_beyond_the_capacity_of_their_expert_train_on_ranks_as_on_one() -> None:
    drawn = torch.Generator().manual_seed(1)
    steps = Steps([{"h_BSD": torch.randn(4, 16, 32, generator=drawn, dtype=torch.float64)} for _ in range(3)])
    with torch.no_grad():
        dropped = Experts().double().block.router(steps.batches[0]["h_BSD"])[0].sum(-1) == 0
    assert dropped.any()
    train_alike(Experts().double(), steps, {"ep": 2}, {}, forced(choices("t+x")))


def test_dropout_inside_of_experts_leaves_their_rows_on_every_device_and_says_so() -> None:
    with pytest.warns(UserWarning, match="all of their rows stay on every device"):
        autopar.plan(switch(dropout_rate=0.5), autopar.Mesh({"ep": 2}, "cpu"), PAIRS)


class Casting(nn.Module):
    """Casts its layer in forward, as routers do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = nn.Linear(4, 4), dtype

    def forward(self, x: Tensor) -> Tensor:
        self.layer = self.layer.to(self.dtype)
        return self.layer(x.to(self.dtype)).sum()


def test_a_cast_in_forward_that_changes_nothing_is_captured() -> None:
    assert_as_eager(Casting(torch.float32), (torch.ones(2, 4),))


def test_a_cast_in_forward_that_changes_parameters_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"parameters of a Linear .* weight would become torch\.float64"):
        capture(Casting(torch.float64), (torch.ones(2, 4),), {})
