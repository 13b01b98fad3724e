"""Order in which a rank runs its graph: calls, moves of activations, and buckets of weights at their first use.

It is the order of `runtime.rewrite.per_rank_graph`, which walks the program once, and emits what a call needs right
before it. The backward runs in reverse. Casts of weights precede the move of their bucket, even those that are made
during it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.costs.pricing.message_sizes import joined_layers, layers_in_order
from autopar.costs.pricing.reshard import ReshardPath
from autopar.costs.space.parameter_buckets import Bucket, buckets_of
from autopar.costs.space.space import Space, TensorEdge
from autopar.ir.program.calls import is_call, module_of
from autopar.ir.program.paths import layer_of
from autopar.ir.program.program import tensor_inputs


@dataclass(frozen=True, slots=True)
class Call:
    """A decision that computes."""

    number: int
    layer: int | None
    """The number of its layer of weights, in the order of their first use; None where it has none."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Arrival of what a call itself has moved while others ran (`Space.travels`), behind the last of these."""

    number: int
    layer: int | None


@dataclass(frozen=True, slots=True)
class Moved:
    """Tensor of an edge that is resharded to the layout its target takes."""

    edge: TensorEdge
    path: ReshardPath
    layer: int | None


@dataclass(frozen=True, slots=True)
class Gathered:
    """The weights of a bucket that is gathered, for the first call of those that use one."""

    bucket: Bucket
    layer: int


Entry = Call | Arrived | Moved | Gathered


@dataclass(frozen=True, slots=True)
class Order:
    """Sequence of entries that a forward runs."""

    entries: tuple[Entry, ...]
    reduced: tuple[Bucket, ...]
    """Buckets that only reduce gradients: they open the graph, and nothing is moved in the forward."""


def order_of(space: Space, choices: Sequence[int]) -> Order:
    """Return the order in which a space runs under a choice per decision."""
    return _Walk(space, choices).run()


class _Walk:
    """One walk over the program's graph."""

    def __init__(self, space: Space, choices: Sequence[int]) -> None:
        self.space, self.choices = space, choices
        self.buckets = buckets_of(space, choices)
        self.bucket_of = {end: bucket for bucket in self.buckets for end in bucket.ends}
        self.entries: list[Entry] = []
        self.there: set[int] = set()
        """Calls and shared reshards that have been emitted."""
        self.travelling: dict[fx.Node, Arrived] = {}
        """The last call that runs while a result is on its way → the arrival of that."""
        self.begun: set[int] = set()
        """Buckets, by their `id`."""
        self.joined = joined_layers(space.program)
        self.numbers = {layer: number for number, layer in enumerate(layers_in_order(self.joined))}

    def run(self) -> Order:
        for node in self.space.program.graph.nodes:
            if is_call(node):
                self._call(self.space.index[node.name])
                if node in self.travelling:
                    self.entries.append(self.travelling.pop(node))
        for number, decision in enumerate(self.space.decisions):
            if decision.kind == "output":
                self._input(number, 0, None)
        return Order(tuple(self.entries), tuple(bucket for bucket in self.buckets if bucket.at_entry))

    def _call(self, number: int) -> None:
        if number in self.there:
            return
        self.there.add(number)
        node = self.space.decisions[number].node
        owner = layer_of(module_of(node)) or module_of(node)
        layer = self.numbers.get(self.joined.get(owner, owner))
        for position in range(len(tensor_inputs(node))):
            self._input(number, position, layer)
        self.entries.append(Call(number, layer))
        if self.space.travels(number, self.choices[number]):
            self.travelling[self.space.meanwhile[node][-1]] = Arrived(number, layer)

    def _input(self, number: int, position: int, layer: int | None) -> None:
        bucket = self.bucket_of.get((number, position))
        if bucket is not None:
            if not bucket.at_entry and id(bucket) not in self.begun:
                self._bucket(bucket)
            return
        edge = self.space.inbound[number, position]
        self._value(edge.source, layer)
        path = self.space.path(edge, self.choices)
        if path.moves:
            self.entries.append(Moved(edge, path, layer))

    def _value(self, number: int, layer: int | None) -> None:
        """Provide a decision's output; shared reshards and casts of weights are emitted when first used."""
        decision = self.space.decisions[number]
        if decision.name in self.space.weight_casts:
            self._call(number)
        elif decision.kind == "shared_reshard" and number not in self.there:
            self.there.add(number)
            self._input(number, 0, layer)

    def _bucket(self, bucket: Bucket) -> None:
        self.begun.add(id(bucket))
        layer = self.numbers[bucket.layer]
        for source in bucket.sources:
            self._value(source, layer)
        self.entries.append(Gathered(bucket, layer))
