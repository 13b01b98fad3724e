"""The module that a user trains: the original names outside, one per-rank graph per kind of input inside."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.errors import InputError
from autopar.layout import Layout
from autopar.plan import Plan
from autopar.program import Program, TensorInfo
from autopar.runtime import collectives
from autopar.runtime.buckets import Regather
from autopar.runtime.code import readable_code
from autopar.runtime.dropout import use_randomness
from autopar.runtime.parameters import local_part, placements_of
from autopar.runtime.rewrite import LocalProgram

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Executable:
    """What runs one kind of input: the captured program, its plan, and the per-rank graph."""

    program: Program
    plan: Plan
    local: LocalProgram
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """(name, local shape) of the graph's parameters, in the order of its placeholders."""

    @property
    def regathers(self) -> bool:
        return any(node.kwargs.get("regather") for node in self.local.module.graph.nodes)


Prepare = Callable[[tuple[Any, ...], dict[str, Any], bool], Executable]
"""(args, kwargs, training) → what runs them; called once for every new kind of input."""


class ParallelModule(nn.Module):
    """A model running on a mesh. Made by `autopar.compile`; used like the model it was made from.

    It takes the global batch as plain tensors, equal on every rank, or DTensors, and returns what the model returns:
    scalars as plain tensors, other tensors as DTensors (or whole, with `outputs="full"`).
    """

    def __init__(
        self,
        forward_signature: inspect.Signature,
        mesh: DeviceMesh,
        prepare: Prepare,
        *,
        whole_outputs: bool = False,
        deterministic: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._forward_signature = forward_signature
        self._mesh = mesh
        self._prepare = prepare
        self._whole_outputs = whole_outputs
        self._deterministic = deterministic
        self._seed = seed
        self._step = 0
        self._executables: dict[object, Executable] = {}
        self._latest: Executable | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the most recent kind of input."""
        return self._ready().plan

    @property
    def mesh(self) -> DeviceMesh:
        return self._mesh

    def print_code(self) -> None:
        """Print the per-rank graph as code: sections per module, layouts as comments, collectives by name."""
        print(readable_code(self._ready().local.module, self._mesh.mesh_dim_names or ()))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """As in `torch.nn.Module`; an error before a lazily compiled model has seen its first inputs."""
        self._ready()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in `torch.nn.Module`; an error before a lazily compiled model has seen its first inputs."""
        self._ready()
        return super().state_dict(*args, **kwargs)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executable:
        """What runs these inputs, planned on their first appearance."""
        args, kwargs = canonical_arguments(self._forward_signature, args, kwargs)
        key = _kind_of(args, kwargs, self.training)
        if key not in self._executables:
            self._executables[key] = self._prepare(args, kwargs, self.training)
        self._latest = self._executables[key]
        return self._latest

    @torch.compiler.disable(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the global batch."""
        executable = self.prepare(args, kwargs)
        leaves = pytree.tree_leaves(canonical_arguments(self._forward_signature, args, kwargs))
        with contextlib.ExitStack() as stack:
            stack.enter_context(collectives.use_mesh(self._mesh))
            stack.enter_context(use_randomness(self._seed, self._step, self._deterministic))
            if executable.regathers and torch.is_grad_enabled():
                stack.enter_context(Regather())
            inputs = self._graph_inputs(executable, leaves)
            outputs = executable.local.module(*inputs)
        if self.training:
            self._step += 1
        return self._user_outputs(executable, outputs)

    @torch.compiler.disable
    def _graph_inputs(self, executable: Executable, leaves: list[Any]) -> list[torch.Tensor]:
        program, local = executable.program, executable.local
        by_placeholder: dict[str, torch.Tensor] = {}
        for name, shape in executable.parameters:
            by_placeholder[program.parameters[name]] = local_part(self.get_parameter(name), shape)
        for name, placeholder in program.buffers.items():
            by_placeholder[placeholder] = self.get_buffer(name)
        for placeholder, constant in program.constants.items():
            by_placeholder[placeholder] = constant.to(self._mesh.device_type)
        for placeholder, leaf in zip(program.inputs, leaves, strict=True):
            if placeholder is not None:
                by_placeholder[placeholder] = self._local_input(leaf, local.layouts[placeholder])
        return [by_placeholder[name] for name in local.placeholders]

    def _local_input(self, value: torch.Tensor, layout: Layout) -> torch.Tensor:
        """This rank's part of an input. Slicing a plain tensor needs no communication."""
        if isinstance(value, DTensor):
            return value.redistribute(self._mesh, placements_of(layout)).to_local()
        for axis, placement in zip(self._mesh.mesh_dim_names or (), layout, strict=True):
            if placement.is_split:
                value = collectives.split(value, axis, placement.dim)
        return value

    @torch.compiler.disable
    def _user_outputs(self, executable: Executable, outputs: tuple[Any, ...]) -> Any:
        program, layouts = executable.program, executable.local.output_layouts
        with torch.no_grad():
            for name, value in zip(program.mutations, outputs[program.num_outputs :], strict=True):
                self.get_buffer(name).copy_(value)
        users = [
            self._user_output(value, layout)
            for value, layout in zip(outputs[: program.num_outputs], layouts, strict=False)
        ]
        return pytree.tree_unflatten(users, program.out_spec)

    def _user_output(self, value: Any, layout: Layout | None) -> Any:
        if layout is None or not isinstance(value, torch.Tensor) or value.ndim == 0 or self._whole_outputs:
            return value
        return DTensor.from_local(value, self._mesh, placements_of(layout), run_check=False)

    def _ready(self) -> Executable:
        if self._latest is None:
            raise InputError(
                "the model was compiled without example_inputs, so it has no parameters and no plan yet; "
                "call it once, or give autopar.compile(..., example_inputs=...)."
            )
        return self._latest


def canonical_arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """The same call with every argument by name, in the order of the signature; as it is where that cannot be."""
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in signature.parameters.values()):
        return args, dict(kwargs)
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise InputError(f"the inputs do not fit the model's forward{signature}: {error}.") from error
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    extra = bound.pop(rest, {}) if rest else {}
    return (), {**bound, **extra}


def _kind_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> object:
    """What a graph depends on: structure, shapes, dtypes and non-tensor values of the inputs, mode, autocast."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    device = next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    kinds = tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf))
        for leaf in leaves
    )
    return str(spec), kinds, training, autocast


def parameter_shapes(
    program: Program, local: LocalProgram, mesh_sizes: tuple[int, ...]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(name, local shape) of every parameter of a program in the layouts its graph takes."""
    nodes = program.placeholders()
    found = []
    for name, placeholder in program.parameters.items():
        info = nodes[placeholder].meta["tensor"]
        assert isinstance(info, TensorInfo)
        found.append((name, local.layouts[placeholder].local_shape(info.shape, mesh_sizes)))
    return tuple(found)
