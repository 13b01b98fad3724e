"""Two small models in plain PyTorch, without attention and without batch statistics: a perceptron and a ConvNet."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F


class Perceptron(nn.Module):
    """Layers with a GELU after each, and the mean loss of a classification."""

    def __init__(self, num_layers: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(hidden, hidden), nn.GELU()) for _ in range(num_layers))
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """features: float[batch, hidden]; labels: int64[batch]."""
        x_BH = features
        for layer in self.layers:
            x_BH = layer(x_BH)
        return F.cross_entropy(self.head(x_BH), labels)


class ConvBlock(nn.Module):
    """A convolution that halves the image, and one around a shortcut, each with a group norm."""

    def __init__(self, channels: int, channels_after: int) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(channels, channels_after, 3, stride=2, padding=1)
        self.norm1 = nn.GroupNorm(8, channels_after)
        self.conv = nn.Conv2d(channels_after, channels_after, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, channels_after)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = F.relu(self.norm1(self.narrow(x_BCHW)))
        return x_BCHW + F.relu(self.norm2(self.conv(x_BCHW)))


class ConvNet(nn.Module):
    """A stem, blocks that each halve the image and double the channels, the average of all places, and a classifier."""

    def __init__(self, num_layers: int, channels: int, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        widths = [channels << block for block in range(num_layers + 1)]
        self.blocks = nn.ModuleList(ConvBlock(*pair) for pair in pairwise(widths))
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """images: float[batch, 3, height, width]; labels: int64[batch]."""
        x_BCHW = self.stem(images)
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        return F.cross_entropy(self.head(x_BCHW.mean((2, 3))), labels)
