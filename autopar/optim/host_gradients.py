"""Gradients that leave the device as soon as the backward has made them, and wait on the host for the step.

Gradients of several backwards are added up there. On a GPU copies and additions overlap with the rest of the backward:
reading, clipping and stepping on the host wait for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from autopar.optim.sharded_tensors import flat, local
from autopar.optim.staging import Link


class HostGradients:
    """The gradients of some parameters, each flat, as this rank has it; hooks bring them, and free them there."""

    def __init__(self, parameters: Iterable[torch.Tensor], link: Callable[[], Link]) -> None:
        self._link = link
        self._memory: dict[torch.Tensor, torch.Tensor] = {}
        self._arrived: dict[torch.Tensor, torch.Event | None] = {}
        """Parameters whose gradient has been brought, with the mark behind its copy."""
        for each in parameters:
            if each.requires_grad:
                each.register_post_accumulate_grad_hook(self._bring_to_host)
        _every.add(self)

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that they take."""
        return sum(each.nbytes for each in self._memory.values())

    def has(self, parameter: torch.Tensor) -> bool:
        """Return whether a gradient of the parameter has been brought to the host."""
        return parameter in self._arrived

    def take(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Event | None]:
        """Return the parameter's gradient and the event of its copy; copy it now if no hook has."""
        if parameter.grad is not None:
            self._bring_to_host(parameter)
        return self._memory[parameter], self._arrived[parameter]

    def arrived(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter's gradient once its copy has finished."""
        gradient, mark = self.take(parameter)
        Link.wait(mark)
        return gradient

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forget what has been brought of some parameters, and keep its memory."""
        for each in parameters:
            self._arrived.pop(each, None)

    def clear(self) -> None:
        """Forget what has been brought, and keep its memory."""
        self._arrived.clear()

    @torch.no_grad()
    def _bring_to_host(self, parameter: torch.Tensor) -> None:
        """Bring a gradient to the host, or add it to the one that is there, and free it on the device."""
        assert parameter.grad is not None, "a hook behind the accumulation of a gradient"
        own, link = local(parameter), self._link()
        gradient = flat(local(parameter.grad), like=own)
        if parameter not in self._memory:
            self._memory[parameter] = link.memory(gradient.numel(), gradient.dtype)
        link.begin()
        if parameter in self._arrived:
            link.add(self._memory[parameter], gradient)
        else:
            link.copy(self._memory[parameter], gradient, link.down)
        self._arrived[parameter] = link.mark(link.down)
        parameter.grad = None


_every: weakref.WeakSet[HostGradients] = weakref.WeakSet()


def gradient_on_host(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of a gradient in host memory, flat, once it has arrived; None if it is on the device."""
    return next((each.arrived(parameter) for each in _every if each.has(parameter)), None)
