"""Lightning's Trainer. Lines marked "new" are those that autopar adds.

torchrun --nproc-per-node 2 docs/examples/lightning_trainer.py CHECKPOINTS [CHECKPOINT TO RESUME]
"""

import os
import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from autopar.integrations.lightning import Strategy  # new


class Regression(nn.Sequential):
    def forward(self, x):
        return (super().forward(x) - x.flip(1)).square().mean()


class Training(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Regression(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.losses = []

    def training_step(self, x):
        loss = self.model(x)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
pl.seed_everything(0)
training, data = Training(), torch.randn(32, 16)
loader = DataLoader(data, 8 // ranks, sampler=DistributedSampler(data, ranks, rank, shuffle=False))
trainer = pl.Trainer(
    strategy=Strategy({"dp": ranks}, "model", (torch.empty(8 // ranks, 16),), strategy="zero3"),  # new
    accelerator="cpu",
    devices=ranks,
    max_epochs=2,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    logger=False,
    callbacks=pl.callbacks.ModelCheckpoint(sys.argv[1], save_top_k=-1),
)
trainer.fit(training, loader, ckpt_path=sys.argv[2] if len(sys.argv) > 2 else None)
print(f"losses {training.losses}")
