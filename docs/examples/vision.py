"""A convolutional classifier, moved over from DDP. Lines marked "new" or "was" are those that autopar changes.

torchrun --nproc-per-node 2 docs/examples/vision.py
"""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopar  # new

ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, stride=2, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 4),
)
labels = torch.arange(64) % 4
samples = TensorDataset(torch.randn(64, 3, 16, 16) + labels[:, None, None, None], labels)
sampler = DistributedSampler(samples, ranks, rank, shuffle=False)
loader = DataLoader(samples, batch_size=16 // ranks, sampler=sampler)
mesh = torch.distributed.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))  # new
model = autopar.compile(model, mesh, (next(iter(loader))[0],), inputs="local")  # new
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
losses = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)  # of this rank's samples, as under DDP
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
print(f"losses {losses}")
