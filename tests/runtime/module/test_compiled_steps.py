"""torch.compile around a user's whole step: forward, backward and optimizer train as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend

import autopar
from benchmarks.transformer_model import Size, batch, transformer
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh

SIZE = Size(1, 32, 4, 64, 8, 8)
STEPS = 3


def _trained(model: nn.Module, by_train_step: bool, backend: str | None) -> tuple[list[float], list[Tensor | None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        if by_train_step:
            loss = model.train_step(ids, labels)  # type: ignore[operator]
        else:
            loss = model(ids, labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def counting(graph: fx.GraphModule, inputs: Any) -> Any:
        products.extend(node for node in graph.graph.nodes if "linear" in str(node.target))
        return lookup_backend(str(backend))(graph, inputs)

    products: list[fx.Node] = []
    torch._dynamo.reset()
    run: Any = step if backend is None else torch.compile(step, backend=counting)
    losses = [float(run(*batch(SIZE))) for _ in range(STEPS)]
    assert backend is None or products, "the model was left out of what is compiled"
    return losses, [whole(each) for each in model.parameters()]


def _compiled(strategy: str, by_train_step: bool, backend: str, options: dict[str, Any]) -> Any:
    devices = mesh((2,), ("tp" if strategy == "megatron" else "dp",))
    model = autopar.compile(
        transformer(SIZE), devices, batch(SIZE), strategy=strategy, hardware=SLOW_DEVICES, **by_flag(**options)
    )
    return _trained(model, by_train_step, backend)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("strategy", "by_train_step", "backend", "options"),
    [
        pytest.param("zero3", True, "aot_eager", {"microbatches": 2}, marks=SLOW),
        pytest.param("zero3", True, "inductor", {"microbatches": 2}, marks=SLOW),
        pytest.param("data_parallel", True, "aot_eager", {}, marks=SLOW),
        pytest.param("megatron", True, "inductor", {"microbatches": 2}, marks=SLOW),
        pytest.param("zero3", False, "aot_eager", {}, marks=SLOW),
        pytest.param("data_parallel", False, "inductor", {}, marks=SLOW),
        pytest.param("zero3", False, "inductor", {}, marks=SLOW),
        pytest.param("megatron", False, "inductor", {}, marks=SLOW),
        pytest.param("zero3", False, "aot_eager", {"recompute": "full"}, marks=SLOW),
    ],
)
def test_a_compiled_step_trains_as_one_process(
    strategy: str, by_train_step: bool, backend: str, options: dict[str, Any], ranks: Ranks
) -> None:
    expected = _trained(transformer(SIZE), False, None)
    for found in ranks.run(_compiled, strategy, by_train_step, backend, options, timeout=300):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
