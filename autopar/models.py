"""Language models to try autopar with: Hugging Face architectures by name, with a loss on the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.errors import InputError
from autopar.text import VOCABULARY

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LLAMAS: dict[str, dict[str, Any]] = {
    # about 10 million parameters over bytes
    "demo": {
        "vocab_size": VOCABULARY,
        "hidden_size": 448,
        "intermediate_size": 1408,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
    },
    "llama-1b": {  # config.json of Llama-3.2-1B
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama-8b": {  # config.json of Llama-3.1-8B
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
GPTS: dict[str, dict[str, Any]] = {"gpt2": {}}  # the defaults of GPT2Config are GPT-2 small
NAMES = (*LLAMAS, *GPTS)


class LanguageModel(nn.Module):
    """A causal language model of a Hugging Face configuration that returns its mean loss per token."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.decoder = AutoModelForCausalLM.from_config(config)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """ids and labels: int64[batch, sequence]; a label is the token that follows its id."""
        logits_BSV = self.decoder(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels.flatten())


def language_model(name: str, num_layers: int | None = None, device: str = "cpu") -> LanguageModel:
    """A model of NAMES, with its own number of layers unless told otherwise; equal after equal `torch.manual_seed`."""
    if name not in NAMES:
        raise InputError(f"no built-in model {name!r}; there are {', '.join(NAMES)}, and yours as module:function.")
    require_transformers()
    with torch.device(device):
        return LanguageModel(_config(name, num_layers))


def require_transformers() -> None:
    """InputError where transformers is not installed."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise InputError(
            'the built-in models need the transformers package, which is not installed; pip install "autopar[hf]".'
        ) from error


def _config(name: str, num_layers: int | None) -> PretrainedConfig:
    from transformers import GPT2Config, LlamaConfig

    config = LlamaConfig(**LLAMAS[name]) if name in LLAMAS else GPT2Config(**GPTS[name])
    if num_layers is not None:
        config.num_hidden_layers = num_layers
    return config
