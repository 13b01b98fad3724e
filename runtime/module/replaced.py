"""Parameters that a user has put in the place of others: what fits is named, what does not fit is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from autopar.errors import InputError
from autopar.runtime.module.tree import MISSING, Tree


def checked(tree: Tree, before: Sequence[Any]) -> dict[str, nn.Parameter]:
    """First name → the parameter that now stands where another stood; `before` is what the slots held.

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
