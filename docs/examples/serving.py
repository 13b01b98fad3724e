"""Text from a Llama whose weights and cache are divided over ranks. Lines marked "new" are those that autopar adds.

torchrun --nproc-per-node 2 docs/examples/serving.py
"""

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar  # new

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()  # yours: from_pretrained(…)
prompts = torch.randint(3, 64, (2, 6))
mesh = torch.distributed.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))  # new
model = autopar.compile(model, mesh, training=False, strategy="megatron")  # new
tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=8, do_sample=False)
print(f"tokens {tokens.tolist()}")
