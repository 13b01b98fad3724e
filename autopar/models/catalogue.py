"""Models to try autopar with: architectures by name, each with its loss and with inputs of any size.

Those whose names begin with "tiny-" take less than a tenth of a second for a step of 8 samples on one thread of a CPU.
They have no dropout and no batch statistics, so that their losses do not depend on who computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.errors import InputError
from autopar.models.corpus import VOCABULARY
from autopar.models.plain import ConvNet, Perceptron

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


@dataclass(frozen=True, slots=True)
class Plain:
    """A built-in model in plain PyTorch: what makes it of a number of layers, that number, and its sample's shape."""

    wrapper: Callable[[int], nn.Module]
    num_layers: int
    sample_shape: tuple[int, ...]
    num_classes: int


def _tiny_perceptron(num_layers: int) -> Perceptron:
    return Perceptron(num_layers, hidden=1024, num_classes=64)


def _tiny_convnet(num_layers: int) -> ConvNet:
    return ConvNet(num_layers, channels=32, num_classes=64)


BUILT_IN: Mapping[str, BuiltIn | Plain] = {
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
    "llama-70b": BuiltIn(
        LanguageModel,
        "LlamaConfig",
        {  # config.json of Llama-3.1-70B
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
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
    "tiny-llama": BuiltIn(
        LanguageModel,
        "LlamaConfig",
        {
            "vocab_size": 512,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 512,
        },
    ),
    "tiny-moe": BuiltIn(
        LanguageModel,
        "Qwen3MoeConfig",
        {
            "vocab_size": 512,
            "hidden_size": 192,
            "moe_intermediate_size": 256,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 24,
            "max_position_embeddings": 512,
        },
    ),
    "tiny-gpt2": BuiltIn(
        LanguageModel,
        "GPT2Config",
        {
            "vocab_size": 512,
            "n_positions": 512,
            "n_embd": 192,
            "n_layer": 2,
            "n_head": 8,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
    "tiny-vit": BuiltIn(
        ImageClassifier,
        "ViTConfig",
        {
            "image_size": 32,
            "patch_size": 4,
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_labels": 64,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
    "tiny-cnn": Plain(_tiny_convnet, 2, (3, 32, 32), 64),
    "tiny-mlp": Plain(_tiny_perceptron, 4, (1024,), 64),
}
NAMES = tuple(BUILT_IN)


def built_in(
    name: str, batch: int, sequence: int, num_layers: int | None = None, device: str = "meta"
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a model of NAMES and inputs for it: its forward returns a loss.

    Args:
        batch: texts or images in all.
        sequence: tokens of a text, for both texts where the model reads one and writes another; an image has its own
            size.
        num_layers: of the encoder and of the decoder each, where the model has both; by default the model's own.

    >>> built_in("vit-h", 64, 4096, num_layers=1)[1][0].shape  # doctest: +SKIP
    torch.Size([64, 3, 224, 224])
    """
    model = _built_in(name, num_layers, device)
    return model, inputs_of(BUILT_IN[name], batch, sequence, device)


def inputs_of(found: BuiltIn | Plain, batch: int, sequence: int, device: str = "meta") -> tuple[Tensor, ...]:
    """Return inputs for what `found` makes: samples and their labels, all zeros."""
    with torch.device(device):
        labels = torch.zeros(batch, dtype=torch.int64)
        if isinstance(found, Plain):
            return torch.zeros(batch, *found.sample_shape), labels
        if found.wrapper is ImageClassifier:
            config = found.config(None)
            return torch.zeros(batch, config.num_channels, config.image_size, config.image_size), labels
        ids_BS = torch.zeros(batch, sequence, dtype=torch.int64)
        return ids_BS, ids_BS.clone()


def num_values(name: str) -> int:
    """Return the vocabulary size of a built-in model, or its number of classes."""
    found = BUILT_IN[name]
    if isinstance(found, Plain):
        return found.num_classes
    size = "num_labels" if found.wrapper is ImageClassifier else "vocab_size"
    return getattr(found.config(None), size)


def language_model(name: str, num_layers: int | None = None, device: str = "cpu") -> LanguageModel:
    """Return a causal language model of NAMES, with its own number of layers unless told otherwise.

    Equal after equal `torch.manual_seed`.
    """
    causal = [other for other, model in BUILT_IN.items() if model.wrapper is LanguageModel]
    if name in BUILT_IN and name not in causal:
        raise InputError(f"{name} is no causal language model; {', '.join(causal)} are.")
    model = _built_in(name, num_layers, device)
    assert isinstance(model, LanguageModel)
    return model


def require_transformers() -> None:
    """Raise InputError if transformers is not installed."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise InputError(
            'the built-in models need the transformers package, which is not installed; pip install "autopar[hf]".'
        ) from error


def _built_in(name: str, num_layers: int | None, device: str) -> nn.Module:
    if name not in BUILT_IN:
        raise InputError(f"no built-in model {name!r}; there are {', '.join(NAMES)}, and yours as module:function.")
    found = BUILT_IN[name]
    if isinstance(found, Plain):
        with torch.device(device):
            return found.wrapper(num_layers or found.num_layers)
    require_transformers()
    with torch.device(device):
        return found.wrapper(found.config(num_layers))
