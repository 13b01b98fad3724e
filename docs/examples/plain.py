"""A training loop of your own. Lines marked "new" are those that autopar adds.

torchrun --nproc-per-node 2 docs/examples/plain.py
"""

import os

import torch
from torch import nn

import autopar  # new

torch.manual_seed(0)  # every rank makes the same model and the same batches
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
batches = torch.randn(6, 32, 16)
mesh = torch.distributed.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))  # new
model = autopar.compile(model, mesh, (batches[0],), strategy="zero3")  # new
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for x in batches:
    labels = x[:, :4].argmax(dim=1)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), labels)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print(f"losses {losses}")
