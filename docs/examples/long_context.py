"""One long text, its positions divided over ranks (ring attention). Lines marked "new" are those that autopar adds.

torchrun --nproc-per-node 2 docs/examples/long_context.py
"""

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar  # new

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=1024, **sizes))
ids = torch.randint(0, 64, (1, 1024))  # a single text: there is no batch to divide
batch = {"input_ids": ids, "labels": ids}
mesh = torch.distributed.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("cp",))  # new
model = autopar.compile(model, mesh, batch, strategy="ring")  # new
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for _ in range(4):
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"losses {losses}")
