"""How many parameters share a message of the runtime, and so the latency of the collective that carries it.

Weights are gathered in two messages per layer: one for those that the backward may gather again, one for the others.
Gradients are reduced in messages of a few megabytes, in the order in which the parameters are used first. So
`runtime.bucketing` makes them of a plan; before there is one, gradients count as whole, and parameters pay equal parts:

    parameters that share a message = parameters / messages, at least 1

which adds up to the latency of the step, and is equal for layers that are equal. A gather counts as shared by no more
parameters than a reduction: where messages of gradients are small, a weight that is gathered instead of reduced leaves
a message that goes all the same, for one of its layer that would not go without it, and must gain nothing by that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

from autopar.program import Program, info_of

LARGEST_MESSAGE = 25 * 2**20  # bytes; DistributedDataParallel's default
SMALLEST_MESSAGE = 2**20
MESSAGES_PER_STEP = 3  # each costs a rank a millisecond with gloo, while few still overlap the backward


@dataclass(frozen=True, slots=True)
class Sharing:
    """How many parameters share a message: one that gathers weights, and one that reduces gradients."""

    gathered: int = 1
    reduced: int = 1


ALONE = Sharing()


def sharing(program: Program, regathered: Container[str]) -> dict[str, Sharing]:
    """The sharing of each parameter, by its placeholder; those in `regathered` may be gathered again."""
    wanted = set(program.parameters.values())
    infos = {name: info_of(node) for name, node in program.placeholders().items() if name in wanted}
    reduced = [info.num_bytes for info in infos.values() if info.requires_grad]
    each = max(1, round(len(reduced) / max(1, len(messages(reduced)))))
    groups = {weight: (layer_of(name), weight in regathered) for name, weight in program.parameters.items()}
    in_group = Counter(groups.values())
    return {weight: Sharing(min(in_group[group], each), each) for weight, group in groups.items()}


def messages(sizes: Sequence[int]) -> list[slice]:
    """Which gradients of so many bytes each, in their order, travel in one message."""
    cap = min(LARGEST_MESSAGE, max(SMALLEST_MESSAGE, sum(sizes) // MESSAGES_PER_STEP))
    starts: list[int] = []
    filled = 0
    for number, size in enumerate(sizes):
        if not starts or filled + size > cap:
            starts.append(number)
            filled = 0
        filled += size
    return [slice(start, end) for start, end in zip(starts, (*starts[1:], len(sizes)), strict=True)] if starts else []


def layer_of(name: str) -> str:
    """The layer of a parameter: its name up to the first number, or the module that owns it."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: number + 1] if number is not None else parts[:-1])
