"""Models to try autopar with: Hugging Face architectures by name, each with its loss and with inputs of any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.errors import InputError
from autopar.text import VOCABULARY

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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


class EncoderDecoder(nn.Module):
    """A model that reads one text and writes another, and returns its mean loss per token written."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        from transformers import AutoModelForSeq2SeqLM

        self.model = AutoModelForSeq2SeqLM.from_config(config)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """ids, of what is read, and labels, of what is written: int64[batch, sequence]."""
        return self.model(input_ids=ids, labels=labels, use_cache=False).loss


class ImageClassifier(nn.Module):
    """A model that sorts images into classes, and returns its mean loss per image."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        from transformers import AutoModelForImageClassification

        self.model = AutoModelForImageClassification.from_config(config)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """images: float[batch, channels, height, width]; labels: int64[batch]."""
        return self.model(pixel_values=images, labels=labels).loss


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A built-in model: what wraps it, its class of configuration in transformers, and the sizes that differ from it.

    `layers` are the names under which the configuration counts layers.
    """

    wrapper: Callable[[PretrainedConfig], nn.Module]
    config_class: str
    sizes: Mapping[str, Any]
    layers: tuple[str, ...] = ("num_hidden_layers",)

    def config(self, num_layers: int | None) -> PretrainedConfig:
        import transformers

        config = getattr(transformers, self.config_class)(**self.sizes)
        if num_layers is not None:
            for name in self.layers:
                setattr(config, name, num_layers)
        return config


BUILT_IN: Mapping[str, BuiltIn] = {
    # about 10 million parameters over bytes
    "demo": BuiltIn(
        LanguageModel,
        "LlamaConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 448,
            "intermediate_size": 1408,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 1024,
        },
    ),
    "llama-1b": BuiltIn(
        LanguageModel,
        "LlamaConfig",
        {  # config.json of Llama-3.2-1B
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "llama-8b": BuiltIn(
        LanguageModel,
        "LlamaConfig",
        {  # config.json of Llama-3.1-8B
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "llama-405b": BuiltIn(
        LanguageModel,
        "LlamaConfig",
        {  # config.json of Llama-3.1-405B
            "vocab_size": 128256,
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
        },
    ),
    "mixtral-dense": BuiltIn(
        LanguageModel,
        "MistralConfig",
        {  # config.json of Mixtral-8x7B, its eight experts of 14336 as one: as many parameters, without routing
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 8 * 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": None,
        },
    ),
    "gpt2": BuiltIn(LanguageModel, "GPT2Config", {}),  # the defaults of GPT2Config are GPT-2 small
    "t5-large": BuiltIn(
        EncoderDecoder,
        "T5Config",
        {  # config.json of t5-large; num_layers are those of the encoder
            "vocab_size": 32128,
            "d_model": 1024,
            "d_kv": 64,
            "d_ff": 4096,
            "num_layers": 24,
            "num_decoder_layers": 24,
            "num_heads": 16,
            "decoder_start_token_id": 0,
        },
        ("num_layers", "num_decoder_layers"),
    ),
    "vit-h": BuiltIn(
        ImageClassifier,
        "ViTConfig",
        {  # config.json of vit-huge-patch14-224, 1000 classes
            "image_size": 224,
            "patch_size": 14,
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_labels": 1000,
        },
    ),
}
NAMES = tuple(BUILT_IN)


def built_in(
    name: str, batch: int, sequence: int, num_layers: int | None = None, device: str = "meta"
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model of NAMES and inputs for it: its forward returns a loss.

    Args:
        batch: texts or images in all.
        sequence: tokens of a text, for both texts where the model reads one and writes another; an image has its own
            size.
        num_layers: of the encoder and of the decoder each, where the model has both; by default the model's own.

    >>> built_in("vit-h", 64, 4096, num_layers=1)[1][0].shape  # doctest: +SKIP
    torch.Size([64, 3, 224, 224])
    """
    model = _built_in(name, num_layers, device)
    config = BUILT_IN[name].config(num_layers)
    with torch.device(device):
        if isinstance(model, ImageClassifier):
            images_BCHW = torch.zeros(batch, config.num_channels, config.image_size, config.image_size)
            return model, (images_BCHW, torch.zeros(batch, dtype=torch.int64))
        ids_BS = torch.zeros(batch, sequence, dtype=torch.int64)
        return model, (ids_BS, ids_BS.clone())


def language_model(name: str, num_layers: int | None = None, device: str = "cpu") -> LanguageModel:
    """A causal language model of NAMES, with its own number of layers unless told otherwise.

    Equal after equal `torch.manual_seed`.
    """
    causal = [other for other, model in BUILT_IN.items() if model.wrapper is LanguageModel]
    if name in BUILT_IN and name not in causal:
        raise InputError(f"{name} is no causal language model; {', '.join(causal)} are.")
    model = _built_in(name, num_layers, device)
    assert isinstance(model, LanguageModel)
    return model


def require_transformers() -> None:
    """InputError where transformers is not installed."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise InputError(
            'the built-in models need the transformers package, which is not installed; pip install "autopar[hf]".'
        ) from error


def _built_in(name: str, num_layers: int | None, device: str) -> nn.Module:
    if name not in BUILT_IN:
        raise InputError(f"no built-in model {name!r}; there are {', '.join(NAMES)}, and yours as module:function.")
    require_transformers()
    with torch.device(device):
        return BUILT_IN[name].wrapper(BUILT_IN[name].config(num_layers))
