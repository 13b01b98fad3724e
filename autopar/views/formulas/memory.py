"""Memory of a device at the peak of a plan, in symbols: the tensors of `memory` and `peak`, at the same moment.

    memory                     bytes per device, while the call runs (forward or backward) at which they are most now
    memory/activations, …      its parts, as `Plan.memory` names them

Another moment may be the fullest at other sizes.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import numpy as np

from autopar.costs.memory.lifetimes import Lifetimes
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import Role
from autopar.costs.memory.peak import memory_use
from autopar.costs.memory.resident_parts import parts_of
from autopar.costs.memory.tensor_bytes import Bytes, TensorBytes
from autopar.costs.space.space import Decision, ExpertRows, Space
from autopar.costs.space.strategy import Strategy
from autopar.ir.program.program import TensorInfo
from autopar.ir.program.recompute_segments import OFFLOAD
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.rule import BoundRule
from autopar.views.formulas.autograd_bytes import hidden_bytes
from autopar.views.formulas.repetition import Repetition
from autopar.views.formulas.symbolic_space import LocalSizes, symbolic_space
from autopar.views.formulas.symbols import Polynomial, Size


def memory_formulas(symbolic: SymbolicMemory, modes: Mapping[str, str], repetition: Repetition) -> dict[str, str]:
    """Return the name → formula, at the fullest moment of a choice per decision; none for stages, several micro-batches
    and a forward alone.
    """
    memory, space = symbolic.numeric, symbolic.space
    several = memory.microbatches.several or space.program.num_sent
    if memory.live is not None or not memory.lifetimes.calls or several:
        return {}
    at = memory.presence.moment(memory_use(memory, symbolic.choices, modes)[2])
    found: Counter[tuple[str, Polynomial, Polynomial]] = Counter()
    counted = [(parts_of(symbolic, n), repetition.of_decision(n)) for n in range(len(space.decisions))]
    counted += [(parts_of(symbolic, edge), repetition.of_edge(edge)) for edge in space.edges]
    for part, count in ((part, count) for parts, count in counted for part in parts):
        mode = memory.lifetimes.mode_of(part.of, modes) if len(part.modes) > 1 else 0
        num_bytes = Size.of(part.modes[mode].item()) if memory.presence.is_resident(part, at) else Size.of(0)
        if num_bytes and part.rows is not None:
            num_bytes = symbolic.uneven(part.rows, num_bytes)
        if num_bytes:
            once = part.role is Role.UPDATING
            found[part.name, num_bytes.polynomial, Polynomial.of(1) if once else count] += 1
    parts: dict[str, list[Polynomial]] = defaultdict(list)
    for (name, num_bytes, count), times in found.items():
        parts[name].append(num_bytes * count * times)
    sums = {name: Polynomial.sum(each) for name, each in parts.items()}
    return {"memory": str(Polynomial.sum(sums.values())), **{f"memory/{name}": str(p) for name, p in sums.items()}}


def offloaded_bytes(
    symbolic: SymbolicMemory, modes: Mapping[str, str], repetition: Repetition
) -> Iterator[tuple[Polynomial, float]]:
    """Yield the bytes of every tensor that is offloaded, and the exposed seconds per byte of its copies."""
    if OFFLOAD not in modes.values():
        return
    lifetimes, own, copies = symbolic.lifetimes, symbolic.host_copies, symbolic.numeric.host_copies
    found = [(n, own.bytes_of(n), repetition.of_decision(n)) for n in lifetimes.calls]
    found += [(edge.target, own.bytes_of(edge), repetition.of_edge(edge)) for edge in symbolic.space.edges]
    for number, num_bytes, count in found:
        segment = lifetimes.segment[number]
        if num_bytes is not None and num_bytes.item() and modes.get(segment) == OFFLOAD:
            yield Polynomial.of(num_bytes.item()) * count, copies.exposed[segment] / copies.bytes_per_s


class SymbolicMemory(MemoryModel):
    """The memory model of one plan: each decision has its one strategy, and bytes are sizes that have symbols."""

    def __init__(self, memory: MemoryModel, choices: Sequence[int], sizes: LocalSizes) -> None:
        self.numeric, self.choices, self._sizes = memory, choices, sizes
        space = symbolic_space(memory.space, choices, sizes)
        tensors = _SymbolicBytes(space, memory.lifetimes, sizes)
        super().__init__(space, memory.microbatches, memory.prefetch, tensors=tensors)

    def uneven(self, rows: ExpertRows, num_bytes: Size) -> Size:
        """Return the bytes of expert rows above an equal share, given the bytes of a share."""
        share = self._sizes.share(rows, self.choices)
        value = math.ceil(self.numeric.space.uneven_share(rows, self.choices) * num_bytes)
        return Size.symbol(f"ceiling(({num_bytes.polynomial})*({share - 1}))", value) if value else Size.of(0)


class _SymbolicBytes(TensorBytes):
    def __init__(self, space: Space, lifetimes: Lifetimes, sizes: LocalSizes) -> None:
        super().__init__(space, lifetimes)
        self._sizes = sizes

    def local(self, shape: Sequence[int], layouts: Sequence[Layout], size: int) -> Bytes:
        key = ("local", id(shape), tuple(layouts), size)  # shapes of other symbols may be equal numbers
        return self.cached(key, lambda: self.array([self._sizes.local(shape, each) * size for each in layouts]))

    def local_sizes(self, strategy: Strategy, bound: BoundRule) -> dict[str, int]:
        return strategy.local_sizes(bound.sizes, self._sizes.axes)

    def array(self, sizes: Sequence[int]) -> Bytes:
        return np.array(sizes, dtype=object)

    def elements(self, decision: Decision) -> Bytes:
        (strategy,) = decision.candidates.strategies
        return self.local(self._sizes.shapes[decision.node.name, 0], strategy.outputs[:1], 1)

    def state_bytes(self, name: str, info: TensorInfo, elements: Bytes, matrix: bool) -> Bytes:
        """Return the bytes of one optimizer state; other numbers of elements take as many bytes of each."""
        (size,) = elements
        num_bytes = self.space.optimizer.state_bytes_of(name, info, elements.astype(np.int64), matrix).item()
        return self.array([Size.make(num_bytes, size.polynomial * Fraction(num_bytes, int(size)))])

    def hidden(self, decision: Decision, other_bytes: int, largest: int, local: Bytes) -> Bytes:
        if not other_bytes:
            return np.zeros_like(local)
        call, shapes = decision.call, tuple(info.shape for info in decision.call.inputs)
        make = functools.partial(hidden_bytes, decision.node, call, shapes, other_bytes, self._sizes.symbols)
        whole, elements = self.cached(("hidden", decision.candidates), make), Size.of(math.prod(shapes[largest]))
        return self.array([-(-whole * each // elements) for each in local])
