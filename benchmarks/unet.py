"""A UNet of the sizes of Stable Diffusion's, without text: what enters each block comes back on the way up.

B batch, C channels, H height, W width, E embedding, N heads, P positions, D channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LATENT_CHANNELS = 4
GROUPS = 32
HEAD_CHANNELS = 64


class ResidualBlock(nn.Module):
    """Two convolutions around a shortcut; the time is added between them."""

    def __init__(self, channels: int, channels_after: int, embedding: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, channels)
        self.conv1 = nn.Conv2d(channels, channels_after, 3, padding=1)
        self.time = nn.Linear(embedding, channels_after)
        self.norm2 = nn.GroupNorm(GROUPS, channels_after)
        self.conv2 = nn.Conv2d(channels_after, channels_after, 3, padding=1)
        self.shortcut = nn.Identity() if channels == channels_after else nn.Conv2d(channels, channels_after, 1)

    def forward(self, x_BCHW: Tensor, time_BE: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x_BCHW)))
        y = y + self.time(F.silu(time_BE))[:, :, None, None]
        y = self.conv2(F.silu(self.norm2(y)))
        return self.shortcut(x_BCHW) + y


class Attention(nn.Module):
    """Every position looks at every other."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.num_heads = channels // HEAD_CHANNELS
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.query = nn.Linear(channels, channels)
        self.key = nn.Linear(channels, channels)
        self.value = nn.Linear(channels, channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BPC = self.norm(x_BCHW).flatten(2).transpose(1, 2)

        def heads(z_BPC: Tensor) -> Tensor:
            return z_BPC.unflatten(2, (self.num_heads, HEAD_CHANNELS)).transpose(1, 2)

        y_BNPD = F.scaled_dot_product_attention(
            heads(self.query(y_BPC)), heads(self.key(y_BPC)), heads(self.value(y_BPC))
        )
        y_BCP = self.out(y_BNPD.transpose(1, 2).flatten(2)).transpose(1, 2)
        return x_BCHW + y_BCP.unflatten(2, x_BCHW.shape[2:])


class Block(nn.Module):
    """A residual block, and attention where the image is small enough."""

    def __init__(self, channels: int, channels_after: int, embedding: int, attends: bool) -> None:
        super().__init__()
        self.residual = ResidualBlock(channels, channels_after, embedding)
        self.attention = Attention(channels_after) if attends else nn.Identity()

    def forward(self, x_BCHW: Tensor, time_BE: Tensor) -> Tensor:
        return self.attention(self.residual(x_BCHW, time_BE))


class UNet(nn.Module):
    """Levels of halving resolution, down and up again; each block's output is a skip to the same level on the way up.

    `channels` are those of each level; the last level has no attention. The loss is the mean squared error.
    """

    def __init__(self, channels: tuple[int, ...], blocks_per_level: int) -> None:
        super().__init__()
        embedding = 4 * channels[0]
        self.time = nn.Sequential(nn.Linear(channels[0], embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.enter = nn.Conv2d(LATENT_CHANNELS, channels[0], 3, padding=1)
        self.down, self.narrow, self.up, self.widen = (nn.ModuleList() for _ in range(4))
        skips, width, last = [channels[0]], channels[0], len(channels) - 1
        for level, size in enumerate(channels):
            for _ in range(blocks_per_level):
                self.down.append(Block(width, size, embedding, level < last))
                width = size
                skips.append(width)
            if level < last:
                self.narrow.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)
        self.middle = Block(width, width, embedding, True)
        for level, size in reversed(list(enumerate(channels))):
            for _ in range(blocks_per_level + 1):
                self.up.append(Block(width + skips.pop(), size, embedding, level < last))
                width = size
            if level:
                self.widen.append(nn.Conv2d(width, width, 3, padding=1))
        self.norm = nn.GroupNorm(GROUPS, width)
        self.leave = nn.Conv2d(width, LATENT_CHANNELS, 3, padding=1)
        self.blocks_per_level = blocks_per_level

    def forward(self, latents_BCHW: Tensor, times_BE: Tensor, target_BCHW: Tensor) -> Tensor:
        time_BE = self.time(times_BE)
        x = self.enter(latents_BCHW)
        skips = [x]
        for number, block in enumerate(self.down):
            x = block(x, time_BE)
            skips.append(x)
            level, place = divmod(number, self.blocks_per_level)
            if place == self.blocks_per_level - 1 and level < len(self.narrow):
                x = self.narrow[level](x)
                skips.append(x)
        x = self.middle(x, time_BE)
        for number, block in enumerate(self.up):
            x = block(torch.cat([x, skips.pop()], 1), time_BE)
            level, place = divmod(number, self.blocks_per_level + 1)
            if place == self.blocks_per_level and level < len(self.widen):
                x = self.widen[level](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return F.mse_loss(self.leave(F.silu(self.norm(x))), target_BCHW)


def unet(batch: int, num_levels: int = 4, device: str = "meta") -> tuple[UNet, tuple[Tensor, Tensor, Tensor]]:
    """The UNet and inputs for it: latents of 64×64 positions, embedded times and targets."""
    channels = (320, 640, 1280, 1280)[:num_levels]
    with torch.device(device):
        latents_BCHW = torch.zeros(batch, LATENT_CHANNELS, 64, 64)
        return UNet(channels, 2), (latents_BCHW, torch.zeros(batch, channels[0]), torch.zeros_like(latents_BCHW))
