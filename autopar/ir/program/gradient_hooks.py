"""The operator behind `tensor.register_hook` in a forward: an identity that carries a hook from a forward to its runs.

It has no rule, so that a plan computes it whole on every rank, where the hook meets the whole gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

Hook = Callable[[Tensor], Tensor | None]

_hooks: tuple[Hook, ...] = ()


@contextlib.contextmanager
def use_hooks(hooks: tuple[Hook, ...]) -> Iterator[None]:
    """Let calls inside the block find the hooks of their program; elsewhere the operator is an identity."""
    global _hooks
    before, _hooks = _hooks, hooks
    try:
        yield
    finally:
        _hooks = before


def _hooked(x: Tensor, number: int) -> Tensor:
    copied = x.clone()
    if _hooks and copied.requires_grad:
        copied.register_hook(_hooks[number])
    return copied


# Like `autopar.constrain`, this needs no autograd.Function: it differentiates as a copy.
torch.library.define("autopar::gradient_hook", "(Tensor x, int number) -> Tensor")
torch.library.impl("autopar::gradient_hook", "CompositeExplicitAutograd", _hooked)
torch.library.impl("autopar::gradient_hook", "Autograd", _hooked)


@torch.library.register_fake("autopar::gradient_hook")
def _(x: Tensor, number: int) -> Tensor:
    return torch.empty_like(x)


GRADIENT_HOOK: torch._ops.OpOverload = torch.ops.autopar.gradient_hook.default
has_side_effect(GRADIENT_HOOK)  # nothing reads it while it is traced
