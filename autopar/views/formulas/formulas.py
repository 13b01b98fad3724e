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

The cost is that of `cost` and `costs.hardware.collectives`. Their functions that count bytes run here on sizes that
remember their symbols (`symbols.Size`). Equal terms are joined, so that a formula is as long as one layer.
`all_reduce_over_tp` is the time of a collective as a function of its `bytes`: the least of its pieces on the plan's
links. The choices and the moves between layouts are those of the plan; at other sizes another plan may be better.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

from torch import fx

from autopar.costs.hardware.collectives import Transfer
from autopar.costs.hardware.overlap import GATHERING, Message, kind_of
from autopar.costs.memory.model import MemoryModel
from autopar.costs.plans.formula_names import COLLECTIVES, FIXED, LAST_HOST, OVERLAPPED, WHOLE, rate_name
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing import operations
from autopar.costs.pricing.moves import in_bucket, place_in, transfers
from autopar.costs.pricing.offload import host_step
from autopar.costs.pricing.optimizer_step import step_flops, step_peak, step_transfers
from autopar.costs.pricing.shortest_paths import LOCAL_MOVE_SECONDS
from autopar.costs.space.call_candidates import own_transfers
from autopar.costs.space.space import Decision, Space, TensorEdge, without_gradient
from autopar.costs.space.strategy import Strategy
from autopar.costs.space.unsharded import dtypes_of, overlapped_of
from autopar.ir.sharding.mesh import Mesh
from autopar.ir.sharding.operation import Call, is_view
from autopar.ir.sharding.rule import BoundRule
from autopar.planning.settings import context_of
from autopar.views.formulas import full_rate
from autopar.views.formulas.local_sizes import LocalSizes, symbolic_call, symbolic_info
from autopar.views.formulas.memory import SymbolicMemory, memory_formulas, offloaded_bytes
from autopar.views.formulas.repetition import Repetition, stacks_of
from autopar.views.formulas.reprice import exposed_share, rate
from autopar.views.formulas.sums import Sum, grouped, multiplied
from autopar.views.formulas.symbolic_shapes import Key, input_keys, symbolic_shapes
from autopar.views.formulas.symbols import LAYERS, Polynomial, Size, axis_symbols


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
    symbolic, ledger = SymbolicMemory(memory, choices, sizes), _Ledger(space, choices, sizes, repetition, memory, modes)
    for num_bytes, seconds in offloaded_bytes(symbolic, modes, repetition):
        ledger.seconds.add(num_bytes * seconds)
        ledger.stored["host_bytes"].add(num_bytes)
    formulas = {**ledger.formulas(), **memory_formulas(symbolic, modes, repetition)}
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


@dataclass(frozen=True, slots=True)
class _Work:
    """FLOPs, time and collectives of one call itself, per device."""

    flops: Polynomial
    roofline: str
    transfers: tuple[Transfer, ...]
    launches: int = 1
    hidden: float = 0.0
    """Largest share of its collectives' seconds that its own computation can hide, given that it lasts as long."""
    whole: str = ""
    """Seconds of the whole call on one device, without the latency."""


class _Ledger:
    """Sums of one plan, filled by one walk over its decisions and one over its edges."""

    def __init__(
        self,
        space: Space,
        choices: Sequence[int],
        sizes: LocalSizes,
        repetition: Repetition,
        memory: MemoryModel,
        modes: Mapping[str, str],
    ) -> None:
        self.space, self.choices, self.sizes, self.repetition = space, choices, sizes, repetition
        self.second, self.modes = memory.second_forward, modes
        self.seconds, self.flops = Sum(), Sum()
        self.stored: dict[str, Sum] = defaultdict(Sum)
        self.traffic: dict[tuple[str, str], list[Polynomial]] = defaultdict(list)
        self.rates: dict[str, str] = {}
        self.overlapped = {name: Sum() for name in OVERLAPPED}

    def formulas(self) -> dict[str, str]:
        unused = without_gradient(self.space)
        numbers = range(len(self.space.decisions))
        kinds = [decision.kind for decision in self.space.decisions]
        for number, times in grouped((n for n in numbers if kinds[n] == "parameter"), self._same_decision):
            self._parameter(number, times)
        calls = (n for n in numbers if kinds[n] == "call")
        for number, times in grouped(calls, lambda number: (self._same_decision(number), number in unused)):
            self._call(number, times, number in unused)
        for number in (n for n in numbers if kinds[n] == "output"):
            for transfer in self.space.decisions[number].candidates.strategies[self.choices[number]].transfers:
                self.seconds.add(Polynomial.of(1), self._seconds_of(transfer))
                self._count(transfer, Polynomial.of(1))
        for edge, times in grouped(self.space.edges, lambda edge: (*self._same_edge(edge), edge.target in unused)):
            self._edge(edge, times, edge.target in unused)
        found = {"seconds": str(self.seconds), "flops": str(self.flops)}
        found.update({name: str(each) for name, each in self.stored.items()})
        for collective in COLLECTIVES:
            over = {axis: Polynomial.sum(parts) for (name, axis), parts in self.traffic.items() if name == collective}
            found[collective] = str(Polynomial.sum(over.values()))
            found.update({f"{collective}/{axis}": str(total) for axis, total in sorted(over.items())})
        found.update(sorted(self.rates.items()))
        found.update(self._overlapped())
        return found

    def _same_decision(self, number: int) -> Hashable:
        """Return a key, equal for decisions with equal terms; equal candidates and shapes are one object each."""
        decision = self.space.decisions[number]
        shapes = [id(self.sizes.shape(key)) for key in self._keys(decision)]
        count = id(self.repetition.of_decision(number))
        share = self.sizes.share(self.space.rows.get(number), self.choices)
        of_plan = number, self.choices, self.modes
        again = self.second.is_rerun(*of_plan), self.second.collectives_of(*of_plan), id(self.second.running(*of_plan))
        return (id(decision.candidates), self.choices[number], again, count, share, *shapes)

    def _keys(self, decision: Decision) -> list[Key]:
        if decision.candidates.call is None:
            return [(decision.node.name, 0)]
        made = [(decision.name, position) for position in range(len(decision.candidates.call.outputs))]
        return [*input_keys(self.space, decision), *made]

    def _parameter(self, number: int, times: int) -> None:
        decision, optimizer, hardware = self.space.decisions[number], self.space.optimizer, self.space.hardware
        info = symbolic_info(decision.node.meta["tensor"], self.sizes.shape((decision.node.name, 0)))
        count, matrix = self.repetition.of_decision(number) * times, self.space.is_matrix(number)
        strategy = decision.candidates.strategies[self.choices[number]]
        elements = self.sizes.local(info.shape, strategy.outputs[0]).polynomial * count
        each = {
            "parameter_bytes": info.dtype.itemsize,
            "gradient_bytes": info.dtype.itemsize if info.requires_grad else 0,
            "optimizer_bytes": sum(optimizer.state_of(info, matrix).values()),
        }
        if optimizer.offload is not None:
            each["host_bytes"] = each.pop("optimizer_bytes") + each["gradient_bytes"] * optimizer.sends_gradients
        for name, size in each.items():
            self.stored[name].add(elements * (int(size) if size == int(size) else size))
        self._moved_weight(decision.node, Size.of(info.num_elements).polynomial * count, count)
        moved = optimizer.step_bytes(info, matrix)
        if moved:
            on_device = moved / hardware.memory_bytes_per_s
            offloaded = optimizer.offload is not None
            self.seconds.add(elements * (host_step(info, hardware, optimizer).seconds if offloaded else on_device))
            self.seconds.add(count * hardware.op_latency_s)
        flops = step_flops(info, self.sizes.local(info.shape, strategy.outputs[0]), optimizer, matrix)
        if flops:
            self.seconds.add(count * Size.of(flops).polynomial * (1 / step_peak(info, hardware, optimizer)))
        for transfer in step_transfers(info, strategy.outputs[0], cast(Mesh, self.sizes.axes), optimizer, matrix):
            self.seconds.add(count, self._seconds_of(transfer))
            self._count(transfer, count)

    def _call(self, number: int, times: int, unused: bool) -> None:
        decision = self.space.decisions[number]
        candidates, call = decision.candidates, self._symbolic(decision)
        assert candidates.call is not None and candidates.op is not None and candidates.bound is not None
        of_plan = number, self.choices, self.modes
        work = self._work_of(call, candidates.bound, self.second.running(*of_plan))
        count = self.repetition.of_decision(number) * times
        passes = 1 + Fraction(operations.backward_share(candidates.call, candidates.op))
        if work.whole:
            latency = count * self.space.hardware.op_latency_s
            self.overlapped["forward_computing"].add(count, work.whole)
            self.overlapped["forward_latency"].add(latency)
            self.overlapped["backward_computing"].add(count * (passes - 1), work.whole)
            self.overlapped["backward_latency"].add(latency * (passes - 1))
        share = self.sizes.share(self.space.rows.get(number), self.choices)
        if work.roofline:
            computed = count * (passes + self.second.is_rerun(*of_plan))
            self.seconds.add(computed, multiplied(share, work.roofline))
            self.seconds.add(computed * (work.launches * self.space.hardware.op_latency_s), share)
            self.flops.add(computed * work.flops)
        for position in candidates.summed:
            layout = candidates.strategies[self.choices[number]].inputs[position]
            moved = self.sizes.local(call.inputs[position].shape, layout).polynomial
            factor = operations.GRADIENTS_MOVED * call.inputs[position].dtype.itemsize
            each = f"({moved})*{factor / self.space.hardware.elementwise_bytes_per_s!r}"
            self.seconds.add(count, multiplied(share, f"({each} + {self.space.hardware.op_latency_s!r})"))
        communicates = self.second.collectives_of(*of_plan)
        again = [each for each in work.transfers if not each.backward and communicates]
        if self.space.travels(number, self.choices[number]):
            self._waits_meanwhile(number, work.transfers, again, count, share)
        else:
            self._own_waits(work, again, passes, count, share)
        for transfer in (*work.transfers, *again):
            if not (unused and transfer.backward):
                self._count(transfer, count)

    def _own_waits(
        self, work: _Work, again: Sequence[Transfer], passes: Fraction, count: Polynomial, share: str
    ) -> None:
        """Add the exposed seconds of an implementation's own collectives."""
        if not work.hidden:
            for transfer in (*work.transfers, *again):
                self.seconds.add(count, multiplied(share, self._seconds_of(transfer)))
        elif work.transfers:
            total = " + ".join(self._seconds_of(transfer) for transfer in work.transfers)
            computing = f"{passes}*({work.roofline} + {work.launches * self.space.hardware.op_latency_s!r})"
            self.seconds.add(count, multiplied(share, f"Max({1 - work.hidden!r}*({total}), {total} - {computing})"))
            for transfer in again:
                waits = f"Max({1 - work.hidden!r}, 1 - {computing}/({total}))"
                self.seconds.add(count, multiplied(share, f"{self._seconds_of(transfer)}*{waits}"))

    def _waits_meanwhile(
        self, number: int, transfers: Sequence[Transfer], again: Sequence[Transfer], count: Polynomial, share: str
    ) -> None:
        """Add the exposed seconds of a call's own collectives, while which others run."""
        space, decision = self.space, self.space.decisions[number]
        others = [space.decisions[space.index[node.name]] for node in space.meanwhile[decision.node]]
        calls = [(self._symbolic(each), each.candidates) for each in others]
        computing = full_rate.passes_formula(calls, space.mesh.num_devices, space.hardware)
        positions = decision.candidates.strategies[self.choices[number]].travelling
        for position, transfer in enumerate(transfers):
            seconds = self._seconds_of(transfer)
            if position in positions:
                least = f"{space.hardware.communication_share!r}*{seconds}"
                seconds = f"Max({least}, {seconds} - ({computing[transfer.backward]}))"
            self.seconds.add(count * (1 + (transfer in again)), multiplied(share, seconds))

    def _symbolic(self, decision: Decision) -> Call:
        """Return a decision's call with symbols in its shapes."""
        assert decision.candidates.call is not None
        shapes, num_inputs = list(map(self.sizes.shape, self._keys(decision))), len(decision.candidates.call.inputs)
        return symbolic_call(decision.candidates.call, shapes[:num_inputs], shapes[num_inputs:])

    def _work_of(self, call: Call, bound: BoundRule, strategy: Strategy) -> _Work:
        num_bytes = []
        for infos, layouts in ((call.inputs, strategy.inputs), (call.outputs, strategy.outputs)):
            each = zip(infos, layouts, strict=True)
            num_bytes.append(sum(self.sizes.local(info.shape, layout) * info.dtype.itemsize for info, layout in each))
        if is_view(call):
            return _Work(Polynomial(), "", ())
        whole = full_rate.alone_formula(call, bound, self.space.hardware)
        bound, op = full_rate.bound_again(call, bound)
        axes, chosen = cast(Mesh, self.sizes.axes), strategy.implementation
        local = strategy.local_sizes(bound.sizes, axes)
        stated = chosen.flops(call, local)
        if stated is not None:
            flops = Size.of(stated).polynomial
        else:
            flops = Size.of(operations.flops(call, op, bound)).polynomial / Size.of(strategy.num_parts(axes))
        hardware = self.space.hardware
        read, written = num_bytes
        speed = float(operations.bandwidth(op, bound, hardware))
        terms = operations.forward_terms(call, op, (read, written), hardware, speed, chosen, local)
        roofline = full_rate.seconds_formula(
            terms, full_rate.full_rate_formula(flops, op, bound, local, hardware, chosen)
        )
        hidden = operations.hidden_share(chosen, hardware, call, local)
        return _Work(
            flops,
            roofline,
            own_transfers(strategy, call, bound.sizes, axes),
            chosen.launches(call, local),
            hidden,
            whole,
        )

    def _same_edge(self, edge: TensorEdge) -> tuple[Hashable, ...]:
        """Return a key, equal for edges with equal terms."""
        ends = ((edge.source, edge.source_output), edge.end)
        ends_of = tuple((id(self.space.decisions[n].candidates), self.choices[n], position) for n, position in ends)
        shape = self.sizes.of_edge(edge)
        share = self.sizes.share(self.space.rows_on(edge), self.choices)
        again = self._exposed(edge)
        return ends_of, edge.tensor, share, again, id(shape), id(self.repetition.of_edge(edge))

    def _exposed(self, edge: TensorEdge) -> tuple[float, ...]:
        """Return the exposed shares of the collectives that run again on an edge."""
        return tuple([share for _, share in self.second.collectives_on(edge, self.choices, self.modes)])

    def _edge(self, edge: TensorEdge, times: int, unused: bool) -> None:
        path = self.space.path(edge, self.choices)
        if not path.moves:
            return
        kept = self.space.decisions[edge.source].candidates.strategies[self.choices[edge.source]].saved
        shape = self.sizes.of_edge(edge)
        tensor = replace(edge.tensor, shape=shape, regather=edge.tensor.regather and not kept)
        count, axes = self.repetition.of_edge(edge) * times, cast(Mesh, self.sizes.axes)
        share = self.sizes.share(self.space.rows_on(edge), self.choices)
        self.seconds.add(count * (len(path.moves) * LOCAL_MOVE_SECONDS), share)
        exposed = iter(self._exposed(edge))
        for number, (move, twice) in enumerate(zip(path.moves, path.regathered, strict=True)):
            for transfer in transfers(move, tensor, axes, tensor.regather):
                message = in_bucket(move, tensor, place_in(path.moves, number)) if path.together else None
                self.seconds.add(count, multiplied(share, self._seconds_of(transfer, message)))
            for transfer in self.sizes.padded(transfers(move, tensor, axes, twice), edge, self.choices):
                if not (unused and transfer.backward):
                    self._count(transfer, count)
                if not transfer.backward and (again := next(exposed, None)) is not None:
                    self.seconds.add(count * again, self._seconds_of(transfer))
                    self._count(transfer, count)

    def _moved_weight(self, node: fx.Node, elements: Polynomial, count: Polynomial) -> None:
        used, summed = dtypes_of(self.space.program, node)
        self.overlapped["weight_size"].add(elements * used.itemsize)
        if summed is not None:
            self.overlapped["gradient_size"].add(elements * summed.itemsize)
        self.overlapped["num_weights"].add(count)

    def _overlapped(self) -> dict[str, str]:
        """Return the formulas of the computation and moves that overlap.

        For a pipeline stage these are constants: the whole model's values at its current sizes.
        """
        known = self.space.overlapped
        if replace(known, waited=()) == overlapped_of(self.space.program, self.space.hardware):
            return {name: str(each) for name, each in self.overlapped.items()}
        passes = (known.backward, known.forward)
        each = [value for one in passes for value in (one.seconds, one.latency, one.num_bytes)]
        return dict(zip(OVERLAPPED, map(repr, (*each, known.num_weights)), strict=True))

    def _count(self, transfer: Transfer, count: Polynomial) -> None:
        self.traffic[transfer.collective, transfer.axis].append(Polynomial.of(transfer.num_bytes) * count)

    def _copy(self, num_bytes: int) -> str:
        """Return the seconds in which a device brings a message into order."""
        hardware = self.space.hardware
        return f"({Polynomial.of(num_bytes)})/{hardware.memory_bytes_per_s!r} + {hardware.op_latency_s!r}"

    def _rate(self, collective: str, axis: str) -> str:
        name = rate_name(collective, axis)
        if name not in self.rates:
            self.rates[name] = rate(collective, axis, self.space.mesh, self.space.hardware)
        return name

    def _seconds_of(self, transfer: Transfer, message: Message | None = None) -> str:
        collective, axis, num_bytes = transfer.collective, transfer.axis, Polynomial.of(transfer.priced_bytes)
        mesh, hardware = self.space.mesh, self.space.hardware
        name = self._rate(collective, axis)
        if transfer.ahead:
            return f"{hardware.communication_share!r}*{name}({num_bytes})"
        if message is None:
            overlapped = [self._copy(each) for each in (transfer.packed, transfer.unpacked) if each]
            if any(link.straggling_s for link in hardware.links):
                overlapped.append(f"{self._rate(LAST_HOST, axis)}(1)")
            return f"({' + '.join((f'{name}({num_bytes})', *overlapped))})" if overlapped else f"{name}({num_bytes})"
        together, passes = message.num_parameters, message.passes
        seconds = f"{name}({num_bytes * together})/{together}"
        if hardware.communication_share == 1 or not message.overlapped.num_weights:
            return seconds
        waited = message.waited(kind_of(collective, axis, transfer.backward))
        if waited is not None:
            return f"{waited!r}*{seconds}"
        passes = 1 if collective == GATHERING else passes
        share = rate_name(collective, axis, together, passes)
        if share not in self.rates:
            self.rates[share] = exposed_share(collective, axis, together, passes, mesh, hardware)
        whole = message.weight_bytes if collective == GATHERING else message.gradient_bytes
        return f"{share}(({num_bytes})/({Polynomial.of(whole)}))*{seconds}"
