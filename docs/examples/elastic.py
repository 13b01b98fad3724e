"""Training that survives its ranks: each start goes on from the last whole checkpoint, on the ranks that there are."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import autopar

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
x = torch.randn(steps, 8, 16)
model = autopar.compile(model, mesh, (x[0],), strategy="zero3")  # planned for the ranks of this start
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
done = max((int(found.parent.name) for found in folder.glob("*/.metadata")), default=0)  # which DCP writes last
if done:
    weights, moments = get_state_dict(model, optimizer)  # where to read to
    load({"model": weights, "optimizer": moments}, checkpoint_id=folder / str(done))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
for step in range(done, steps):
    optimizer.zero_grad()
    loss = (model(x[step]) - x[step].flip(1)).square().mean()
    loss.backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": moments}, checkpoint_id=folder / str(step + 1))
    if dist.get_rank() == 0:
        print(json.dumps({"step": step, "loss": loss.item(), "ranks": dist.get_world_size()}), flush=True)
dist.destroy_process_group()
