"""Losses launch no kernel for options that they are not given: smoothing, and weights of classes."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.collectives.mesh_axes import use_mesh
from autopar.runtime.implementations.loss import cross_entropy, start_count
from benchmarks.step_counts import Operations
from tests.support.simulation.fake_mesh import fake_mesh


@pytest.mark.parametrize(
    ("axes", "forward", "backward"),
    [
        # PyTorch's loss, the number of targets, the mean; or the logits less their maximum, and the part of the target.
        ({"n": ("dp",)}, 5, 3),
        ({"n": ("dp",), "v": ("tp",)}, 19, 9),
    ],
)
def test_a_mean_without_options(axes: dict[str, tuple[str, ...]], forward: int, backward: int) -> None:
    logits, target = torch.randn(4, 6, requires_grad=True), torch.tensor([1, 5, -100, 0])
    with fake_mesh({"dp": 2, "tp": 2}) as devices, use_mesh(devices):
        with Operations() as operations:
            count = start_count(target, -100, axes={"n": ("dp",)}, classes="v")
            loss = cross_entropy(logits, target, axes=axes, sizes={"v": 12}, divisor=count)
        assert operations.kernels.total() <= forward, operations.kernels
        grad = torch.ones(())
        with Operations() as operations:
            loss.backward(grad)
    assert operations.kernels.total() <= backward, operations.kernels
