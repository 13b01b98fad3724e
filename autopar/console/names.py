"""Names that users write as options, for whoever lists them without PyTorch, as the command line does.

The tables that say what each name means have exactly these keys (tests/console/test_names.py).
"""

from __future__ import annotations

from collections.abc import Mapping

MODELS = (
    *("demo", "llama-1b", "llama-8b", "llama-70b", "llama-405b", "mixtral-dense", "gpt2", "t5-large", "vit-h"),
    *("tiny-llama", "tiny-moe", "tiny-gpt2", "tiny-vit", "tiny-cnn", "tiny-mlp"),
)
PRESETS = (
    *("fully_replicated", "data_parallel", "zero1", "zero2", "zero3", "hsdp"),
    *("megatron", "megatron_sequence", "async_tensor_parallel", "megatron_regather"),
    *("ulysses", "gather_kv", "ring", "ring_self_attention", "usp", "context_parallel"),
    *("tensor_2d", "tensor_2_5d", "tensor_3d", "fsdp_megatron", "flash_decoding"),
    *("expert_data", "expert_model", "expert_data_model", "expert_folded"),
)
ALIASES: Mapping[str, str] = {
    "ddp": "data_parallel",
    "fsdp": "zero3",
    "tp": "megatron",
    "sp": "megatron_sequence",
    "cp": "context_parallel",
    "ep": "expert_data",
}
"""Short name → the preset that it means."""
JOINED = "+"
"""Joins presets to one strategy: "fsdp+tp+cp"."""
PIPELINE = "pp"
"""The mesh axis that is a pipeline unless another one is named; no preset."""
AUTO = "auto"
PEERS = ("ddp", "fsdp2", "dtensor-tp", "dtensor-tp+sp", "transformers-ep", "transformers-ep-reduce", "ep-by-hand")
"""Trainers that `autopar bench` compares with."""
EXPERT_PEERS = PEERS[-3:]
OPTIMIZERS = ("adamw", "sgd", "adamw-8bit", "muon", "galore", "none")
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
    "pipedream",
    "pipedream_2bw",
)
RECOMPUTATIONS = ("none", "selective", "full_save_collectives", "full")
OFFLOADED = ("none", "optimizer", "activations", "both", "auto")
MEMORY_CONVENTIONS = ("autopar", "tensors", "megatron", "deepspeed")
PREFETCH_DEPTHS = (0, 1, 2)
PRECISIONS = ("bf16-mixed", "fp16-mixed", "bf16", "fp32")
