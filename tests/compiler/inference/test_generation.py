"""Generation on ranks: the tokens of one process, whatever divides the model and its cache."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import autopar
from autopar.compiler.inference.inference_module import InferenceModule
from autopar.ir.sharding.layout import Layout, S
from tests.support.generating import FAMILIES, generating, prompts
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

AXES = {1: ("tp",), 2: ("dp", "tp")}
BATCH, LENGTH = 4, 7


def _compiled(family: str, shape: tuple[int, ...], strategy: str | None, **changed: Any) -> InferenceModule:
    on = mesh(shape, AXES[len(shape)])
    found = autopar.compile(
        generating(family, precise=True, **changed), on, training=False, strategy=strategy, hardware=SLOW_DEVICES
    )
    assert isinstance(found, InferenceModule)
    return found


def _layout(module: InferenceModule) -> Layout:
    assert module._session is not None
    return module._session.layout


def _differing(
    family: str, shape: tuple[int, ...], strategy: str | None, new: int, changed: dict[str, Any]
) -> tuple[str, Layout]:
    """Return the differences of generated tokens from those of one process, and the layout of the cache.

    Tokens are generated greedily, drawn at random, and from prompts of different lengths.
    """
    model, compiled, ids = (
        generating(family, precise=True, **changed),
        _compiled(family, shape, strategy, **changed),
        prompts(BATCH, LENGTH),
    )
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, :6] = 0, 0
    ways: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "drawn": {"do_sample": True, "temperature": 1.5, "top_k": 20, "top_p": 0.9},
        "of different lengths": {"do_sample": False, "attention_mask": mask, "repetition_penalty": 1.2},
    }
    wrong = []
    for way, options in ways.items():
        given = torch.where(mask.bool(), ids, 0) if "attention_mask" in options else ids
        found = []
        for each in (model, compiled):
            torch.manual_seed(3)
            found.append(each.generate(given, max_new_tokens=new, **options))
        if not torch.equal(*found):
            wrong.append(f"{way}: {found[0].tolist()} and {found[1].tolist()}")
        if len(set(found[0][:, LENGTH:].flatten().tolist())) < 8:
            wrong.append(f"{way}: tokens that tell nothing, {found[0].tolist()}")
    return "\n".join(wrong), _layout(compiled)


FAST: list[Any] = [
    ("mistral", (2,), "megatron", Layout((S(1),)), {}),
    ("qwen3", (2,), "zero3", Layout((S(0),)), {}),
    pytest.param("llama", (2,), "data_parallel", Layout((S(0),)), {}, marks=pytest.mark.slow),
    pytest.param("gpt2", (2, 2), "zero3", Layout((S(0), S(0))), {}, marks=pytest.mark.slow),
    pytest.param("gpt2", (2,), None, Layout((S(0),)), {}, marks=pytest.mark.slow),
    pytest.param("llama", (4,), "flash_decoding", Layout((S(2),)), {}, marks=pytest.mark.slow),
    pytest.param("mixtral", (2, 2), "megatron", Layout((S(0), S(1))), {}, marks=pytest.mark.slow),
]


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:megatron", "ignore:flash_decoding")
@pytest.mark.parametrize(("family", "shape", "strategy", "layout", "changed"), FAST)
def test_tokens_are_those_of_one_process(
    ranks: Ranks, family: str, shape: tuple[int, ...], strategy: str | None, layout: Layout, changed: dict[str, Any]
) -> None:
    found = ranks.run(_differing, family, shape, strategy, 12, changed, world_size=math.prod(shape))
    assert found == [("", layout)] * math.prod(shape)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:megatron", "ignore:flash_decoding")
@pytest.mark.parametrize("strategy", ["megatron", "flash_decoding", "data_parallel", None])
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_sixty_four_tokens_of_a_family_are_those_of_one_process(
    ranks: Ranks, family: str, shape: tuple[int, ...], strategy: str | None
) -> None:
    found = ranks.run(_differing, family, shape, strategy, 64, {}, world_size=math.prod(shape), timeout=300)
    assert [wrong for wrong, _ in found] == [""] * math.prod(shape)
