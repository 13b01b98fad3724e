"""A model with fewer of its layers, which is traced in a fraction of the time."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn


def without_layers(model: nn.Module, names: Collection[str]) -> bool:
    """Take layers out of the lists that hold them, in place; those that remain keep their names.

    Args:
        model: A module that nobody else uses.
        names: Paths of modules that are entries of a ModuleList or Sequential, as "model.layers.3".

    Returns False, with the model as it was, if one of them is no such entry. A forward that goes through the list
    finds the others; one that takes layers by their number may raise KeyError.
    """
    found = []
    for name in names:
        parent, _, key = name.rpartition(".")
        try:
            module = model.get_submodule(parent)
        except AttributeError:
            return False
        if not isinstance(module, nn.ModuleList | nn.Sequential) or key not in module._modules:
            return False
        found.append((module, key))
    for module, key in found:
        del module._modules[key]
    return True
