"""Features on one CUDA device: families, experts, presets, precision, recomputation, offload, generation.

Helpers come from `test_cuda`. `make gpu` has no time for these tests; `python -m pytest -m cuda` runs them all. Tests
that a CPU can run, too, are marked slow there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import assert_close

import autopar
from autopar.optim import GaLoreAdamW, Muon
from autopar.tools.calibration.timing import QUICK, Timer
from tests.runtime.module.test_cuda import EVERY, ON_BOTH, ON_CUDA, _batch, _compiled, _trained, mesh
from tests.support.expert_families import WITH_EXPERTS
from tests.support.families import FAMILIES
from tests.support.generating import generating, prompts
from tests.support.simulation.training import Steps, train_alike
from tests.support.towers import tower

__all__ = ["mesh"]


@ON_BOTH
@pytest.mark.parametrize("name", list(EVERY))
def test_every_family_trains_as_one_process(device: str, name: str, mesh: DeviceMesh) -> None:
    found = _trained(name, _compiled(name, mesh, strategy="zero3", recompute="full"), device)
    assert_close(found, _trained(name, EVERY[name].build().to(device), device), rtol=1e-3, atol=1e-4)


@ON_BOTH
@pytest.mark.parametrize("strategy", ["megatron", "megatron_sequence", "ulysses", "ring", "tensor_2d", "data_parallel"])
def test_presets_on_simulated_ranks(device: str, strategy: str) -> None:
    axes = {"dp": 2, "tp": 2} if strategy == "tensor_2d" else {"sp" if strategy in ("ulysses", "ring") else "tp": 2}
    axes = {"dp": 2} if strategy == "data_parallel" else axes
    model = FAMILIES["llama"].build().double().to(device)
    steps = Steps([_batch("llama", device, number)[1] for number in range(2)])
    train_alike(model, steps, axes, {"strategy": strategy}, device=device)


@ON_BOTH
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_on_simulated_ranks(device: str, name: str) -> None:
    model = WITH_EXPERTS[name].build().to(device)
    steps = Steps([_batch(name, device, number)[1] for number in range(2)])
    train_alike(model, steps, {"dp": 2}, {}, device=device)


@ON_BOTH
@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", "fp16-mixed"])
def test_precisions_train(device: str, precision: str, mesh: DeviceMesh) -> None:
    model = _compiled("llama", mesh, strategy="zero3", precision=precision, recompute="full")
    found = _trained("llama", model, device)
    wide = _trained("llama", FAMILIES["llama"].build().to(device), device)
    for number in range(3):
        loss, other = found[f"loss {number}"].float(), wide[f"loss {number}"]
        assert_close(loss, other, rtol=2e-2, atol=2e-2)


@ON_BOTH
@pytest.mark.parametrize("offload", ["activations", "both"])
def test_activations_come_back_from_the_host(device: str, offload: Any, mesh: DeviceMesh) -> None:
    x = torch.randn(512, 32, device=device)
    found = []
    for compiled in (False, True):
        model: Any = tower().to(device)
        if compiled:
            model = autopar.compile(model, mesh, (x,), memory=autopar.Memory(offload=offload), outputs="full")
            assert set(model.plan.recompute.values()) == {"offload"}
        losses = []
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
        found.append([*losses, *(each.grad for each in model.parameters())])
    assert_close(*found, rtol=1e-4, atol=1e-5)


@ON_BOTH
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generation_gives_the_tokens_of_one_process(
    device: str, family: str, dtype: torch.dtype, mesh: DeviceMesh
) -> None:
    model, ids = generating(family).to(device, dtype), prompts(2, 7).to(device)
    compiled: Any = autopar.compile(
        generating(family).to(device, dtype), mesh, training=False, strategy="data_parallel"
    )
    found, expected = (each.generate(ids, max_new_tokens=12, do_sample=False) for each in (compiled, model))
    if dtype == torch.float32:
        assert torch.equal(found, expected)
    else:
        assert found.shape == expected.shape and torch.equal(found[:, :8], expected[:, :8])


@ON_CUDA
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("strategy", ["zero3", "data_parallel"])
def test_modes_of_torch_compile(device: str, mode: str, strategy: str, mesh: DeviceMesh) -> None:
    model = _compiled("llama", mesh, strategy=strategy)
    model.compile(mode=mode)
    expected = _trained("llama", FAMILIES["llama"].build().to(device), device)
    assert_close(_trained("llama", model, device), expected, rtol=1e-3, atol=1e-4)


@ON_BOTH
def test_a_timing_of_the_device_runs_what_is_timed(device: str, mesh: DeviceMesh) -> None:
    x, y = torch.ones(4, device=device, requires_grad=True), torch.zeros(4, device=device)

    def call() -> None:
        y.add_(torch.autograd.grad((x * x).sum(), x)[0])

    again = Timer(torch.device(device), QUICK).on_device(call)
    y.zero_()
    for _ in range(3):
        again()
    assert torch.equal(y, torch.full_like(y, 6.0))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


@ON_BOTH
def test_a_checkpoint_goes_on(device: str, mesh: DeviceMesh, tmp_path: Any) -> None:
    def made() -> tuple[Any, Any]:
        model = _compiled("llama", mesh, strategy="zero3")
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: Any, optimizer: Any, number: int) -> float:
        optimizer.zero_grad()
        loss = FAMILIES["llama"].loss(model(**_batch("llama", device, number)[1]))
        loss.backward()
        optimizer.step()
        return loss.item()

    model, optimizer = made()
    step(model, optimizer, 0)
    save(_state(model, optimizer), checkpoint_id=str(tmp_path))
    after = step(model, optimizer, 1)
    model, optimizer = made()
    step(model, optimizer, 2)
    state = _state(model, optimizer)
    load(state, checkpoint_id=str(tmp_path))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_close(step(model, optimizer, 1), after)


@ON_BOTH
@pytest.mark.parametrize("kind", [Muon, GaLoreAdamW])
def test_optimizers_step_as_on_one_process(device: str, kind: Any, mesh: DeviceMesh) -> None:
    x, found = torch.randn(512, 32, device=device), []
    for compiled in (False, True):
        model: Any = tower().to(device)
        if compiled:
            model = autopar.compile(model, mesh, (x,), strategy="zero3", outputs="full")
        optimizer = kind(model.named_parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        found.append([each.detach() for each in model.parameters()])
    assert_close(*found, rtol=1e-3, atol=1e-4)
