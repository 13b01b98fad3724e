"""Number of parameters that share a message of the runtime, and so the latency of the collective that carries it.

Weights are gathered in one message per layer. Weights that the backward gathers again share one more message per
layer. A small module outside the numbered layers travels with the layer that is used next (`joined_layers`): a final
norm with the head. Gradients are reduced in a few messages of about equal bytes, in the order in which the parameters
are used first. `costs.space.parameter_buckets` forms these messages once there is a plan. Before that, gradients count
as whole, and parameters pay equal parts of the latency:

    parameters that share a message = parameters / messages, at least 1

These parts add up to the latency of the step, and they are equal for equal layers. Weights that travel in another
layer's message add no message. They pay the least, so that the other layer stays equal to its peers. Computation
overlaps all messages (`costs.hardware.overlap`) except those of the first layer.
A weight that is gathered in a message of its own (`gathered_alone`) pays no more: the extra latency is less than the
time of the copy that it saves, and that copy is not priced either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from autopar.costs.hardware.collectives import pieces
from autopar.costs.hardware.overlap import NOTHING, OverlappedWork
from autopar.costs.hardware.profile import Hardware
from autopar.ir.program.paths import layer_of, layer_or_owner
from autopar.ir.program.program import Program, info_of
from autopar.ir.sharding.layout import I, Layout, R
from autopar.ir.sharding.mesh import Mesh, joined_name

Count = TypeVar("Count", int, np.ndarray)
LARGEST_MESSAGE = 25 * 2**20  # bytes; DistributedDataParallel's default
SMALLEST_MESSAGE = 2**20
LARGE = 2 * 2**20  # to copy so much into a message with others takes longer than to send one more
MESSAGES_PER_STEP = 2  # each costs a rank a millisecond with gloo, while few still overlap the backward


@dataclass(frozen=True, slots=True)
class Sharing:
    """Number of parameters that share a message: `gathered` for weight gathers, `reduced` for gradient reductions."""

    gathered: int = 1
    reduced: int = 1
    overlapped: OverlappedWork = NOTHING
    """Computation that overlaps the messages."""


ALONE = Sharing()


def sharing(program: Program, overlapped: OverlappedWork = NOTHING, waited_for: str = "") -> dict[str, Sharing]:
    """Return the sharing of each parameter that a call reads, by its placeholder.

    Beside its messages a program computes, but for those of one layer, which are waited for.
    """
    wanted = set(program.parameters.values())
    infos = {name: info_of(node) for name, node in program.placeholders().items() if name in wanted}
    reduced = [info.num_bytes for info in infos.values() if info.requires_grad]
    each = max(1, round(len(reduced) / max(1, len(messages(reduced)))))
    layers = layers_read(program)
    joined, in_layer = joined_layers(program), Counter(layers.values())
    return {
        weight: Sharing(
            in_layer[layer] if joined[layer] == layer else max(each, in_layer[layer]),
            each,
            NOTHING if joined[layer] == waited_for else overlapped,
        )
        for weight, layer in layers.items()
    }


def first_layer(program: Program) -> str:
    """Return the layer whose weights are used first; "" where there is none."""
    return next(iter(layers_in_order(joined_layers(program))), "")


def gathered_alone(before: Layout, after: Layout, num_bytes: int, mesh: Mesh, hardware: Hardware) -> bool:
    """Return whether a weight, of `num_bytes` bytes once gathered, is gathered in a message of its own.

    This holds if its shards lie contiguously as calls read them, that is, if all axes split its first dim, and if the
    weight is `worth_a_message`.
    """
    axes = [axis for axis, placement in enumerate(before) if placement.is_split and after[axis] in (R, I)]
    if not axes or any(before[axis].dim for axis in axes):
        return False
    return bool(worth_a_message(num_bytes, axes, mesh, hardware))


def worth_a_message(num_bytes: Count, axes: Sequence[int], mesh: Mesh, hardware: Hardware) -> Count:
    """Return whether weights of `num_bytes` (one or an array), gathered over these axes, get messages of their own.

    They do if they are large, and if a copy out of a shared message (one read, one write) would take longer than the
    latency of one more message.
    """
    latency, _ = pieces("all_gather", mesh, joined_name(mesh.names, axes), hardware)[-1]
    return (num_bytes >= LARGE) & (2 * num_bytes / hardware.memory_bytes_per_s > latency)


def joined_layers(program: Program) -> dict[str, str]:
    """Map each layer of parameters to the layer whose message gathers it: itself, or one that is used later.

    At most `SMALLEST_MESSAGE` bytes join a layer, since they stay gathered as long as that layer does.
    """
    layers = layers_read(program)
    num_bytes: Counter[str] = Counter()
    for name, node in program.placeholders().items():
        if name in layers:
            num_bytes[layers[name]] += info_of(node).num_bytes
    used = (argument.name for node in program.graph.nodes for argument in node.all_input_nodes)
    found: dict[str, str] = {}
    message, room = "", -1
    for layer in reversed(dict.fromkeys(layers[name] for name in used if name in layers)):
        if num_bytes[layer] > room or layer_of(layer):
            message, room = layer, SMALLEST_MESSAGE
        else:
            room -= num_bytes[layer]
        found[layer] = message
    return found


def layers_read(program: Program) -> dict[str, str]:
    """Return the layer of each parameter that a call reads, by its placeholder."""
    read = {name for name, node in program.placeholders().items() if node.users}
    return {weight: layer_or_owner(name) for name, weight in program.parameters.items() if weight in read}


def layers_in_order(joined: Mapping[str, str]) -> tuple[str, ...]:
    """Return the layers that have a message of `joined_layers`, in the order of their first use."""
    return tuple(dict.fromkeys(reversed(list(joined.values()))))


def messages(sizes: Sequence[int]) -> list[list[int]]:
    """Group gradients of these byte sizes, given in order, into messages; return the indices in each message."""
    together = [number for number, size in enumerate(sizes) if size < LARGE]
    total = sum(sizes[number] for number in together)
    most = min(LARGEST_MESSAGE, max(SMALLEST_MESSAGE, -(-total // MESSAGES_PER_STEP)))
    count = max(1, -(-total // most))
    shared: dict[int, list[int]] = {}
    filled = 0
    for number in together:
        # A gradient is in the message in whose equal share of the bytes its middle lies.
        middle = filled + sizes[number] / 2
        shared.setdefault(int(middle * count // max(1, total)), []).append(number)
        filled += sizes[number]
    return sorted([*shared.values(), *([number] for number, size in enumerate(sizes) if size >= LARGE)])
