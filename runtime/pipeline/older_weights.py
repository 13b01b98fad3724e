"""Two versions of the weights, as PipeDream-2BW has them: W(t+1) = W(t) - ν ∇f(W(t-1)) (Narayanan et al., ICML 2021).

A step runs on the weights before the last update, which change places with the newest for it; the gradients that it
leaves are for the newest. The first step, and the first after weights are loaded, has one version: W(-1) = W(0).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class OlderWeights:
    """The parameters of a rank's stages as they were before the last update, in the layout in which they are stored."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    @contextmanager
    def in_place(self, root: nn.Module) -> Iterator[None]:
        """Run a step on the older weights; after it the newest are in place, and the older ones of the next step."""
        learning = {name: _local(each) for name, each in root.named_parameters() if each.requires_grad}
        with torch.no_grad():
            for name, weight in learning.items():
                newest = weight.detach().clone()
                if name in self._values:
                    weight.copy_(self._values[name])
                self._values[name] = newest
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in learning.items():
                    weight.copy_(self._values[name])

    def forget(self) -> None:
        """Begin with one version again."""
        self._values.clear()


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()
