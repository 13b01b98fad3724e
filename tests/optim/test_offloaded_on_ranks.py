"""AdamW on the host, on compiled models: trained as by AdamW in one process, with the bytes that are planned."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import autopar
from autopar.models.named import named
from autopar.optim import OffloadedAdamW
from autopar.tools.benchmarking.meters import peak_bytes
from tests.support.families import FAMILIES
from tests.support.optimizing import losses_of
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh

STEPS = 4
SETTINGS: dict[str, Any] = {"lr": 1e-3, "eps": 1e-4}
HOSTED = replace(SLOW_DEVICES, host_link_bytes_per_s=1e8, host_memory_bytes_per_s=1e8)
WHOLE = StateDictOptions(full_state_dict=True)


@dataclass(slots=True)
class _Run:
    losses: list[float]
    parameters: dict[str, Tensor]
    host_bytes: int = 0
    planned: int = 0
    held: int = 0
    stored: int = 0


def _bytes(tensor: Tensor | None) -> int:
    assert tensor is not None
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: bool = False) -> _Run:
    def loss_of(step: int) -> Tensor:
        args, kwargs = FAMILIES["llama"].inputs(step)
        return FAMILIES["llama"].loss(model(*args, **kwargs))

    def clipped() -> None:
        if clip:
            getattr(model, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, model.parameters()))(0.5)

    losses = losses_of(optimizer, range(STEPS), loss_of, clipped)
    return _Run(losses, {name: whole(each) for name, each in model.named_parameters()})  # pyright: ignore[reportArgumentType]


def _build(dtype: torch.dtype) -> nn.Module:
    return FAMILIES["llama"].build().to(dtype)


def _compiled(
    shape: tuple[int, ...], strategy: str, dtype: torch.dtype, gradients: Any = "device", clip: bool = False
) -> _Run:
    """`gradients` that are "stepped" are on the host, which steps in the backward."""
    gradients, stepped = "host" if gradients == "stepped" else gradients, gradients == "stepped"
    args, kwargs = FAMILIES["llama"].inputs(0)
    masters = dtype == torch.bfloat16
    model = autopar.compile(
        _build(dtype),
        mesh(shape, ("dp", "tp")[: len(shape)]),
        kwargs or args,
        strategy=strategy,
        optimizer=autopar.Optimizer(gradients=gradients, in_backward=stepped, master_copies=masters),
        memory=autopar.Memory(offload="optimizer"),
        hardware=HOSTED,
    )
    optimizer = OffloadedAdamW(model.named_parameters(), **SETTINGS, master_copies=masters, gradients=gradients)
    if stepped:
        optimizer.step_in_backward()
    found = _train(model, optimizer, clip)
    plan = model.plan
    assert plan.offload == "optimizer" and plan.memory is not None
    assert not {"optimizer", "master copies"} & plan.memory.parts.keys()
    found.host_bytes, found.planned = optimizer.host_bytes, plan.host_bytes
    found.stored = sum(row.stored_bytes for row in plan.rows if row.kind == "parameter")
    if gradients == "device":
        found.held = sum(_bytes(each) + _bytes(each.grad) for each in model.parameters())
    return found


CASES = [
    ((2,), "zero3", torch.float32, "device"),
    ((2,), "megatron", torch.bfloat16, "host"),
    ((2,), "zero3", torch.bfloat16, "stepped"),
    pytest.param((2, 2), "fsdp_megatron", torch.float32, "stepped", marks=pytest.mark.slow),
    pytest.param((2, 2), "fsdp_megatron", torch.float32, "host", marks=pytest.mark.slow),
    pytest.param((2,), "zero2", torch.float32, "host", marks=pytest.mark.slow),
    pytest.param((2,), "zero1", torch.bfloat16, "device", marks=pytest.mark.slow),
    pytest.param((2,), "data_parallel", torch.float32, "device", marks=pytest.mark.slow),
    pytest.param((2, 2), "zero3", torch.bfloat16, "device", marks=pytest.mark.slow),
    pytest.param((4,), "megatron", torch.float32, "device", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "strategy", "dtype", "gradients"), CASES)
def test_compiled_models_are_trained_as_on_one_process(
    ranks: Ranks, shape: tuple[int, ...], strategy: str, dtype: torch.dtype, gradients: str
) -> None:
    alone = _build(dtype)
    masters = dtype == torch.bfloat16
    wanted = _train(alone, OffloadedAdamW(alone.parameters(), **SETTINGS, master_copies=masters))
    if not masters:
        theirs = _build(dtype)
        peer = _train(theirs, torch.optim.AdamW(theirs.parameters(), **SETTINGS))
        torch.testing.assert_close(wanted.parameters, peer.parameters, rtol=1e-5, atol=1e-6)
    for found in ranks.run(_compiled, shape, strategy, dtype, gradients, world_size=math.prod(shape), timeout=180):
        tolerance: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if masters else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found.losses, wanted.losses, **tolerance)
        torch.testing.assert_close(found.parameters, wanted.parameters, **tolerance)
        assert found.host_bytes == found.planned > 0
        assert gradients != "device" or found.held == found.stored


@pytest.mark.parametrize(
    ("shape", "strategy", "gradients"),
    [
        ((2,), "zero3", "host"),
        pytest.param((2,), "zero3", "device", marks=pytest.mark.slow),
        pytest.param((2, 2), "fsdp_megatron", "host", marks=pytest.mark.slow),
        pytest.param((2,), "data_parallel", "host", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_clipped_by_their_norm_over_all_ranks(
    ranks: Ranks, shape: tuple[int, ...], strategy: str, gradients: str
) -> None:
    alone = _build(torch.float32)
    wanted = _train(alone, torch.optim.AdamW(alone.parameters(), **SETTINGS), clip=True)
    arguments = (shape, strategy, torch.float32, gradients, True)
    for each in ranks.run(_compiled, *arguments, world_size=math.prod(shape), timeout=180):
        torch.testing.assert_close(each.parameters, wanted.parameters, rtol=1e-4, atol=1e-5)


def _measured(strategy: str, gradients: Any) -> tuple[int, int]:
    """Bytes on the device at the highest moment of the second step, and those of the plan."""
    model, inputs = named("tiny-llama", 8, 64)
    assert isinstance(inputs, tuple)
    requested = autopar.Optimizer(gradients=gradients)
    compiled = autopar.compile(
        model,
        mesh((2,), ("dp",)),
        inputs,
        strategy=strategy,
        memory=autopar.Memory(offload="optimizer"),
        optimizer=requested,
    )
    compiled.to_empty(device="cpu")
    for each in (*compiled.parameters(), *compiled.buffers()):
        nn.init.normal_(each, std=0.02)
    values = tuple(torch.randint(0, 200, each.shape) for each in inputs)
    optimizer = OffloadedAdamW(compiled.named_parameters(), gradients=gradients)

    def step() -> None:
        compiled(*values).square().mean().backward()

    step()
    optimizer.step()

    def held() -> list[Tensor]:
        gradients = [each.grad for each in compiled.parameters() if each.grad is not None]
        return [*compiled.parameters(), *compiled.buffers(), *gradients, *values]

    return peak_bytes(step, optimizer.zero_grad, held), compiled.plan.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "gradients"),
    [("zero3", "device"), ("data_parallel", "host"), pytest.param("zero3", "host", marks=pytest.mark.slow)],
)
def test_ranks_hold_what_the_plan_predicts_on_the_device(ranks: Ranks, strategy: str, gradients: str) -> None:
    for found, predicted in ranks.run(_measured, strategy, gradients, world_size=2):
        assert predicted == pytest.approx(found, rel=0.05)


def _tower() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


def _limited(memory: int | None, offload: Any) -> tuple[list[float], str]:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    model = autopar.compile(
        *(_tower(), mesh((2,), ("dp",)), (x,)),
        memory=autopar.Memory(memory, offload=offload, conventions="tensors"),
        outputs="full",
        hardware="h100",
    )
    offloads = model.plan.offload == "optimizer"
    optimizer = (OffloadedAdamW if offloads else torch.optim.AdamW)(model.named_parameters(), **SETTINGS)
    losses = losses_of(optimizer, [x] * STEPS, lambda x: model(x).square().mean())
    model(x[:8])  # planned anew, and for the same optimizer
    assert model.plan.offload == ("optimizer" if offloads else "none")
    return losses, model.plan.offload


def _refused(memory: int) -> str:
    with pytest.raises(autopar.InfeasibleError) as refused:
        _limited(memory, "none")
    return str(refused.value)


@pytest.mark.slow
def test_a_model_whose_state_does_not_fit_is_trained_with_it_on_the_host(ranks: Ranks) -> None:
    least = autopar.plan(
        _tower(),
        autopar.Mesh({"dp": 2}),
        (torch.zeros(16, 64),),
        strategy="zero3",
        memory=autopar.Memory(recompute="full", offload="optimizer"),
        hardware="h100",
    )
    limit = int(1.05 * least.peak_bytes)
    assert all("the memory limit is" in each for each in ranks.run(_refused, limit, world_size=2, timeout=180))
    free = ranks.run(_limited, None, "none", world_size=2, timeout=180)
    for (found, offload), (wanted, _) in zip(
        ranks.run(_limited, limit, "auto", world_size=2, timeout=180), free, strict=True
    ):
        assert offload == "optimizer"
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


def _in_stages(gradients: Any) -> tuple[list[float], int, int]:
    family = FAMILIES["llama"]
    _, kwargs = family.inputs(0)
    many = {name: torch.cat([each] * 4) for name, each in kwargs.items()}
    model: Any = autopar.compile(
        family.build(),
        mesh((2, 2), ("pp", "dp")),
        many,
        strategy="zero3",
        microbatches=4,
        pipeline=autopar.Pipeline(schedule="1f1b"),
        memory=autopar.Memory(offload="optimizer"),
        optimizer=autopar.Optimizer(gradients=gradients),
        hardware=HOSTED,
    )
    optimizer = OffloadedAdamW(model.named_parameters(), **SETTINGS, gradients=gradients)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(model.train_step(**many)))
        model.clip_grad_norm_(0.5)
        optimizer.step()
    rank = model.plan.schedule.stages_of(torch.distributed.get_rank() // 2)
    planned = sum(model.plan.stages[number].plan.host_bytes for number in rank)
    return losses, optimizer.host_bytes, planned


@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["device", "host"])
def test_stages_of_a_pipeline_are_trained_as_on_one_process(ranks: Ranks, gradients: str) -> None:
    family = FAMILIES["llama"]
    _, kwargs = family.inputs(0)
    alone = family.build()
    optimizer = torch.optim.AdamW(alone.parameters(), **SETTINGS)
    wanted = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = family.loss(alone(**kwargs))
        loss.backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizer.step()
        wanted.append(loss.item())
    for losses, held, planned in ranks.run(_in_stages, gradients, world_size=4, timeout=240):
        torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=0)
        assert held == planned


def _resumed() -> tuple[list[float], list[float], Any, Any]:
    """Losses of a run that goes on, and of one that does by another strategy from its checkpoint; the state of both."""

    def made(strategy: str) -> tuple[Any, OffloadedAdamW]:
        args, kwargs = FAMILIES["llama"].inputs(0)
        options: dict[str, Any] = {"strategy": strategy, "offload": "optimizer", "hardware": HOSTED}
        model = autopar.compile(_build(torch.bfloat16), mesh((2,), ("dp",)), kwargs or args, **by_flag(**options))
        return model, OffloadedAdamW(model.named_parameters(), **SETTINGS, master_copies=True)

    model, optimizer = made("zero3")
    _train(model, optimizer)
    weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=WHOLE))
    going_on = _train(model, optimizer).losses
    other, again = made("megatron")
    set_state_dict(other, again, model_state_dict=weights, optim_state_dict=state, options=WHOLE)
    _, back = copy.deepcopy(get_state_dict(other, again, options=WHOLE))
    return going_on, _train(other, again).losses, state["state"], back["state"]


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_by_another_strategy(ranks: Ranks) -> None:
    for going_on, resumed, state, back in ranks.run(_resumed, world_size=2, timeout=240):
        assert all(each["master"].dtype == torch.float32 for each in state.values())
        torch.testing.assert_close(back, state, rtol=0, atol=0)
        torch.testing.assert_close(resumed, going_on, rtol=2e-2, atol=0)
