"""transformers' Trainer. Lines marked "new" or "was" are those that autopar changes.

torchrun --nproc-per-node 2 docs/examples/trainer.py OUTPUT [CHECKPOINT TO RESUME]
"""

import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from autopar.integrations.trainer import Trainer  # was: from transformers import Trainer

sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
batch_size = 8 // int(os.environ.get("WORLD_SIZE", "1"))  # of one rank
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    use_cpu=True,
    report_to="none",
    per_device_train_batch_size=batch_size,
    per_device_eval_batch_size=batch_size,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    max_steps=4,
    save_steps=2,
    logging_steps=1,
)
torch.manual_seed(0)
dataset = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (64, 16))]
trainer = Trainer(
    model=LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)),
    args=arguments,
    train_dataset=dataset,
    eval_dataset=dataset[:16],
    mesh=torch.distributed.init_device_mesh("cpu", (arguments.world_size,), mesh_dim_names=("dp",)),  # new
    options={"strategy": "zero3"},  # new
)
trainer.train(resume_from_checkpoint=sys.argv[2] if len(sys.argv) > 2 else None)
predicted = trainer.predict(dataset[:16]).predictions.argmax(-1)
evaluated = trainer.evaluate()["eval_loss"]
if trainer.is_world_process_zero():
    print(f"losses {[line['loss'] for line in trainer.state.log_history if 'loss' in line]}")
    print(f"evaluated {[evaluated]}")
    print(f"predicted {predicted[0].tolist()}")
