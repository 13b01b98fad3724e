"""Buffers without values, of which no state dict has any: tables that a model computes when it is made.

`to_empty` replaces buffers as it does parameters, whose values come from a state dict. Values of a buffer that is not
persistent are loaded from nowhere, so existing ones stay; if the model was made on the meta device there are none, and
a step that would read what lies in memory instead is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from autopar.errors import InputError


def not_persistent(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every buffer that no state dict has."""
    for path, module in root.named_modules():
        for leaf in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(leaf)
            if buffer is not None:
                yield f"{path}.{leaf}".removeprefix("."), buffer


def persistent(root: nn.Module) -> dict[str, Tensor]:
    """Return the name → every buffer that state dicts have."""
    left_out = dict(not_persistent(root))
    return {name: each for name, each in nn.Module.named_buffers(root) if name not in left_out}


class UnsetBuffers:
    """Buffers of a module that have memory and no values yet; a write or a replacement gives one its values."""

    def __init__(self) -> None:
        self._unset: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        """Name → the tensor, and its version at which it had no values."""

    def __bool__(self) -> bool:
        return bool(self._unset)

    def names(self, root: nn.Module) -> tuple[str, ...]:
        """Return the names of the buffers that still have no values."""
        found = ((name, root.get_buffer(name), *known) for name, known in self._unset.items())
        return tuple(name for name, buffer, known, version in found if known() is buffer and buffer._version == version)

    def mark(self, root: nn.Module, names: Iterable[str]) -> None:
        """Know these, and no others, to have none."""
        buffers = ((name, root.get_buffer(name)) for name in names)
        self._unset = {name: (weakref.ref(buffer), buffer._version) for name, buffer in buffers}

    def restore(self, root: nn.Module, before: Mapping[str, Tensor]) -> None:
        """Give buffers that are new the values they had `before`, where these were no meta tensors."""
        unset = {*self.names(root), *(name for name, buffer in before.items() if buffer.is_meta)}
        for name, buffer in before.items():
            if name not in unset:
                with torch.no_grad():
                    root.get_buffer(name).copy_(buffer)
        self.mark(root, unset)

    def check(self, root: nn.Module, read: Iterable[str]) -> None:
        """Raise InputError where one of those that a step reads has none."""
        if self._unset:
            self.mark(root, self.names(root))
        found = [name for name in read if name in self._unset or root.get_buffer(name).is_meta]
        if found:
            path, _, leaf = found[0].rpartition(".")
            raise InputError(
                f"{', '.join(found)} {'has' if len(found) == 1 else 'have'} no values: the model was made on the meta "
                "device, and a state dict has no buffers that are not persistent. Give each its values before the "
                f'first step: model.get_submodule("{path}").{leaf} = values. Or make the model so that its buffers '
                "have values, as accelerate.init_empty_weights(include_buffers=False) does."
            )
