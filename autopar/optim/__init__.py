"""Optimizers that take whole matrices or hold less, on parameters that are stored in parts.

`Muon` and `GaLoreAdamW` are `torch.optim.Optimizer`s: on a compiled model each is equal to itself in one process,
however a plan stores the parameters, and on a model that is not compiled it is an ordinary optimizer. What they hold is
what `optimizer="muon"` and `optimizer="galore"` plan for. Knows no plans.
"""

from autopar.optim.galore import GaLoreAdamW
from autopar.optim.muon import Muon

__all__ = ["GaLoreAdamW", "Muon"]
