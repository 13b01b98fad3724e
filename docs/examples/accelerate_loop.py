"""A training loop with accelerate. Lines marked "new" or "was" are those that autopar changes.

torchrun --nproc-per-node 2 docs/examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopar  # new


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x):
        return (self.layers(x) - x.flip(1)).square().mean()


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = Regression()
batch_size = 8 // accelerator.num_processes  # of one rank
loader = accelerator.prepare(DataLoader(TensorDataset(torch.randn(64, 16)), batch_size))
mesh = torch.distributed.init_device_mesh("cpu", (accelerator.num_processes,), mesh_dim_names=("dp",))  # new
model = autopar.compile(model, mesh, (torch.empty(batch_size, 16),), inputs="local", strategy="zero3")  # new
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = accelerator.prepare(optimizer)  # was: model, optimizer = accelerator.prepare(model, optimizer)
losses = []
for (x,) in loader:
    with accelerator.accumulate(model):
        loss = model(x)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
print(f"losses {losses}")
