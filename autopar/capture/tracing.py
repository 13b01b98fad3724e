"""`torch.export`, with what it would silently lose recorded next to the graph, and errors in the user's terms."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, UnsupportedOperatorException
from torch.fx import config as fx_config
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from autopar.capture.assumptions import Assumption, Branches, UndecidedError, decided_branches, place_of
from autopar.capture.autograd_functions import kept_functions
from autopar.capture.derivatives.tape import recorded_gradients
from autopar.capture.derivatives.transforms import transforms_taken_apart
from autopar.capture.guards import faithful_tracing
from autopar.capture.inlining.function_stand_ins import KeptUse
from autopar.capture.inlining.gradients import GradientCall
from autopar.capture.layers.once import EqualLayers
from autopar.capture.passes.autocast import Autocast
from autopar.capture.passes.refused_calls import NeedsValuesError
from autopar.capture.python.assigned_buffers import assigned_buffers
from autopar.capture.python.distributed import refuse_collectives
from autopar.capture.python.globals_read import called_functions, globals_read
from autopar.capture.python.grad_mode import read_modes
from autopar.capture.python.outside import refuse_outside_sources
from autopar.capture.python.recorder import Recorder
from autopar.capture.python.tensor_hooks import TensorHooks
from autopar.capture.python.writes import writes_past_autograd
from autopar.capture.static.values import StaticValues
from autopar.errors import CaptureError


@dataclass(slots=True, eq=False)
class Observed:
    """Observations made while a model is traced, apart from its graph."""

    branches: Branches
    """On the values of tensors."""
    recorder: Recorder
    """Record of the Python state that the forward reads and writes."""
    hooks: TensorHooks
    """Gradient hooks that the forward registers on its tensors."""
    called: Sequence[FunctionType]
    """The user's functions that the forward may call."""
    functions: list[KeptUse] = field(default_factory=list)
    """Uses of autograd.Functions, in order."""
    gradients: list[GradientCall] = field(default_factory=list)
    """Uses of torch.autograd.grad, in order."""
    modes: dict[str, bool] = field(default_factory=dict)
    """Gradient modes of PyTorch that the forward queries, with the answers, by name of the query."""
    layers: EqualLayers = field(init=False)
    """Layers that are traced once for all their equals."""

    def __post_init__(self) -> None:
        self.layers = EqualLayers(self.recorder, self._observation_counts)

    @classmethod
    def of(cls, traced: nn.Module, model: nn.Module, assume: Sequence[Assumption]) -> Observed:
        """Build the observations for a trace of `traced`, a copy of `model`."""
        called = called_functions(traced)
        recorder = Recorder(traced, model, globals_read(traced, called))
        return cls(Branches(type(model).__name__, assume), recorder, TensorHooks(traced, model), called)

    @contextlib.contextmanager
    def observing(self, traced: nn.Module) -> Iterator[None]:
        """Notice inside; CaptureError for what cannot be kept."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(kept_functions(self.functions))
            stack.enter_context(recorded_gradients(self.gradients))
            stack.enter_context(transforms_taken_apart())
            stack.enter_context(decided_branches(self.branches))
            self.modes = stack.enter_context(read_modes())
            stack.enter_context(refuse_outside_sources(traced, self.called))
            stack.enter_context(refuse_collectives(self.called))
            stack.enter_context(assigned_buffers(traced))
            stack.enter_context(writes_past_autograd(traced))
            stack.enter_context(self.hooks.recording())
            stack.enter_context(self.recorder.recording())
            stack.enter_context(self.layers.once(traced))
            yield

    def _observation_counts(self) -> tuple[int, ...]:
        """Return the counts of all observations that are not in the graph."""
        branches = self.branches
        of_branches = len(branches.taken), len(branches.open), len(branches.origins)
        return *of_branches, len(self.functions), len(self.gradients), len(self.hooks.hooks)


def export(
    traced: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    autocast: Autocast | None,
    observed: Observed,
    statics: StaticValues,
    device: str | None = None,
) -> torch.export.ExportedProgram:
    """Return the result of `torch.export` for a model on fake tensors; CaptureError if it cannot be followed.

    An UndecidedError says which branches on values are open.

    The fake tensors are on the CPU; `device` is the type of device that they stand for. In the place of static
    arguments are the texts that `statics` knows.
    """
    branches = observed.branches
    dtype = torch.bfloat16 if autocast is None else autocast.dtype
    autocasting = torch.autocast("cpu", dtype, enabled=autocast is not None)
    try:
        surroundings = faithful_tracing(device, statics.is_static), _only_what_is_read(), autocasting
        with contextlib.ExitStack() as stack:
            for each in (*surroundings, observed.observing(traced), statics.given_to(traced)):
                stack.enter_context(each)
            exported = torch.export.export(traced, args, kwargs, strict=False)
    except Exception as error:
        own = _cause(error, CaptureError)
        if own is error:
            raise
        if own is not None:
            raise own from error
        if branches.open:
            raise UndecidedError(branches) from error
        raise _explained(branches.model, error) from error
    if branches.open:
        raise UndecidedError(branches)
    return exported


@contextlib.contextmanager
def _only_what_is_read() -> Iterator[None]:
    """Let `torch.export` leave out Python code and stack traces, a third of its time: the graph alone is read."""
    quiet = mock.patch.object(fx_config, "do_not_emit_stack_traces", True)
    with _use_lazy_graph_module(True), quiet, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The tensor attribute")  # autopar records these writes
        yield


def _cause(error: BaseException, kind: type[Exception]) -> Exception | None:
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, kind):
            return current
        current = current.__cause__ or current.__context__
    return None


_UNKNOWN = re.compile(r"Found <class '([^']+)'> in output|Unsupported input type <class '([^']+)'>")
"""Pattern of torch.export's messages about an object that is no container that it knows."""


def _explained(name: str, error: Exception) -> CaptureError:
    """Return an error that says what was found, where in the model, and what to do about it."""
    text, place = str(error).strip(), place_of(error)
    first = text.splitlines()[0] if text else type(error).__name__
    where = "" if place is None else f" at {place}"
    if "data-dependent" in text.lower() or "DataDependent" in type(error).__name__ or "unbacked" in text.lower():
        return NeedsValuesError(
            f"{name} decides on the value of a tensor while it runs{where} ({first}); a captured graph is one path for "
            "all values. Replace the branch by torch.where, make the number an argument of forward, and set "
            "layerdrop to 0 where the model has one."
        )
    unknown = _UNKNOWN.search(text)
    if unknown is not None:
        kind, side = unknown[1] or unknown[2], "returns" if unknown[1] else "is given"
        if kind.endswith(".BlockMask"):
            return CaptureError(
                f"{name} {side} a BlockMask, whose mask_mod is a function that no graph takes as an input. Give the "
                "model the tensors that the function reads, and call create_block_mask in forward, which then "
                "computes no blocks; a mask that never changes may be an attribute of a module."
            )
        return CaptureError(
            f"{name} {side} a {kind}, which torch.export does not know how to take apart. Call "
            f"torch.export.register_dataclass({kind.rpartition('.')[2]}) once before autopar, or, if it is no "
            "dataclass, torch.utils._pytree.register_pytree_node."
        )
    lacking = _cause(error, DynamicOutputShapeException) or _cause(error, UnsupportedOperatorException)
    operation = getattr(lacking, "func", None)
    if operation is not None:
        return NeedsValuesError(
            f"{name} cannot be traced{where}: what {operation} gives, or its shape, depends on the values of tensors, "
            "of which a captured graph knows none. Compute it outside of the model and pass the result as an input, or "
            "wrap it in a torch.library.custom_op whose register_fake tells the shape."
        )
    return CaptureError(
        f"{name} cannot be traced{where}: {type(error).__name__}: {first}. Check that the model runs eagerly on these "
        "inputs; its forward must be one path of PyTorch operations on its own parameters, buffers and inputs."
    )
