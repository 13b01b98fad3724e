"""Executable of one kind of input on a rank: a captured program, its plan, and the per-rank graph with its inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.numbers.marked import tensor_for
from autopar.costs.plans.plan import Plan
from autopar.costs.space.parameter_buckets import axes_apart
from autopar.errors import InputError
from autopar.ir.program.gradient_hooks import use_hooks
from autopar.ir.program.program import Program, TensorInfo, info_of
from autopar.ir.program.python_state import PythonState
from autopar.runtime.collectives.gradient_buckets import gather_parameters, reduce_gradients
from autopar.runtime.collectives.mesh_axes import Axis, axes_on, gathering_groups, join_axes, use_axes
from autopar.runtime.collectives.regather import Regather
from autopar.runtime.implementations.randomness import Randomness, use_randomness
from autopar.runtime.module.inputs import Arguments, local_input
from autopar.runtime.module.parameters import local_parts
from autopar.runtime.module.unset_buffers import UnsetBuffers
from autopar.runtime.numbers.leaves import leaves_of
from autopar.runtime.outputs.sums import axes_of_sums
from autopar.runtime.recompute.graph import RankGraph
from autopar.runtime.recompute.random_state import generators_of_first_rank
from autopar.runtime.rewrite.layers import in_layers
from autopar.runtime.rewrite.per_rank_graph import LocalProgram
from autopar.runtime.rewrite.prefetch import fetched_ahead


def gathering_axes(plan: Plan) -> tuple[str, ...]:
    """Return the axes over which a plan fetches weights ahead in a backward that reduces over them, too; all ranks
    agree.
    """
    moved = ((each.collective, each.axis) for row in plan.rows for each in row.transfers if each.backward)
    return axes_apart(moved) if plan.prefetch else ()


def graph_of(module: fx.GraphModule, program: Program, plan: Plan) -> RankGraph:
    """Return a per-rank graph of a program, with its weights fetched ahead as the plan says."""
    return RankGraph(module, bool(program.python.hooks), in_layers, fetched_ahead(module, plan.prefetch))


@dataclass(frozen=True, slots=True)
class GraphParameter:
    """A parameter as a graph takes it: its name, its placeholder, and the shape and dtype of a rank's part."""

    name: str
    path: tuple[str, ...]
    """The parts of its name."""
    placeholder: str
    local_shape: tuple[int, ...]
    dtype: torch.dtype

    def check(self, stored: torch.Tensor, device: str) -> None:
        """Raise InputError where a parameter is no longer what the graph was made for."""
        if stored.is_meta:
            raise InputError(
                f"{self.name} is on the meta device and has no values; call "
                f'model.to_empty(device="{device}") and load a state dict before the first step.'
            )
        if stored.dtype != self.dtype:
            raise InputError(
                f"{self.name} is {stored.dtype} now and was {self.dtype} when the model was compiled; "
                "convert the model before autopar.compile."
            )


class Captured(Protocol):
    """Compiled form of one kind of input."""

    @property
    def python(self) -> PythonState:
        """State of Python that the forward read when it was captured."""
        ...

    @property
    def input_values(self) -> tuple[object, ...]:
        """The leaves of the inputs as the program has them."""
        ...


Runs = TypeVar("Runs", bound=Captured)
"""Compiled form of one kind of input: of a whole model, or of the stages of a rank."""


@dataclass(frozen=True, slots=True, eq=False)
class Executable:
    """Executable of one kind of input: the captured program, its plan, and the per-rank graph with its inputs."""

    program: Program
    plan: Plan
    local: LocalProgram
    mesh: DeviceMesh
    axes: Mapping[str, Axis]
    """Name in the graph → axis of the mesh, or joined axes."""
    parameters: tuple[GraphParameter, ...]
    buffers: dict[str, TensorInfo]
    constants: dict[str, torch.Tensor]
    """Placeholder → the constant, on the device of the mesh."""
    graph: RankGraph
    draws: bool
    """True if the graph draws random numbers."""

    @property
    def python(self) -> PythonState:
        """Python state that the forward has read."""
        return self.program.python

    @property
    def input_values(self) -> tuple[object, ...]:
        """The leaves of the inputs as the program has them: values, or descriptions of tensors."""
        return self.program.input_values

    @classmethod
    def of(cls, program: Program, plan: Plan, local: LocalProgram, mesh: DeviceMesh) -> Executable:
        """Put together what runs a rewritten program on a mesh, on all its ranks at once."""
        nodes = program.placeholders()
        parameters = []
        for name, placeholder in program.parameters.items():
            info = info_of(nodes[placeholder])
            shape = local.layouts[placeholder].local_shape(info.shape, mesh.shape)
            parameters.append(GraphParameter(name, tuple(name.split(".")), placeholder, shape, info.dtype))
        buffers = {name: info_of(nodes[placeholder]) for name, placeholder in program.buffers.items()}
        constants = {name: constant.to(mesh.device_type) for name, constant in program.constants.items()}
        draws = any("key" in node.kwargs for node in local.module.graph.nodes)
        graph = graph_of(local.module, program, plan)
        buckets = [node for node in local.module.graph.nodes if node.target in (gather_parameters, reduce_gradients)]
        summed = axes_of_sums(local.output_layouts, mesh.mesh_dim_names or (), mesh.shape)
        moved = sorted({axis for _, axis in plan.traffic} | summed)
        moved_over = dict.fromkeys((*(node.args[0] for node in buckets), *moved))
        joined = join_axes(mesh, moved_over)
        gathering = gathering_groups(mesh, gathering_axes(plan))
        axes = axes_on(mesh, joined, gathering)
        return cls(program, plan, local, mesh, axes, tuple(parameters), buffers, constants, graph, draws)

    def weights_of(self, root: nn.Module, waits: bool = False) -> dict[str, torch.Tensor]:
        """Return placeholder → this rank's part of each parameter that `root` stores, in the autograd graph.

        If it `waits`, one node waits for the reductions of all gradients, at the end of the backward.
        """
        stored: list[torch.Tensor] = []
        for parameter in self.parameters:  # in every step, so without a call for each
            owner: nn.Module = root
            for part in parameter.path[:-1]:
                owner = owner._modules[part]  # pyright: ignore[reportAssignmentType]
            found = owner._parameters[parameter.path[-1]]
            assert found is not None
            if found.is_meta or found.dtype != parameter.dtype:
                parameter.check(found, self.mesh.device_type)
            stored.append(found)
        parts = local_parts(stored, [parameter.local_shape for parameter in self.parameters], waits)
        return {parameter.placeholder: part for parameter, part in zip(self.parameters, parts, strict=True)}

    def buffers_of(self, root: nn.Module) -> dict[str, torch.Tensor]:
        """Return the placeholder → buffer of `root`, for one run of the graph; InputError where one has no values."""
        found: dict[str, torch.Tensor] = {}
        unset = getattr(root, "unset_buffers", None) or UnsetBuffers()
        missing = bool(unset)
        for name, placeholder in self.program.buffers.items():
            buffer, info = root.get_buffer(name), self.buffers[name]
            if buffer.shape != info.shape or buffer.dtype != info.dtype:
                raise InputError(
                    f"the buffer {name} is {list(buffer.shape)} of {buffer.dtype} now and was {list(info.shape)} of "
                    f"{info.dtype} when the model was compiled; give it that shape and dtype, "
                    "or change the model and call autopar.compile again."
                )
            missing = missing or buffer.is_meta
            # The graph may keep the old value for its backward.
            found[placeholder] = buffer.clone() if name in self.program.mutations else buffer
        if missing:
            unset.check(root, self.program.buffers)
        return found

    def inputs_of(self, arguments: Arguments) -> dict[str, torch.Tensor]:
        """Return placeholder → this rank's part of each input that the graph takes; a number that is a tensor there
        as one.
        """
        program = self.program
        leaves = zip(program.inputs, leaves_of(arguments)[0], program.input_values, strict=True)
        return {
            name: local_input(_as_tensor(leaf, value), self.local.layouts[name])
            for name, leaf, value in leaves
            if name is not None
        }

    def write_buffers(self, root: nn.Module, outputs: tuple[torch.Tensor, ...]) -> None:
        """Write what the graph has changed, from its flat output, into the buffers of `root`."""
        program = self.program
        if not program.mutations:
            return
        with torch.no_grad():
            for name, value in zip(program.mutations, outputs[program.num_results :], strict=True):
                root.get_buffer(name).copy_(value)

    @contextlib.contextmanager
    def surroundings(self, random: Randomness) -> Iterator[None]:
        """Enter the surroundings of the graph: the mesh, the seed of this step, no autocast (its casts are in the
        graph).
        """
        axes, drawn = use_axes(self.axes), use_randomness(random.seed, random.step, random.deterministic)
        with contextlib.ExitStack() as stack, axes, drawn:
            if random.deterministic and self.draws:
                stack.enter_context(generators_of_first_rank(self.mesh))
            if self.program.python.hooks:
                stack.enter_context(use_hooks(self.program.python.hooks))
            if torch.is_autocast_enabled(self.mesh.device_type):
                stack.enter_context(torch.autocast(self.mesh.device_type, enabled=False))
            if self.graph.regathers and torch.is_grad_enabled():
                stack.enter_context(Regather(self.plan.prefetch))
            yield


def _as_tensor(leaf: Tensor | int | float, value: object) -> Tensor:
    """Return an input as the program has it, for which a number may be a tensor."""
    assert isinstance(value, TensorInfo)
    return leaf if isinstance(leaf, Tensor) else tensor_for(leaf, value.dtype)
