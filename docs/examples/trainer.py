"""transformers' Trainer. Lines with "new" or "was" are those that autopar changes."""

import json
import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from autopar.integrations.trainer import Trainer  # was: from transformers import Trainer

sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
each = 8 // int(os.environ.get("WORLD_SIZE", "1"))
batches = {"per_device_train_batch_size": each, "per_device_eval_batch_size": each, "gradient_accumulation_steps": 2}
when = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2}
arguments = TrainingArguments(output_dir=sys.argv[1], use_cpu=True, report_to="none", **batches, **when)

torch.manual_seed(0)
dataset = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (64, 16))]
trainer = Trainer(
    model=LlamaForCausalLM(LlamaConfig(**sizes)),
    args=arguments,
    train_dataset=dataset,
    eval_dataset=dataset[:16],
    mesh=torch.distributed.init_device_mesh("cpu", (arguments.world_size,), mesh_dim_names=("dp",)),  # new
    options={"strategy": "zero3"},  # new
)
trainer.train(resume_from_checkpoint=sys.argv[2] if len(sys.argv) > 2 else None)
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
predicted = trainer.predict(dataset[:16]).predictions
found = {"losses": losses, "eval": trainer.evaluate()["eval_loss"], "sum": float(abs(predicted).sum())}
if trainer.is_world_process_zero():
    print(json.dumps(found))
