"""Traffic and memory of prompts and tokens on ranks: bytes equal those of their plans, peaks are within 10%."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

import autopar
from autopar.compiler.inference.inference_module import InferenceModule
from autopar.compiler.inference.session import IDS, POSITION_IDS, POSITIONS, Ready
from autopar.ir.sharding.layout import Layout, S
from autopar.runtime.collectives.mesh_axes import record_traffic
from autopar.tools.benchmarking.meters import LiveBytes
from tests.support.generating import generating, prompts
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

AXES = {1: ("tp",), 2: ("dp", "tp")}
BATCH, LENGTH, CACHE = 4, 16, 32
RUNS = 4  # of which the least counts: where the machine is busy, a thread of gloo may be late to free what was sent


def _differing(module: InferenceModule, ready: Ready, changing: Mapping[str, Tensor]) -> list[str]:
    """Return the differences between the traffic and peak of a run and those of its plan."""
    plan, wrong, peaks = ready.executable.plan, [], []
    predicted = {key: size for key, size in plan.traffic.items() if size}
    for _ in range(RUNS):
        live = LiveBytes([*module.parameters(), *ready.held.values(), *changing.values()])
        with record_traffic() as traffic, live:
            ready.run(module, changing)
        peaks.append(live.highest)
        if traffic.num_bytes != predicted:
            wrong.append(f"moved {dict(traffic.num_bytes)}, planned {predicted}")
    if abs(min(peaks) / plan.peak_bytes - 1) > 0.1:
        wrong.append(f"peaks of {peaks}, planned {plan.peak_bytes}: {plan.memory}")
    return wrong


def _served(family: str, shape: tuple[int, ...], strategy: str) -> tuple[Layout, list[str], list[str]]:
    """Return the layout of the cache, and the differences of a prompt's and a token's run from their plans."""
    on, ids = mesh(shape, AXES[len(shape)]), prompts(BATCH, LENGTH)
    compiled = autopar.compile(generating(family), on, training=False, strategy=strategy, hardware=SLOW_DEVICES)
    assert isinstance(compiled, InferenceModule)
    session = compiled.session(BATCH, CACHE)
    session.prefill(ids)
    at = torch.full((BATCH,), LENGTH)
    prompt = _differing(compiled, session.prompts[LENGTH], {IDS: ids, POSITIONS: torch.zeros_like(at)})
    specified = {IDS: ids[:, -1:].clone(), POSITION_IDS: at.unsqueeze(-1), POSITIONS: at}
    return session.layout, prompt, _differing(compiled, session.token, specified)


SAMPLES, HEADS, LENGTHS = S(0), S(1), S(2)
CASES = [
    ("llama", (2,), "megatron", Layout((HEADS,))),
    ("llama", (2,), "zero3", Layout((SAMPLES,))),
    ("llama", (2, 2), "flash_decoding", Layout((SAMPLES, LENGTHS))),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in [
            ("llama", (2,), "flash_decoding", Layout((LENGTHS,))),
            ("llama", (2,), "data_parallel", Layout((SAMPLES,))),
            ("llama", (2, 2), "megatron", Layout((SAMPLES, HEADS))),
            ("llama", (2, 2), "zero3", Layout((SAMPLES, SAMPLES))),
            ("qwen3", (2, 2), "megatron", Layout((SAMPLES, HEADS))),
            ("mistral", (2,), "megatron", Layout((HEADS,))),
            ("gpt2", (2, 2), "flash_decoding", Layout((SAMPLES, LENGTHS))),
            ("gpt2", (2,), "zero3", Layout((SAMPLES,))),
        ]
    ),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:megatron", "ignore:strategy='flash_decoding'")
@pytest.mark.parametrize(("family", "shape", "strategy", "layout"), CASES)
def test_prompts_and_tokens_move_and_hold_what_their_plans_predict(
    ranks: Ranks, family: str, shape: tuple[int, ...], strategy: str, layout: Layout
) -> None:
    num_ranks = math.prod(shape)
    assert ranks.run(_served, family, shape, strategy, world_size=num_ranks) == [(layout, [], [])] * num_ranks
