"""Dtypes in which a model is stored, computed, reduced and returned, as in FSDP2's `MixedPrecisionPolicy`.

    parameters   as parameters are stored and optimized, and as their gradients are added up
    compute      as weights are gathered and used, and as floating-point inputs are given to the forward
    reduce       as gradients are summed over devices, and over micro-batches before that
    outputs      as floating-point outputs are returned

None is what is there: the model's own parameters, parameters as they are stored, gradients and outputs as the forward
makes them. Without `reduce`, micro-batches are summed in float32, or wider. Buffers keep their dtype, as with FSDP2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from autopar.errors import InputError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a model's parameters, compute, gradient reduction and outputs; InputError for one that is no float.

    >>> Precision(parameters=torch.float32, compute=torch.bfloat16, reduce=torch.float32) == NAMED["bf16-mixed"]
    True
    """

    parameters: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    outputs: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            found = getattr(self, name)
            if found is not None and found not in DTYPES:
                raise InputError(
                    f"Precision({name}={found!r}); give {', '.join(map(str, DTYPES))}, or None for what is there."
                )

    def computes(self, stored: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor is used that is stored, or given, in this one."""
        return self.compute if self.compute is not None and stored.is_floating_point else stored

    def stores(self, given: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter is stored that is given in this one."""
        return self.parameters if self.parameters is not None and given.is_floating_point else given

    @property
    def reduced(self) -> torch.dtype | None:
        """The dtype of the sums of gradients over devices; None: that of the gradients as weights are used."""
        return None if self.reduce == (self.compute or self.parameters) else self.reduce


NAMED: Mapping[str, Precision] = {
    "bf16-mixed": Precision(torch.float32, torch.bfloat16, torch.float32),
    "fp16-mixed": Precision(torch.float32, torch.float16, torch.float32),
    "bf16": Precision(torch.bfloat16, torch.bfloat16),
    "fp32": Precision(torch.float32, torch.float32),
}


def precision_of(requested: str | Precision | None) -> Precision:
    """Return a precision by its name, or itself; without one, that of the model. InputError for unknown names."""
    if requested is None:
        return AS_IT_IS
    if isinstance(requested, Precision):
        return requested
    if requested not in NAMED:
        raise InputError(
            f"precision={requested!r} is not known; names are {', '.join(map(repr, NAMED))}, and others are given as "
            "autopar.Precision(parameters=…, compute=…, reduce=…, outputs=…)."
        )
    return NAMED[requested]


AS_IT_IS = Precision()
