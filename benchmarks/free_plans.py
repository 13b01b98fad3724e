"""The step of a plan without a strategy, with those of presets and of the plan without a search for others.

Nothing runs: models lie on the meta device, few layers at their sizes, and steps are simulated. Few layers with large
experts are where a sum of costs says least of a step: what one layer gathers only the next one hides.

    python -m benchmarks.free_plans                  all questions: some minutes
    python -m benchmarks.free_plans --only mixtral   questions on one model

preset: the step of the fastest preset by that of the plan; others: the same of the plan without a search for others
(`autopar.planning.best_plan`), with the processor seconds of both plans, capture included.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
from tabulate import tabulate

import autopar
from autopar.costs.plans.plan import Plan
from autopar.errors import AutoparError
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import BuiltIn, LanguageModel, inputs_of
from autopar.planning import best_plan
from benchmarks.ablation import MODELS as OF_ABLATION

PRESETS = ("data_parallel", "zero1", "zero3", "hsdp", "zero1+ep", "zero3+ep", "megatron_sequence", "zero1+tp+sp")
MODELS: dict[str, BuiltIn] = {
    "mixtral": BuiltIn(LanguageModel, "MixtralConfig", {}),  # config.json of Mixtral-8x7B
    "gpt-oss": BuiltIn(LanguageModel, "GptOssConfig", {"num_local_experts": 32}),  # that of gpt-oss-20b
    "qwen3-moe": BuiltIn(
        LanguageModel,
        "Qwen3MoeConfig",
        {  # config.json of Qwen3-30B-A3B
            "vocab_size": 151936,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
    "granite-moe": BuiltIn(
        LanguageModel,
        "GraniteMoeConfig",
        {  # config.json of granite-3.0-3b-a800m
            "vocab_size": 49152,
            "hidden_size": 1536,
            "intermediate_size": 512,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 40,
            "num_experts_per_tok": 8,
        },
    ),
    "olmoe": OF_ABLATION["olmoe-7b"],
    "falcon": OF_ABLATION["falcon-40b"],
    "qwen2": OF_ABLATION["qwen2-1.5b"],
    "dinov2": OF_ABLATION["dinov2-large"],
    "bart": OF_ABLATION["bart-large"],
}


@dataclass(frozen=True, slots=True)
class Question:
    """A model of some layers on a mesh, in bfloat16 with parameters in float32."""

    model: str
    layers: int
    mesh: tuple[int, int]
    batch: int
    sequence: int = 4096
    hardware: str = "h100"
    memory: str | None = None

    def __str__(self) -> str:
        rows, columns = self.mesh
        size = f"{self.batch}×{self.sequence}" if self.sequence else f"{self.batch}"
        return f"{self.model} {self.layers} {rows}×{columns} {size} {self.hardware} {self.memory or ''}".strip()

    def plan(self, strategy: str | None = None) -> Plan:
        """Return the plan with a strategy, or the one without."""
        found = MODELS[self.model]
        config = found.config(self.layers)
        with torch.device("meta"):
            model = found.wrapper(config)
        axes = "dp", "ep" if "num_experts_per_tok" in config.to_dict() else "tp"
        mesh = Mesh(dict(zip(axes, self.mesh, strict=True)), hardware=self.hardware)
        inputs = inputs_of(found, self.batch, self.sequence)
        return autopar.plan(
            model, mesh, inputs, precision="bf16-mixed", strategy=strategy, memory=autopar.Memory(self.memory)
        )


QUESTIONS = (
    Question("mixtral", 2, (4, 8), 128),
    Question("mixtral", 2, (8, 8), 64),
    Question("mixtral", 8, (4, 8), 128),
    Question("mixtral", 8, (8, 8), 64),
    Question("mixtral", 3, (16, 4), 128, 2048, "a100"),
    Question("mixtral", 4, (4, 8), 64, 4096, memory="30GB"),
    Question("gpt-oss", 2, (4, 8), 64),
    Question("gpt-oss", 6, (8, 4), 64),
    Question("qwen3-moe", 2, (4, 8), 128),
    Question("qwen3-moe", 4, (8, 8), 64),
    Question("granite-moe", 4, (4, 8), 128, 2048),
    Question("olmoe", 2, (8, 8), 128),
    Question("olmoe", 6, (2, 8), 64, 2048, "a100"),
    Question("falcon", 4, (16, 8), 128, 2048),
    Question("falcon", 4, (4, 8), 64, 2048, "b200"),
    Question("qwen2", 4, (8, 8), 128, 2048),
    Question("dinov2", 4, (4, 8), 512, 0),
    Question("bart", 4, (4, 4), 128, 512),
)


def row_of(question: Question) -> list[object]:
    """Return a row of the table."""
    presets = dict(_presets(question))
    question.plan()  # the first of several plans takes longer
    with patch.object(best_plan, "is_doubtful", lambda first, best: False):
        alone, before = _timed(question)
    found, seconds = _timed(question)
    step = found.step_seconds
    fastest = min(presets, key=lambda name: presets[name])
    return [
        str(question),
        f"{1e3 * step:.1f}",
        f"{alone.step_seconds / step:.3f}",
        f"{before:.1f} → {seconds:.1f}",
        f"{presets[fastest] / step:.3f}",
        fastest,
        f"{found.gap:.1%}",
    ]


def _timed(question: Question) -> tuple[Plan, float]:
    began = time.process_time()
    plan = question.plan()
    return plan, time.process_time() - began


def _presets(question: Question) -> Iterator[tuple[str, float]]:
    for name in PRESETS:
        try:
            yield name, question.plan(name).step_seconds
        except AutoparError:
            continue  # the model, the mesh or the limit does not suit it


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args(arguments)
    headers = ["question", "step ms", "others", "seconds", "preset", "fastest", "gap"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [row_of(each) for each in QUESTIONS if each.model in options.only]
    print(tabulate(rows, headers, disable_numparse=True))


if __name__ == "__main__":
    main()
