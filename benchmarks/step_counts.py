"""Counts of what the phases of a step run: kernels, operations, Python calls."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.timed_training import adamw

NOT_WRITING = frozenset(
    (
        "_unsafe_view",
        "unflatten_dense_tensors",
        "promote_types",
        "empty",
        "new_empty",
        "empty_like",
        "empty_strided",
        "new_empty_strided",
        "detach",
        "set_",
        "resize_",
        "lift_fresh",
        "_local_scalar_dense",
    )
)
"""Operations that write no values, though they are no views by their schema."""
NO_KERNELS = frozenset(("_c10d_functional", "_c10d_functional_autograd", "c10d", "profiler"))
"""Namespaces of collectives, and of marks for a profiler."""


@dataclass(slots=True)
class Counts:
    """Counts of one phase of a step."""

    kernels: int = 0
    operations: int = 0
    calls: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.kernels + other.kernels, self.operations + other.operations, self.calls + other.calls)


Phases = dict[str, Counts]


@dataclass
class Operations(TorchDispatchMode):
    """Counts operations by name, and of those the kernels."""

    every: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # counted are the operations on local tensors that it becomes
            return NotImplemented
        self.every[func.name()] += func.namespace != "profiler"
        self.kernels[func.name()] += kernels_of(func, args)
        return func(*args, **(kwargs or {}))


def kernels_of(func: Any, args: Sequence[Any]) -> int:
    """Return how many kernels an operation launches."""
    if func.namespace in NO_KERNELS or func.is_view or func._opname in NOT_WRITING:
        return 0
    if func._opname == "_foreach_copy_":
        targets, sources = args[:2]
        pairs = zip(targets, sources, strict=True)
        return 1 if all(x.stride() == y.stride() and _is_dense(x) for x, y in pairs) else len(targets)
    return 1


def _is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or x.numel() == 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))


class Calls:
    """Counts Python calls inside the block, but for those by which a TorchDispatchMode runs operations."""

    def __init__(self) -> None:
        self.number = 0
        self._uncounted = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        if event == "return":
            self._uncounted -= self._uncounted > 0
        elif event == "call":
            if self._uncounted or _is_of_a_mode(frame):
                self._uncounted += 1
            else:
                self.number += 1


def _is_of_a_mode(frame: Any) -> bool:
    """Return whether a call looks a mode's rule up, or runs the mode."""
    code = frame.f_code
    if code.co_filename.endswith("torch/_library/simple_registry.py"):
        return True
    wraps = code.co_name == "inner" and code.co_filename.endswith("torch/_compile.py")
    return wraps and getattr(frame.f_locals["fn"], "__name__", "") == "__torch_dispatch__"


@dataclass(frozen=True, slots=True)
class Contestant:
    """A model of one side: what its step runs, phase by phase."""

    phases: Mapping[str, Callable[[], object]]

    @classmethod
    def of(cls, model: nn.Module, inputs: tuple[Tensor, ...], context: Any = contextlib.nullcontext) -> Contestant:
        """Return the step of a model that returns its loss."""
        losses: list[Tensor] = []

        def forward() -> None:
            with context():
                losses.append(model(*inputs))

        def backward() -> None:
            with context():
                losses.pop().backward()

        return cls({"forward": forward, "backward": backward, "step": stepped(model)})


def stepped(model: nn.Module) -> Callable[[], None]:
    """Return the optimizer's part of a step."""
    optimizer = adamw(model.parameters())

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def counted(contestant: Contestant) -> tuple[Phases, Mapping[str, Operations]]:
    """Return the counts of each phase, after two steps that plan and fill the optimizer's state."""
    found = {name: Counts() for name in contestant.phases}
    names = {}
    for _ in range(2):
        for run in contestant.phases.values():
            run()
    for name, run in contestant.phases.items():
        with Operations() as operations:
            run()
        names[name] = operations
        found[name].operations, found[name].kernels = operations.every.total(), operations.kernels.total()
    for name, run in contestant.phases.items():
        with Calls() as calls:
            run()
        found[name].calls = calls.number
    return found, names
