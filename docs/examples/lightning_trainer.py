"""Lightning. Lines with "new" are those that autopar adds."""

import json
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
    def training_step(self, x):
        losses.append(loss := self.model(x))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


ranks, rank, losses = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0")), []
pl.seed_everything(0)
(training := Training()).model, data = Regression(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), torch.randn(32, 16)
loader = DataLoader(data, 8 // ranks, sampler=DistributedSampler(data, ranks, rank, shuffle=False))
how = {"accelerator": "cpu", "devices": ranks, "max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
how |= {"logger": False, "callbacks": pl.callbacks.ModelCheckpoint(sys.argv[1], save_top_k=-1)}
trainer = pl.Trainer(
    strategy=Strategy({"dp": ranks}, "model", (torch.empty(8 // ranks, 16),), strategy="zero3"),  # new
    **how,
)
trainer.fit(training, loader, ckpt_path=(*sys.argv, None)[2])
print(json.dumps({"losses": [loss.item() for loss in losses]}))
