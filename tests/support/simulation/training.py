"""Training of any model on one process and on simulated ranks, so that one can be compared with the other.

What is compared: the loss of every step, the outputs and every parameter's gradient of the first, and parameters and
buffers after the last.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode, local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import autopar
from autopar.capture.export import Traced
from autopar.costs.hardware.profile import Hardware, Link
from autopar.costs.plans.plan import Plan
from autopar.costs.space.space import Space
from autopar.planning import best_plan, request
from autopar.runtime.module.executable import Executable
from tests.support.options import by_flag
from tests.support.simulation.simulate import from_ranks, local_values, simulate

SLOW_DEVICES = Hardware(
    "slow devices, fast links",
    {"float32": 1e8, "float64": 1e8},
    1e8,
    10**9,
    0.0,
    (Link("wire", None, 0.0, 1e12),),
)
"""Everything pays that divides the work, so that plans are truly split."""

Batch = Mapping[str, Any]
Pins = dict[int, np.ndarray]
# foreach is off: simulated ranks do not know its calls. A large eps: rounding must not become whole steps.
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9, weight_decay=0.01, foreach=False),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=1e-2, foreach=False),
}


@dataclass(frozen=True, slots=True)
class Steps:
    """Training steps of a model: one per batch, given by keyword."""

    batches: Sequence[Batch]
    optimizer: str = "sgd"
    num_microbatches: int = 1
    evaluated: bool = False
    """True if the last batch is run again in evaluation mode."""


@dataclass(slots=True)
class Training:
    """Results of a training; every value once per rank, whole."""

    losses: list[list[Tensor]] = field(default_factory=list)
    outputs: dict[str, list[Tensor] | None] = field(default_factory=dict)
    gradients: dict[str, list[Tensor] | None] = field(default_factory=dict)
    buffers: dict[str, list[Tensor] | None] = field(default_factory=dict)
    parameters: dict[str, list[Tensor] | None] = field(default_factory=dict)
    split: float = 0.0
    """Share of the calls with a weight or a contraction that the plan splits; simulated ranks only."""
    plan: Plan | None = None
    """Plan that simulated ranks run."""

    @property
    def is_finite(self) -> bool:
        """True if all numbers are finite and none is huge (1e6 or more)."""
        tensors = pytree.tree_leaves((self.losses, self.gradients, self.parameters))
        return all(not x.numel() or float(x.abs().max()) < 1e6 for x in tensors if isinstance(x, Tensor))


def train_alone(model: nn.Module, steps: Steps) -> Training:
    """Train on one process."""

    def step(batch: Batch) -> tuple[Any, Tensor]:
        num, total, outputs = steps.num_microbatches, torch.zeros(()), None
        for i in range(num):
            outputs = model(
                **{name: x.chunk(num)[i] if isinstance(x, Tensor) and num > 1 else x for name, x in batch.items()}
            )
            loss = loss_of(outputs) / num
            loss.backward()
            total = total + loss.detach()
        return outputs, total

    return _train(model, steps, step, steps.batches)


def train_on_ranks(
    model: nn.Module,
    steps: Steps,
    mesh: Mapping[str, int],
    options: Mapping[str, Any],
    forced: Callable[[Space, Pins], Pins] = lambda space, pins: pins,
    device: str = "cpu",
) -> Training:
    """Compile with `options` for a mesh of simulated ranks, and train there; `forced` adds to the pins of a plan.

    Model and batches lie on the `device`, as all simulated ranks do.
    """
    num_ranks = math.prod(mesh.values())
    with simulate(num_ranks) as mode, planning_alone(mode, forced):
        device_mesh = init_device_mesh(device, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        specified: dict[str, Any] = {"hardware": SLOW_DEVICES, "deterministic": True, **options}
        compiled = autopar.compile(model, device_mesh, steps.batches[0], **by_flag(**specified))
        unshare(compiled, mode)

        def step(batch: Batch) -> tuple[Any, Tensor]:
            if steps.num_microbatches > 1:
                return None, compiled.train_step(**batch)
            outputs = compiled(**batch)
            loss = loss_of(outputs)
            loss.backward()
            return outputs, loss.detach()

        given = pytree.tree_map_only(Tensor, lambda x: from_ranks([x] * num_ranks), list(steps.batches))
        found = _train(compiled, steps, step, given)
        rows = [row for row in compiled.plan.rows if row.kind == "call"]
        split = [row for row in rows if any(role not in ("replicated", "partial") for role in row.roles)]
        found.split = len(split) / max(1, len(rows))
        found.plan = compiled.plan
        return found


def train_alike(
    model: nn.Module,
    steps: Steps,
    mesh: Mapping[str, int],
    options: Mapping[str, Any],
    forced: Callable[[Space, Pins], Pins] = lambda space, pins: pins,
    device: str = "cpu",
) -> Plan:
    """Check that simulated ranks train as one process does; returns their plan."""
    alone = copy.deepcopy(model)
    found = train_on_ranks(model, steps, mesh, options, forced, device)
    assert fault_of(found, train_alone(alone, steps)) == ""
    assert found.plan is not None
    return found.plan


def _train(
    model: nn.Module, steps: Steps, step: Callable[[Batch], tuple[Any, Tensor]], batches: Sequence[Batch]
) -> Training:
    found = Training()
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[steps.optimizer](learning) if learning else None
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        outputs, loss = step(batch)
        found.losses.append(_values(loss))
        if number == 0:
            found.gradients = {n: None if p.grad is None else _values(p.grad) for n, p in model.named_parameters()}
            if steps.num_microbatches == 1:
                leaves = pytree.tree_leaves(outputs)
                found.outputs = {str(i): _values(x) for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    if steps.evaluated and steps.num_microbatches == 1:
        model.eval()
        with torch.no_grad():
            found.losses.append(_values(loss_of(model(**batches[-1]))))
    found.parameters = {name: _values(p) for name, p in model.named_parameters()}
    found.buffers = {name: _values(b) for name, b in model.named_buffers()}
    return found


@contextlib.contextmanager
def planning_alone(
    mode: LocalTensorMode, forced: Callable[[Space, Pins], Pins] = lambda space, pins: pins
) -> Iterator[None]:
    """Capture and plan outside of the simulation, which tensors without values are not for; constants lie on ranks."""

    def unsimulated(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            with mode.disable():
                return function(*given, **named)

        return run

    def pinned(annotations: Any, space: Space, *given: Any) -> Pins:
        return forced(space, pins_of(annotations, space, *given))

    def with_constants(*given: Any) -> Executable:
        made = executable_of(*given)
        return replace(made, constants={name: on_ranks(constant, mode) for name, constant in made.constants.items()})

    pins_of, executable_of = best_plan.pins_of, Executable.of
    with contextlib.ExitStack() as stack:
        for module, name in (
            (request, "trace"),
            (request, "build_space"),
            (best_plan, "best_plan_of"),
            (Traced, "program"),
        ):
            stack.enter_context(mock.patch.object(module, name, unsimulated(getattr(module, name))))
        stack.enter_context(mock.patch.object(best_plan, "pins_of", pinned))
        stack.enter_context(mock.patch.object(Executable, "of", with_constants))
        yield


def on_ranks(tensor: Tensor, mode: LocalTensorMode) -> Tensor:
    """A copy of a tensor for each simulated rank, which alone they slice and write apart."""
    with mode.disable():
        copies = {rank: tensor.detach().clone() for rank in mode.ranks}
        return LocalTensor(copies)  # pyright: ignore[reportReturnType]


def unshare(model: nn.Module, mode: LocalTensorMode) -> None:
    """Give every simulated rank its own parameters and buffers: one plain tensor for all would be written by each."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if isinstance(tensor, DTensor):
                    if not isinstance(tensor._local_tensor, LocalTensor):
                        tensor._local_tensor = on_ranks(tensor._local_tensor, mode)
                elif tensor is not None and not isinstance(tensor, LocalTensor):
                    if tensor not in made:
                        copies, learns = on_ranks(tensor, mode), tensor.requires_grad
                        made[tensor] = copies if table is module._buffers else nn.Parameter(copies, learns)
                    table[name] = made[tensor]  # pyright: ignore[reportArgumentType]


def loss_of(outputs: Any) -> Tensor:
    """The loss among what a model returns: its only output, the one called "loss", or the first."""
    loss = getattr(outputs, "loss", outputs) if not isinstance(outputs, Tensor) else outputs
    loss = loss[0] if isinstance(loss, (tuple, list)) else loss
    return _whole(loss)


def _whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _values(x: Tensor) -> list[Tensor]:
    """Return a tensor's whole value on every rank, or one value on one process."""
    x, mode = _whole(x).detach(), local_tensor_mode()
    if mode is None:
        return [x.clone()]
    values = local_values(x)
    with mode.disable():
        return [value.clone() for value in values]


def fault_of(found: Training, expected: Training, relative: float = 1e-6, absolute: float = 1e-9) -> str:
    """Return the first difference from one process; empty if there is none.

    Entries may be apart by `relative` of themselves and of a tenth of the largest one, and by `absolute`.
    """
    for number, (ours, (loss,)) in enumerate(zip(found.losses, expected.losses, strict=True)):
        fault = _apart(ours, loss, relative, absolute)
        if fault:
            return f"loss of step {number}: {fault}"
    for kind in ("outputs", "gradients", "buffers", "parameters"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        if ours.keys() != theirs.keys():
            return f"{kind}: {sorted(ours)} instead of {sorted(theirs)}"
        for name, value in theirs.items():
            if (value is None) != (ours[name] is None):
                return f"{kind} of {name}: None on {'one process' if value is None else 'ranks'} only"
            fault = "" if value is None else _apart(ours[name], value[0], relative, absolute)
            if fault:
                return f"{kind} of {name}: {fault}"
    return ""


def _apart(found: list[Tensor], expected: Tensor, relative: float, absolute: float) -> str:
    """Return how the values of the ranks differ from that of one process; empty if they do not."""
    exact = not (expected.is_floating_point() or expected.is_complex())
    scale = 1.0 if exact or not expected.numel() else max(1.0, float(expected.abs().max()))
    for rank, value in enumerate(found):
        if value.shape != expected.shape:
            return f"{list(value.shape)} on rank {rank} instead of {list(expected.shape)}"
        if value.dtype != expected.dtype:
            return f"{value.dtype} on rank {rank} instead of {expected.dtype}"
        if exact:
            if not torch.equal(value, expected):
                return f"{int((value != expected).sum())} entries differ on rank {rank}"
        elif not torch.allclose(value, expected, rtol=relative, atol=absolute + relative * scale / 10, equal_nan=True):
            far = float((value - expected).abs().max())
            return f"{far:.3g} apart on rank {rank}, largest entry {scale:.3g}"
    return ""
