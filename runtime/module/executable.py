"""Executable of one kind of input on a rank: a captured program, its plan, and the per-rank graph with its inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.numbers.marked import tensor_for
from autopar.capture.static.arguments import StaticTensor
from autopar.costs.plans.plan import Plan
from autopar.costs.space.parameter_buckets import axes_apart
from autopar.errors import InputError
from autopar.ir.program.gradient_hooks import use_hooks
from autopar.ir.program.program import Program, TensorInfo, info_of
from autopar.ir.program.python_state import PythonState
from autopar.runtime.collectives.gradient_buckets import gather_parameters, reduce_gradients
from autopar.runtime.collectives.mesh_axes import Axis, axes_on, gathering_groups, join_axes, put_axes
from autopar.runtime.collectives.regather import Regather
from autopar.runtime.collectives.reused_weights import ReusedBuckets
from autopar.runtime.implementations.randomness import Randomness, put_randomness
from autopar.runtime.module.inputs import Arguments, local_input
from autopar.runtime.module.parameters import SharedParts, local_parts
from autopar.runtime.module.unset_buffers import UnsetBuffers
from autopar.runtime.numbers.leaves import leaves_of
from autopar.runtime.outputs.sums import axes_of_sums
from autopar.runtime.recompute.graph import RankGraph
from autopar.runtime.recompute.random_state import generators_of_first_rank
from autopar.runtime.rewrite.layers import in_layers
from autopar.runtime.rewrite.per_rank_graph import LocalProgram
from autopar.runtime.rewrite.prefetch import emptied_after_use, fetched_ahead


def gathering_axes(plan: Plan) -> tuple[str, ...]:
    """Return the axes over which a plan fetches weights ahead in a backward that reduces over them, too; all ranks
    agree.
    """
    moved = ((each.collective, each.axis) for row in plan.rows for each in row.transfers if each.backward)
    return axes_apart(moved) if plan.prefetch else ()


def graph_of(module: fx.GraphModule, program: Program, plan: Plan) -> RankGraph:
    """Return a per-rank graph of a program, with its weights fetched ahead as the plan says."""
    ahead = fetched_ahead(module, plan.prefetch)
    return RankGraph(module, bool(program.python.hooks), in_layers, ahead, emptied_after_use(ahead))


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
    device: str
    """Type of device of the mesh."""
    moves_weights: bool
    """True if the graph gathers weights or reduces their gradients."""
    returns_constants: bool
    """True if an output may be a static input, which is a constant of the graph."""

    @property
    def here(self) -> tuple[Executable, ...]:
        """Executables of this rank: this one alone, where a `Pipeline` has one for each stage."""
        return (self,)

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
        of_graph = axes, tuple(parameters), buffers, constants, graph, draws
        returns_constants = any(isinstance(each, StaticTensor) for each in program.input_values)
        return cls(program, plan, local, mesh, *of_graph, mesh.device_type, bool(buckets), returns_constants)

    def weights_of(self, root: nn.Module, shared: SharedParts | None = None) -> dict[str, torch.Tensor]:
        """Return placeholder → this rank's part of each parameter that `root` stores, in the autograd graph.

        If they are `shared`, one node waits for the reductions of all gradients, at the end of the backward.
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
        shapes = [parameter.local_shape for parameter in self.parameters]
        parts = local_parts(stored, shapes, shared, self.moves_weights)
        return {parameter.placeholder: part for parameter, part in zip(self.parameters, parts, strict=True)}

    def buffers_of(self, root: nn.Module) -> dict[str, torch.Tensor]:
        """Return the placeholder → buffer of `root`, for one run of the graph; InputError where one has no values."""
        found: dict[str, torch.Tensor] = {}
        unset: UnsetBuffers | None = getattr(root, "unset_buffers", None)
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
            (unset or UnsetBuffers()).check(root, self.program.buffers)
        return found

    def inputs_of(self, arguments: Arguments) -> dict[str, torch.Tensor]:
        """Return placeholder → this rank's part of each input that the graph takes; a number that is a tensor there
        as one.
        """
        program = self.program
        leaves = zip(program.inputs, leaves_of(arguments)[0], program.input_values, strict=True)
        return {
            name: leaf if type(leaf) is Tensor else local_input(_as_tensor(leaf, value), self.local.layouts[name])
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


class Surroundings:
    """The surroundings of a graph: the mesh, the seed of this step, no autocast (its casts are in the graph).

    Entered in every step, so that only what a graph needs costs calls. Weights that are gathered again are those of
    `buckets`.
    """

    __slots__ = ("_before", "_buckets", "_executable", "_others", "_random")

    def __init__(self, executable: Executable, random: Randomness, buckets: ReusedBuckets | None = None) -> None:
        self._executable, self._random, self._buckets = executable, random, buckets

    def __enter__(self) -> None:
        executable, random = self._executable, self._random
        others: list[contextlib.AbstractContextManager[Any]] = []
        if random.deterministic and executable.draws:
            others.append(generators_of_first_rank(executable.mesh))
        if executable.program.python.hooks:
            others.append(use_hooks(executable.program.python.hooks))
        if torch.is_autocast_enabled(executable.device):
            others.append(torch.autocast(executable.device, enabled=False))
        if executable.graph.regathers and torch.is_grad_enabled():
            others.append(Regather(executable.plan.prefetch, self._buckets))
        self._before = put_axes(executable.axes), put_randomness(random)
        self._others: contextlib.ExitStack | None = None
        if others:
            try:
                with contextlib.ExitStack() as stack:
                    for each in others:
                        stack.enter_context(each)
                    self._others = stack.pop_all()
            except BaseException:
                self.__exit__(None, None, None)
                raise

    def __exit__(self, *raised: Any) -> bool | None:
        try:
            return self._others.__exit__(*raised) if self._others is not None else None
        finally:
            put_axes(self._before[0])
            put_randomness(self._before[1])


def _as_tensor(leaf: Tensor | int | float, value: object) -> Tensor:
    """Return an input as the program has it, for which a number may be a tensor."""
    assert isinstance(value, TensorInfo)
    return leaf if isinstance(leaf, Tensor) else tensor_for(leaf, value.dtype)
