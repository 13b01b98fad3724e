"""A diffusion model (DDPM) on small images. Lines marked "new" are those that autopar adds.

torchrun --nproc-per-node 2 docs/examples/diffusion.py
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

import autopar  # new


class Denoiser(nn.Module):
    """Predict the noise in an image, given the time step."""

    def __init__(self, channels=32, steps=100):
        super().__init__()
        self.time = nn.Embedding(steps, channels)
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.GroupNorm(8, channels)
        self.middle = nn.Conv2d(channels, channels, 3, padding=1)
        self.last = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, images, t):
        hidden = self.first(images) + self.time(t)[:, :, None, None]
        hidden = hidden + self.middle(F.silu(self.norm(hidden)))
        return self.last(F.silu(hidden))


torch.manual_seed(0)
kept = torch.cumprod(1 - torch.linspace(1e-4, 0.05, 100), dim=0)  # the share of the image that is left at each step
model = Denoiser()
images = torch.rand(16, 3, 16, 16)
mesh = torch.distributed.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))  # new
model = autopar.compile(model, mesh, (images, torch.zeros(16, dtype=torch.int64)))  # new
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for _ in range(6):
    t = torch.randint(100, (16,))
    noise = torch.randn_like(images)
    share = kept[t][:, None, None, None]
    noisy = share.sqrt() * images + (1 - share).sqrt() * noise
    optimizer.zero_grad()
    loss = F.mse_loss(model(noisy, t), noise)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"losses {losses}")
