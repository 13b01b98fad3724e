"""`train_step` with a scaler of gradients, on pipelines and without one, against one process that scales its loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from autopar.errors import PipelineError
from tests.support.parity import whole
from tests.support.pipeline_training import (
    PipelineCase,
    accumulated,
    batch_of,
    build,
    compiled,
    loss_of,
    microbatches_of,
)
from tests.support.ranks import Ranks

STEPS, OVERFLOWING_STEP, SCALE = 3, 1, 2.0**12
Found = tuple[list[float], list[float], dict[str, Tensor]]
"""The loss and the scale of every step, and the parameters after the last."""


def _trained(model: nn.Module, scaler: Any, forward_backward: Any, clip: Any) -> Found:
    """Train with a scaler; in one step a gradient of the first layer overflows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, scales = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(forward_backward(step))
        first = dict(model.named_parameters()).get("model.embed_tokens.weight")
        if step == OVERFLOWING_STEP and first is not None:
            assert first.grad is not None
            first.grad.mul_(float("inf"))
        scaler.unscale_(optimizer)
        clip(0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return losses, scales, {name: whole(p) for name, p in model.named_parameters()}  # type: ignore[misc]


def _alone(case: PipelineCase) -> Found:
    model = build(case)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)

    def forward_backward(step: int) -> float:
        total = 0.0
        for args, kwargs in microbatches_of(case, step):
            loss = loss_of(case, model(*args, **kwargs)) / case.microbatches
            scaler.scale(loss).backward()
            total += loss.item()
        return total

    return _trained(model, scaler, forward_backward, lambda most: nn.utils.clip_grad_norm_(model.parameters(), most))


def _parallel(case: PipelineCase) -> Found:
    model = compiled(case)
    model.scaler = ShardedGradScaler("cpu", init_scale=SCALE, growth_interval=2, process_group=dist.group.WORLD)

    def forward_backward(step: int) -> float:
        args, kwargs = batch_of(microbatches_of(case, step))
        return float(model.train_step(*args, **kwargs))

    def clip(most: float) -> Any:
        if hasattr(model, "clip_grad_norm_"):
            return model.clip_grad_norm_(most)
        return nn.utils.clip_grad_norm_(model.parameters(), most)

    return _trained(model, model.scaler, forward_backward, clip)


def _gradients(case: PipelineCase) -> dict[str, Tensor]:
    """The scaled gradients of a step in float16."""
    model = compiled(case)
    model.scaler = ShardedGradScaler("cpu", init_scale=SCALE, process_group=dist.group.WORLD)
    args, kwargs = batch_of(microbatches_of(case, 0))
    model.train_step(*args, **kwargs)
    return {name: whole(p.grad) for name, p in model.named_parameters()}  # type: ignore[misc]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "case",
    [
        PipelineCase("llama", "pp2", "1f1b"),
        PipelineCase("llama", "pp2", "interleaved_zero_bubble"),
        pytest.param(PipelineCase("llama", "pp2xdp2", "1f1b"), marks=pytest.mark.slow),
        PipelineCase("llama", "dp2"),
        # Says that it is another graph than that of a micro-batch, which ranks keep.
        PipelineCase("llama", "dp2", options={"microbatches": 1}, frozen=("none",)),
    ],
    ids=["pp2-1f1b", "pp2-zero-bubble", "pp2xdp2-1f1b", "dp2", "dp2-one-micro-batch"],
)
def test_a_scaler_scales_skips_and_grows_as_on_one_process(ranks: Ranks, case: PipelineCase) -> None:
    losses, scales, parameters = _alone(case)
    assert scales == [SCALE, SCALE / 2, SCALE / 2], "one process did not skip the step that overflowed"
    for their_losses, their_scales, theirs in ranks.run(_parallel, case, world_size=case.world_size, timeout=180):
        torch.testing.assert_close(their_losses, losses, rtol=1e-4, atol=1e-5)
        assert their_scales == scales
        for name, parameter in theirs.items():
            torch.testing.assert_close(parameter, parameters[name], rtol=1e-4, atol=1e-5)


def test_gradients_in_float16_are_scaled_before_they_vanish(ranks: Ranks) -> None:
    case = PipelineCase("mlp", "pp2", "1f1b", dtype=torch.float16)
    precise = build(PipelineCase("mlp", "pp2", "1f1b"))
    accumulated(PipelineCase("mlp", "pp2", "1f1b"), precise, 0)
    for found in ranks.run(_gradients, case, timeout=180):
        for name, gradient in found.items():
            expected = precise.get_parameter(name).grad
            assert expected is not None
            distance = (gradient.float() / SCALE - expected).norm() / expected.norm()
            assert distance < 0.05, f"{name}: {distance:.3g}"


def _pipedream() -> str:
    case = PipelineCase("llama", "pp2", "pipedream")
    model = compiled(case)
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.scaler = ShardedGradScaler("cpu", process_group=dist.group.WORLD)
    with pytest.raises(PipelineError) as caught:
        model.train_step(**batch_of(microbatches_of(case, 0))[1])
    return str(caught.value)


def test_pipedream_refuses_a_scaler(ranks: Ranks) -> None:
    assert all("found model.scaler. Set it to None" in message for message in ranks.run(_pipedream))
