"""Reasons for which a step cannot be one CUDA graph, found before it is captured.

A graph replays kernels with the arguments that they had. So no value may come from the host, such as a number that it
reads from the device. (Sizes that depend on values are refused when a model is captured.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import fx
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh

from autopar.costs.plans.plan import Plan
from autopar.errors import InputError
from autopar.ir.program.operators.expert_operators import DISPATCH, GROUPED_MM
from autopar.ir.program.program import Program
from autopar.planning.pipeline.schedules.schedule import UPDATING_OTHERWISE
from autopar.runtime.implementations import draws, experts
from autopar.runtime.recompute.marks import is_offloaded

CudaGraph = bool | Literal["auto", "none"]
"""Values of `Run(cuda_graph=…)`."""
WITHOUT = 'leave out Run(cuda_graph=True), or give "auto", which runs without a graph then.'
GROUPED_PRODUCTS = (GROUPED_MM, torch.ops.aten._grouped_mm.default)
WITH_GROUPED_KERNELS = (9, 10)
"""Major compute capabilities for which PyTorch has kernels of grouped products; others multiply in a loop."""
BY_HOST = "multiplies rows of experts by a product for which PyTorch reads their counts on the host"


class Captured(Protocol):
    """Executable of one kind of input."""

    @property
    def program(self) -> Program: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def local(self) -> _Local: ...


class _Local(Protocol):
    @property
    def module(self) -> fx.GraphModule: ...


def graph_is_required(
    cuda_graph: CudaGraph, mesh: DeviceMesh, training: bool, schedule: str | None = None
) -> bool | None:
    """Return whether steps must be graphs (True) or may be (False); None if they are not to be.

    Raises InputError if they must and cannot: on a CPU, with gloo, without `training`, with a pipeline's `schedule`
    that updates weights inside a step.
    """
    if cuda_graph is False or cuda_graph == "none":
        return None
    reason = _reason_on(mesh, training, schedule)
    if reason is not None and cuda_graph is True:
        raise InputError(f"Run(cuda_graph=True) {reason}; {WITHOUT}")
    return None if reason is not None else cuda_graph is True


def _reason_on(mesh: DeviceMesh, training: bool, schedule: str | None) -> str | None:
    if training and mesh.device_type != "cuda":
        return f"needs CUDA devices, and the mesh has the device type {mesh.device_type}"
    if (reason := _reason_anywhere(training, schedule)) is not None:
        return reason
    backends = [dist.get_backend(mesh.get_group(number)) for number in range(mesh.ndim)]
    by_host = [each for each in backends if each != "nccl"]
    return f"needs NCCL, and the mesh communicates by {by_host[0]}, on the host" if by_host else None


def _reason_anywhere(training: bool, schedule: str | None) -> str | None:
    if not training:
        return "is given with training=False, which has no step"
    if schedule in UPDATING_OTHERWISE:
        return f'is given with Pipeline(schedule="{schedule}"), which exchanges versions of the weights on the host'
    return None


def reason_offline(is_host: bool, training: bool, schedule: str | None) -> str | None:
    """Return why steps on planned devices, of a CPU where `is_host`, cannot be graphs; None if they may be."""
    if training and is_host:
        return "needs CUDA devices, and the hardware profile is of a CPU"
    return _reason_anywhere(training, schedule)


def reasons_of(executable: Captured, deterministic: bool = False) -> Iterator[str]:
    """Yield what in the per-rank graph needs the host in each step, in words, with what to do."""
    yield from reasons_in(executable.program, executable.plan, executable.local.module.graph, deterministic)
    if _dtypes_of_grouped_products(executable.program) and torch.cuda.is_available():
        major, _ = torch.cuda.get_device_capability()
        if major not in WITH_GROUPED_KERNELS:
            yield f"{BY_HOST} on a {torch.cuda.get_device_name()}; use Hopper or Blackwell GPUs"


def reasons_in(program: Program, plan: Plan, graph: fx.Graph, deterministic: bool = False) -> Iterator[str]:
    """Yield the same of the per-rank graph of a program and its plan; `deterministic` as in `Run`."""
    if deterministic and any("key" in node.kwargs for node in graph.nodes):
        yield "draws random numbers as one device would, by a state of the host; leave out Run(deterministic=True)"
    drawn = (node.kwargs["op"] for node in graph.nodes if node.target is draws.seeded)
    for op in dict.fromkeys(op for op in drawn if isinstance(op, OpOverload) and draws.taking_generator(op) is None):
        yield f"draws random numbers by {op}, which takes no generator; draw by torch.rand_like or nn.Dropout"
    if plan.offloads_optimizer or any(map(is_offloaded, graph.nodes)):
        yield 'moves tensors to host memory and back; plan with Memory(offload="none")'
    if program.python.hooks:
        yield "registers gradient hooks, which are Python; register none in its forward"
    for dtype in _dtypes_of_grouped_products(program) - {torch.bfloat16}:
        yield f'{BY_HOST} in {str(dtype).removeprefix("torch.")}; give precision="bf16-mixed"'
    if any(map(_exchanges_counted_rows, graph.nodes)):
        yield (
            "sends rows to experts, and the host reads how many; plan with Experts(padded=…), or keep experts whole on "
            'every rank, as annotate(model, "*experts*", tp="replicated") does on an axis tp, and drop no rows'
        )


def _dtypes_of_grouped_products(program: Program) -> set[torch.dtype]:
    return {node.meta["tensor"].dtype for node in program.graph.nodes if node.target in GROUPED_PRODUCTS}


def _exchanges_counted_rows(node: fx.Node) -> bool:
    """Return whether a dispatch keeps or sends some of its rows, which the host counts."""
    if node.target in (experts.dispatch, experts.start_dispatch):
        axes = node.kwargs["axes"]
        assert isinstance(axes, Mapping)
        return not _pads(node) and (bool(axes.get(experts.EXPERTS)) or _drops(node))
    return node.target is DISPATCH and _drops(node)


def _pads(node: fx.Node) -> bool:
    return (node.args[4] if len(node.args) > 4 else node.kwargs.get("padded")) is not None


def _drops(node: fx.Node) -> bool:
    return bool(node.args[3] if len(node.args) > 3 else node.kwargs.get("dropping", False))
