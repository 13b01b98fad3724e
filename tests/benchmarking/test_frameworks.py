"""Models with kernels of frameworks compute what those of transformers do; clusters differ in their networks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from autopar.hardware.load import load
from benchmarks.frameworks import Experts, RMSNorm, hardware_of, rotary_in_one_call, with_kernels
from tests.support.expert_families import WITH_EXPERTS
from tests.support.families import FAMILIES

pytest.importorskip("transformers")


@pytest.mark.parametrize(("family", "experts"), [("mixtral", 1), ("qwen3_moe", 2), ("gpt_oss", 0)])
def test_a_model_with_kernels_computes_the_same(family: str, experts: int) -> None:
    model: Any = WITH_EXPERTS[family].build()
    (_, given) = WITH_EXPERTS[family].inputs(0)
    expected = model(**given).logits
    changed = copy.deepcopy(model)
    with_kernels(changed)
    assert sum(isinstance(each, Experts) for each in changed.modules()) == experts
    assert sum(isinstance(each, RMSNorm) for each in changed.modules()) >= 3
    with rotary_in_one_call(changed):
        found = changed(**given).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_model_without_rotary_embedding_computes_as_it_did() -> None:
    model: Any = FAMILIES["gpt2"].build()
    args, kwargs = FAMILIES["gpt2"].inputs(0)
    expected = model(*args, **kwargs)[0]
    with rotary_in_one_call(model):
        torch.testing.assert_close(model(*args, **kwargs)[0], expected)


def test_clusters_of_nvidia_have_the_network_of_the_datasheet() -> None:
    profile = load("h100")
    assert hardware_of("h100", "nanotron") == profile
    theirs = hardware_of("h100", "NVIDIA-NeMo/Megatron-Bridge")
    assert any(each.straggling_s for each in profile.links) and not any(each.straggling_s for each in theirs.links)
    assert [each.bytes_per_s for each in theirs.links] == [each.bytes_per_s for each in profile.links]
