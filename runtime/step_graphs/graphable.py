"""Modules whose steps may be CUDA graphs: what they have in common, with stages or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from autopar.capture.passes.autocast import Autocast
from autopar.errors import InputError
from autopar.runtime.recompute.graph import Compilation
from autopar.runtime.step_graphs.cuda import CudaRecorder, Recorder
from autopar.runtime.step_graphs.refusals import Captured, reasons_of
from autopar.runtime.step_graphs.step import GraphedStep, noting

OF_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that make CUDA graphs."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

T = TypeVar("T")


class Graphable:
    """Base of compiled modules whose steps may be CUDA graphs, before the base that stores parameters."""

    _called: list[Call | OtherCall] | None = None
    """Calls of the model in a step that is to be a graph, while it runs."""
    _called_in_any: ClassVar[list[Call | OtherCall] | None] = None
    """Calls in a step that is to be a graph, while one of any model runs."""
    _recorder: Recorder | None = None
    _graph_is_required = False
    _graphed_step: GraphedStep | None = None
    """`train_step` as a graph. Inside another step that is to be one, where calls are noted, it runs as it is."""

    def capture_steps(self, required: bool, recorder: Recorder | None = None) -> None:
        """Make CUDA graphs of `train_step`, and of functions given to `cuda_graph`, from now on.

        `required`: a step that cannot be one is an InputError; else it runs without, with a warning.
        """
        self._recorder, self._graph_is_required = recorder or CudaRecorder(), required
        self._graphed_step = self.cuda_graph(self._train_step)

    @property
    def graphs_steps(self) -> bool:
        """True if steps become CUDA graphs."""
        return self._recorder is not None

    def cuda_graph(self, step: Callable[..., Any]) -> GraphedStep:
        """Return a function that calls `step`, and is one CUDA graph after its first calls.

        `step` is the body of a loop: forward, backward and, if the optimizer is `capturable`, its step. In a pipeline
        `train_step` is forward and backward. It takes tensors on the device, and its result comes back detached. Its
        Python code runs in its first calls alone.

        Raises InputError if the model was compiled without Run(cuda_graph=…), or on devices without CUDA graphs.
        """
        if self._recorder is None:
            raise InputError(
                "the model was compiled without CUDA graphs; compile it with run=autopar.Run(cuda_graph=True) on CUDA "
                'devices, or with cuda_graph="auto".'
            )
        return GraphedStep(step, _Stepping(self), self._recorder, self._graph_is_required)

    def compile(self, *args: Any, regional: bool = False, **kwargs: Any) -> None:
        """Run graphs under `torch.compile` as the base class says.

        Raises InputError for modes with CUDA graphs of their own, if steps are CUDA graphs.
        """
        if self._recorder is not None and kwargs.get("mode") in OF_CUDA_GRAPHS:
            raise InputError(
                f'model.compile(mode="{kwargs["mode"]}") makes CUDA graphs of parts of a step, and Run(cuda_graph=…) '
                'one of all of it; give mode="max-autotune-no-cudagraphs" or "default", or leave out cuda_graph.'
            )
        super().compile(*args, regional=regional, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _graphed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Run `train_step` as a graph; inputs are brought to the sizes of a bucket before, which are its kinds."""
        module: Any = self
        if module.varying is not None:
            with module._watch:
                args, kwargs = module._in_bucket(args, kwargs)
        if self._called_in_any is not None:
            return self._train_step(*args, **kwargs)
        assert self._graphed_step is not None
        return self._graphed_step(*args, **kwargs)

    def _train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run `train_step` as it is."""
        raise NotImplementedError

    def _prepared(self, *args: Any, **kwargs: Any) -> Any:
        prepare: Callable[..., Any] = super()._prepared  # pyright: ignore[reportAttributeAccessIssue]
        found = prepare(*args, **kwargs)
        if self._called is not None:
            device: str = self._device  # pyright: ignore[reportAttributeAccessIssue]
            call = Call(found, partial(prepare, *args, **kwargs), device, Autocast.around(device))
            self._called.append(call)
        elif self._called_in_any is not None and torch.is_grad_enabled():
            self._called_in_any.append(OtherCall())
        return found

    def _of_all_stages(self, own: T) -> Sequence[T]:
        """Return what each rank of a pipeline has; all ranks with the same stages have the same."""
        return (own,)

    @property
    def _stages_here(self) -> str:
        """The stages of this rank, in words."""
        return ""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the model inside a step."""

    runs: Any
    """Executable or pipeline that it ran."""
    prepare: Callable[[], Any]
    device: str
    autocast: Autocast | None
    """Region of autocast that it was in."""

    def is_still_so(self) -> bool:
        """Return whether the same call would run the same executable now."""
        region = self.autocast
        with torch.autocast(self.device, None if region is None else region.dtype, enabled=region is not None):
            return self.prepare() is self.runs

    def reasons(self, deterministic: bool) -> Iterator[str]:
        """Yield what in the graphs that it ran needs the host, in words."""
        here: Sequence[Captured] = self.runs.here
        for each in here:
            yield from reasons_of(each, deterministic)


class OtherCall:
    """A call of another compiled model inside a step, with gradients."""

    def is_still_so(self) -> bool:
        """Return True: the reason ends it."""
        return True

    def reasons(self, deterministic: bool) -> Iterator[str]:
        """Yield why it cannot be in a graph, in words."""
        yield (
            "calls another compiled model, whose gradients a graph of this one does not leave; compile both as one "
            "module, or call the other outside of the step or under torch.no_grad()"
        )


class _Stepping:
    """A module as a step that becomes a graph knows it."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.random_state = module.random_state
        self.calls, self.watch = module._calls, module._watch
        self.of_all_stages = module._of_all_stages

    @property
    def modes(self) -> tuple[bool, Compilation | None, Autocast | None]:
        """State that chooses what runs: of the module, and of autocast around it."""
        return self._module.training, self._module.compilation, Autocast.around(self._module._device)

    @property
    def modes_in_words(self) -> dict[str, str]:
        """The same in words, alike on all ranks."""
        training, compilation, autocast = self.modes
        return {
            "mode": "training" if training else "evaluation",
            "torch.compile": "off" if compilation is None else str(compilation),
            "autocast": "off" if autocast is None else str(autocast.dtype),
        }

    @property
    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters and buffers, as they are now."""
        return list(self._module.parameters()), list(self._module.buffers())

    @property
    def stages_here(self) -> str:
        """The stages of this rank, in words; nothing without a pipeline."""
        return self._module._stages_here

    @property
    def python_hooks(self) -> list[str]:
        """Hooks of the user on the module and its parameters, in words."""
        found = ["on the module"] if any(getattr(self._module, name) for name in HOOKS) else []
        named = self._module.named_parameters()
        hooked = (name for name, p in named if p._backward_hooks or p._post_accumulate_grad_hooks)
        return found + [f"on the parameter {name}" for name in hooked]

    @contextmanager
    def calls_noted(self) -> Iterator[list[Any]]:
        """Note the calls of the model, and of others, inside the block."""
        with noting([], self._module, "_called") as called, noting(called, Graphable, "_called_in_any"):
            yield called
