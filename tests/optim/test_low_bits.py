"""LoRA on a frozen base of few bits, as in QLoRA: trained on ranks as on one process, by optimizers that save memory.

The base of a layer is a matrix of 4 bits, two in a byte, each the number of a value of NF4 (Dettmers et al., 2023),
times the scale of its block of a row; it is made whole again in the forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.optim import GaLoreAdamW, Muon
from autopar.optim.sharded_tensors import local, whole
from tests.support.optimizing import losses_of, planned_for
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

AXES, STEPS = ("dp", "tp"), 4
WIDTH, HIDDEN, BLOCK, ADAPTER, RANK = 16, 32, 8, 8, 4
NF4 = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0)
NF4 += (0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0)


class _Adapted(nn.Module):
    """A frozen matrix of 4 bits, stored as a buffer or as a parameter, with two small trained ones."""

    def __init__(self, inputs: int, outputs: int, as_parameter: bool) -> None:
        super().__init__()
        packed = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8)
        if as_parameter:
            self.packed = nn.Parameter(packed, requires_grad=False)
        else:
            self.register_buffer("packed", packed)
        self.register_buffer("scales", torch.rand(outputs, inputs // BLOCK) / 4)
        self.register_buffer("values", torch.tensor(NF4), persistent=False)
        self.a, self.b = (nn.Linear(n, m, bias=False) for n, m in ((inputs, ADAPTER), (ADAPTER, outputs)))

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.stack((self.packed & 15, self.packed >> 4), -1).flatten(-2)
        blocks = self.values[codes.long()].unflatten(-1, (-1, BLOCK)) * self.scales.unsqueeze(-1)  # type: ignore[index, operator]
        return nn.functional.linear(x, blocks.flatten(-2)) + self.b(self.a(x))


class _Model(nn.Module):
    def __init__(self, as_parameter: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(_Adapted(WIDTH, HIDDEN, as_parameter), nn.SiLU(), _Adapted(HIDDEN, WIDTH, as_parameter))
            for _ in range(2)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return (x - target).square().mean()


def _model(as_parameter: bool) -> _Model:
    torch.manual_seed(0)
    return _Model(as_parameter)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def _adamw_of_8_bits(model: nn.Module) -> torch.optim.Optimizer:
    return pytest.importorskip("torchao.optim").AdamW8bit(model.parameters(), lr=1e-2)


MADE_BY: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "galore": lambda model: GaLoreAdamW(model.named_parameters(), lr=1e-2, eps=1e-4, rank=RANK, update_proj_gap=2),
    "muon": lambda model: Muon(model.named_parameters(), lr=1e-2),
    "adamw-8bit": _adamw_of_8_bits,
}


def _trained(model: nn.Module, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    losses = losses_of(MADE_BY[kind](model), range(STEPS), lambda step: model(*_batch(step)))
    return losses, {name: whole(each) for name, each in model.named_parameters()}


def _on_ranks(
    kind: str, as_parameter: bool, shape: tuple[int, ...], strategy: str
) -> tuple[list[float], dict[str, Tensor], bool]:
    """Losses, parameters, and whether parameters have the bytes of the plan, those of a base in parts."""
    model = autopar.compile(
        _model(as_parameter),
        mesh(shape, AXES[: len(shape)]),
        _batch(0),
        strategy=strategy,
        optimizer=planned_for(kind, RANK),
        hardware=SLOW_DEVICES,
        outputs="full",
    )
    assert model.plan.memory is not None
    held = sum(local(each).nbytes for each in model.parameters())
    in_parts = all(local(each).numel() < each.numel() for name, each in model.named_parameters() if "packed" in name)
    return *_trained(model, kind), in_parts and held == model.plan.memory.parts["parameters"]


FAST = [("galore", True, (2,), "zero3"), ("muon", False, (2,), "zero3")]
EVERY = [
    (kind, as_parameter, shape, strategy)
    for kind in MADE_BY
    for as_parameter in (False, True)
    for shape, strategy in (((2,), "zero3"), ((2, 2), "fsdp_megatron"))
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "as_parameter", "shape", "strategy"),
    [each if each in FAST else pytest.param(*each, marks=pytest.mark.slow) for each in EVERY],
)
def test_adapters_of_a_frozen_base_of_few_bits_are_trained_as_on_one_process(
    ranks: Ranks, kind: str, as_parameter: bool, shape: tuple[int, ...], strategy: str
) -> None:
    start = dict(_model(as_parameter).named_parameters())
    losses, parameters = _trained(_model(as_parameter), kind)
    for found, after, as_planned in ranks.run(
        _on_ranks, kind, as_parameter, shape, strategy, world_size=math.prod(shape)
    ):
        torch.testing.assert_close(found, losses, rtol=1e-3 if kind == "muon" else 1e-5, atol=0)
        assert as_planned and after.keys() == parameters.keys()
        for name, value in after.items():
            if not start[name].requires_grad:
                assert torch.equal(value, start[name])
                continue
            # Muon iterates in bfloat16, which takes gradients apart that differ by the rounding of float32.
            apart, changed = value - parameters[name], parameters[name] - start[name].detach()
            assert apart.norm() <= (0.15 if kind == "muon" else 1e-3) * changed.norm(), name


def _held_in_8_bits(shape: tuple[int, ...], strategy: str) -> tuple[int, int]:
    """Bytes of moments that a rank has after a step, and those of its plan; some parts are too small for 8 bits."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 60))
    x = torch.randn(8, 128)
    model = autopar.compile(
        layers, mesh(shape, AXES[: len(shape)]), (x,), strategy=strategy, optimizer="adamw-8bit", hardware=SLOW_DEVICES
    )
    optimizer = _adamw_of_8_bits(model)
    model(x).square().mean().backward()
    optimizer.step()
    held = 0
    for values in optimizer.state.values():
        for moment in (local(values["exp_avg"]), local(values["exp_avg_sq"])):
            parts = [getattr(moment, name) for name in getattr(moment, "tensor_attrs", ())] or [moment]
            held += sum(each.nbytes for each in parts)
    assert model.plan.memory is not None
    return held, round(model.plan.memory.parts["optimizer"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "strategy"), [((2,), "zero3"), ((2,), "data_parallel"), ((2, 2), "fsdp_megatron"), ((4,), "megatron")]
)
def test_moments_of_8_bits_take_the_bytes_of_the_plan(ranks: Ranks, shape: tuple[int, ...], strategy: str) -> None:
    pytest.importorskip("torchao.optim")
    for held, planned in ranks.run(_held_in_8_bits, shape, strategy, world_size=math.prod(shape), timeout=180):
        assert held == planned
