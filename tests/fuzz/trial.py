"""One case on one process and on simulated ranks: loss, gradients, outputs, and parameters and buffers after steps."""

from __future__ import annotations

import contextlib
import random
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from autopar.compiler import whole as whole_model
from autopar.errors import AutoparError
from autopar.hardware.profile import Hardware, Link
from autopar.planning import request
from autopar.space.space import Space
from tests.fuzz.case import Case
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
RELATIVE, ABSOLUTE = 1e-6, 1e-9
"""How far numbers may be apart; some are rounded to float32 on the way."""
PLANNING_SECONDS = 10.0
GOOD, BAD = ("equal", "refused", "unusable"), ("wrong", "internal", "hang")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case: "equal", "refused", "unusable" (one process fails), "wrong", "internal" or "hang"."""

    kind: str
    text: str = ""
    """What is wrong, or the error in one line."""
    details: str = ""
    """The traceback, where there is one."""

    @property
    def is_bad(self) -> bool:
        return self.kind in BAD

    @property
    def cause(self) -> str:
        """What failures of one cause have in common: the class of the error and where it was raised."""
        places = [line.strip() for line in self.details.splitlines() if line.strip().startswith("File ")]
        ours = [
            place
            for place in places
            if "/tests/" not in place and "site-packages" not in place and "lib/python" not in place
        ]
        where = ours[-1].rpartition("/")[2].replace('", line ', ":").replace(", in ", " ") if ours else ""
        return f"{self.kind}: {self.text.split(':')[0][:60]} {where}".strip()


@dataclass(slots=True)
class Training:
    """What a run leaves behind; every value once per rank."""

    losses: list[list[Tensor]] = field(default_factory=list)
    gradients: dict[str, list[Tensor] | None] = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    parameters: dict[str, list[Tensor]] = field(default_factory=dict)
    buffers: dict[str, list[Tensor]] = field(default_factory=dict)


class OutOfTimeError(Exception):
    """A case has taken longer than it may."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in this thread, the main one, after so many seconds."""

    def stop(*_: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judge(case: Case, seconds: float = 60.0) -> Outcome:
    """Run a case both ways and compare."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = _alone(case)
        except Exception as error:
            return Outcome("unusable", _line(error))
        if not _is_finite(expected):
            return Outcome("unusable", "one process computes inf or nan")
        try:
            with time_limit(seconds):
                found = _on_ranks(case)
        except OutOfTimeError:
            return Outcome("hang", f"more than {seconds:g} s", traceback.format_exc())
        except AutoparError as error:
            return Outcome("refused", _line(error), traceback.format_exc())
        except Exception as error:
            return Outcome("internal", _line(error), traceback.format_exc())
    fault = _fault(found, expected)
    return Outcome("wrong", fault) if fault else Outcome("equal")


def _alone(case: Case) -> Training:
    model = case.program.build()
    found = Training()

    def train_step(batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
        num = case.num_microbatches
        parts = [{name: x.chunk(num)[i] for name, x in batch.items()} for i in range(num)]
        total = torch.zeros(())
        outputs = None
        for part in parts:
            outputs = model(**part)
            loss = _loss_of(outputs) / num
            loss.backward()
            total = total + loss.detach()
        return outputs, total

    _train(case, model, found, train_step, [case.program.batch(step) for step in range(case.steps)])
    return found


def _on_ranks(case: Case) -> Training:
    model, found = case.program.build(), Training()
    batches = [case.program.batch(step) for step in range(case.steps)]
    for pattern, said in case.annotations:
        autopar.annotate(model, pattern, **said)
    with simulate(case.num_ranks) as mode, planning_alone(mode, case):
        mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=case.axes)
        compiled = autopar.compile(
            model,
            mesh,
            batches[0],
            deterministic=True,
            **{"hardware": SLOW_DEVICES, "time_limit": PLANNING_SECONDS, **case.options},
        )
        _unshare(compiled, mode)

        def step(batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
            if case.num_microbatches > 1:
                return None, compiled.train_step(**batch)
            outputs = compiled(**batch)
            loss = _loss_of(outputs)
            loss.backward()
            return outputs, loss.detach()

        given = pytree.tree_map_only(Tensor, lambda x: from_ranks([x] * case.num_ranks), batches)
        _train(case, compiled, found, step, given)
    return found


def _train(
    case: Case,
    model: nn.Module,
    found: Training,
    step: Callable[[dict[str, Tensor]], tuple[Any, Tensor]],
    batches: Sequence[dict[str, Tensor]],
) -> None:
    # foreach is off: simulated ranks do not know its calls. A large eps: rounding must not become whole steps.
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9, weight_decay=0.01, foreach=False),
        "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=1e-2, foreach=False),
    }
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = kinds[case.optimizer](learning or [nn.Parameter(torch.zeros(1))])
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        outputs, loss = step(batch)
        found.losses.append(_values(loss))
        if number == 0:
            found.gradients = {n: None if p.grad is None else _values(p.grad) for n, p in model.named_parameters()}
            if isinstance(outputs, tuple) and case.num_microbatches == 1:
                found.outputs = {str(i): _values(value) for i, value in enumerate(outputs)}
        optimizer.step()
        optimizer.zero_grad()
    if case.evaluated and case.num_microbatches == 1:
        model.eval()
        with torch.no_grad():
            found.losses.append(_values(_loss_of(model(**batches[-1]))))
    found.parameters = {name: _values(p) for name, p in model.named_parameters()}
    found.buffers = {name: _values(b) for name, b in model.named_buffers()}


@contextlib.contextmanager
def planning_alone(mode: LocalTensorMode, case: Case | None = None) -> Iterator[None]:
    """Capture and plan outside of the simulation, which has no use for tensors without values; force what is forced."""

    def unsimulated(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            with mode.disable():
                return function(*given, **named)

        return run

    def forced(*given: Any, **named: Any) -> Any:
        pins = pins_of(*given, **named)
        return pins if case is None else _forced(case, given[1], pins)

    pins_of = request.pins_of
    with contextlib.ExitStack() as stack:
        for module, name in ((whole_model, "capture"), (request, "build_space"), (request, "make_plan")):
            stack.enter_context(mock.patch.object(module, name, unsimulated(getattr(module, name))))
        stack.enter_context(mock.patch.object(request, "pins_of", forced))
        yield


def _forced(case: Case, space: Space, pins: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """The pins, and one strategy at random for a share of the decisions; the same one wherever the decision stands."""
    forced = dict(pins)
    stored = {space.index[name] for name in space.program.parameters.values()} if len(pins) else set()
    for number, decision in enumerate(space.decisions):
        chance = random.Random(f"{case.seed} {decision.name}")
        allowed = pins[number] if number in pins else np.ones(len(decision.menu.strategies), dtype=bool)
        if chance.random() >= case.forced or (number in stored and number in pins):
            continue
        mask = np.zeros(len(allowed), dtype=bool)
        mask[chance.choice(np.flatnonzero(allowed).tolist())] = True
        forced[number] = mask
    return forced


def _unshare(model: nn.Module, mode: LocalTensorMode) -> None:
    """Give every simulated rank its own parameters and buffers: one plain tensor for all would be written by each."""
    made: dict[Tensor, Tensor] = {}

    def on_ranks(tensor: Tensor) -> Tensor:
        with mode.disable():
            return LocalTensor({rank: tensor.detach().clone() for rank in mode.ranks})  # pyright: ignore

    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if isinstance(tensor, DTensor):
                    if not isinstance(tensor._local_tensor, LocalTensor):
                        tensor._local_tensor = on_ranks(tensor._local_tensor)
                elif tensor is not None and not isinstance(tensor, LocalTensor):
                    if tensor not in made:
                        copies = on_ranks(tensor)
                        learns = tensor.requires_grad
                        made[tensor] = copies if table is module._buffers else nn.Parameter(copies, learns)
                    table[name] = made[tensor]  # pyright: ignore[reportArgumentType]


def _loss_of(outputs: Any) -> Tensor:
    loss = outputs[0] if isinstance(outputs, tuple) else outputs
    return _whole(loss)


def _whole(x: Any) -> Any:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _values(x: Tensor) -> list[Tensor]:
    """What a tensor is, whole, on every rank; on one process one value."""
    x, mode = _whole(x).detach(), local_tensor_mode()
    if mode is None:
        return [x.clone()]
    values = local_values(x)
    with mode.disable():
        return [value.clone() for value in values]


def _is_finite(found: Training) -> bool:
    tensors = pytree.tree_leaves((found.losses, found.gradients, found.parameters))
    return all(bool(x.isfinite().all()) and float(x.abs().max()) < 1e6 for x in tensors if isinstance(x, Tensor))


def _fault(found: Training, expected: Training) -> str:
    """What differs first; empty where nothing does."""
    for number, (ours, (loss,)) in enumerate(zip(found.losses, expected.losses, strict=True)):
        fault = _apart(ours, loss)
        if fault:
            return f"loss of step {number}: {fault}"
    for kind in ("outputs", "gradients", "buffers", "parameters"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        if ours.keys() != theirs.keys():
            return f"{kind}: {sorted(ours)} instead of {sorted(theirs)}"
        for name, value in theirs.items():
            if (value is None) != (ours[name] is None):
                return f"{kind} of {name}: None on {'one process' if value is None else 'ranks'} only"
            fault = "" if value is None else _apart(ours[name], value[0])
            if fault:
                return f"{kind} of {name}: {fault}"
    return ""


def _apart(found: list[Tensor], expected: Tensor) -> str:
    """How the values of the ranks differ from one process."""
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    for rank, value in enumerate(found):
        if value.shape != expected.shape:
            return f"{list(value.shape)} on rank {rank} instead of {list(expected.shape)}"
        if value.dtype != expected.dtype:
            return f"{value.dtype} on rank {rank} instead of {expected.dtype}"
        if not torch.allclose(value, expected, rtol=RELATIVE, atol=ABSOLUTE + RELATIVE * scale * 0.1):
            far = float((value.double() - expected.double()).abs().max())
            return f"{far:.3g} apart on rank {rank}, largest entry {scale:.3g}"
    return ""


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]
