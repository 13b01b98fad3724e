"""Zigzag-sharded positions work with what people use around a model: parts of the batch, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing import assert_close

import autopar
from tests.strategies.test_zigzag import Text, batch
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.simulate import from_ranks, local_values, simulate
from tests.support.simulation.training import planning_alone, unshare


def parts_of(x: Tensor, how: str) -> list[Tensor]:
    """Return the part of `x` that each of four ranks is called with."""
    if how == "samples":
        return list(x.chunk(4))
    if how == "samples over dp":
        return [x.chunk(2)[rank // 2] for rank in range(4)]
    return [x.chunk(2)[rank // 2].chunk(2, 1)[rank % 2] for rank in range(4)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("how", "inputs"), [("samples", "local"), ("samples over dp", "dp"), ("samples and positions", "whole")]
)
def test_parts_of_the_batch_are_in_order_and_are_zigzag(how: str, inputs: str) -> None:
    given, alone = batch(4), Text()
    expected = alone(**given)
    expected.backward()
    with simulate(4) as mode, planning_alone(mode):
        on = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        parts: dict[str, Any] = {name: from_ranks(parts_of(x, how)) for name, x in given.items()}
        if inputs == "whole":
            placed = [Shard(0), Shard(1)]
            parts = {name: DTensor.from_local(x, on, placed, run_check=False) for name, x in parts.items()}
        options = {"strategy": "ring", "inputs": inputs, "hardware": SLOW_DEVICES, "deterministic": True}
        model = autopar.compile(Text(), on, parts, **by_flag(**options))
        unshare(model, mode)
        loss = model(**parts)
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        loss.backward()
        losses = local_values(loss.detach())
        gradients = {name: local_values(whole(p.grad)) for name, p in model.named_parameters()}
    (attention,) = (row for row in model.plan.rows if row.name == "scaled_dot_product_attention_default")
    assert attention.layout == "S(0) Z(2)"
    for value in losses:
        assert_close(value, expected.detach())
    for name, parameter in alone.named_parameters():
        for value in gradients[name]:
            assert_close(value, parameter.grad)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(2):
        loss = model(**batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(whole(loss)))  # type: ignore[arg-type]
    return losses


def _compiled(axis: str, strategy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Text()
    autopar.annotate(model, "*", storage=axis)
    made = autopar.compile(model, mesh((2,), (axis,)), batch(), strategy=strategy, hardware=SLOW_DEVICES)
    return made, torch.optim.AdamW(made.parameters(), lr=1e-2, eps=1e-4)


def _goes_on(folder: str) -> list[list[float]]:
    """Losses behind a checkpoint of a ring: there, on samples, and on a ring again."""
    model, optimizer = _compiled("cp", "ring")
    train(model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    losses = [train(model, optimizer)]
    for axis, strategy in (("dp", "data_parallel"), ("cp", "gather_kv")):
        other, its = _compiled(axis, strategy)
        train(other, its)  # so that the optimizer has a state to load into
        weights, moments = get_state_dict(other, its)
        load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(other, its, model_state_dict=weights, optim_state_dict=moments)
        losses.append(train(other, its))
    return losses


@pytest.mark.slow
def test_a_checkpoint_of_a_ring_goes_on_elsewhere(ranks: Ranks, tmp_path: Any) -> None:
    for here, *elsewhere in ranks.run(_goes_on, str(tmp_path)):
        for losses in elsewhere:
            assert losses == pytest.approx(here, abs=1e-5)


def _under_torch_compile() -> list[list[float]]:
    """Losses and norms of gradients of a ring, as it is and compiled."""
    found = []
    model, _ = _compiled("cp", "ring")
    for called in (model, torch.compile(model, backend="aot_eager")):
        loss = called(**batch())
        loss.backward()
        norms = [float(whole(p.grad).norm()) for p in model.parameters()]  # type: ignore[union-attr]
        model.zero_grad()
        found.append([float(whole(loss)), *norms])  # type: ignore[arg-type]
    return found


@pytest.mark.slow
def test_a_ring_under_torch_compile(ranks: Ranks) -> None:
    for plain, compiled in ranks.run(_under_torch_compile, timeout=120):
        assert compiled == pytest.approx(plain, rel=1e-5)
