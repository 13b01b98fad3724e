"""Safetensors into a module that is stored in parts: each rank reads its own part of every tensor, one after the other.

A file is opened for each tensor: its pages are mapped, and count as this process's memory until it is closed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from autopar.errors import InputError
from autopar.runtime.checkpoints.files import files_of


def read(names: Mapping[str, Tensor], elsewhere: Collection[str], path: str | Path) -> None:
    """Fill tensors with what a checkpoint has under their names.

    A tensor that has several names, being tied, is read under the first of them that the checkpoint has.

    Args:
        names: name → tensor as this rank stores it, under each of its names.
        elsewhere: names of the model that this rank has nothing of.
        path: a file, or a folder with one or several and an index.

    Raises InputError where a tensor is missing, has another shape, or belongs to no parameter or buffer.
    """
    files = files_of(path)
    tied: dict[int, list[str]] = {}
    for name, tensor in names.items():
        tied.setdefault(id(tensor), []).append(name)
    missing = [known[0] for known in tied.values() if not any(name in files for name in known)]
    unknown = sorted(files.keys() - names.keys() - set(elsewhere))
    if missing or unknown:
        parts = [f"it has no {_listed(missing)}"] if missing else []
        parts += [f"the model has no {_listed(unknown)}"] if unknown else []
        raise InputError(
            f"{path} is no checkpoint of this model: {'; '.join(parts)}. Names are those of model.named_parameters(); "
            "where transformers stores other names than it loads, load the model there and write it with "
            "save_pretrained(path, save_original_format=False)."
        )
    with torch.no_grad():
        for known in tied.values():
            name = next(name for name in known if name in files)
            _fill(names[name], name, files[name])


def _fill(tensor: Tensor, name: str, file: Path) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    start = (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    with safe_open(file, framework="pt") as opened:
        whole = opened.get_slice(name)
        if tuple(whole.get_shape()) != tuple(tensor.shape):
            raise InputError(
                f"{name} is {whole.get_shape()} in {file}, and {list(tensor.shape)} in the model; make the model with "
                "the configuration of the checkpoint."
            )
        part = tuple(slice(begin, begin + size) for begin, size in zip(start, local.shape, strict=True))
        if local.numel():
            local.copy_(whole[part] if part else opened.get_tensor(name))


def give_values(root: nn.Module, names: Iterable[str]) -> None:
    """Compute again what a model of transformers computes when it is made: tables that are in no checkpoint.

    `names` are those of buffers without values. Another model's stay as they are.
    """
    initialize = getattr(root, "_init_weights", None)
    if initialize is None:
        return
    with torch.no_grad():
        for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
            initialize(root.get_submodule(path))


def _listed(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
