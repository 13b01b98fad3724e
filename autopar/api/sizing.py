"""Questions the other way round: how many devices a deadline takes, and how large a batch or sequence fits.

Each plans a model with `mesh="auto"` at a few sizes, and takes what changes between them to change once:

least_devices      of more devices a step takes no longer; where it gets no shorter, the search ends with an error
largest_batch      a batch fits where a larger one does; it is of one micro-batch, as more of them take no more memory
largest_sequence   a sequence fits where a longer one does
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.api.entry import plan
from autopar.compiler.arguments import ExampleInputs, plan_request
from autopar.compiler.offline_planner import OfflinePlanner
from autopar.compiler.plan_cache import PlanCache
from autopar.console.tables import fitted_table, wrapped
from autopar.console.units import format_bytes, format_count, format_seconds, parse_count
from autopar.costs.hardware.profile import Hardware
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing.model_flops import batch_of
from autopar.errors import InfeasibleError, InputError, TimeLimitError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.mesh_estimates.bisection import largest_size, least_size
from autopar.planning.options.groups import Memory
from autopar.planning.pipeline.plan import PipelinePlan

DAY = 86400.0
MOST_DEVICES = 2**17
MOST_SAMPLES, MOST_TOKENS = 2**20, 2**24
"""Largest batch and longest sequence that are tried."""
NO_SHORTER = 0.98
"""Times the step on half of the devices: where it is longer, more devices do not help."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One size that was planned."""

    size: int
    is_enough: bool
    seconds: float | None = None
    """Seconds of a step; None if there is no plan."""
    num_bytes: int | None = None
    """Bytes of tensors per device at the peak; None if there is no plan."""
    mesh: Mesh | None = None
    reason: str = ""
    """Why it has no plan."""


@dataclass(frozen=True, slots=True)
class Sized:
    """The answer: the size with its plan, and the sizes that were planned. `print` shows a table of them."""

    quantity: str
    """Name of what the size counts: "devices", "samples" or "tokens of a sequence"."""
    size: int
    plan: Plan | PipelinePlan
    attempts: tuple[Attempt, ...]
    question: str
    """Condition that the size meets, in words."""

    def __str__(self) -> str:
        rows = [
            [
                ("→ " if each.size == self.size else "") + str(each.size),
                "-" if each.seconds is None else format_seconds(each.seconds),
                "-" if each.num_bytes is None else format_bytes(each.num_bytes),
                "yes" if each.is_enough else "no",
                str(each.mesh or "") or each.reason,
            ]
            for each in sorted(self.attempts, key=lambda each: each.size)
        ]
        table = fitted_table(rows, (self.quantity, "step", "tensors", "enough", "mesh, or why not"), right=(0, 1, 2))
        return f"{wrapped(f'{self.size} {self.quantity}: {self.question}')}\n\n{table}"


@dataclass(slots=True)
class _Search:
    """Plans of sizes, each made once."""

    make: Callable[[int], Plan | PipelinePlan]
    most_seconds: float = math.inf
    check: Callable[[_Search], None] = lambda search: None
    """Raises an error where further sizes are of no use."""
    plans: dict[int, Plan | PipelinePlan] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)

    def works(self, size: int) -> bool:
        try:
            made = self.make(size)
        except InfeasibleError as error:
            self.attempts.append(Attempt(size, False, reason=str(error).splitlines()[-1]))
            return False
        except TimeLimitError:
            self.attempts.append(Attempt(size, False, reason="no plan was found within the time limit"))
            return False
        seconds = step_seconds(made)
        self.plans[size] = made
        self.attempts.append(Attempt(size, seconds <= self.most_seconds, seconds, made.peak_bytes, made.mesh))
        if seconds > self.most_seconds:
            self.check(self)
        return seconds <= self.most_seconds

    def answer(self, quantity: str, size: int | None, question: str) -> Sized:
        """Return the answer; InfeasibleError where no size works."""
        if size is None:
            tried = ", ".join(str(each.size) for each in self.attempts)
            reason = next((each.reason for each in reversed(self.attempts) if each.reason), "")
            raise InfeasibleError(f"no number of {quantity} is known: {question}; tried {tried}. {reason}".rstrip())
        return Sized(quantity, size, self.plans[size], tuple(self.attempts), question)


def step_seconds(made: Plan | PipelinePlan) -> float:
    """Return the seconds of a step of all micro-batches."""
    if isinstance(made, PipelinePlan) or made.workload is None:
        return made.seconds
    return made.workload.seconds


def least_devices(
    model: nn.Module, example_inputs: ExampleInputs, *, tokens: float | str, days: float, **options: Any
) -> Sized:
    """Return the least number of devices whose best plan trains on so many tokens within so many days.

    Whole nodes of the hardware profile are tried: powers of two times a node, then numbers between, whose other prime
    factors divide the batch or the number of layers. The step of the plan counts, without checkpoints and failures.

    Args:
        model: as `plan` takes it.
        example_inputs: of the global batch.
        tokens: to train on, a number or text as "1T".
        days: until they have to be trained on.
        options: those of `plan`; `Search(time_limit=…)` is for each number of devices.

    Raises:
        InputError: the inputs hold no tokens, or `tokens` and `days` are no numbers above 0.
        InfeasibleError: no number of devices is enough; more of them do not shorten the step.

    >>> least_devices(model, (ids, labels), tokens="1T", days=30, hardware="h100", memory="80GB")  # doctest: +SKIP
    """
    total = parse_count(tokens)
    if not isinstance(days, int | float) or isinstance(days, bool) or not 0 < days < math.inf:
        raise InputError(f"days={days!r}; give the days until the tokens have to be trained on, a number above 0.")
    planner = OfflinePlanner(model, example_inputs, plan_request(model, **options), PlanCache())
    request, program = planner.request, planner.single.program
    samples, each = batch_of(program)
    if each is None:
        raise InputError("no input holds token ids (whole numbers of two dims), so that tokens cannot be counted.")
    count = request.microbatches or 1
    steps = total / (each * count)
    allowed = days * DAY / steps
    one = Mesh({"dp": 1}, _named(request.hardware))
    node, limit = _node(request.hardware_of(one)), planner.limit(one)
    least = max(planner.at_least(one) / allowed, planner.stored / limit if limit else 0.0, 1.0)
    factors = samples * count * max(len(planner.blocks), 1)
    search = _Search(
        lambda size: plan(model, "auto", example_inputs, devices=size, **options), allowed, _check_that_more_help
    )
    size = least_size(
        _powers(node, least), lambda low, high: _node_counts(low, high, node, least, factors), search.works
    )
    words = f"{format_count(total)} tokens in {days:g} days, {steps:,.0f} steps of at most {format_seconds(allowed)}"
    return search.answer("devices", size, words)


def largest_batch(
    model: nn.Module, example_inputs: ExampleInputs, *, devices: int, microbatches: int = 1, **options: Any
) -> Sized:
    """Return the largest batch that fits on so many devices, in `microbatches` micro-batches.

    The batch of the inputs is doubled or halved, then bisected to an eighth. More micro-batches take no more memory, so
    that there is no largest batch of any number of them. `options` are those of `plan`, with `memory`.

    Raises:
        InfeasibleError: not even one sample fits.
    """
    made = _limited(options)
    first = _batch(example_inputs)
    search = _Search(
        lambda size: plan(
            model, "auto", _resized(example_inputs, 0, first, size), devices=devices, microbatches=microbatches, **made
        )
    )
    size = largest_size(first, MOST_SAMPLES, search.works)
    return search.answer(
        "samples", size, _limit_text(devices, made, "" if microbatches == 1 else f" in {microbatches} micro-batches")
    )


def largest_sequence(model: nn.Module, example_inputs: ExampleInputs, *, devices: int, **options: Any) -> Sized:
    """Return the longest sequence with which a batch fits on so many devices.

    The sequence of the inputs (dim 1 of the first one of whole numbers, and of all that are as long) is doubled or
    halved, then bisected to an eighth. `options` are those of `plan`, with `memory`.

    Raises:
        InputError: no input is a tensor of whole numbers with two dims.
        InfeasibleError: not even one token fits.
    """
    made = _limited(options)
    tensors = [each for each in pytree.tree_leaves(example_inputs) if isinstance(each, torch.Tensor)]
    first = next((each.shape[1] for each in tensors if each.ndim > 1 and not each.is_floating_point()), None)
    if first is None:
        raise InputError("no input holds token ids (whole numbers of two dims), so that there is no sequence.")
    search = _Search(
        lambda size: plan(model, "auto", _resized(example_inputs, 1, first, size), devices=devices, **made)
    )
    size = largest_size(first, MOST_TOKENS, search.works)
    return search.answer(
        "tokens of a sequence", size, _limit_text(devices, made, f" with a batch of {_batch(example_inputs)}")
    )


def _limited(options: Mapping[str, Any]) -> dict[str, Any]:
    if Memory.of(options.get("memory")).limit is None:
        raise InputError('memory is not given, and without a limit any size fits; give it, as memory="80GB".')
    return dict(options)


def _limit_text(devices: int, options: Mapping[str, Any], more: str) -> str:
    return f"the most that fits on {devices} devices within {Memory.of(options['memory']).limit}{more}"


def _named(hardware: str | Hardware | None) -> str:
    return hardware.name if isinstance(hardware, Hardware) else hardware or Mesh({"dp": 1}).hardware


def _node(hardware: Hardware) -> int:
    """Return the devices of a node: of a host, or of the innermost link."""
    return hardware.host_devices or hardware.links[0].devices or 1


def _powers(node: int, least: float) -> Iterator[int]:
    """Yield powers of two times a node, from the first that may be enough."""
    size = node
    while size <= MOST_DEVICES:
        if size >= least:
            yield size
        size *= 2


def _node_counts(low: int, high: int, node: int, least: float, factors: int) -> Sequence[int]:
    """Return whole nodes between two numbers whose odd prime factors divide the batch or the number of layers."""
    start = max(low + 1, math.ceil(least))
    sizes = range(-(-start // node) * node, high, node)
    return [size for size in sizes if factors % _odd_part(size) == 0 or _odd_part(size) == _odd_part(node)]


def _odd_part(number: int) -> int:
    while number % 2 == 0:
        number //= 2
    return number


def _check_that_more_help(search: _Search) -> None:
    """Raise InfeasibleError where the last doubling of the devices did not shorten the step."""
    seconds = {each.size: each.seconds for each in search.attempts}
    last = search.attempts[-1]
    before = seconds.get(last.size // 2)
    if before and last.seconds and last.seconds > NO_SHORTER * before:
        raise InfeasibleError(
            f"a step takes {format_seconds(last.seconds)} on {last.size} devices, {format_seconds(before)} on half of "
            f"them, and has to take {format_seconds(search.most_seconds)}: more devices do not help. Give a larger "
            "batch, or more days."
        )


def _batch(example_inputs: ExampleInputs) -> int:
    tensors = [each for each in pytree.tree_leaves(example_inputs) if isinstance(each, torch.Tensor) and each.ndim]
    if not tensors:
        raise InputError("no input is a tensor with dims, so that there is no batch.")
    return tensors[0].shape[0]


def _resized(example_inputs: ExampleInputs, dim: int, before: int, after: int) -> ExampleInputs:
    """Return inputs of another batch (dim 0) or sequence (dim 1); only shapes count, so that values are repeated."""

    def resized(each: Any) -> Any:
        if not isinstance(each, torch.Tensor) or each.ndim <= dim or each.shape[dim] != before:
            return each
        sizes = [after if number == dim else size for number, size in enumerate(each.shape)]
        return each.narrow(dim, 0, 1).expand(sizes)

    return pytree.tree_map(resized, example_inputs)
