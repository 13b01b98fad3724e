"""Cost of a plan as expressions in batch, sequence, hidden, layers and the mesh axes: text that sympy reads.

    seconds          Σ count · (Max(flops / peak, bytes / bandwidth) + latency) + count · all_reduce_over_tp(bytes) + …
                     and the plan's `host_seconds`, as they are at its own sizes
    all_reduce       bytes per device and step, in NCCL's convention; "all_reduce/tp" those over one axis; so for the
                     other collectives
    flops            floating point operations per device and step, forward, backward and recomputation
    parameter_bytes  of parameters, and gradient_bytes, optimizer_bytes: per device, in the storage layouts; host_bytes
                     in place of the last where the optimizer is on the host, without what passes through it; with
                     activations that leave for the host
    memory           bytes per device at the fullest moment, and "memory/activations" … (see `views.formulas.memory`)
    forward_computing, forward_latency, weight_size, num_weights …
                     overlapped compute and moves, whole, on one device (see
                     `costs.hardware.overlap`)
    whole            what must be whole numbers for the plan to fit: dims, and their parts

The functions of `costs` that give bytes and seconds run here on sizes that remember their symbols (`symbols.Size`), in
the space that has a plan's choices alone. Equal terms are joined, so that a formula is as long as one layer.
`all_reduce_over_tp` is the time of a collective as a function of its `bytes`: the least of its pieces on the plan's
links. The choices and the moves between layouts are those of the plan; at other sizes another plan may be better.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, cast

from autopar.costs.hardware.collectives import Transfer, rearranging_seconds
from autopar.costs.hardware.overlap import GATHERING, NOTHING, Message, kind_of
from autopar.costs.memory.model import MemoryModel
from autopar.costs.plans.formula_names import COLLECTIVES, FIXED, LAST_HOST, OVERLAPPED, WHOLE, rate_name
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing.moves import in_bucket, place_in, transfers
from autopar.costs.pricing.operations import backward_share, gradient_sum_seconds
from autopar.costs.pricing.optimizer_step import step_seconds, step_transfers
from autopar.costs.pricing.shortest_paths import LOCAL_MOVE_SECONDS
from autopar.costs.space.call_candidates import OwnCollectives, own_transfers
from autopar.costs.space.computing import Work, computing_seconds
from autopar.costs.space.space import Space, TensorEdge, without_gradient
from autopar.costs.space.unsharded import dtypes_of, overlapped_of, seconds_alone, work_of
from autopar.ir.sharding.operation import Call, OpRule, is_view
from autopar.ir.sharding.rule import BoundRule
from autopar.planning.settings import context_of
from autopar.views.formulas.memory import SymbolicMemory, memory_formulas, offloaded_bytes
from autopar.views.formulas.repetition import Repetition, stacks_of
from autopar.views.formulas.reprice import exposed_share, rate
from autopar.views.formulas.symbolic_shapes import symbolic_shapes
from autopar.views.formulas.symbolic_space import LocalSizes
from autopar.views.formulas.symbols import LAYERS, Polynomial, Size, axis_symbols

Item = TypeVar("Item")


def formulas_of(
    space: Space, choices: Sequence[int], memory: MemoryModel, modes: Mapping[str, str]
) -> tuple[dict[str, int], dict[str, str]]:
    """Map symbols to their current values, and names to the formulas of one choice per decision.

    `modes` says how segments are computed again.
    """
    stacks = stacks_of(space.program)
    shapes = symbolic_shapes(space, stacks)
    symbols = dict(shapes.symbols)
    if stacks:
        symbols[LAYERS] = len(stacks[0].numbers)
    axes = zip(axis_symbols(space.mesh), space.mesh.sizes, strict=True)
    symbols.update({name: size for name, size in axes if size > 1})
    sizes, repetition = LocalSizes(space, shapes), Repetition(space, stacks)
    symbolic = SymbolicMemory(memory, choices, sizes)
    formulas = _Ledger(symbolic, sizes, repetition, modes).formulas()
    formulas.update(memory_formulas(symbolic, modes, repetition))
    formulas[WHOLE] = f"[{', '.join(sorted(map(str, sizes.fractions)))}]"
    formulas.update({f"{FIXED}{name}": reason for name, reason in shapes.fixed.items()})
    return symbols, formulas


def with_formulas(plan: Plan) -> Plan:
    """Return the plan with its symbols and formulas: made now, unless it has them or was loaded without."""
    if plan.formulas or plan.context is None:
        return plan
    context = context_of(plan)
    symbols, formulas = formulas_of(context.space, context.choices, context.memory_model, plan.recompute)
    if plan.host_seconds:
        formulas["seconds"] += f" {'-' if plan.host_seconds < 0 else '+'} {abs(plan.host_seconds)!r}"
    return replace(plan, symbols=symbols, formulas=formulas)


class _Ledger:
    """Sums of one plan, filled by one walk over its decisions and one over its edges."""

    def __init__(
        self, symbolic: SymbolicMemory, sizes: LocalSizes, repetition: Repetition, modes: Mapping[str, str]
    ) -> None:
        self.symbolic, self.space, self.choices = symbolic, symbolic.numeric.space, symbolic.choices
        self.decisions, self.inbound = symbolic.space.decisions, symbolic.space.inbound
        """Decisions and edges in symbols; `space` has those with all strategies, and numbers for sizes."""
        self.sizes, self.repetition, self.axes = sizes, repetition, sizes.axes
        self.second, self.modes = symbolic.numeric.second_forward, modes
        self.sums: dict[str, list[Polynomial]] = {"seconds": [], "flops": []}
        self.traffic: dict[tuple[str, str], list[Polynomial]] = defaultdict(list)
        self.rates: dict[str, str] = {}
        self.overlapped: dict[str, list[Polynomial]] = {name: [] for name in OVERLAPPED}

    def formulas(self) -> dict[str, str]:
        for num_bytes, seconds in offloaded_bytes(self.symbolic, self.modes, self.repetition):
            self._add("seconds", num_bytes * seconds)
            self._add("host_bytes", num_bytes)
        unused = without_gradient(self.space)
        kinds: dict[str, list[int]] = defaultdict(list)
        for number, decision in enumerate(self.decisions):
            kinds[decision.kind].append(number)
        for number, times in _grouped(kinds["parameter"], self._same_decision):
            self._parameter(number, times)
        for number, times in _grouped(kinds["call"], lambda number: (self._same_decision(number), number in unused)):
            self._call(number, times, number in unused)
        for number in kinds["output"]:
            for transfer in self.decisions[number].candidates.strategies[0].transfers:
                self._add("seconds", self._seconds_of(transfer))
                self._count(transfer, Polynomial.of(1))
        for edge, times in _grouped(self.space.edges, lambda edge: (self._same_edge(edge), edge.target in unused)):
            self._edge(edge, times, edge.target in unused)
        found = {name: str(Polynomial.sum(each)) for name, each in self.sums.items()}
        for collective in COLLECTIVES:
            over = {axis: Polynomial.sum(parts) for (name, axis), parts in self.traffic.items() if name == collective}
            found[collective] = str(Polynomial.sum(over.values()))
            found.update({f"{collective}/{axis}": str(total) for axis, total in sorted(over.items())})
        return {**found, **dict(sorted(self.rates.items())), **self._overlapped()}

    def _add(self, name: str, amount: Polynomial) -> None:
        self.sums.setdefault(name, []).append(amount)

    def _same_decision(self, number: int) -> Hashable:
        """Return a key, equal for decisions with equal terms; equal candidates are one object."""
        share = self.sizes.share(self.space.rows.get(number), self.choices)
        of_plan = number, self.choices, self.modes
        again = self.second.is_rerun(*of_plan), self.second.collectives_of(*of_plan), id(self.second.running(*of_plan))
        return id(self.decisions[number].candidates), again, id(self.repetition.of_decision(number)), share

    def _parameter(self, number: int, times: int) -> None:
        decision, optimizer = self.decisions[number], self.space.optimizer
        stored = decision.node.meta["tensor"]
        info = replace(stored, shape=self.sizes.shapes[decision.node.name, 0])
        count, matrix = self.repetition.of_decision(number) * times, self.space.is_matrix(number)
        layout = decision.candidates.strategies[0].outputs[0]
        elements = self.sizes.local(info.shape, layout).polynomial * count
        each = {
            "parameter_bytes": info.dtype.itemsize,
            "gradient_bytes": info.dtype.itemsize if info.requires_grad else 0,
            "optimizer_bytes": sum(optimizer.state_of(stored, matrix).values()),
        }
        if optimizer.offload is not None:
            each["host_bytes"] = each.pop("optimizer_bytes") + each["gradient_bytes"] * optimizer.sends_gradients
        for name, size in each.items():
            self._add(name, elements * (int(size) if size == int(size) else size))
        used, summed = dtypes_of(self.space.program, decision.node)
        whole = Size.of(info.num_elements).polynomial * count
        self.overlapped["weight_size"].append(whole * used.itemsize)
        self.overlapped["gradient_size"].append(whole * (0 if summed is None else summed.itemsize))
        self.overlapped["num_weights"].append(count)
        self._add("seconds", count * step_seconds(info, layout, self.axes, self.space.hardware, optimizer, matrix))
        for transfer in step_transfers(info, layout, self.axes, optimizer, matrix):
            self._add("seconds", count * self._seconds_of(transfer))
            self._count(transfer, count)

    def _call(self, number: int, times: int, unused: bool) -> None:
        candidates, hardware, of_plan = self.decisions[number].candidates, self.space.hardware, (number, self.choices)
        call, op, bound = self._ruled(number)
        strategy = self.second.running(*of_plan, self.modes)
        for info, layout in zip((*call.inputs, *call.outputs), (*strategy.inputs, *strategy.outputs), strict=True):
            self.sizes.local(info.shape, layout)  # notes sizes that must be whole
        count = self.repetition.of_decision(number) * times
        share = self.sizes.share(self.space.rows.get(number), self.choices)
        work, passes = Work.of(call, op, bound, hardware), Polynomial.of(backward_share(call, op)) + 1
        forward = computing_seconds(strategy, work, self.axes, hardware)
        if not is_view(call):
            alone = count * seconds_alone(call, op, bound, hardware)
            for side, part in (("forward", 1), ("backward", passes - 1)):
                self.overlapped[f"{side}_computing"].append(alone * part)
                self.overlapped[f"{side}_latency"].append(count * part * hardware.op_latency_s)
            computed = count * (passes + self.second.is_rerun(*of_plan, self.modes))
            self._add("seconds", computed * forward * share)
            stated = strategy.implementation.flops(call, strategy.local_sizes(bound.sizes, self.axes))
            flops = Polynomial.of(work.num_flops) / strategy.num_parts(self.axes) if stated is None else stated
            self._add("flops", computed * flops)
        for position in candidates.summed:
            info, layout = call.inputs[position], strategy.inputs[position]
            self._add("seconds", count * gradient_sum_seconds(info, layout, self.axes.sizes, hardware) * share)
        own = own_transfers(strategy, call, bound.sizes, self.axes)
        seconds, computing = cast("list[float]", list(map(self._seconds_of, own))), cast(float, passes * forward)
        others = self.space.meanwhile.get(self.decisions[number].node)
        ruled = (self._ruled(self.space.index[node.name]) for node in others or ())
        meanwhile = NOTHING if others is None else work_of(ruled, hardware)
        waits = OwnCollectives(call, bound, self.axes, hardware, meanwhile).exposed(strategy, seconds, computing)
        again = bool(self.second.collectives_of(*of_plan, self.modes))
        for transfer, wait in zip(own, waits, strict=True):
            runs = count * (1 + (again and not transfer.backward))
            self._add("seconds", runs * wait * share)
            if not (unused and transfer.backward):
                self._count(transfer, runs)

    def _ruled(self, number: int) -> tuple[Call, OpRule, BoundRule]:
        found = self.decisions[number].candidates
        assert found.call is not None and found.op is not None and found.bound is not None
        return found.call, found.op, found.bound

    def _same_edge(self, edge: TensorEdge) -> Hashable:
        """Return a key, equal for edges with equal terms."""
        ends = ((edge.source, edge.source_output), edge.end)
        ends_of = tuple((id(self.decisions[n].candidates), position) for n, position in ends)
        share, shape = self.sizes.share(self.space.rows_on(edge), self.choices), self.inbound[edge.end].tensor.shape
        return ends_of, edge.tensor, share, self._exposed(edge), id(shape), id(self.repetition.of_edge(edge))

    def _exposed(self, edge: TensorEdge) -> tuple[float, ...]:
        """Return the exposed shares of the collectives that run again on an edge."""
        return tuple([share for _, share in self.second.collectives_on(edge, self.choices, self.modes)])

    def _edge(self, edge: TensorEdge, times: int, unused: bool) -> None:
        path = self.space.path(edge, self.choices)
        if not path.moves:
            return
        tensor, (source,) = self.inbound[edge.end].tensor, self.decisions[edge.source].candidates.strategies
        tensor = replace(tensor, regather=tensor.regather and not source.saved)
        count, axes = self.repetition.of_edge(edge) * times, self.axes
        share = self.sizes.share(self.space.rows_on(edge), self.choices)
        self._add("seconds", count * (len(path.moves) * LOCAL_MOVE_SECONDS) * share)
        exposed = iter(self._exposed(edge))
        for number, (move, twice) in enumerate(zip(path.moves, path.regathered, strict=True)):
            for transfer in transfers(move, tensor, axes, tensor.regather):
                message = in_bucket(move, tensor, place_in(path.moves, number)) if path.together else None
                self._add("seconds", count * share * self._seconds_of(transfer, message))
            for transfer in self.sizes.padded(transfers(move, tensor, axes, twice), edge, self.choices):
                if not (unused and transfer.backward):
                    self._count(transfer, count)
                if not transfer.backward and (again := next(exposed, None)) is not None:
                    self._add("seconds", count * again * self._seconds_of(transfer))
                    self._count(transfer, count)

    def _overlapped(self) -> dict[str, str]:
        """Return the formulas of the computation and moves that overlap.

        For a pipeline stage these are constants: the whole model's values at its current sizes.
        """
        known = self.space.overlapped
        if replace(known, waited=()) == overlapped_of(self.space.program, self.space.hardware):
            return {name: str(Polynomial.sum(each)) for name, each in self.overlapped.items()}
        passes = (known.backward, known.forward)
        each = [value for one in passes for value in (one.seconds, one.latency, one.num_bytes)]
        return dict(zip(OVERLAPPED, map(repr, (*each, known.num_weights)), strict=True))

    def _count(self, transfer: Transfer, count: Polynomial) -> None:
        self.traffic[transfer.collective, transfer.axis].append(Polynomial.of(transfer.num_bytes) * count)

    def _rate(self, collective: str, axis: str, num_bytes: int | Polynomial) -> Polynomial:
        """Return the seconds of a collective alone, as a function of its bytes."""
        name = rate_name(collective, axis)
        if name not in self.rates:
            self.rates[name] = rate(collective, axis, self.space.mesh, self.space.hardware)
        return Polynomial.symbol(f"{name}({Polynomial.of(num_bytes)})")

    def _seconds_of(self, transfer: Transfer, message: Message | None = None) -> Polynomial:
        """Return what `collectives.transfer_seconds` does, which knows the bytes."""
        collective, axis, num_bytes = transfer.collective, transfer.axis, Polynomial.of(transfer.priced_bytes)
        mesh, hardware = self.space.mesh, self.space.hardware
        if message is None:
            alone = self._rate(collective, axis, num_bytes)
            if transfer.ahead:
                return alone * hardware.communication_share
            late = any(link.straggling_s for link in hardware.links)
            return alone + rearranging_seconds(transfer, hardware) + (self._rate(LAST_HOST, axis, 1) if late else 0)
        together, passes = message.num_parameters, message.passes
        seconds = self._rate(collective, axis, num_bytes * together) / together
        if hardware.communication_share == 1 or not message.overlapped.num_weights:
            return seconds
        waited = message.waited(kind_of(collective, axis, transfer.backward))
        if waited is not None:
            return seconds * waited
        passes = 1 if collective == GATHERING else passes
        share = rate_name(collective, axis, together, passes)
        if share not in self.rates:
            self.rates[share] = exposed_share(collective, axis, together, passes, mesh, hardware)
        whole = message.weight_bytes if collective == GATHERING else message.gradient_bytes
        return seconds * Polynomial.symbol(f"{share}({num_bytes / whole})")


def _grouped(items: Iterable[Item], same: Callable[[Item], Hashable]) -> list[tuple[Item, int]]:
    """Return the first of all items that are the same, and how many they are."""
    found: dict[Hashable, tuple[Item, int]] = {}
    for item in items:
        key = same(item)
        first, times = found.get(key, (item, 0))
        found[key] = (first, times + 1)
    return list(found.values())
