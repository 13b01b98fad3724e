"""Weights that are cast behind the reductions of their gradients are cast layer by layer, by one kernel each way."""

from __future__ import annotations

from typing import Any

import torch

import autopar
from autopar.runtime.collectives.gradient_buckets import cast_weight, cast_weights
from benchmarks.step_counts import Operations
from benchmarks.step_operations import MACHINE
from benchmarks.transformer_model import Size, batch, transformer
from tests.support.simulation.fake_mesh import fake_mesh

SIZE = Size(2, 64, 4, 128, 8, 8)


def test_the_weights_of_a_layer_are_cast_together() -> None:
    with fake_mesh({"dp": 8}) as devices:
        options: dict[str, Any] = {"strategy": "data_parallel", "precision": "bf16-mixed", "hardware": MACHINE}
        model = autopar.compile(transformer(SIZE), devices, batch(SIZE), **options)
        graph = model.prepare(batch(SIZE), {}).local.module.graph
        casts = [node for node in graph.nodes if node.target is cast_weights]
        assert len(casts) < SIZE.num_layers + 4  # the layers, the embedding, the last norm, the head
        assert sum(len(node.args) - 1 for node in casts) == len(list(model.parameters()))
        assert not [node for node in graph.nodes if node.target is cast_weight]
        model(*batch(SIZE)).backward()
        assert all(each.grad is not None and each.grad.dtype == torch.float32 for each in model.parameters())
        with Operations() as operations:
            model(*batch(SIZE)).backward()
    assert operations.kernels["aten::_to_copy"] < len(list(model.parameters()))


def test_weights_cast_together_get_the_gradients_of_weights_cast_alone() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(3, 4), torch.randn(5).to(torch.bfloat16), torch.randn(4, 3).T, torch.randn(2)]
    for each in weights:
        each.requires_grad_()
    uses = (torch.bfloat16, torch.bfloat16, torch.float16, torch.bfloat16)
    alone = [cast_weight(x, dtype) for x, dtype in zip(weights, uses, strict=True)]
    together = cast_weights(uses, *weights)
    for one, other in zip(alone, together, strict=True):
        assert one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
    used = [weights[number] for number in (0, 1, 2)]  # the last one's cast is not

    def gradients(casts: Any) -> Any:
        loss = torch.stack([(3.7 * each.float()).square().sum() for each in casts[:3]]).sum()
        return torch.autograd.grad(loss, [*used, weights[3]], allow_unused=True)

    for one, other in zip(gradients(together), gradients(alone), strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.dtype == other.dtype and torch.equal(one, other))
    assert gradients(together)[-1] is None
