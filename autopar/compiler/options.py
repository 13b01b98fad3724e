"""Allowed arguments of `compile`, `plan` and `attach` that are no groups, checked before anything is captured.

The meaning of words and numbers (an unknown preset, a schedule that does not fit) is checked by the code that reads
them.
"""

from __future__ import annotations

import os
import reprlib
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.costs.hardware.profile import Hardware
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing.optimizer import Optimizer
from autopar.errors import InputError, MeshError
from autopar.files.schema import Flag, Maybe, Schema, Text, Whole
from autopar.ir.program.precision import NAMED, Precision
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.options.definition import Satisfying, check_kind
from autopar.planning.options.groups import is_names
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.runtime.module.stored import StoredModule

_WORD = Text()
_OPTIMIZER = Satisfying(
    lambda found: isinstance(found, str | Optimizer), 'the name of an optimizer ("adamw") or an autopar.Optimizer'
)
_PROFILE = Satisfying(
    lambda found: isinstance(found, str | os.PathLike | Hardware),
    'the name of a hardware profile ("h100"), the path of one, or a Hardware',
)
_PLAN = Satisfying(
    lambda found: isinstance(found, Plan | PipelinePlan),
    "a Plan or a PipelinePlan, as autopar.plan or Plan.load(path) return it",
)
_PARTS = Satisfying(
    lambda found: isinstance(found, str) or is_names(found),
    '"whole", "local", or names of axes over which ranks give different parts of the batch',
)
_PRECISION = Satisfying(
    lambda found: isinstance(found, str | Precision),
    f"one of {', '.join(map(repr, NAMED))}, or an autopar.Precision",
)

OPTIONS: Mapping[str, Schema] = {
    "mode": _WORD,
    "strategy": Maybe(_WORD),
    "plan": Maybe(_PLAN),
    "precision": Maybe(_PRECISION),
    "optimizer": _OPTIMIZER,
    "hardware": Maybe(_PROFILE),
    "inputs": _PARTS,
    "outputs": _WORD,
    "microbatches": Maybe(Whole(1)),
    "training": Flag(),
}
"""Option that is no group → what it may be."""


def check_options(given: Mapping[str, Any]) -> None:
    """Raise InputError for the first option that is not of its kind."""
    for name, kind in OPTIONS.items():
        if name in given:
            check_kind(kind, given[name], f"{name}={reprlib.repr(given[name])}")


def check_model(model: object) -> None:
    """Raise InputError for what is no model, or runs on a mesh already."""
    if isinstance(model, StoredModule):
        raise InputError(
            f"the model is a {type(model).__name__}, which was compiled already; give the nn.Module it was made from."
        )
    if not isinstance(model, nn.Module):
        shown = model.__name__ if isinstance(model, type) else type(model).__name__
        called = f"; call it, {shown}(…), and give what that returns" if isinstance(model, type) else ""
        raise InputError(f"model is {'the class' if called else 'a'} {shown}; give an nn.Module{called}.")
    for path, module in model.named_modules():
        _check_not_compiled(path, module)


def _check_not_compiled(path: str, module: nn.Module) -> None:
    """Raise InputError for a module that is a graph of torch.compile or torch.jit already, or is to become one."""
    name = f"the part {path}" if path else "the model"
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(
            f"{name} is a {type(module).__name__} of torch.jit, whose code autopar cannot read; give the nn.Module "
            "that was scripted or traced."
        )
    if isinstance(module, torch._dynamo.OptimizedModule):
        inside = f'model.set_submodule("{path}", model.get_submodule("{path}")._orig_mod)'
        plain = inside if path else "autopar.compile(model._orig_mod, …)"
        raise InputError(
            f"{name} was wrapped by torch.compile, and autopar captures the module inside; write {plain}. Then call "
            "compile() on the module that autopar.compile returns, which runs its graphs by torch.compile."
        )
    if isinstance(module._compiled_call_impl, types.FunctionType):
        called = f'model.get_submodule("{path}").compile()' if path else "model.compile()"
        raise InputError(
            f"{called} was called before autopar.compile, which makes other graphs; leave it out. Then call compile() "
            "on the module that autopar.compile returns, or compile(regional=True) for one graph per layer."
        )


def check_planned_mesh(mesh: object, devices: object) -> None:
    """Raise MeshError for a mesh that `plan` cannot use, or if `devices` contradicts its size."""
    if isinstance(mesh, str):
        return  # autopar.planning.mesh_search.arrangements says which words there are
    if not isinstance(mesh, Mesh | DeviceMesh):
        raise MeshError(
            f'mesh is a {type(mesh).__name__}; give an autopar.Mesh, as Mesh({{"dp": 2, "tp": 4}}), a DeviceMesh, or '
            '"auto" with the number of devices.'
        )
    num_devices = mesh.num_devices if isinstance(mesh, Mesh) else mesh.size()
    if devices is not None and not (isinstance(devices, int) and devices == num_devices):
        raise MeshError(
            f'devices={devices!r} with a mesh of {num_devices}; leave it out, or give mesh="auto" to arrange them.'
        )


def check_example_inputs(example_inputs: object) -> None:
    """Raise InputError for what are no positional inputs and no keyword inputs."""
    if not isinstance(example_inputs, tuple | Mapping):
        raise InputError(
            f"example_inputs is a {type(example_inputs).__name__}; give a tuple of positional inputs, (x,), "
            "or a dict of keyword inputs."
        )
    wrong = [key for key in example_inputs if not isinstance(key, str)] if isinstance(example_inputs, Mapping) else []
    if wrong:
        raise InputError(f"example_inputs has the key {wrong[0]!r}; keyword inputs have the names of forward's.")
