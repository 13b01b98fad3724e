"""The models that tests speak of: one tiny member of each family, equal on every build, with batches and a loss.

Every size that may be split (batch 4, sequence 16, hidden 32, 4 heads …) divides by 4; GPT-2's vocabulary, 257,
does not.
transformers is imported when a family that needs it is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.convnets import ResNet, UNet

BATCH, SEQUENCE, HIDDEN, HEADS, LAYERS, INTERMEDIATE, VOCABULARY = 4, 16, 32, 4, 2, 64, 256
SEED = 20240613

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Family:
    """A tiny model of one family.

    `build()` gives the same weights each time, and takes `dropout=` where the family has dropout; `inputs(batch_seed)`
    gives (args, kwargs); `loss(output)` is a scalar.
    """

    name: str
    build: Callable[..., nn.Module]
    inputs: Callable[[int], Inputs]
    loss: Callable[[Any], Tensor]


def _seeded(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """The same weights on every build, whatever random numbers were drawn before."""

    def build(**options: Any) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return make(**options).train()

    return build


def _generator(batch_seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(SEED + 7919 * batch_seed)


def _ids(generator: torch.Generator, vocabulary: int = VOCABULARY, length: int = SEQUENCE) -> Tensor:
    return torch.randint(3, vocabulary, (BATCH, length), generator=generator)


def _causal_inputs(batch_seed: int, vocabulary: int = VOCABULARY) -> Inputs:
    ids = _ids(_generator(batch_seed), vocabulary)
    return (), {"input_ids": ids, "labels": ids}


def _masked_inputs(batch_seed: int) -> Inputs:
    """Labels at a third of the positions, -100 elsewhere; how many differs between the rows."""
    generator = _generator(batch_seed)
    ids = _ids(generator)
    chosen = torch.rand(BATCH, SEQUENCE, generator=generator) < 0.35
    chosen[:, 0] = True
    return (), {"input_ids": ids, "labels": torch.where(chosen, ids, -100)}


def _encoder_decoder_inputs(batch_seed: int) -> Inputs:
    generator = _generator(batch_seed)
    return (), {"input_ids": _ids(generator), "labels": _ids(generator)}


def _vit_inputs(batch_seed: int) -> Inputs:
    generator = _generator(batch_seed)
    images = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return (), {"pixel_values": images, "labels": torch.randint(0, 8, (BATCH,), generator=generator)}


def _labelled_ids(batch_seed: int) -> Inputs:
    generator = _generator(batch_seed)
    return (_ids(generator), _ids(generator)), {}


def _image_inputs(batch_seed: int) -> Inputs:
    generator = _generator(batch_seed)
    images = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return (images, torch.randint(0, 8, (BATCH,), generator=generator)), {}


def _image_pairs(batch_seed: int) -> Inputs:
    generator = _generator(batch_seed)
    return (torch.randn(BATCH, 4, 16, 16, generator=generator), torch.randn(BATCH, 4, 16, 16, generator=generator)), {}


def _vectors(batch_seed: int) -> Inputs:
    return (torch.randn(BATCH, HIDDEN, generator=_generator(batch_seed)),), {}


def _of_output(output: Any) -> Tensor:
    return output.loss


def _gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=257,
            n_positions=32,
            n_embd=HIDDEN,
            n_layer=LAYERS,
            n_head=HEADS,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def _decoder_sizes(dropout: float) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 64,
        "attention_dropout": dropout,
    }


def _llama(dropout: float = 0.0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder_sizes(dropout), num_key_value_heads=2))


def _qwen3(dropout: float = 0.0) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = _decoder_sizes(dropout)
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True))


def _mistral(dropout: float = 0.0) -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**_decoder_sizes(dropout), num_key_value_heads=2, sliding_window=8))


def _encoder_sizes(dropout: float) -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }


def _bert(dropout: float = 0.0) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **_encoder_sizes(dropout)))


def _roberta(dropout: float = 0.0) -> nn.Module:
    from transformers import RobertaConfig, RobertaForMaskedLM

    sizes = _encoder_sizes(dropout)
    config = RobertaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, type_vocab_size=1, **sizes)
    return RobertaForMaskedLM(config)


def _t5(dropout: float = 0.0) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=HIDDEN,
            d_kv=HIDDEN // HEADS,
            d_ff=INTERMEDIATE,
            num_layers=LAYERS,
            num_heads=HEADS,
            dropout_rate=dropout,
            decoder_start_token_id=0,  # pyright: ignore[reportCallIssue]
        )
    )


def _bart(dropout: float = 0.0) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCABULARY,
            d_model=HIDDEN,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_ffn_dim=INTERMEDIATE,
            decoder_ffn_dim=INTERMEDIATE,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            max_position_embeddings=32,
            dropout=dropout,
            attention_dropout=dropout,
            activation_dropout=dropout,
        )
    )


def _vit(dropout: float = 0.0) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = _encoder_sizes(dropout)
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=8, **sizes))  # pyright: ignore[reportCallIssue]


def _lora(dropout: float = 0.0) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    # Both adapter matrices start random: with B = 0 the gradient of A would be zero, and tests of it would be empty.
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=targets, lora_dropout=dropout, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return get_peft_model(_llama(), config)  # type: ignore[arg-type, return-value]


class EncoderClassifier(nn.Module):
    """Token embeddings, nn.TransformerEncoder, a head over the vocabulary and the cross-entropy."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, INTERMEDIATE, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids_BS: Tensor, labels_BS: Tensor) -> Tensor:
        logits_BSV = self.head(self.encoder(self.embedding(ids_BS)))
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())


class MLP(nn.Module):
    """Three linear layers with GELU; the loss is left to the caller."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INTERMEDIATE)
        self.middle = nn.Linear(INTERMEDIATE, INTERMEDIATE)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.down(self.dropout(F.gelu(self.middle(F.gelu(self.up(x_BD))))))


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("gpt2", _seeded(_gpt2), lambda batch_seed: _causal_inputs(batch_seed, 257), _of_output),
        Family("llama", _seeded(_llama), _causal_inputs, _of_output),
        Family("qwen3", _seeded(_qwen3), _causal_inputs, _of_output),
        Family("mistral", _seeded(_mistral), _causal_inputs, _of_output),
        Family("bert", _seeded(_bert), _masked_inputs, _of_output),
        Family("roberta", _seeded(_roberta), _masked_inputs, _of_output),
        Family("t5", _seeded(_t5), _encoder_decoder_inputs, _of_output),
        Family("bart", _seeded(_bart), _encoder_decoder_inputs, _of_output),
        Family("vit", _seeded(_vit), _vit_inputs, _of_output),
        Family("transformer_encoder", _seeded(EncoderClassifier), _labelled_ids, lambda loss: loss),
        Family("resnet", _seeded(ResNet), _image_inputs, lambda output: output[0]),
        Family("unet", _seeded(UNet), _image_pairs, lambda loss: loss),
        Family("mlp", _seeded(MLP), _vectors, lambda output: output.square().mean()),
        Family("lora", _seeded(_lora), _causal_inputs, _of_output),
    )
}
