"""What users call: `compile` reads top-down: capture, plan, rewrite, run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.annotate import annotations_of, pins_of
from autopar.capture import capture, skeleton
from autopar.errors import AutoparError, InputError, MeshError
from autopar.hardware import Hardware, load
from autopar.layout import Layout, replicated
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.planner import choices_of, make_plan
from autopar.runtime.module import Executable, ParallelModule, canonical_arguments, parameter_shapes
from autopar.runtime.parameters import attach
from autopar.runtime.rewrite import rewrite
from autopar.sizes import parse_bytes
from autopar.space import build_space

Mode = Literal["auto", "semi_auto", "manual"]
ExampleInputs = tuple[Any, ...] | Mapping[str, Any]


def compile(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: ExampleInputs | None = None,
    *,
    mode: Mode = "auto",
    plan: Plan | None = None,
    memory: str | int | None = None,
    outputs: Literal["dtensor", "full"] = "dtensor",
    hardware: str | Hardware | None = None,
    solver: Literal["auto", "ilp"] = "auto",
    deterministic: bool = False,
    seed: int | None = None,
) -> ParallelModule:
    """Parallelize `model` over `mesh`: capture it, plan a layout for every operation, rewrite it, and run it there.

    Args:
        model: any module that `torch.export` can trace; its parameters may be on the meta device.
        mesh: a DeviceMesh with axis names, over ranks of an initialised process group.
        example_inputs: positional inputs (a tuple) or keyword inputs (a dict) of the global batch; only shapes and
            dtypes count. Without them the model is planned on its first call.
        mode: "auto" (the solver decides; pins hold), "semi_auto" (the same, and every annotation must match
            something), "manual" (what is not annotated is data parallel).
        plan: a plan made before; nothing is solved.
        memory: hard limit per device, in bytes or as text ("8GB").
        outputs: "dtensor" or "full": how tensors that are no scalars come back.
        hardware: name or path of a hardware profile, or a `Hardware`.
        solver: "auto" or "ilp" (the plain reference ILP).
        deterministic: dropout equal to one device's, at the price of drawing whole masks.
        seed: of dropout; by default rank 0's `torch.initial_seed()`.

    Raises:
        CaptureError, AnnotationError, MeshError, PlanError, InfeasibleError, InputError: see their messages.
    """
    _check_mesh(mesh)
    _check_options(mode, outputs)
    abstract = Mesh.of(mesh)
    profile = _profile(hardware, abstract)
    limit = None if memory is None else parse_bytes(memory)
    traced = skeleton(model)
    annotations = annotations_of(model)
    signature = inspect.signature(model.forward)
    storage: dict[str, Layout] = {}

    def prepare(args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Executable:
        program = capture(traced, args, kwargs, training=training)
        space = build_space(program, abstract, profile, whole_outputs=outputs == "full")

        def solve() -> Plan:
            pins = pins_of(annotations, space, mode, storage)
            return make_plan(space, pins, limit, solver)[0]

        first = not storage
        agreed = _agree(plan if plan is not None and first else None, solve, mesh)
        local = rewrite(space, choices_of(agreed, space))
        if first:
            storage.update({name: local.layouts[node] for name, node in program.parameters.items()})
            attach(module, model, storage, mesh, replicated(abstract.ndim))
        return Executable(program, agreed, local, parameter_shapes(program, local, abstract.sizes))

    module = ParallelModule(
        signature,
        mesh,
        prepare,
        whole_outputs=outputs == "full",
        deterministic=deterministic,
        seed=_shared(torch.initial_seed() if seed is None else seed, mesh),
    )
    module.train(model.training)
    if example_inputs is not None:
        args, kwargs = _example(example_inputs)
        module.prepare(args, kwargs)
    return module


def plan(
    model: nn.Module,
    mesh: Mesh | DeviceMesh,
    example_inputs: ExampleInputs,
    *,
    mode: Mode = "auto",
    memory: str | int | None = None,
    outputs: Literal["dtensor", "full"] = "dtensor",
    hardware: str | Hardware | None = None,
    solver: Literal["auto", "ilp"] = "auto",
) -> Plan:
    """Plan without running: needs no process group and no devices; see `compile` for the arguments.

    >>> plan(model, Mesh({"dp": 8, "tp": 8}, hardware="h100"), (ids, labels))  # doctest: +SKIP
    """
    _check_options(mode, outputs)
    abstract = Mesh.of(mesh)
    args, kwargs = canonical_arguments(inspect.signature(model.forward), *_example(example_inputs))
    program = capture(skeleton(model), args, kwargs, training=model.training)
    space = build_space(program, abstract, _profile(hardware, abstract), whole_outputs=outputs == "full")
    pins = pins_of(annotations_of(model), space, mode, {})
    return make_plan(space, pins, None if memory is None else parse_bytes(memory), solver)[0]


def _profile(hardware: str | Hardware | None, mesh: Mesh) -> Hardware:
    return hardware if isinstance(hardware, Hardware) else load(hardware or mesh.hardware)


def _check_options(mode: str, outputs: str) -> None:
    if mode not in ("auto", "semi_auto", "manual"):
        raise InputError(f'mode={mode!r}; modes are "auto", "semi_auto" and "manual".')
    if outputs not in ("dtensor", "full"):
        raise InputError(f'outputs={outputs!r}; outputs are "dtensor" or "full".')


def _check_mesh(mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"compile needs a DeviceMesh over ranks of a process group, found {type(mesh).__name__}; "
            'make one with init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).'
        )


def _example(example_inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    raise InputError(
        f"example_inputs is a {type(example_inputs).__name__}; give a tuple of positional inputs, (x,), "
        "or a dict of keyword inputs."
    )


def _agree(given: Plan | None, solve: Any, mesh: DeviceMesh) -> Plan:
    """The same plan on every rank: the mesh's first rank makes it, the others receive its text, or its error."""
    if not _many_processes(mesh):
        return given or solve()
    message: list[Any] = [None]
    error: Exception | None = None
    if dist.get_rank() == int(mesh.mesh.flatten()[0]):
        try:
            message = [(given or solve()).to_json()]
        except AutoparError as found:
            error, message = found, [found]
    _broadcast(message, mesh)
    if isinstance(message[0], Exception):
        raise error or message[0]
    return Plan.from_json(message[0])


def _shared(value: int, mesh: DeviceMesh) -> int:
    """The first rank's value, on every rank."""
    message = [value]
    if _many_processes(mesh):
        _broadcast(message, mesh)
    return message[0]


def _many_processes(mesh: DeviceMesh) -> bool:
    """Whether the mesh spans processes; simulated ranks share one."""
    return mesh.size() > 1 and dist.get_backend() != "fake"


def _broadcast(message: list[Any], mesh: DeviceMesh) -> None:
    """Send the first rank's message to the whole mesh, one axis after the other, outermost last."""
    for axis in reversed(range(mesh.ndim)):
        group = mesh.get_group(axis)
        dist.broadcast_object_list(message, src=dist.get_global_rank(group, 0), group=group)
