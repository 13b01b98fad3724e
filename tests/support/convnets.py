"""Two small convolutional networks: one with batch statistics and residuals, one with skips across resolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    """Two convolutions around a shortcut, which is itself a convolution where the block narrows the image."""

    def __init__(self, channels: int, channels_after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels_after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_after)
        self.conv2 = nn.Conv2d(channels_after, channels_after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_after)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != channels_after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, channels_after, 1, stride, bias=False), nn.BatchNorm2d(channels_after)
            )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x_BCHW)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x_BCHW)
        return self.relu(y)


class ResNet(nn.Module):
    """Stem with max-pooling, two residual blocks, average-pooling and a classifier."""

    def __init__(self, channels: int = 8, num_classes: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(ResidualBlock(channels, channels, 1), ResidualBlock(channels, 2 * channels, 2))
        self.average = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(2 * channels, num_classes)

    def forward(self, images_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the logits of images float[batch, 3, height, width]."""
        x = self.blocks(self.pool(self.relu(self.norm(self.stem(images_BCHW)))))
        logits = self.head(torch.flatten(self.average(x), 1))
        return F.cross_entropy(logits, labels_B), logits


class DoubleConv(nn.Module):
    """Two convolutions, each with GroupNorm and SiLU."""

    def __init__(self, channels: int, channels_after: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels_after, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, channels_after)
        self.conv2 = nn.Conv2d(channels_after, channels_after, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, channels_after)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x = F.silu(self.norm1(self.conv1(x_BCHW)))
        return F.silu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """Two levels down, two up, with the skips concatenated; the loss is the mean squared error."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.enter = DoubleConv(4, channels)
        self.down = DoubleConv(channels, 2 * channels)
        self.bottom = DoubleConv(2 * channels, 2 * channels)
        self.up1 = DoubleConv(4 * channels, channels)
        self.up2 = DoubleConv(2 * channels, channels)
        self.leave = nn.Conv2d(channels, 4, 1)

    def forward(self, x_BCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        a = self.enter(x_BCHW)
        b = self.down(F.avg_pool2d(a, 2))
        c = self.bottom(F.avg_pool2d(b, 2))
        d = self.up1(torch.cat([F.interpolate(c, scale_factor=2.0, mode="nearest"), b], 1))
        e = self.up2(torch.cat([F.interpolate(d, scale_factor=2.0, mode="nearest"), a], 1))
        return F.mse_loss(self.leave(e), target_BCHW)
