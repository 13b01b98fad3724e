"""A training step that becomes one CUDA graph for each kind of inputs, once it has run a few times.

    1, 2    as it is: plans, compiles, allocates; optimizers make their state in one and use it in the next
    3, 4    as it is, recorded: refused if an operation needs the host, or if the two differ in a size or a number
    5       captured, and replayed
    6 …     replayed: `.grad` are the tensors that the graph writes

Arguments are copied into buffers of the kind before each run, and what it draws is seeded.

A kind is what the graph fixes: shapes, values that are no tensors, modes, and where parameters, buffers and gradients
lie. A step that finds no gradients and one that adds to some are two kinds. What a call of the model checks on the host
(agreement of ranks, values of inputs, frozen parameters, attributes that forward reads) is checked before each run.

Stages of a pipeline hold other parameters each. So a kind is what all stages find, and a step that one of them refuses
is refused by all. Hosts exchange both before each run, and reasons after each run before the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from autopar.errors import InputError, warn_user
from autopar.runtime.implementations.randomness import StepDraws
from autopar.runtime.numbers.leaves import described as in_words
from autopar.runtime.ranks.calls import Calls
from autopar.runtime.ranks.failure import Watch
from autopar.runtime.ranks.uncompiled import uncompiled
from autopar.runtime.recompute.random_state import RandomState
from autopar.runtime.step_graphs.cuda import Recorder
from autopar.runtime.step_graphs.kinds import Graph, Kind, address, description, detached
from autopar.runtime.step_graphs.operations import RecordedOperations, first_difference
from autopar.runtime.step_graphs.refusals import WITHOUT

RECORDED = (2, 3)
"""Runs of a kind that are recorded and compared, counted from 0."""
WARM_UP = 4
"""Runs of a kind before it is captured."""
MOST_KINDS = 8
"""Kinds of a step, each with a graph."""
TOO_MANY = (
    f"is of another kind than the {MOST_KINDS} before it: shapes, numbers, modes or the storages of parameters, "
    "buffers or gradients change from step to step; pad inputs to a few lengths, and keep tensors where they are"
)
CHANGING = (
    "sets a mode, freezes parameters or changes attributes of the model between its calls, or they change from step to "
    "step; set them before the step, and keep them"
)
PLAIN = (bool, int, float, str, tuple, type(None))
"""Types of numbers that ranks send each other as they are."""

Key = tuple[tuple[int, bool], ...]
"""For each stage, the number of what it finds, and whether a parameter has no gradient."""
Numbers = list[tuple[str, Any]]
"""Options of optimizers that are no tensors, by name."""


class Called(Protocol):
    """A call of the model inside a step."""

    def is_still_so(self) -> bool:
        """Return whether the same call would run the same executable now."""
        ...

    def reasons(self, deterministic: bool) -> Iterator[str]:
        """Yield what in the graphs that it ran needs the host, in words."""
        ...


class Stepping(Protocol):
    """A module whose steps are captured."""

    random_state: RandomState
    calls: Calls
    watch: Watch

    @property
    def modes(self) -> tuple[object, ...]:
        """State of the module that chooses what runs."""
        ...

    @property
    def modes_in_words(self) -> dict[str, str]:
        """The same in words, alike on all ranks."""
        ...

    @property
    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters and buffers, as they are now."""
        ...

    @property
    def python_hooks(self) -> list[str]:
        """Hooks on the module and its parameters, in words."""
        ...

    @property
    def stages_here(self) -> str:
        """The stages of this rank, in words; nothing without a pipeline."""
        ...

    def of_all_stages(self, own: Any) -> Sequence[Any]:
        """Return what each rank of a pipeline has; all of them call this. Without one it is what this rank has."""
        ...

    def calls_noted(self) -> AbstractContextManager[list[Any]]:
        """Note the calls of the model inside the block."""
        ...


class GraphedStep:
    """Calls a function that trains a step of a module, as one CUDA graph after its first calls."""

    def __init__(self, function: Callable[..., Any], module: Stepping, recorder: Recorder, required: bool) -> None:
        """`required`: a step that cannot be a graph is refused with InputError; else it runs without, and warns."""
        self._function, self._module, self._recorder, self._required = function, module, recorder, required
        self._kinds: dict[Key, Kind] = {}
        self._begun: dict[Key, tuple[Kind, list[Tensor | None]]] = {}
        """Kinds that find no gradients, and the shared ones that they add to from their second run on."""
        self._found: dict[Any, int] = {}
        """Description of a call, with addresses of tensors on this rank → its number."""
        self._numbers_of_all: list[tuple[str, Numbers]] = []
        """Stages, and numbers of their optimizers, before the most recent call."""
        self._optimizers: dict[torch.optim.Optimizer, None] = {}
        self._gradients: list[Tensor | None] | None = None
        """Gradients of the first graph."""
        self.without = False
        """True if a reason was found for which the step runs without a graph."""

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step; tensors of its result are detached.

        Raises InputError where the step cannot be a graph and has to be, or a number of an optimizer has changed.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        described = None if self.without else self._described(leaves, spec)
        key, kind = ((), None) if described is None else self._kind(described, leaves, spec)
        if described is None or kind is None:
            return self._function(*args, **kwargs)
        kind.give(leaves)
        with self._module.watch:
            phase = "as a CUDA graph" if kind.runs == WARM_UP else f"run {kind.runs} before it is captured"
            specified = {"the step": phase, **self._module.modes_in_words, **in_words((args, kwargs))}
            self._module.calls.agree((self._function, described, phase), lambda: specified, dict)
            if not all(call.is_still_so() for call in kind.called):
                kind.runs, kind.called, kind.graph = 0, (), None
                kind.restarts += 1
        if kind.restarts == MOST_KINDS:
            self._refuse_if([CHANGING])
            return self._function(*args, **kwargs)
        if kind.runs == 0:
            return detached(self._first(key, kind))
        with self._module.watch, self._module.calls.quiet():
            if kind.runs < WARM_UP:
                return detached(self._warmed(kind))
            if kind.graph is None:
                kind.graph = self._captured(kind)
            return self._replayed(kind.graph, kind.draws)

    def _kind(self, described: Any, leaves: Sequence[Any], spec: Any) -> tuple[Key, Kind | None]:
        """Return the kind of a call; None if there are too many or the call is refused, and need not be a graph.

        All graphs share the gradients of the first. So a kind that finds none adds to those, set to zero, once its
        first run has shown which parameters get one.
        """
        reasons = list(self._reasons_of_call(leaves))
        key = self._key(described, reasons)
        begun, shared = self._begun.get(key, (None, []))
        if begun is not None and not self.without:
            for parameter, gradient in zip(self._module.tensors[0], shared, strict=True):
                if gradient is not None:
                    parameter.grad = gradient.zero_()
            key = self._key(described, reasons)
        if self.without:
            return key, None
        if key not in self._kinds:
            if len(self._kinds) == MOST_KINDS:
                self._refuse_if([TOO_MANY])
                return key, None
            self._kinds[key] = begun or Kind.of(leaves, spec)
        return key, self._kinds[key]

    def _key(self, described: Any, reasons: Sequence[str]) -> Key:
        """Return the numbers of what all stages find; refuse the call if one of them has a reason."""
        number = self._found.setdefault((described, self._addresses()), len(self._found))
        finds_none = any(each.grad is None and each.requires_grad for each in self._module.tensors[0])
        own = self._module.stages_here, tuple(reasons), (number, finds_none), self._numbers()
        found = self._module.of_all_stages(own)
        self._refuse_if(_reasons_of_all([(stages, reasons) for stages, reasons, *_ in found]))
        self._numbers_of_all = [(stages, numbers) for stages, *_, numbers in found]
        return tuple(key for *_, key, _ in found)

    def _first(self, key: Key, kind: Kind) -> Any:
        """Run the first step of a kind, and let its gradients be those that graphs share, where there are some."""
        parameters = self._module.tensors[0]
        had_none = [each.grad is None for each in parameters]
        result = self._warmed(kind)
        if self._gradients is not None and key in self._kinds and any(finds_none for _, finds_none in key):
            pairs = zip(parameters, self._gradients, had_none, strict=True)
            shared = [each if none and parameter.grad is not None else None for parameter, each, none in pairs]
            for parameter, each in zip(parameters, shared, strict=True):
                if each is not None and parameter.grad is not None:
                    parameter.grad = each.copy_(parameter.grad)
            self._begun[key] = self._kinds.pop(key), shared
        return result

    def _reasons_of_call(self, leaves: Sequence[Any]) -> Iterator[str]:
        if torch.is_anomaly_enabled():
            yield "runs in autograd's anomaly mode, which reads gradients on the host; leave the mode"
        if any(isinstance(each, Tensor) and each.requires_grad for each in leaves):
            yield "takes an input that requires a gradient, which would stay with the graph; give it detached"
        if hooks := self._module.python_hooks:
            yield f"would leave out the hook {hooks[0]}, which is Python; remove it"

    def _described(self, leaves: Sequence[Any], spec: Any) -> tuple[Any, ...]:
        """Return what tells kinds of calls apart, alike on all ranks; InputError for values that cannot be told."""
        module = self._module
        found = [description(each) for each in leaves]
        return spec, (*module.modes, torch.is_grad_enabled()), *found

    def _addresses(self) -> tuple[int | None, ...]:
        parameters, buffers = self._module.tensors
        gradients = (each.grad for each in parameters)
        return tuple(None if each is None else address(each) for each in (*parameters, *buffers, *gradients))

    def _warmed(self, kind: Kind) -> Any:
        """Run a step as it is, and look for reasons for which it cannot be a graph."""
        recorded = RecordedOperations() if kind.runs in RECORDED else None
        noted = register_optimizer_step_pre_hook(lambda optimizer, *_: self._optimizers.setdefault(optimizer))

        def run() -> Any:
            with recorded or nullcontext():
                return self._function(*kind.args, **kind.kwargs)

        state = self._module.random_state
        try:
            with self._module.calls_noted() as kind.called, kind.draws.run(state.at(state.step)):
                result = self._recorder.warm_up(run)
        finally:
            noted.remove()
        reasons = [reason for call in kind.called for reason in call.reasons(state.deterministic)]
        reasons += [reason for each in self._optimizers for reason in _reasons_of_optimizer(each)]
        if recorded is not None:
            reasons += [f"calls {each}, for which the host waits; compute it without" for each in recorded.of_host]
            if kind.runs > min(RECORDED) and not reasons:
                difference = first_difference(kind.operations, recorded.operations)
                reasons += [] if difference is None else [f"depends on the host: {difference}; give it as a tensor"]
            kind.operations = recorded.operations
        kind.runs += 1
        self._refuse_if(self._of_all(reasons))
        return result

    def _of_all(self, reasons: Sequence[str]) -> list[str]:
        """Return the reasons of all stages for the same run."""
        return _reasons_of_all(self._module.of_all_stages((self._module.stages_here, tuple(reasons))))

    def _captured(self, kind: Kind) -> Graph:
        kind.operations, kind.restarts = [], 0
        state = self._module.random_state
        before, captured, failure = state.step, None, None
        with self._module.calls_noted() as kind.called, kind.draws.run(state.at(before)):
            try:
                captured = self._recorder.capture(
                    lambda: detached(self._function(*kind.args, **kind.kwargs)), kind.draws.generators
                )
            except torch.AcceleratorError as error:
                failure = error
        failed = self._of_all([] if failure is None else [str(failure)])
        if failed or captured is None:
            raise InputError(
                f"the step was not captured as a CUDA graph: {failed[0]}. Something in it needs the host; {WITHOUT}"
            ) from failure
        result, replay = captured
        steps = state.step - before
        state.advance(-steps)  # the replay counts them
        gradients = [each.grad for each in self._module.tensors[0]]
        self._gradients = self._gradients or gradients
        return Graph(replay, result, gradients, steps, self._numbers_of_all)

    def _replayed(self, graph: Graph, draws: StepDraws) -> Any:
        _check_numbers(graph.numbers, self._numbers_of_all)
        state = self._module.random_state
        draws.begin(state.at(state.step))
        graph.replay()
        state.advance(graph.steps)
        for parameter, gradient in zip(self._module.tensors[0], graph.gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        return pytree.tree_map_only(Tensor, torch.clone, graph.result)

    def _numbers(self) -> Numbers:
        return [
            (f"{name} of {type(each).__name__}", value if isinstance(value, PLAIN) else repr(value))
            for each in self._optimizers
            for group in each.param_groups
            for name, value in group.items()
            if name != "params" and not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
        ]

    def _refuse_if(self, reasons: Sequence[str]) -> None:
        if not reasons:
            return
        if self._required:
            raise InputError(f"Run(cuda_graph=True): the step {reasons[0]}, or {WITHOUT}")
        self.without = True
        self._kinds.clear()
        self._begun.clear()
        warn_user(f'Run(cuda_graph="auto"): the step runs without a CUDA graph, because it {reasons[0]}.')


@contextmanager
def noting(called: list[Any], owner: Any, attribute: str) -> Iterator[list[Any]]:
    """Let an attribute of the owner be the list inside the block."""
    setattr(owner, attribute, called)
    try:
        yield called
    finally:
        setattr(owner, attribute, None)


def _check_numbers(captured: Sequence[tuple[str, Numbers]], current: Sequence[tuple[str, Numbers]]) -> None:
    """Raise InputError, on all ranks of a pipeline, if a number is not what it was when a step was captured."""
    for (stages, before), (_, now) in zip(captured, current, strict=True):
        changed = next((pair for pair in zip(before, now, strict=True) if pair[0] != pair[1]), None)
        if changed is not None:
            (name, was), (_, value) = changed
            where = f" in {stages}" if stages else ""
            raise InputError(
                f"{name}{where} is {value} now and was {was} when the step was captured, and a CUDA graph keeps "
                f"numbers; give it as a tensor on the device, torch.tensor({was}, device=…), and change that in place, "
                "or call the optimizer outside of the step."
            )


def _reasons_of_all(found: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Return the reasons of all stages, each with the stages that have it where others have not."""
    having: dict[str, list[str]] = {}
    for stages, reasons in found:
        for reason in dict.fromkeys(reasons):
            having.setdefault(reason, []).append(stages)
    return [
        reason if len(stages) == len(found) else f"{reason} (in {', '.join(stages)})"
        for reason, stages in having.items()
    ]


def _reasons_of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SGD):
        if any(isinstance(group["lr"], Tensor) and not group["fused"] for group in optimizer.param_groups):
            yield (
                f"calls {name}.step(), which reads its learning rate on the host; make it {name}(…, fused=True) if "
                "parameters are no DTensors, step outside, or take AdamW(…, capturable=True)"
            )
        return
    if any("capturable" not in group for group in optimizer.param_groups):
        yield f"calls {name}.step(), which counts on the host; step outside, or take AdamW(…, capturable=True)"
    elif not all(group["capturable"] for group in optimizer.param_groups):
        yield f"calls {name}.step(), which counts on the host; make it {name}(…, capturable=True), or step outside"
