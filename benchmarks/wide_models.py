"""Models whose graphs have high treewidth or are irregular: stars, skips over many layers, scans, few equal layers.

Sizes are about those of published models, but for scans that are captured step by step: texts are short there, or
layers few. B batch, C channels, H height, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.models.catalogue import BuiltIn, EncoderDecoder, LanguageModel, inputs_of
from benchmarks.unet import unet

GROWTH, BOTTLENECK = 32, 4
BLOCKS = (6, 12, 24, 16)
"""Layers of each block of DenseNet-121."""
IMAGE = 224
NUM_CLASSES = 1000
HYBRID_LAYERS, EVERY, FIRST = 40, 10, 5

TEXTS: dict[str, BuiltIn] = {
    "mamba2-1.3b": BuiltIn(
        LanguageModel,
        "Mamba2Config",
        {  # config.json of mamba2-1.3b
            "vocab_size": 50288,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_heads": 64,
            "head_dim": 64,
            "n_groups": 1,
            "state_size": 128,
            "tie_word_embeddings": True,
        },
    ),
    "rwkv-4-169m": BuiltIn(
        LanguageModel,
        "RwkvConfig",
        {  # config.json of rwkv-4-169m-pile; its scan is captured token by token
            "vocab_size": 50277,
            "hidden_size": 768,
            "num_hidden_layers": 12,
        },
    ),
    "pegasus-x-large": BuiltIn(
        EncoderDecoder,
        "PegasusXConfig",
        {"num_global_tokens": 128, "dropout": 0.0},  # config.json of pegasus-x-large, else the defaults
        ("encoder_layers", "decoder_layers"),
    ),
    # The defaults are those of Qwen3-Next-80B-A3B; its scan is captured chunk by chunk.
    "qwen3-next-80b": BuiltIn(LanguageModel, "Qwen3NextConfig", {}),
    "granite-4-h-micro": BuiltIn(
        LanguageModel,
        "GraniteMoeHybridConfig",
        {  # config.json of granite-4.0-h-micro
            "vocab_size": 100352,
            "hidden_size": 2048,
            "num_hidden_layers": HYBRID_LAYERS,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "shared_intermediate_size": 8192,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 64,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "embedding_multiplier": 12,
            "attention_multiplier": 0.015625,
            "residual_multiplier": 0.22,
            "logits_scaling": 8,
            "tie_word_embeddings": True,
            "layer_types": [
                "full_attention" if layer % EVERY == FIRST else "linear_attention" for layer in range(HYBRID_LAYERS)
            ],
        },
    ),
}


class DenseLayer(nn.Module):
    """A bottleneck and a convolution; their output is concatenated to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(BOTTLENECK * GROWTH)
        self.conv1 = nn.Conv2d(channels, BOTTLENECK * GROWTH, 1, bias=False)
        self.conv2 = nn.Conv2d(BOTTLENECK * GROWTH, GROWTH, 3, padding=1, bias=False)

    def forward(self, before: list[Tensor]) -> Tensor:
        y = self.conv1(F.relu(self.norm1(torch.cat(before, 1))))
        return self.conv2(F.relu(self.norm2(y)))


class DenseNet(nn.Module):
    """DenseNet (Huang et al. 2017): every layer of a block sees the outputs of all before it; returns the mean loss."""

    def __init__(self, blocks: tuple[int, ...]) -> None:
        super().__init__()
        channels = 2 * GROWTH
        self.enter = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.blocks, self.narrow = nn.ModuleList(), nn.ModuleList()
        for number, layers in enumerate(blocks):
            self.blocks.append(nn.ModuleList([DenseLayer(channels + GROWTH * place) for place in range(layers)]))
            channels += GROWTH * layers
            if number < len(blocks) - 1:
                conv = nn.Conv2d(channels, channels // 2, 1, bias=False)
                self.narrow.append(nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), conv, nn.AvgPool2d(2)))
                channels //= 2
        self.last = nn.BatchNorm2d(channels)
        self.classify = nn.Linear(channels, NUM_CLASSES)

    def forward(self, images_BCHW: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.enter(images_BCHW))), 3, stride=2, padding=1)
        for number, block in enumerate(self.blocks):
            assert isinstance(block, nn.ModuleList)
            found = [x]
            for layer in block:
                found.append(layer(found))
            x = torch.cat(found, 1)
            if number < len(self.narrow):
                x = self.narrow[number](x)
        return F.cross_entropy(self.classify(F.relu(self.last(x)).mean((2, 3))), labels)


def densenet(batch: int, num_blocks: int = len(BLOCKS)) -> tuple[DenseNet, tuple[Tensor, Tensor]]:
    """DenseNet-121, or its first blocks, and images for it, on the meta device."""
    with torch.device("meta"):
        return DenseNet(BLOCKS[:num_blocks]), (torch.zeros(batch, 3, IMAGE, IMAGE), torch.zeros(batch).long())


NAMES = ("unet", "densenet-121", *TEXTS)


def wide_model(name: str, batch: int, sequence: int, layers: int | None) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model of NAMES and inputs, on the meta device; the layers of a UNet are its levels, of DenseNet its blocks."""
    if name == "unet":
        return unet(batch) if layers is None else unet(batch, layers)
    if name == "densenet-121":
        return densenet(batch) if layers is None else densenet(batch, layers)
    found = TEXTS[name]
    with torch.device("meta"):
        return found.wrapper(found.config(layers)), inputs_of(found, batch, sequence)
