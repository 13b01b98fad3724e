"""Memory limits from a free plan's peak down to the least that any plan needs: a plan within each, or the refusal.

    python benchmarks/memory_sweep.py [FAMILY ...] [--steps 10] [--time-limit 20]

One table per run. Limits are evenly spaced from 100 % of the peak of the plan without a limit to the least peak. Then
two more: the least itself must give a plan, and 99.9 % of it the refusal that states the least.
"""

from __future__ import annotations

import argparse
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import autopar
from autopar.errors import InfeasibleError
from autopar.models.catalogue import built_in

BELOW = 0.999  # of the least: where a plan must be refused
Inputs = tuple[Any, ...] | dict[str, Any]
Made = tuple[nn.Module, Inputs]
IDS_BS = torch.randint(3, 256, (4, 16), generator=torch.Generator().manual_seed(0))
TEXT = {"input_ids": IDS_BS, "labels": IDS_BS}
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def hugging_face(model: str, config: str, inputs: dict[str, Any], **sizes: Any) -> Callable[[], Made]:
    """A model of transformers with a configuration of these sizes."""

    def make() -> Made:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**sizes)), inputs

    return make


def text_model(family: str, kind: str = "ForMaskedLM", **sizes: Any) -> Callable[[], Made]:
    return hugging_face(f"{family}{kind}", f"{family}Config", TEXT, vocab_size=256, **sizes)


IMAGES = {"pixel_values": torch.zeros(4, 3, 16, 16), "noise": torch.linspace(0, 1, 64).reshape(4, 16)}
DECODER: dict[str, Any] = {
    "decoder_hidden_size": 32,
    "decoder_intermediate_size": 64,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 4,
}
OPT: dict[str, Any] = {
    "hidden_size": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 32,
}
DISTILBERT: dict[str, Any] = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}
LLAMA: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}


def _llama_512() -> Made:
    import transformers

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8192, **LLAMA))
        ids_BS = torch.zeros(8, 256, dtype=torch.int64)
    return model, {"input_ids": ids_BS, "labels": ids_BS}


FAMILIES: dict[str, tuple[Callable[[], Made], dict[str, int], str]] = {
    "tiny-gpt2": (lambda: built_in("tiny-gpt2", 8, 64), {"dp": 2, "tp": 2}, "cpu"),
    "tiny-llama": (lambda: built_in("tiny-llama", 8, 64), {"dp": 2, "tp": 2}, "cpu"),
    "tiny-vit": (lambda: built_in("tiny-vit", 8, 64), {"dp": 2, "tp": 2}, "cpu"),
    "tiny-cnn": (lambda: built_in("tiny-cnn", 8, 64), {"dp": 2, "tp": 2}, "cpu"),
    "tiny-mlp": (lambda: built_in("tiny-mlp", 8, 64), {"dp": 2, "tp": 2}, "cpu"),
    "ELECTRA": (text_model("Electra", embedding_size=16, **SIZES), {"dp": 2, "tp": 2}, "cpu"),
    "GPT-NeoX": (text_model("GPTNeoX", "ForCausalLM", **SIZES), {"dp": 2, "tp": 2}, "cpu"),
    "DistilBERT": (text_model("DistilBert", **DISTILBERT), {"dp": 2, "tp": 2}, "cpu"),
    "OPT": (text_model("OPT", "ForCausalLM", **OPT), {"dp": 2, "tp": 2}, "cpu"),
    "BERT": (text_model("Bert", **SIZES), {"dp": 2, "tp": 2}, "cpu"),
    "ViT-MAE": (
        hugging_face("ViTMAEForPreTraining", "ViTMAEConfig", IMAGES, image_size=16, patch_size=4, **SIZES, **DECODER),
        {"dp": 2, "tp": 2},
        "cpu",
    ),
    "Llama 512x8": (_llama_512, {"dp": 8}, "h100"),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Outcome of planning under one memory limit."""

    limit: int
    peak: int | None
    """None: refused."""
    seconds: float | None
    took: float
    text: str = ""
    """Message of the refusal; empty if there is a plan."""

    @property
    def holds(self) -> bool:
        return self.peak is None or self.peak <= self.limit


def requested(name: str, limit: int | None, time_limit: float) -> Answer:
    """The plan of a family under a limit on bytes of tensors, or its refusal."""
    make, axes, hardware = FAMILIES[name]
    model, inputs = make()
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            mesh = autopar.Mesh(axes, hardware=hardware)
            memory = autopar.Memory(limit, conventions="tensors")
            plan = autopar.plan(model, mesh, inputs, memory=memory, search=autopar.Search(time_limit))
        except InfeasibleError as error:
            return Answer(limit or 0, None, None, time.monotonic() - start, str(error))
    return Answer(limit or plan.peak_bytes, plan.peak_bytes, plan.seconds, time.monotonic() - start)


def stated_least(text: str) -> int:
    """The least bytes that a refusal states."""
    found = re.search(r"at least [^(]*\((\d+) bytes\)|found is [^(]*\((\d+) bytes\)", text)
    assert found is not None, f"the refusal states no least: {text}"
    return int(found[1] or found[2])


def swept(name: str, num_steps: int, time_limit: float) -> list[str]:
    """The row of a family: what came of every limit."""
    free = requested(name, None, time_limit)
    assert free.peak is not None
    refused = requested(name, free.peak // 1000, time_limit)
    assert refused.peak is None, f"{name} has a plan within a thousandth of its free peak"
    least = stated_least(refused.text)
    limits = [round(free.peak - (free.peak - least) * step / (num_steps - 1)) for step in range(num_steps)]
    answers = [requested(name, limit, time_limit) for limit in limits]
    below = requested(name, int(BELOW * least), time_limit)
    slower = [f"{a.seconds / free.seconds:.2f}" for a in answers if a.seconds is not None and free.seconds is not None]
    return [
        name,
        f"{free.peak:,}",
        f"{least:,}",
        "proven" if "every choice needs" in refused.text else "found",
        f"{sum(a.peak is not None and a.holds for a in answers)}/{num_steps}",
        "plan" if answers[-1].peak is not None and answers[-1].holds else "REFUSED",
        "refused" if below.peak is None else "PLANNED",
        " ".join(slower),
        f"{max(a.took for a in (*answers, refused, below)):.0f}",
    ]


HEADERS = (
    "family",
    "free peak",
    "least peak",
    "",
    "plans within",
    "at the least",
    "0.1 % below",
    "step ×",
    "slowest s",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--time-limit", type=float, default=20.0)
    options = parser.parse_args()
    rows = []
    for name in options.families:
        rows.append(swept(name, options.steps, options.time_limit))
        print(f"<!-- {' | '.join(rows[-1])} -->", flush=True)
    print(tabulate(rows, headers=HEADERS, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
