"""Model families trained on simulated ranks and on one process: `python -m benchmarks.families [family …]`.

Each family is a tiny model of transformers, made from its config with random weights. On a mesh of (2, 2), with slow
devices and fast links so that plans truly split, it trains two steps under each strategy; loss, outputs, every
parameter's gradient, and the parameters and buffers afterwards are compared with one process. A family is run in a
process of its own, and what it gave is appended to the results at once.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import subprocess
import sys
import time
import unittest.mock
from collections import Counter
from pathlib import Path
from typing import Any

import tabulate
import torch
from torch import Tensor, nn

STRATEGIES = ("auto", "data_parallel", "megatron", "zero3")
MESH = {"dp": 2, "tp": 2}
BATCH, LENGTH, VOCABULARY, NUM_CLASSES = 4, 8, 64, 8
PLANNING_SECONDS, STRATEGY_SECONDS = 20.0, 300.0
RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""float32: rounding is amplified by norms of tiny numbers."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "decoder_num_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_query_groups"), 2),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 32),
    **dict.fromkeys(("hidden_dim", "ffn_hidden_size"), 32),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 4),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "use_cache": False,
    "layerdrop": 0.0,
    "sliding_window": 4,
}
"""Sizes that are set in a config if it has the field: field → value."""

FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "AutoModelForCausalLM": {
        name: {}
        for name in [
            "opt",
            "gpt_neox",
            "gptj",
            "codegen",
            "gpt_bigcode",
            "bloom",
            "mpt",
            "falcon",
            "phi",
            "phi3",
            "gemma",
            "gemma2",
            "gemma3_text",
            "qwen2",
            "qwen2_moe",
            "qwen3_moe",
            "mixtral",
            "olmo",
            "olmo2",
            "olmoe",
            "cohere",
            "cohere2",
            "stablelm",
            "starcoder2",
            "granite",
            "granitemoe",
            "glm",
            "glm4",
            "helium",
            "nemotron",
            "persimmon",
            "xglm",
            "biogpt",
            "openai-gpt",
            "ctrl",
            "smollm3",
            "arcee",
            "exaone4",
            "deepseek_v2",
            "deepseek_v3",
            "dots1",
            "ernie4_5",
            "hunyuan_v1_dense",
            "seed_oss",
            "apertus",
            "bitnet",
            "diffllama",
            "gpt_oss",
            "jetmoe",
            "minimax",
            "ministral",
            "moshi",
            "phimoe",
            "recurrent_gemma",
            "mamba",
            "mamba2",
            "trocr",
            "youtu",
            "dbrx",
            "glm4_moe",
            "llama4_text",
            "ernie4_5_moe",
        ]
    }
    | {
        "gpt_neo": {"attention_types": [[["global"], 1]], "window_size": 4},
        "bert-generation": {"is_decoder": True},
    },
    "AutoModelForMaskedLM": {
        name: {}
        for name in [
            "albert",
            "big_bird",
            "camembert",
            "convbert",
            "data2vec-text",
            "deberta",
            "deberta-v2",
            "distilbert",
            "electra",
            "ernie",
            "esm",
            "fnet",
            "ibert",
            "megatron-bert",
            "mobilebert",
            "modernbert",
            "mpnet",
            "nystromformer",
            "rembert",
            "roberta-prelayernorm",
            "roformer",
            "squeezebert",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
            "layoutlm",
            "flaubert",
            "xlm",
            "mra",
            "yoso",
        ]
    },
    "AutoModelForSeq2SeqLM": {
        name: {}
        for name in [
            "blenderbot",
            "blenderbot-small",
            "m2m_100",
            "marian",
            "mbart",
            "mt5",
            "mvp",
            "pegasus",
            "plbart",
            "umt5",
        ]
    },
    "AutoModelForImageClassification": {
        name: {}
        for name in [
            "beit",
            "convnext",
            "convnextv2",
            "dinov2",
            "ijepa",
            "vit_msn",
            "mobilenet_v1",
            "mobilenet_v2",
            "regnet",
            "resnet",
            "poolformer",
            "focalnet",
            "mobilevit",
            "data2vec-vision",
        ]
    },
}
"""Class of transformers → family → what its config needs in addition to SIZES."""
OVERRIDES: dict[str, dict[str, Any]] = {
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "convbert": {"head_ratio": 2, "conv_kernel_size": 3, "num_groups": 1},
    "big_bird": {"attention_type": "original_full"},
    "squeezebert": {f"{name}_groups": 1 for name in ("q", "k", "v", "post_attention", "intermediate", "output")},
    "xlm": {"emb_dim": 16, "n_langs": 1},
    "flaubert": {"emb_dim": 16, "n_langs": 1},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "nystromformer": {"segment_means_seq_len": 8, "num_landmarks": 4},
    "deepseek_v3": {"first_k_dense_replace": 0, "num_key_value_heads": 4},
    "youtu": {"num_key_value_heads": 4},
    "gemma": {"head_dim": 4},
    "deepseek_v2": {"first_k_dense_replace": 0, "num_key_value_heads": 4},
    "dots1": {"first_k_dense_replace": 0},
    "glm4_moe": {"first_k_dense_replace": 0},
    "llama4_text": {"intermediate_size_mlp": 32, "num_experts_per_tok": 1},
    "ernie4_5_moe": {"moe_layer_start_index": 0, "moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16},
    },
    "mamba": {"state_size": 4, "conv_kernel": 2, "expand": 2},
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 4, "n_groups": 1, "chunk_size": 4},
    "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "convnextv2": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "poolformer": {
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "num_encoder_blocks": 2,
        "patch_sizes": [3, 3],
        "strides": [2, 2],
        "padding": [1, 1],
    },
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "gemma3_text": {"layer_types": ["full_attention"]},
    "cohere2": {"layer_types": ["sliding_attention"]},
}


def kind_of(family: str) -> str:
    """The class of transformers that makes a family."""
    return next(kind for kind, families in FAMILIES.items() if family in families)


def build(family: str) -> nn.Module:
    """A tiny model of the family, equal on every call."""
    import transformers

    default = transformers.AutoConfig.for_model(family)
    known = default.to_dict().keys() | getattr(type(default), "attribute_map", {}).keys()
    sizes = {
        name: value for name, value in SIZES.items() if name in known and not isinstance(getattr(default, name), list)
    }
    sizes |= {name: 0.0 for name in known if "drop" in name and isinstance(getattr(default, name, None), float)}
    sizes |= {"attn_implementation": "eager"} if family in ("gpt_oss",) else {}
    kind = kind_of(family)
    sizes |= {"num_labels": NUM_CLASSES} if kind == "AutoModelForImageClassification" else {}
    config = transformers.AutoConfig.for_model(family, **sizes | FAMILIES[kind][family] | OVERRIDES.get(family, {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, kind).from_config(config).train()


def batch(family: str, step: int) -> dict[str, Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    if kind_of(family) == "AutoModelForImageClassification":
        size = 32 if family in ("mobilenet_v1", "mobilenet_v2", "regnet", "resnet", "efficientnet") else 16
        images = torch.randn(BATCH, 3, size, size, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(0, NUM_CLASSES, (BATCH,), generator=generator)}
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def run(family: str) -> dict[str, Any]:
    """Strategy → [outcome, what is wrong, share of calls split, seconds]; or the reason why there is none."""
    from autopar.capture.export import capture
    from autopar.compiler import whole
    from tests.support.simulation.outcome import judged
    from tests.support.simulation.training import Steps, train_alone, train_on_ranks

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    try:
        steps, model = Steps([batch(family, 0), batch(family, 1)]), build(family)
        expected = train_alone(model, steps)
    except Exception as error:
        return {"none": ["unusable", f"{type(error).__name__}: {str(error).splitlines()[0]}"[:160], 0.0, 0.0]}
    programs: dict[str, Any] = {}

    def captured(*args: Any, **kwargs: Any) -> Any:
        """`capture`, run once: it takes most of the time and knows nothing of the mesh and of strategies."""
        kind = repr([value for value in (*args, *kwargs.values()) if isinstance(value, bool | str)])
        if kind not in programs:
            programs[kind] = capture(*args, **kwargs)
        return programs[kind]

    found: dict[str, Any] = {}
    for strategy in STRATEGIES:
        start = time.monotonic()
        options: dict[str, Any] = {"time_limit": PLANNING_SECONDS}
        options |= {} if strategy == "auto" else {"strategy": strategy}
        with unittest.mock.patch.object(whole, "capture", captured):
            outcome = judged(
                lambda: expected,
                lambda options=options: train_on_ranks(build(family), steps, MESH, options),
                STRATEGY_SECONDS,
                RELATIVE,
                ABSOLUTE,
            )
        text = outcome.text or ""
        found[strategy] = [outcome.kind, text[:200], outcome.split, time.monotonic() - start]
        if outcome.kind == "internal":
            found[strategy][1] += f" [{outcome.cause}]"
        if "CaptureError" in text:
            break
    return found


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the results under a head line, one row per family, with the reasons below."""
    rows, notes, counts = [], [], Counter[str]()
    for family, found in results.items():
        cells = []
        for strategy in STRATEGIES:
            if strategy not in found:
                cells.append("-")
                continue
            kind, text, split, _ = found[strategy]
            counts[kind] += 1
            cells.append(f"{kind} ({split:.0%} split)" if kind == "equal" else kind)
            if kind != "equal":
                notes.append(f"{family}, {strategy}: {kind}: {text}")
        if "none" in found:
            notes.append(f"{family}: {found['none'][1]}")
        rows.append((family, *cells))
    ran = [family for family, found in results.items() if any(each[0] == "equal" for each in found.values())]
    total = f"{len(ran)} families equal under at least one strategy; runs: {dict(counts)}"
    head = f"python -m benchmarks.families, {datetime.date.today()}, {os.cpu_count()} cores, torch {torch.__version__}"
    return f"{head}\n\n{tabulate.tabulate(rows, ('family', *STRATEGIES))}\n\n{total}\n\n" + "\n".join(notes) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__)
    parser.add_argument("families", nargs="*", help="by default all of them")
    parser.add_argument("--results", default=None, help="text file; what a JSON file beside it holds is not run again")
    parser.add_argument("--seconds", type=float, default=900.0, help="that a family may take, all strategies together")
    parser.add_argument("--one", action="store_true", help="run one family here and print its results as JSON")
    requested = parser.parse_args()
    if requested.one:
        print(json.dumps(run(requested.families[0])))
        return
    file = Path(requested.results or "benchmarks/results/families.txt")
    state = Path("build") / f"{file.stem}.json"
    state.parent.mkdir(exist_ok=True)
    results: dict[str, dict[str, Any]] = json.loads(state.read_text()) if state.exists() else {}
    for family in requested.families or [family for families in FAMILIES.values() for family in families]:
        if family in results and not requested.families:
            continue
        command = [sys.executable, "-m", "benchmarks.families", "--one", family]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=requested.seconds)
            lines = done.stdout.splitlines()
            results[family] = json.loads(lines[-1]) if lines else {"none": ["internal", done.stderr[-300:], 0.0, 0.0]}
        except subprocess.TimeoutExpired:
            results[family] = {"none": ["hang", f"more than {requested.seconds:g} s", 0.0, requested.seconds]}
        print(family, {name: each[:2] + each[3:] for name, each in results[family].items()}, flush=True)
        state.write_text(json.dumps(results))
        file.write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
