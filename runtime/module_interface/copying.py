"""Copies of a compiled module, as averages of weights and target networks take them; and why it cannot be pickled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn

from autopar.errors import InputError


class Copyable:
    """Base of compiled modules that `copy.deepcopy` copies: parameters and buffers anew, everything else shared."""

    duplicate: Callable[[], Any]
    """Make another module for the same model, mesh and options, without values; set by what made this one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a module with parameters and buffers of its own, and the same mesh, plans and graphs.

        Called by all ranks of the mesh, which number their modules alike.
        """
        mine: Any = self
        mine._ready()
        other = memo[id(self)] = self.duplicate()
        other.tree.take_copies(mine.tree, memo)
        other.training, other._held = mine.training, type(mine._held)(other.tree)
        for name in ("_storage", "_latest", "_state", "_numbers", "compilation", "varying", "scaler"):
            setattr(other, name, getattr(mine, name))
        root = other.tree.root
        for kind, known in mine._known.items():
            other._known[kind] = [(watch.on(root), runs) for watch, runs in known]
        other.unset_buffers.mark(other, mine.unset_buffers.names(mine))
        other.follow(None)
        other.__class__ = type(self)
        for name in vars(self).keys() - vars(other).keys():
            setattr(other, name, copy.deepcopy(vars(self)[name], memo))
        return other

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise InputError: process groups belong to this process."""
        raise InputError(
            "a compiled module cannot be pickled or copied by copy.copy: its process groups belong to this process. "
            "Save model.state_dict() and load it into what autopar.compile returns, or use copy.deepcopy on all ranks."
        )
