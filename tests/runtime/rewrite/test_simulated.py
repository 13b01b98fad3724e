"""Eight simulated ranks on a mesh of three axes compute the loss and the gradients of one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

import autopar
from tests.support.families import FAMILIES
from tests.support.parity import SLOW_DEVICES
from tests.support.simulation.simulate import from_ranks, local_values, simulate
from tests.support.simulation.training import planning_alone, unshare

AXES = ("dp", "sp", "tp")
Annotations = tuple[tuple[str, dict[str, Any]], ...]
THREE_ROLES: Annotations = (
    ("*", {"dp": "data"}),
    ("*", {"sp": "sequence"}),
    ("linear", {"tp": "column"}),
)
"""Data, sequence and tensor parallelism, each on an axis of its own."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One forward and backward, as every rank sees it."""

    losses: list[Tensor]
    gradients: dict[str, list[Tensor] | None]


def on_one_process(family: str) -> Seen:
    model = FAMILIES[family].build()
    args, kwargs = FAMILIES[family].inputs(0)
    loss = FAMILIES[family].loss(model(*args, **kwargs))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return Seen([loss.detach()], {name: None if g is None else [g] for name, g in gradients.items()})


def on_simulated_ranks(family: str, annotations: Annotations) -> Seen:
    model = FAMILIES[family].build()
    args, kwargs = FAMILIES[family].inputs(0)
    for pattern, specified in annotations:
        autopar.annotate(model, pattern, **specified)
    with simulate(8) as mode, planning_alone(mode):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=AXES)
        compiled = autopar.compile(model, mesh, kwargs or args, mode="semi_auto", hardware=SLOW_DEVICES)
        unshare(compiled, mode)
        loss = whole(FAMILIES[family].loss(compiled(*on_all_ranks(args), **on_all_ranks(kwargs))))
        loss.backward()
        return Seen(
            local_values(loss),
            {n: None if p.grad is None else local_values(whole(p.grad)) for n, p in compiled.named_parameters()},
        )


def on_all_ranks(inputs: Any) -> Any:
    """The same batch on every rank, as the ranks of a real mesh are given it."""
    return pytree.tree_map_only(Tensor, lambda x: from_ranks([x] * 8), inputs)


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def assert_equal(found: Seen, expected: Seen) -> None:
    (loss,) = expected.losses
    for each in found.losses:
        torch.testing.assert_close(each, loss, rtol=1e-4, atol=1e-5)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        parts = found.gradients[name]
        assert (parts is None) == (gradient is None), f"{name} has a gradient on one side only"
        for part in parts or ():
            assert gradient is not None
            torch.testing.assert_close(part, gradient[0], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def slow(*families: str) -> list[Any]:
    return [pytest.param(family, marks=pytest.mark.slow) for family in families]


@pytest.mark.parametrize("family", ["mlp", *slow("bert", "llama", "vit", "unet", "resnet")])
def test_a_plan_on_three_axes_trains_as_one_process_does(family: str) -> None:
    assert_equal(on_simulated_ranks(family, ()), on_one_process(family))


@pytest.mark.parametrize(
    "family",
    ["transformer_encoder", *slow("gpt2", "llama", "qwen3", "mistral", "roberta", "t5", "lora")],
)
def test_data_sequence_and_tensor_parallelism_train_as_one_process_does(family: str) -> None:
    assert_equal(on_simulated_ranks(family, THREE_ROLES), on_one_process(family))
