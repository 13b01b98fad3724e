"""Allowed arguments of `compile`, `plan` and `attach`: a table of kinds, checked before anything is captured.

The meaning of words and numbers (an unknown preset, a schedule that does not fit) is checked by the code that reads
them.
"""

from __future__ import annotations

import inspect
import math
import os
import reprlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.costs.hardware.profile import Hardware
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing.conventions import CONVENTIONS, MemoryConventions
from autopar.costs.pricing.optimizer import Optimizer
from autopar.errors import InputError, MeshError
from autopar.files.schema import Flag, Malformed, Maybe, Real, Schema, Text, Whole, differs
from autopar.ir.program.precision import NAMED, Precision
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.settings import DEPTHS
from autopar.runtime.lengths.length_buckets import Buckets
from autopar.runtime.module.stored import StoredModule

MAX_TILES = 1024  # each is a turn of a loop, which compilers unroll


@dataclass(frozen=True, slots=True)
class _Satisfying:
    """Schema of the values that a predicate accepts."""

    accepts: Callable[[Any], bool]
    needed: str

    def __str__(self) -> str:
        return self.needed

    def check(self, found: Any, where: str) -> None:
        if not self.accepts(found):
            differs(found, where, self)


def _is_names(found: object) -> bool:
    return isinstance(found, Sequence) and not isinstance(found, str) and all(isinstance(each, str) for each in found)


_WORD = Text()
_MEMORY = _Satisfying(
    lambda found: isinstance(found, str) or (isinstance(found, int) and not isinstance(found, bool) and found > 0),
    'bytes per device, as a whole number above 0 or as text ("8GB")',
)
_HOST_MEMORY = _Satisfying(_MEMORY.accepts, 'bytes per host, as a whole number above 0 or as text ("512GB")')
_OPTIMIZER = _Satisfying(
    lambda found: isinstance(found, str | Optimizer), 'the name of an optimizer ("adamw") or an autopar.Optimizer'
)
_CONVENTIONS = _Satisfying(
    lambda found: isinstance(found, str | MemoryConventions),
    f"one of {', '.join(map(repr, CONVENTIONS))}, or an autopar.MemoryConventions",
)
_PROFILE = _Satisfying(
    lambda found: isinstance(found, str | os.PathLike | Hardware),
    'the name of a hardware profile ("h100"), the path of one, or a Hardware',
)
_PLAN = _Satisfying(
    lambda found: isinstance(found, Plan | PipelinePlan),
    "a Plan or a PipelinePlan, as autopar.plan or Plan.load(path) return it",
)
_MODULES = _Satisfying(_is_names, 'a list of names of modules, as in ["layers.4", "layers.8"]')
_ARGUMENTS = _Satisfying(_is_names, 'a list of names of arguments of forward, as in ["image_grid_thw"]')
_PARTS = _Satisfying(
    lambda found: isinstance(found, str) or _is_names(found),
    '"whole", "local", or names of axes over which ranks give different parts of the batch',
)
_SECONDS = _Satisfying(
    lambda found: isinstance(found, int | float) and not isinstance(found, bool) and 0 <= found <= math.inf,
    "seconds of at least 0",
)
_FACTOR = _Satisfying(
    lambda found: isinstance(found, int | float) and not isinstance(found, bool) and 0 < found <= sys.float_info.max,
    "a finite number above 0 (1.25: a quarter more rows than an expert has where routing is balanced)",
)


def _is_tiles(found: object) -> bool:
    return (type(found) is int and 0 < found <= MAX_TILES) or (isinstance(found, str) and found == "auto")


_TILES = _Satisfying(
    lambda found: found is False or _is_tiles(found), f'a whole number from 1 to {MAX_TILES}, "auto" or False'
)
_MLP_TILES = _Satisfying(_is_tiles, f'a whole number from 1 to {MAX_TILES}, or "auto"')

_PRECISION = _Satisfying(
    lambda found: isinstance(found, str | Precision),
    f"one of {', '.join(map(repr, NAMED))}, or an autopar.Precision",
)

_FOLDER = _Satisfying(lambda found: isinstance(found, str | os.PathLike), "the path of a folder")
_BUCKETS = _Satisfying(
    lambda found: isinstance(found, Buckets) or (isinstance(found, str) and found == "auto"),
    '"auto" or autopar.Buckets(…)',
)

_DEPTH = _Satisfying(
    lambda found: (type(found) is int and found in DEPTHS) or (isinstance(found, str) and found == "auto"),
    f'"auto", or how many layers ahead of their use weights are gathered, {", ".join(map(str, DEPTHS))}',
)

OPTIONS: Mapping[str, Schema] = {
    "mode": _WORD,
    "strategy": Maybe(_WORD),
    "plan": Maybe(_PLAN),
    "memory": Maybe(_MEMORY),
    "recompute": _WORD,
    "prefetch": _DEPTH,
    "optimizer": _OPTIMIZER,
    "master_copies": Flag(),
    "outputs": _WORD,
    "hardware": Maybe(_PROFILE),
    "solver": _WORD,
    "time_limit": _SECONDS,
    "gap": Maybe(Real(0)),
    "imbalance": Real(1),
    "deterministic": Flag(),
    "seed": Maybe(Whole(-(2**63), 2**64 - 1)),
    "microbatches": Maybe(Whole(1)),
    "pipeline": Maybe(_WORD),
    "schedule": Maybe(_WORD),
    "chunks": Maybe(Whole(1)),
    "stages": Maybe(_MODULES),
    "static_argnames": Maybe(_ARGUMENTS),
    "inputs": _PARTS,
    "check_inputs": Maybe(Flag()),
    "capacity_factor": Maybe(_FACTOR),
    "loss_tiles": Maybe(_TILES),
    "mlp_tiles": Maybe(_MLP_TILES),
    "weight_tiles": Flag(),
    "precision": Maybe(_PRECISION),
    "training": Flag(),
    "buckets": Maybe(_BUCKETS),
    "offload": _WORD,
    "host_memory": Maybe(_HOST_MEMORY),
    "plan_cache": Maybe(_FOLDER),
    "memory_conventions": _CONVENTIONS,
}
"""Argument → its valid values; None is also valid if it is the default."""


def check_options(given: Mapping[str, Any]) -> None:
    """Raise InputError for the first argument that is not of its kind."""
    for name, value in given.items():
        kind = OPTIONS.get(name)
        if kind is None:
            continue
        try:
            kind.check(value, name)
        except Malformed:
            needed = f"{kind.kind}, or None" if isinstance(kind, Maybe) else str(kind)
            raise InputError(f"{name}={reprlib.repr(value)}; give {needed}.") from None


def check_known(given: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Raise InputError for an argument that a function does not take by name."""
    known = [each.name for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise InputError(f"{unknown[0]} is no option here; options are {', '.join(known)}.")


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
