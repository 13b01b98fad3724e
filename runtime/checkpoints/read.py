"""Safetensors into a module that is stored in parts: each rank reads its own part of every tensor, one after the other.

Names and shapes are those of the model, or those that transformers converts to them. A file is opened for each tensor:
its pages are mapped, and count as this process's memory until it is closed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from autopar.errors import InputError
from autopar.runtime.checkpoints.conversions import Conversion, Shape, conversions_of, is_of_transformers
from autopar.runtime.checkpoints.files import files_of

WHAT_TO_DO = "make the model with the configuration of the checkpoint"


@torch.no_grad()
def read(
    model: nn.Module,
    stand_ins: AbstractContextManager[nn.Module],
    names: Mapping[str, Tensor],
    elsewhere: Collection[str],
    path: str | Path,
) -> None:
    """Fill tensors with what a checkpoint has under their names, or with what transformers makes of it.

    A tensor that has several names, being tied, is read under the first of them that the checkpoint has.

    Args:
        model: has the class and configuration for which transformers has rules.
        stand_ins: gives `model` parameters and buffers of the whole shapes, on the meta device.
        names: name → tensor as this rank stores it, under each of its names.
        elsewhere: all names of the model; those not in `names` this rank has nothing of.
        path: a file, or a folder with one or several and an index.

    Raises:
        InputError: a tensor is missing, has another shape, or belongs to no parameter or buffer.
    """
    files = files_of(path)
    tied = _ties(names)
    error = _misfit(names, tied, elsewhere, path, files)
    if error is None:
        for known in tied:
            name = next(name for name in known if name in files)
            _fill(names[name], name, files[name])
    elif is_of_transformers(model):
        with stand_ins:
            _read_converted(model, names, tied, elsewhere, path, files)
    else:
        raise error


def _ties(names: Mapping[str, Tensor]) -> list[list[str]]:
    tied: dict[int, list[str]] = {}
    for name, tensor in names.items():
        tied.setdefault(id(tensor), []).append(name)
    return list(tied.values())


def _misfit(
    names: Mapping[str, Tensor],
    tied: list[list[str]],
    elsewhere: Collection[str],
    path: str | Path,
    files: Mapping[str, Path],
) -> InputError | None:
    """Return why the checkpoint cannot be read under the model's own names, if it cannot."""
    missing = [known[0] for known in tied if not any(name in files for name in known)]
    unknown = sorted(files.keys() - names.keys() - set(elsewhere))
    if missing or unknown:
        return _unfit(path, [*_has_no("it", missing), *_has_no("the model", unknown)], "")
    for name, shape in _shapes({name: files[name] for name in names if name in files}).items():
        if shape != tuple(names[name].shape):
            return InputError(f"{_other_shape(name, shape, files[name], names[name])}; {WHAT_TO_DO}.")
    return None


def _read_converted(
    model: Any,
    names: Mapping[str, Tensor],
    tied: list[list[str]],
    elsewhere: Collection[str],
    path: str | Path,
    files: Mapping[str, Path],
) -> None:
    """Fill tensors with what transformers makes of the checkpoint; read only what this rank stores a part of."""
    quantized = getattr(model.config, "quantization_config", None)
    if quantized is not None:
        raise InputError(
            f"{path} has other names or shapes than the model, whose configuration has a quantization_config: "
            "quantized checkpoints are not converted. Load it with transformers, dequantized, and write it with "
            "save_pretrained(path, save_original_format=False)."
        )
    maker = _makers(model, tied, elsewhere, path, files)
    wanted: dict[Conversion, list[str]] = {}
    for known in tied:
        name = next(name for name in known if name in maker)
        if _local(names[name])[0].numel():
            wanted.setdefault(maker[name], []).append(name)
    for conversion, made in wanted.items():
        if conversion.converter is None:
            [source] = conversion.names
            _fill(names[made[0]], source, files[source])
        else:
            _convert(conversion, model, {name: names[name] for name in made}, files)


def _makers(
    model: Any, tied: list[list[str]], elsewhere: Collection[str], path: str | Path, files: Mapping[str, Path]
) -> dict[str, Conversion]:
    """Return the model's name of each tensor → the conversion that makes it.

    Raises InputError if names or shapes do not fit the whole model, also what other ranks store of it.
    """
    known = {name: each for name, each in model.state_dict(keep_vars=True).items() if isinstance(each, Tensor)}
    conversions, unknown = conversions_of(model, known, files)
    unknown = [name for name in unknown if name not in elsewhere]
    shapes = _shapes(files)
    makers: dict[str, Conversion] = {}
    gaps, others = [], []
    for each in conversions:
        gaps += (lacking := each.gaps())
        made, problem = ({}, "") if lacking else _tried(each, model, known, shapes, files)
        makers |= dict.fromkeys(made, each)
        others += [problem] if problem else []
    # A conversion that fails makes nothing, and the tensors that it should make are not missing in the checkpoint.
    missing = [] if gaps or others else [n[0] for n in (*_ties(known), *tied) if not any(name in makers for name in n)]
    if missing or gaps or unknown:
        parts = [*_has_no("it", gaps or list(dict.fromkeys(missing))), *_has_no("the model", unknown)]
        raise _unfit(path, parts, ", or those that transformers converts to them")
    if others:
        raise InputError(f"{path} is no checkpoint of this model: {others[0]}.")
    return makers


def _tried(
    conversion: Conversion,
    model: Any,
    known: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    files: Mapping[str, Path],
) -> tuple[dict[str, Shape], str]:
    """Return name → shape of what a conversion makes, and why the model cannot take it; an empty text if it can."""
    first, names = conversion.first, _listed(conversion.names)
    if conversion.several_for_one():
        return {}, f"it has several tensors for {first}; keep one kind of {names}"
    try:
        made = conversion.shapes(model, shapes)
    except Exception as error:  # whatever an operation of transformers raises
        return {}, f"{conversion.lacks() or f'{first} cannot be made of {names} ({error})'}; {WHAT_TO_DO}"
    for name, shape in made.items():
        if name not in known:
            return {}, f"the model has no {name}, which transformers makes of {names}; {WHAT_TO_DO}"
        if shape != tuple(known[name].shape):
            is_renamed = conversion.converter is None
            source = conversion.names[0] if is_renamed else f"{name}, which transformers makes of {names},"
            text = conversion.lacks() or _other_shape(source, shape, files[conversion.names[0]], known[name])
            return {}, f"{text}; {WHAT_TO_DO}"
    return made, ""


def _convert(conversion: Conversion, model: Any, tensors: Mapping[str, Tensor], files: Mapping[str, Path]) -> None:
    """Fill tensors with what transformers makes of the sources; read only this rank's rows of stacked ones."""
    parts = {name: _local(tensor) for name, tensor in tensors.items()}
    rows = next(iter(parts.values()))[1][0] if conversion.stacks else slice(None)
    with contextlib.ExitStack() as stack:
        opened = {file: stack.enter_context(_opened(file)) for file in {files[name] for name in conversion.names}}
        made = conversion.made(model, lambda name: opened[files[name]].get_tensor(name), rows)
        for name, (local, part) in parts.items():
            local.copy_(made[name][(slice(None), *part[1:]) if conversion.stacks else part])


def _fill(tensor: Tensor, name: str, file: Path) -> None:
    """Fill this rank's part of a tensor with that of a tensor of the same shape in a file."""
    local, part = _local(tensor)
    if local.numel():
        with _opened(file) as opened:
            local.copy_(opened.get_slice(name)[part] if part else opened.get_tensor(name))


def _local(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this rank's part of a tensor, and where it lies in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    local = tensor.to_local()
    _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return local, tuple(slice(begin, begin + size) for begin, size in zip(start, local.shape, strict=True))


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except Exception as error:  # safetensors has an exception of its own, and no base for it
        raise InputError(f"{file} is no safetensors file: {error}.") from error


def _shapes(files: Mapping[str, Path]) -> dict[str, Shape]:
    """Return the shapes of tensors in files; no values are read."""
    names: dict[Path, list[str]] = {}
    for name, file in files.items():
        names.setdefault(file, []).append(name)
    shapes: dict[str, Shape] = {}
    for file, wanted in names.items():
        with _opened(file) as opened:
            found = set(opened.keys())
            for name in wanted:
                if name not in found:
                    raise InputError(f"{file} has no {name}, of which the index says that it is there.")
                shapes[name] = tuple(opened.get_slice(name).get_shape())
    return shapes


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


def _unfit(path: str | Path, parts: list[str], names: str) -> InputError:
    return InputError(
        f"{path} is no checkpoint of this model: {'; '.join(parts)}. Names are those of model.named_parameters()"
        f"{names}; {WHAT_TO_DO}."
    )


def _other_shape(name: str, shape: Shape, file: Path, tensor: Tensor) -> str:
    return f"{name} is {list(shape)} in {file}, and {list(tensor.shape)} in the model"


def _has_no(owner: str, names: list[str]) -> list[str]:
    return [f"{owner} has no {_listed(names)}"] if names else []


def _listed(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
