"""Models with kernels of frameworks compute what those of transformers do; clusters differ in their networks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import autopar
from autopar.costs.hardware.load import load
from benchmarks.frameworks import (
    Experts,
    RMSNorm,
    devices_of_token,
    hardware_of,
    rotary_in_one_call,
    rows_once_per_device,
    with_kernels,
)
from benchmarks.publications.kernels import swiglu
from tests.support.divided_experts import BATCH, D, Form, batches, with_experts
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


def test_swiglu_in_one_call_has_the_gradients_of_two_and_saves_its_inputs_alone() -> None:
    gate, up = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        found = swiglu(gate, up)
    assert {each.data_ptr() for each in saved} == {gate.data_ptr(), up.data_ptr()}
    expected = torch.nn.functional.silu(gate) * up
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), (gate, up)),
        torch.autograd.grad(expected.square().sum(), (gate, up)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_a_token_is_expected_on_fewer_devices_than_it_has_experts() -> None:
    assert devices_of_token(2, 4, 4) == pytest.approx(2)  # a device for each expert
    assert devices_of_token(2, 4, 2) == pytest.approx(1 + 2 / 3)  # the second is elsewhere in two of three cases
    assert devices_of_token(4, 4, 2) == pytest.approx(2)
    assert devices_of_token(3, 4, 1) == pytest.approx(1)


def test_rows_once_per_device_are_priced_by_the_devices_of_a_token() -> None:
    form, length = Form(num_experts=16, top_k=5), 7  # prices are kept by the shapes of a call, which no other test has
    (batch,) = batches(1, length=length)
    with rows_once_per_device():
        given = (batch["x"], batch["labels"])
        plan = autopar.plan(with_experts(form), autopar.Mesh({"ep": 2}), given, strategy="fsdp+ep")
    tokens = BATCH * length // 2
    sent = int(tokens * form.top_k * D * 8 * devices_of_token(form.top_k, 16, 2) / form.top_k)
    assert plan.traffic["all_to_all", "ep"] == 4 * sent + 8 * 16 < 4 * tokens * form.top_k * D * 8
