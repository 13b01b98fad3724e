"""Message time that computing hides: at most the messages' own time, 0 without computing, more with more."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.capture.export import capture
from autopar.costs.hardware.collectives import Transfer, transfer_seconds
from autopar.costs.hardware.load import load
from autopar.costs.hardware.overlap import NOTHING, Message, OverlappedWork, Pass
from autopar.costs.space.unsharded import overlapped_of
from autopar.ir.sharding.mesh import Mesh
from tests.support.simulation.training import Steps, train_alike

H100 = load("h100")
seconds, sizes = st.floats(0, 10), st.integers(1, 1 << 32)


@given(
    collective=st.sampled_from(("all_gather", "reduce_scatter", "all_reduce")),
    axes=st.sampled_from(({"dp": 8}, {"dp": 64}, {"dp": 8, "tp": 8})),
    together=st.integers(1, 100),
    moved=sizes,
    whole=sizes,
    num_weights=st.integers(1, 1000),
    computing=seconds,
    more=seconds,
    share=st.floats(0, 1),
)
def test_what_is_hidden_is_between_nothing_and_what_computes_next_to(
    collective: str,
    axes: dict[str, int],
    together: int,
    moved: int,
    whole: int,
    num_weights: int,
    computing: float,
    more: float,
    share: float,
) -> None:
    punctual = tuple(replace(link, straggling_s=0.0) for link in H100.links)
    mesh, hardware = Mesh(axes, hardware="h100"), replace(H100, communication_share=share, links=punctual)
    transfer = Transfer(collective, "dp", min(moved, whole))

    def exposed(each: float) -> float:
        side = Pass(each, 0.0, whole * num_weights)
        overlapped = OverlappedWork(side, side, num_weights) if each else NOTHING
        return transfer_seconds(transfer, mesh, hardware, Message(together, whole, whole, 1, overlapped))

    nothing, some, longer = exposed(0.0), exposed(computing), exposed(computing + more)
    alone = transfer_seconds(replace(transfer, num_bytes=transfer.num_bytes * together), mesh, hardware) / together
    assert nothing == pytest.approx(alone)
    assert share * nothing * (1 - 1e-9) <= longer <= some * (1 + 1e-9) <= nothing * (1 + 2e-9)
    if share == 1:
        assert longer == pytest.approx(nothing)
    # All parameters hide no more than is computed.
    assert (nothing - some) * num_weights <= computing / mesh.num_devices * (1 + 1e-6) + 1e-12


def test_a_gather_behind_a_reduction_overlaps_with_the_forward_alone() -> None:
    work = OverlappedWork(
        Pass(1.0, 0.0, 8), Pass(2.0, 0.0, 8), 2, (("all_gather dp forward", 0.5), ("reduce_scatter dp backward", 0.25))
    )
    message = Message(1, 8, 8, 1, work.of_gathers)
    assert message.overlaps("all_gather") and not message.overlaps("reduce_scatter")
    assert message.waited("all_gather dp forward") == 0.5 and message.waited("reduce_scatter dp backward") is None
    assert message.exposed("reduce_scatter", 1.0, 2, 0.1) == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_program_computes_next_to_what_its_products_and_weights_say(dtype: torch.dtype) -> None:
    """Large products alone: FLOPs at what is reached, forward, and for the gradients of the weight and of the input."""
    rows, width = 65536, 8192
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=dtype, device="meta") for _ in range(3)))
    program = capture(model, (torch.empty(rows, width, dtype=dtype, device="meta"),), {}, training=True)
    found = overlapped_of(program, H100)
    waves = H100.product_wave * (rows + 2 * width) / 3
    one = (2 * rows * width**2 + waves) / (H100.flops_of(dtype) * H100.product_efficiency)
    assert found.forward.seconds == pytest.approx(3 * one) and found.backward.seconds == pytest.approx(5 * one)
    assert found.forward.latency == pytest.approx(3 * H100.op_latency_s)
    assert found.forward.num_bytes == found.backward.num_bytes == 3 * width**2 * dtype.itemsize
    assert found.num_weights == 3 and overlapped_of(program, H100) is found


class _WithNone(nn.Module):
    """A layer without features next to others, as MobileBERT has if its sizes are equal."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there is nothing to initialize
            self.none = nn.Linear(16, 0, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.down(self.up(x).relu()), self.none(x)], -1).square().mean()


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", [None, "zero3", "megatron"])
def test_a_parameter_without_elements_moves_nothing(strategy: str | None) -> None:
    steps = Steps([{"x": torch.randn(8, 16, dtype=torch.float64)} for _ in range(2)])
    train_alike(_WithNone().double(), steps, {"dp": 2, "tp": 2}, {"strategy": strategy})
