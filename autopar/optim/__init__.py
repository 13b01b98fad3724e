"""Optimizers that take whole matrices, hold less, or hold it on the host, on parameters that are stored in parts.

`Muon`, `GaLoreAdamW` and `OffloadedAdamW` are `torch.optim.Optimizer`s: on a compiled model each is equal to itself in
one process, however a plan stores the parameters, and on a model that is not compiled it is an ordinary optimizer.
Their state is the one that `optimizer="muon"`, `optimizer="galore"` and `offload="optimizer"` plan for.
`clip_grad_norm_` clips gradients that one of them has taken to the host, too. Knows no plans.
"""

from autopar.optim.clipping import clip_grad_norm_
from autopar.optim.galore import GaLoreAdamW
from autopar.optim.muon import Muon
from autopar.optim.offloaded import OffloadedAdamW

__all__ = ["GaLoreAdamW", "Muon", "OffloadedAdamW", "clip_grad_norm_"]
