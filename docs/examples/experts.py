"""A mixture of experts, its experts divided over ranks. Lines marked "new" are those that autopar adds.

torchrun --nproc-per-node 2 docs/examples/experts.py
"""

import os

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import autopar  # new

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
config = MixtralConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=4, output_router_logits=True, **sizes)
model = MixtralForCausalLM(config)
ids = torch.randint(0, 64, (4, 16))
batch = {"input_ids": ids, "labels": ids}
mesh = torch.distributed.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("ep",))  # new
model = autopar.compile(model, mesh, batch, strategy="expert_data")  # new
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for _ in range(4):
    optimizer.zero_grad()
    loss = model(**batch).loss  # with the auxiliary loss that balances experts
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"losses {losses}")
