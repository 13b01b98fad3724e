"""Small language models of transformers that generate, and what one process makes of their prompts."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "experts_implementation": "grouped_mm"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 16}),
    "mistral": ("Mistral", SIZES | {"sliding_window": 8}),
    "gpt2": ("GPT2", {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "mixtral": ("Mixtral", SIZES | EXPERTS | {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", SIZES | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16}),
}
"""Family → the name of its classes, and sizes. A window is shorter than what is generated."""


def generating(family: str, precise: bool = False, **changed: Any) -> Any:  # of nn.Module pyright knows no generate
    """The same weights in every call, in evaluation, with tokens that change.

    Where it is to be `precise`, in float64, so that no order of sums confuses tokens; grouped products have none.
    """
    name, sizes = FAMILIES[family]
    sizes = sizes | changed
    experts = sizes.pop("experts_implementation", None)
    config = getattr(transformers, f"{name}Config")(**sizes, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    kind = {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).eval()
    if experts is not None:
        model.set_experts_implementation(experts)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model.double() if precise and experts is None else model


def prompts(batch: int, length: int) -> Tensor:
    """Token ids, none of them padding."""
    return torch.randint(1, 96, (batch, length), generator=torch.Generator().manual_seed(1))
