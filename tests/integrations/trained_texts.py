"""A script: transformers' Trainer on texts of lengths from 3 to 14, on one process, or with autopar under torchrun.

FOLDER [STRATEGY [CHECKPOINT]]
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

BATCH, STEPS = 8, 4
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def texts() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 15, (BATCH * STEPS,), generator=generator).tolist()
    rows = [torch.randint(1, 64, (length,), generator=generator) for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def collated(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A rank's part, as long as its longest text."""
    ids, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    return {"input_ids": pad_sequence(ids, True, 0), "labels": pad_sequence(labels, True, -100)}


def main(folder: str, strategy: str | None = None, checkpoint: str | None = None) -> None:
    import transformers

    when = {"max_steps": STEPS, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2}
    arguments = transformers.TrainingArguments(
        output_dir=folder, use_cpu=True, report_to="none", per_device_train_batch_size=BATCH // WORLD, **when
    )
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))
    kind: Any = transformers.Trainer
    if strategy is not None:
        from torch.distributed.device_mesh import init_device_mesh

        import autopar
        from autopar.integrations.trainer import Trainer as kind

        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
        example, buckets = collated(texts()[: BATCH // WORLD]), autopar.Buckets((16,))
        model = autopar.compile(
            model, mesh, example, run=autopar.Run(buckets=buckets), inputs="local", strategy=strategy
        )
    trainer = kind(model=model, args=arguments, data_collator=collated, train_dataset=texts())
    trainer.train(resume_from_checkpoint=checkpoint)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    plans = 0 if strategy is None else sum(map(len, model._known.values()))
    if trainer.is_world_process_zero():
        print(json.dumps({"losses": losses, "plans": plans}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
