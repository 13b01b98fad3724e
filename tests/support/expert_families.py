"""Hugging Face's Mixture-of-Experts: tiny models of six families. As `families`."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.support.families import HEADS, HIDDEN, VOCABULARY, Family, _causal_inputs, _of_output, _seeded

NUM_EXPERTS, TOP_K, EXPERT_HIDDEN = 8, 2, 16

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": EXPERT_HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 64,
    "num_experts_per_tok": TOP_K,
    "use_cache": False,
}
FURTHER_SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": NUM_EXPERTS, "output_router_logits": True},
    "qwen3_moe": {
        "num_hidden_layers": 2,
        "num_experts": NUM_EXPERTS,
        "moe_intermediate_size": EXPERT_HIDDEN,
        "head_dim": HIDDEN // HEADS,
    },
    "olmoe": {"num_experts": NUM_EXPERTS},
    "deepseek_v3": {
        "n_routed_experts": NUM_EXPERTS,
        "moe_intermediate_size": EXPERT_HIDDEN,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
    "gpt_oss": {
        "num_local_experts": NUM_EXPERTS,
        "head_dim": HIDDEN // HEADS,
        "layer_types": ["full_attention"],
    },
    "granitemoe": {"num_local_experts": NUM_EXPERTS},
}
"""Kind → what its config has besides; of Mixtral the auxiliary loss of the router is taken, too."""


def _family(kind: str) -> Family:
    def make() -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(kind, **{**SIZES, **FURTHER_SIZES[kind]})
        model = AutoModelForCausalLM.from_config(config)
        model.set_experts_implementation("grouped_mm")
        return model

    return Family(kind, _seeded(make), _causal_inputs, _of_output)


WITH_EXPERTS: dict[str, Family] = {kind: _family(kind) for kind in FURTHER_SIZES}


def _llama4() -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**SIZES, "num_experts_per_tok": 1, "intermediate_size_mlp": EXPERT_HIDDEN, "attention_chunk_size": 64}
    sizes |= {"num_local_experts": NUM_EXPERTS, "head_dim": HIDDEN // HEADS}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama4_text", **sizes))


LLAMA4 = Family("llama4_text", _seeded(_llama4), _causal_inputs, _of_output)
"""Every expert on all tokens."""
