"""A loop of one's own. Lines with "new" are those that autopar adds."""

import json
import os

import torch
from torch import nn

import autopar  # new

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Flatten(0))
batches = torch.randn(6, 8, 16)
mesh = torch.distributed.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))  # new
model = autopar.compile(model, mesh, (batches[0],), strategy="zero3")  # new
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for x in batches:
    optimizer.zero_grad()
    loss = (model(x) - x.flip(1).flatten()).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print(json.dumps({"losses": losses}))
