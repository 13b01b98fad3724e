"""Helpers that tests of tiled losses and of tiled MLPs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.parity import whole


def under_torch_compile(model: Any, batch: dict[str, Tensor], backend: Callable[..., Any]) -> tuple[int, float]:
    """Graphs that torch.compile makes of a model that returns its loss, and how far its step is from without."""
    torch._dynamo.reset()
    graphs = []

    def counting(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return backend(graph, example_inputs)

    def step(called: Any) -> list[Tensor]:
        model.zero_grad()
        loss = called(**batch)
        loss.backward()
        return [whole(x) for x in (loss, *(parameter.grad for parameter in model.parameters()))]  # type: ignore[misc]

    pairs = zip(step(model), step(torch.compile(model, backend=counting)), strict=True)
    apart = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    torch._dynamo.reset()
    return len(graphs), apart
