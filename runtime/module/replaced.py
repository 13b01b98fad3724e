"""Parameters that a user has put in the place of others: what fits is named, what does not fit is refused."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.runtime.module.tree import MISSING, Tree


class TreeTensors:
    """Parameters in the slots of a tree when they were last looked at."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.tensors: list[Any] = tree.held()
        self._split = {
            slot.name: each
            for slot, each in zip(tree.parameters, self.tensors, strict=True)
            if isinstance(each, DTensor)
        }
        self._storages = self._storages_next_to()

    def is_still_there(self) -> bool:
        """Return whether no parameter stands in the place of another.

        Raises InputError once if `.data` of a DTensor was assigned to, which PyTorch ignores.
        """
        before = self._storages
        if before:
            self._storages = self._storages_next_to()
        if before != self._storages:
            changed = next(name for name, a, b in zip(self._split, before, self._storages, strict=True) if a != b)
            raise InputError(
                f"{changed}.data was assigned to, which has no effect: the parameter is stored as a DTensor, of which "
                f"PyTorch keeps the values. Use {changed}.data.copy_(…) with a DTensor, or give the whole tensor "
                f'to model.load_state_dict({{"{changed}": …}}, strict=False).'
            )
        return all(map(operator.is_, self._tree.held(), self.tensors))

    def _storages_next_to(self) -> list[int]:
        """Return the storages that DTensors have next to those of their local tensors.

        `p.data = value` replaces this storage and leaves the local tensor as it is (torch 2.13).
        """
        return [each.untyped_storage()._cdata for each in self._split.values()]


def checked(tree: Tree, before: Sequence[Any]) -> dict[str, nn.Parameter]:
    """Map first names to replaced parameters; `before` are the slots' earlier values.

    Raises InputError where one is gone, has another shape, or is tied to others than before.
    """
    found: dict[str, nn.Parameter] = {}
    owner: dict[int, str] = {}
    for slot, now, held in zip(tree.parameters, tree.held(), before, strict=True):
        name = tree.first_name[slot.name]
        if now is MISSING or (now is None and held is not None):
            raise InputError(
                f"{slot.name} is gone, which the model was compiled with; put a parameter of shape "
                f"{list(slot.stand_in.shape)} there, or change the model and call autopar.compile again."
            )
        if now is None:
            continue
        if now.shape != slot.stand_in.shape:
            raise InputError(
                f"{slot.name} has the shape {list(now.shape)} now, and {list(slot.stand_in.shape)} when the model was "
                "compiled; give it that shape, or change the model and call autopar.compile again."
            )
        other = owner.setdefault(id(now), name)
        if other != name or found.get(name, now) is not now:
            tied = f"shares its tensor with {other}" if other != name else f"no longer shares its tensor with {name}"
            raise InputError(
                f"{slot.name} {tied} since the model was compiled; a tie is planned for: tie or untie parameters of "
                "the model, then call autopar.compile."
            )
        if now is not held:
            found[name] = now
    return found
