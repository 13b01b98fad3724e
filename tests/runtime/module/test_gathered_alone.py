"""Weights that are gathered in messages of their own train as those that share them, and take no room for a copy.

Nor do their gradients, which are sent from where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.costs.pricing import message_sizes as messages
from autopar.runtime.collectives import gradient_buckets as buckets
from autopar.runtime.collectives.gradient_buckets import gather_parameters
from tests.support.measured_bytes import peak_of_step
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, Case, Training, parallel
from tests.support.ranks import Ranks, mesh

SIZE, LAYERS = 512, 4
BOTH = (messages.LARGE, 1)


def _case(shape: tuple[int, ...], **options: object) -> Case:
    return Case("llama", shape, (), {"hardware": SLOW_DEVICES, "strategy": "zero3", **options}, steps=3)


def _shared_and_alone(case: Case) -> list[Training]:
    found = []
    for large in BOTH:
        with mock.patch.object(messages, "LARGE", large):
            found.append(parallel(case))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        _case((2,), prefetch=2),
        pytest.param(_case((2,), prefetch=0, precision="bf16-mixed"), marks=pytest.mark.slow),
        _case((2, 2), strategy="fsdp_megatron", recompute="full"),
    ],
    ids=["zero3", "mixed", "two axes"],
)
def test_ranks_train_as_with_messages_that_weights_share(ranks: Ranks, case: Case) -> None:
    for shared, alone in ranks.run(_shared_and_alone, case, world_size=torch.Size(case.mesh).numel(), timeout=180):
        assert alone.counted == shared.counted == {key: count for key, count in alone.predicted.items() if count}
        assert alone.losses == shared.losses
        for kind in ("gradients", "parameters"):
            torch.testing.assert_close(getattr(alone, kind), getattr(shared, kind), rtol=0, atol=0)


class _Scaled(nn.Module):
    """A product, and the scale of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale_D = (nn.Parameter(torch.randn(*shape) / SIZE) for shape in ((SIZE, SIZE), (SIZE,)))
        self.bias_D = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x_BD: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(x_BD, self.weight, self.bias_D) * self.scale_D)


class _Frozen(nn.Module):
    """Layers of which biases alone are trained: no gradient of a weight takes more room than the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(_Scaled() for _ in range(LAYERS))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith("bias_D"))

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BD = layer(x_BD)
        return x_BD.square().mean()


def _peaks() -> list[tuple[int, int, int]]:
    """Bytes at the highest moment and those of the plan, and how many messages gather weights; shared, and alone.

    A thread of gloo may hold a message for a moment longer than anybody needs it: the least of some steps counts.
    """
    found, x_BD = [], torch.randn(8, SIZE)
    for large in BOTH:
        with mock.patch.object(messages, "LARGE", large):
            options: dict[str, Any] = {"strategy": "zero3", "prefetch": 0, "hardware": SLOW_DEVICES}
            compiled = autopar.compile(_Frozen(), mesh((2,), ("dp",)), (x_BD,), **by_flag(**options))
            nodes = compiled.prepare((x_BD,), {}).local.module.graph.nodes
            gathers = sum(node.target is gather_parameters for node in nodes)
            measured = min(peak_of_step(compiled, {"x_BD": x_BD}) for _ in range(6))
            found.append((measured, compiled.plan.peak_bytes, gathers))
    return found


def test_they_take_no_room_for_a_message_that_they_are_copied_from(ranks: Ranks) -> None:
    for shared, alone in ranks.run(_peaks):
        assert (shared[2], alone[2]) == (2 * LAYERS, 3 * LAYERS)  # what is trained shares none with what is not
        assert shared[1] < 1.05 * shared[0]
        assert alone[1] == pytest.approx(alone[0], rel=0.05)
        assert alone[0] < shared[0] - 0.9 * SIZE * SIZE * 4


def _copied_for_messages() -> list[list[int]]:
    """The elements of gradients that are copied into each message; weights shared, and alone."""
    found, x_BD, packed = [], torch.randn(8, SIZE), buckets.packed
    for large in BOTH:
        copied: list[int] = []

        def counted(wholes: Sequence[Tensor], *rest: Any, copied: list[int] = copied) -> Tensor:
            message = packed(wholes, *rest)
            if message.data_ptr() not in [each.data_ptr() for each in wholes]:
                copied.append(sum(each.numel() for each in wholes))
            return message

        with mock.patch.object(messages, "LARGE", large), mock.patch.object(buckets, "packed", counted):
            options: dict[str, Any] = {"strategy": "zero3", "prefetch": 0, "hardware": SLOW_DEVICES}
            model = nn.Sequential(*(_Scaled() for _ in range(LAYERS)))
            compiled = autopar.compile(model, mesh((2,), ("dp",)), (x_BD,), **by_flag(**options))
            compiled(x_BD).square().mean().backward()
        found.append(copied)
    return found


def test_their_gradients_are_sent_from_where_they_lie(ranks: Ranks) -> None:
    for shared, alone in ranks.run(_copied_for_messages):
        assert shared == [SIZE * SIZE + 2 * SIZE] * LAYERS
        assert not alone
