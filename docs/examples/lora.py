"""LoRA of peft on a Llama of transformers. Lines marked "new" are those that autopar adds.

torchrun --nproc-per-node 2 docs/examples/lora.py
"""

import os

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import autopar  # new

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
base = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))  # yours: AutoModelForCausalLM.from_pretrained(…)
model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (1, 8, 16)).expand(6, -1, -1)]
mesh = torch.distributed.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))  # new
model = autopar.compile(model, mesh, batches[0], strategy="megatron")  # new
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-2)
losses = []
for batch in batches:
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
model.save_pretrained("lora-adapter")  # PeftModel.from_pretrained(base, "lora-adapter") reads it
print(f"losses {losses}")
