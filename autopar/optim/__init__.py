"""Optimizers that take whole matrices, hold less, or hold it on the host, on parameters that are stored in parts.

`Muon`, `GaLoreAdamW` and `OffloadedAdamW` are `torch.optim.Optimizer`s: on a compiled model each is equal to itself in
one process, however a plan stores the parameters, and on a model that is not compiled it is an ordinary optimizer. What
they hold is what `optimizer="muon"`, `optimizer="galore"` and `offload="optimizer"` plan for. Knows no plans.
"""

from autopar.optim.galore import GaLoreAdamW
from autopar.optim.muon import Muon
from autopar.optim.offloaded import OffloadedAdamW

__all__ = ["GaLoreAdamW", "Muon", "OffloadedAdamW"]
