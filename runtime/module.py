"""The module that a user trains: the original names outside, one per-rank graph per kind of input inside."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.errors import InputError
from autopar.layout import Layout
from autopar.plan import Plan
from autopar.program import Program, info_of
from autopar.runtime.axes import use_mesh
from autopar.runtime.buckets import Regather
from autopar.runtime.code import readable_code
from autopar.runtime.dropout import use_randomness
from autopar.runtime.inputs import Arguments, canonical_arguments, kind_of, local_input
from autopar.runtime.parameters import as_stored, local_parts, placements_of, tie, ties_of
from autopar.runtime.recompute import Step, run, steps_of
from autopar.runtime.rewrite import LocalProgram

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Keep torch.compile out of a function and of all that it calls."""
    return torch.compiler.disable(function)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class GraphParameter:
    """A parameter as a graph takes it: its name, its placeholder, and the shape and dtype of a rank's part."""

    name: str
    path: tuple[str, ...]
    """The parts of its name."""
    placeholder: str
    local_shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Executable:
    """What runs one kind of input: the captured program, its plan, and the per-rank graph with what it takes."""

    program: Program
    plan: Plan
    local: LocalProgram
    parameters: tuple[GraphParameter, ...]
    constants: dict[str, torch.Tensor]
    """Placeholder → the constant, on the device of the mesh."""
    regathers: bool
    """Whether some gathered weights are freed after use and gathered again in the backward."""
    recomputing: tuple[Step, ...]
    """The calls of the graph where some are computed again in the backward; else none."""

    @classmethod
    def of(cls, program: Program, plan: Plan, local: LocalProgram, mesh: DeviceMesh) -> Executable:
        """Put together what runs a rewritten program on a mesh."""
        nodes = program.placeholders()
        parameters = []
        for name, placeholder in program.parameters.items():
            info = info_of(nodes[placeholder])
            shape = local.layouts[placeholder].local_shape(info.shape, mesh.shape)
            parameters.append(GraphParameter(name, tuple(name.split(".")), placeholder, shape, info.dtype))
        constants = {name: constant.to(mesh.device_type) for name, constant in program.constants.items()}
        regathers = any(node.kwargs.get("regather") for node in local.module.graph.nodes)
        steps = steps_of(local.module.graph)
        recomputing = steps if any(step.role is not None for step in steps) else ()
        return cls(program, plan, local, tuple(parameters), constants, regathers, recomputing)


Prepare = Callable[[Arguments, bool, frozenset[str] | None], Executable]
"""(arguments, training, names of frozen parameters if known) → what runs them; called once per kind of input."""


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

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """As in `torch.nn.Module`; an error before a lazily compiled model has seen its first inputs."""
        self._ready()
        return super().named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in `torch.nn.Module`; an error before a lazily compiled model has seen its first inputs."""
        self._ready()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As in `torch.nn.Module`; parameters may also be whole tensors, equal on every rank."""
        self._ready()
        ties = ties_of(self)
        result = super().load_state_dict(as_stored(self, state_dict), *args, **kwargs)
        tie(self, ties)
        return result

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """As in `torch.nn.Module` (`to`, `to_empty` …), but tied parameters stay tied."""
        self._ready()
        ties = ties_of(self)
        super()._apply(fn, recurse)
        tie(self, ties)
        return self

    @uncompiled
    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executable:
        """What runs these inputs, planned on their first appearance."""
        return self._prepared(canonical_arguments(self._forward_signature, args, kwargs))

    def _prepared(self, arguments: Arguments) -> Executable:
        frozen = self._frozen() if self._latest is not None else None
        key = kind_of(arguments, self._mesh.device_type), self.training, frozen
        if key not in self._executables:
            # A first call for inference is prepared for training all the same.
            with torch.inference_mode(False), torch.enable_grad():
                found = self._prepare(arguments, self.training, frozen)
            # The first graph gave the module its parameters, and the key must name those that are frozen.
            self._executables[*key[:2], self._frozen() if frozen is None else frozen] = found
            self._latest = found
        else:
            self._latest = self._executables[key]
        return self._latest

    def _frozen(self) -> frozenset[str]:
        """Frozen parameters get no gradient, which a graph is made for."""
        return frozenset(name for name, p in super().named_parameters() if not p.requires_grad)

    # Under torch.compile this frame runs as it is, and what it calls is compiled: the per-rank graph alone, because
    # everything else is disabled.
    @torch.compiler.disable(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the global batch."""
        executable, inputs = self._entered(args, kwargs)
        with self._surroundings(executable):
            if executable.recomputing and torch.is_grad_enabled():
                _check_not_compiled(executable)
                outputs = run(executable.local.module.graph, executable.recomputing, inputs)
            else:
                outputs = executable.local.module(*inputs)
        return self._left(executable, outputs)

    @uncompiled
    def _entered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Executable, list[torch.Tensor]]:
        """What runs these inputs, and what its graph takes."""
        arguments = canonical_arguments(self._forward_signature, args, kwargs)
        executable = self._prepared(arguments)
        program, layouts = executable.program, executable.local.layouts
        given: dict[str, torch.Tensor] = dict(executable.constants)
        stored = [self._parameter(parameter) for parameter in executable.parameters]
        parts = local_parts(stored, [parameter.local_shape for parameter in executable.parameters])
        given.update(zip((parameter.placeholder for parameter in executable.parameters), parts, strict=True))
        for name, placeholder in program.buffers.items():
            buffer = self.get_buffer(name)
            # The graph may keep the old value for its backward.
            given[placeholder] = buffer.clone() if name in program.mutations else buffer
        for placeholder, leaf in zip(program.inputs, pytree.tree_leaves(arguments), strict=True):
            if placeholder is not None:
                given[placeholder] = local_input(leaf, layouts[placeholder])
        return executable, [given[name] for name in executable.local.placeholders]

    def _parameter(self, wanted: GraphParameter) -> torch.Tensor:
        """A parameter as it is stored; InputError where it is no longer what the graph was made for."""
        owner: nn.Module = self
        for part in wanted.path[:-1]:
            owner = owner._modules[part]  # pyright: ignore[reportAssignmentType]
        parameter = owner._parameters[wanted.path[-1]]
        assert parameter is not None
        if parameter.is_meta:
            raise InputError(
                f"{wanted.name} is on the meta device and has no values; call "
                f'model.to_empty(device="{self._mesh.device_type}") and load a state dict before the first step.'
            )
        if parameter.dtype != wanted.dtype:
            raise InputError(
                f"{wanted.name} is {parameter.dtype} now and was {wanted.dtype} when the model was compiled; "
                "convert the model before autopar.compile."
            )
        return parameter

    @contextlib.contextmanager
    def _surroundings(self, executable: Executable) -> Iterator[None]:
        """What a graph runs in: the mesh, the seed of this step, no autocast (its casts are in the graph)."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(use_mesh(self._mesh))
            stack.enter_context(use_randomness(self._seed, self._step, self._deterministic))
            stack.enter_context(torch.autocast(self._mesh.device_type, enabled=False))
            if executable.regathers and torch.is_grad_enabled():
                stack.enter_context(Regather())
            yield
        self._step += 1

    @uncompiled
    def _left(self, executable: Executable, outputs: tuple[Any, ...]) -> Any:
        """What the user gets; mutated buffers are written."""
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


def _check_not_compiled(executable: Executable) -> None:
    """Raise InputError under torch.compile, which decides by itself what to keep and does not see saved tensors."""
    if get_eval_frame_callback() not in (None, False):
        modes = [step.role for step in executable.recomputing if step.role is not None]
        named = ", ".join(sorted({f"{role.segment}: {role.mode}" for role in modes}))
        raise InputError(
            f"torch.compile runs a plan that computes segments again in the backward ({named}), and it decides by "
            'itself what to keep; run the model without torch.compile, or use autopar.compile(..., recompute="none").'
        )
