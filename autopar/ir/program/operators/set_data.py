"""The operator that stands for `x.data = y` in an exported graph, until in-place operations are rewritten."""

from __future__ import annotations

import torch
from torch import Tensor


def _record(x: Tensor, source: Tensor) -> None:
    """Do nothing: the operator is recorded while a model is traced, and its effect belongs to the rewritten graph."""


torch.library.define("autopar::set_data", "(Tensor(a!) x, Tensor source) -> ()")
torch.library.impl("autopar::set_data", "CompositeExplicitAutograd", _record)
torch.library.impl("autopar::set_data", "Autograd", _record)
torch.library.register_fake("autopar::set_data", _record)

SET_DATA: torch._ops.OpOverload = torch.ops.autopar.set_data.default
