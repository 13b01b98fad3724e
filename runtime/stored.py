"""A module whose parameters are stored as a plan says: their names, state dict and ties are those of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autopar.runtime.parameters import as_stored, tie, ties_of


class StoredModule(nn.Module):
    """A module that gets its parameters when its first inputs are known, as `parameters.attach` stores them."""

    scaler: Any = None
    """A `ShardedGradScaler` whose scale `train_step` puts on the gradients; its `step` and `update` stay the caller's.

    Its process group is that of all ranks of the mesh: all of them skip an update, or none.
    """

    def _ready(self) -> Any:
        """Raise InputError where the module has no parameters yet."""
        raise NotImplementedError

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """As in `torch.nn.Module`; an error before a lazily compiled model has seen its first inputs."""
        self._ready()
        return super().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """As in `torch.nn.Module`; an error before a lazily compiled model has seen its first inputs."""
        self._ready()
        return super().named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in `torch.nn.Module`; an error before a lazily compiled model has seen its first inputs."""
        self._ready()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As in `torch.nn.Module`; parameters may also be whole tensors, equal on every rank."""
        self._ready()
        ties = ties_of(self)
        result = super().load_state_dict(as_stored(self, state_dict), *args, **kwargs)
        tie(self, ties)
        return result

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """As in `torch.nn.Module` (`to`, `to_empty` …), but tied parameters stay tied."""
        self._ready()
        ties = ties_of(self)
        super()._apply(fn, recurse)
        tie(self, ties)
        return self

    def _frozen(self) -> frozenset[str]:
        """Frozen parameters get no gradient, which a graph is made for."""
        return frozenset(name for name, p in super().named_parameters() if not p.requires_grad)
