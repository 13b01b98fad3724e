"""Models by the names that commands take: one of the built-in models, or MODULE:FUNCTION; with inputs to train on."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.models.catalogue import BUILT_IN, built_in, num_values


def named(
    name: str, batch: int, sequence: int, num_layers: int | None = None, device: str = "meta"
) -> tuple[nn.Module, Any]:
    """Return the model that is named and inputs for it.

    MODULE:FUNCTION returns a model, or a model and its example inputs; without them the model takes tokens. Only
    built-in models have `batch`, `sequence`, `num_layers` and `device`, and models that take tokens the first two.
    """
    if ":" not in name:
        return built_in(name, batch, sequence, num_layers, device)
    made = called(name)
    model, example_inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError(f"{name} returned a {type(model).__name__}; return an nn.Module, or (module, inputs).")
    return model, _tokens(model, batch, sequence) if example_inputs is None else example_inputs


def trainable(
    name: str, batch: int, sequence: int, num_layers: int | None, device: str, seed: int
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the model that is named with weights on the device, and a batch of random data; equal after equal seeds.

    Raises InputError where its inputs are no tuple of tensors.
    """
    torch.manual_seed(seed)
    model, inputs = named(name, batch, sequence, num_layers, device="cpu")
    if not isinstance(inputs, tuple) or not all(isinstance(x, Tensor) for x in inputs):
        raise InputError(
            f"{name} has inputs that are no tuple of tensors; a benchmark needs (x, …), split along dim 0."
        )
    if name in BUILT_IN:
        generator = torch.Generator().manual_seed(seed)
        inputs = tuple(_random(x, num_values(name), generator) for x in inputs)
    return model.to(device), tuple(x.to(device) for x in inputs)


def called(spec: str) -> Any:
    """Return the result of calling MODULE:FUNCTION; modules of the current folder are found, as with `python -m`."""
    module_name, _, function_name = spec.partition(":")
    if not all(name.isidentifier() for name in module_name.split(".")):
        raise InputError(
            f"{spec}: {module_name!r} is no name of a module; write MODULE:FUNCTION, as mine.models:small."
        )
    sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if module_name == error.name or module_name.startswith(f"{error.name}."):
            raise InputError(
                f"{spec}: {error}; write MODULE:FUNCTION, with the module importable from here."
            ) from error
        raise InputError(f"{spec}: importing {module_name} failed:\n{of_user(error)}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"{spec}: importing {module_name} failed:\n{of_user(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(f"{spec}: the module {module_name} has no function {function_name!r}.")
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise InputError(f"{spec}: {function_name} failed:\n{of_user(error)}") from error


def of_user(error: BaseException) -> str:
    """Return an error with its traceback, without the frames that lead from autopar to the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = next((n for n, frame in enumerate(frames) if not frame.filename.startswith(_NOT_THEIRS)), len(frames))
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames[theirs:])]
    return "".join([*(lines if theirs < len(frames) else ()), *traceback.format_exception_only(error)]).rstrip()


_NOT_THEIRS = (str(Path(__file__).parents[1]), "<frozen importlib", importlib.__file__, nn.modules.module.__file__)


def _tokens(model: nn.Module, batch: int, sequence: int) -> tuple[Tensor, ...]:
    """Return token ids, and labels for a model that takes them."""
    ids_BS = torch.zeros(batch, sequence, dtype=torch.int64)
    return (ids_BS, ids_BS) if "labels" in inspect.signature(model.forward).parameters else (ids_BS,)


def _random(x: Tensor, num_values: int, generator: torch.Generator) -> Tensor:
    if x.is_floating_point():
        return torch.randn(x.shape, dtype=x.dtype, generator=generator)
    return torch.randint(num_values, x.shape, dtype=x.dtype, generator=generator)
