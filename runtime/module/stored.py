"""A module whose parameters are stored as a plan says: their names, state dict and ties are those of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from autopar.errors import InputError
from autopar.runtime.module.inputs import Arguments, kind_of
from autopar.runtime.module.parameters import as_stored, tie, ties_of

Runs = TypeVar("Runs")
"""What runs one kind of input."""


class StoredModule(nn.Module, Generic[Runs]):
    """A module that gets its parameters when its first inputs are known, as `parameters.attach` stores them."""

    FIRST_CALL = "call it once"

    scaler: Any = None
    """A `ShardedGradScaler` whose scale `train_step` puts on the gradients; its `step` and `update` stay the caller's.

    Its process group is that of all ranks of the mesh: all of them skip an update, or none.
    """

    def __init__(self, device: str, prepare: Callable[[Arguments, bool, frozenset[str] | None], Runs]) -> None:
        """`prepare` takes arguments, training, and the names of frozen parameters if known; once per kind of input."""
        super().__init__()
        self._device = device
        self._prepare = prepare
        self._known: dict[object, Runs] = {}
        self._latest: Runs | None = None
        self._slots: tuple[tuple[str, dict[str, Any], str], ...] = ()
        """(name, parameters of the module that owns it, its name there) of every parameter, tied ones once."""

    def _ready(self) -> Runs:
        """What ran last; InputError where the module has no parameters yet."""
        if self._latest is None:
            raise InputError(
                "the model was compiled without example_inputs, so it has no parameters and no plan yet; "
                f"{self.FIRST_CALL}, or give autopar.compile(..., example_inputs=...)."
            )
        return self._latest

    def _prepared(self, arguments: Arguments) -> Runs:
        """What runs these arguments, prepared on their first appearance."""
        frozen = self._frozen() if self._latest is not None else None
        key = kind_of(arguments, self._device), self.training, frozen
        if key not in self._known:
            # A first call for inference is prepared for training all the same.
            with torch.inference_mode(False), torch.enable_grad():
                found = self._prepare(arguments, self.training, frozen)
            # The first graph gave the module its parameters, and the key must name those that are frozen.
            key = *key[:2], self._frozen() if frozen is None else frozen
            self._known[key] = found
        self._latest = self._known[key]
        return self._latest

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
        if not isinstance(state_dict, Mapping):
            raise InputError(f"a state dict is a mapping of names to tensors; found a {type(state_dict).__name__}.")
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
        if not self._slots:  # asked for in every step, and slow to walk through modules for
            self._slots = tuple(self._found_slots())
        return frozenset(name for name, owner, leaf in self._slots if not owner[leaf].requires_grad)

    def _found_slots(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        for name, _ in super().named_parameters():
            path, _, leaf = name.rpartition(".")
            yield name, self.get_submodule(path)._parameters, leaf
