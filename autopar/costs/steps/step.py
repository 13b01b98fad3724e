"""The tasks of a step of a plan, as the runtime issues them.

forward     calls in their order; what moves activations is waited for, as are gathers of weights, unless they are
            issued ahead of their layer (`prefetch`)
backward    the same the other way: a segment is computed again when a backward first needs something of it, gathers
            that run again are waited for when a call uses their value, weights are gathered again where a call saved
            them, gradients are reduced as soon as the last of a message is there, and left running
host        what a segment saves is offloaded during the calls behind it, and is waited for when the segment after the
            next begins; it comes back when the backward of the segment behind it begins
optimizer   behind all of these; if any parameter is split, all are DTensors, which take longer (`Hardware.dtensor_s`).
            On a host parallel to the device, copies down, steps and copies up run on streams of their own. Gradients
            that are taken in the backward are as soon as they are there, for which reductions are waited for

Collectives that a call's implementation overlaps with its compute run in parallel with it. A call takes what the
planner says, and a collective what it takes alone; messages of weights take what all their bytes take at once. A view
takes what any call takes at least where the device launches its calls itself. It is the step of one micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from autopar.costs.hardware.collectives import Transfer
from autopar.costs.memory.model import MemoryModel
from autopar.costs.space.parameter_buckets import Bucket, axes_apart, late_casts
from autopar.costs.space.space import stores_dtensors, without_gradient
from autopar.costs.steps.calls import Calls
from autopar.costs.steps.host_copies import HostCopies
from autopar.costs.steps.host_steps import HostSteps
from autopar.costs.steps.order import Arrived, Call, Entry, Gathered, Moved, order_of
from autopar.costs.steps.tasks import Tasks
from autopar.costs.steps.uses import Uses
from autopar.costs.steps.weights import Backward, BucketMessages, Reductions, Regathered, of_sums
from autopar.costs.timeline.simulation import behind_another, simulate
from autopar.costs.timeline.values import Task, Timeline

END = -1


def step_timeline(memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str]) -> Timeline:
    """Return the simulated step under a choice per decision; `modes` says how segments are computed again."""
    return simulate(step_tasks(memory, choices, modes), memory.space.hardware.communication_share)


def microbatch_seconds(memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str]) -> tuple[float, float]:
    """Return the seconds of the forward and of the backward of one of several micro-batches, without what a step does
    once.

    Once are casts and moves of resident weights, the reduction of their gradients, and the optimizer.
    """
    return forward_and_backward(microbatch_tasks(memory, choices, modes), memory.space.hardware.communication_share)


def forward_and_backward(tasks: Sequence[Task], share: float) -> tuple[float, float]:
    """Return the seconds of the forward and of the backward of a micro-batch's tasks; collectives take a `share` of the
    device.
    """
    found = behind_another(tasks, share)
    forward = max((each.end for each in found if each.task.phase == "forward"), default=0.0)
    return forward, max((each.end for each in found), default=0.0) - forward


def microbatch_tasks(memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str]) -> tuple[Task, ...]:
    """Return the tasks of one of several micro-batches, without what a step does once."""
    return _Step(memory, choices, modes, "microbatch").run()


def last_microbatch_tasks(memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str]) -> tuple[Task, ...]:
    """Return the same of the last micro-batch, and the reductions of gradients `of_sums` during its backward."""
    return _Step(memory, choices, modes, "last").run()


def step_tasks(memory: MemoryModel, choices: Sequence[int], modes: Mapping[str, str]) -> tuple[Task, ...]:
    """Return the tasks of a step in the order in which they are issued; weights are fetched ahead as the model says."""
    return _Step(memory, choices, modes).run()


class _Step:
    """One walk through the order, forward and back.

    It is a step of one micro-batch, or one of several micro-batches, without what their step does once, or the last of
    these, which reduces gradients that were added up.
    """

    def __init__(
        self,
        memory: MemoryModel,
        choices: Sequence[int],
        modes: Mapping[str, str],
        part: Literal["step", "microbatch", "last"] = "step",
    ) -> None:
        self.memory, self.space, self.choices = memory, memory.space, choices
        self.modes, self.part, self.once = modes, part, part == "step"
        order = order_of(self.space, choices)
        self.entries = [each for each in order.entries if self.once or self._is_each_time(each)]
        self.reduced = () if part == "microbatch" else order.reduced
        self.places = {each.number: n for n, each in enumerate(self.entries) if isinstance(each, Call)}
        self.uses = Uses(memory, self.places)
        self.unused = without_gradient(self.space)
        self.tasks = Tasks(self.space.mesh, self.space.hardware)
        gathered = [each.bucket for each in order.entries if isinstance(each, Gathered)]
        casts = late_casts(self.space, (*gathered, *order.reduced))
        every = {id(bucket): range(len(bucket.ends)) for bucket in (*gathered, *self.reduced)}
        self.messages = {
            id(bucket): BucketMessages(self.space, bucket, every[id(bucket)], casts)
            if self.once
            else BucketMessages(self.space, bucket, bucket.regathered, casts, before=())
            for bucket in gathered
        }
        for bucket in self.reduced:
            sums = (not self.once, False)
            self.messages[id(bucket)] = BucketMessages(self.space, bucket, every[id(bucket)], casts, sums=sums)
        self.held: dict[int, list[BucketMessages]] = defaultdict(list)
        """Place in the order → messages of the last backward besides those of entries; END: behind it."""
        for place, bucket in () if self.once else self._followed(order.entries):
            for messages, at_end in of_sums(self.space, bucket, casts, memory.microbatches.reduce_each):
                self.held[END if at_end else place].append(messages)
        self.calls = Calls(memory, choices, modes, self.tasks, self.unused)
        self.copies = HostCopies(memory, choices, modes, self.tasks)
        axes = (
            axes_apart((each.collective, each.axis) for each in self._backward_transfers()) if memory.prefetch else ()
        )
        self.streams = {axis: f"{axis}, weights" for axis in axes}
        self.on_host = HostSteps(memory, choices, self.tasks)
        self.travelling: dict[int, list[int]] = defaultdict(list)
        """Call → gathers of the second forward that bring what it takes."""
        frees = self.once and memory.presence.frees_gradients
        self.reductions = Reductions(self.tasks, frees, with_sums=part == "last")

    def run(self) -> tuple[Task, ...]:
        self._forward()
        self.tasks.phase = "backward"
        self._backward()
        if not self.once:
            return tuple(self.tasks.found)
        self.tasks.phase = "optimizer"
        dtensor_s = self.space.hardware.dtensor_s if stores_dtensors(self.space, self.choices) else 0.0
        own_seconds, launching = (dtensor_s, 0.0) if self.space.hardware.is_host else (0.0, dtensor_s)
        for number, decision in enumerate(self.space.decisions):
            seconds = float(decision.candidates.seconds[self.choices[number]])
            if decision.kind != "parameter" or not seconds:
                continue
            own = decision.candidates.strategies[self.choices[number]]
            if self.space.optimizer.offload is not None:
                self.on_host.step(number)
            else:
                computing = seconds - sum(own.waits) + own_seconds
                self.tasks.compute("optimizer", computing, decision.name, host=launching)
                self.tasks.move(own.transfers, decision.name)
        return tuple(self.tasks.found)

    def _is_each_time(self, entry: Entry) -> bool:
        """Return whether every micro-batch runs the entry."""
        more = self.memory.accumulation
        if isinstance(entry, Call | Arrived):
            return not more.once(entry.number)
        if isinstance(entry, Gathered):
            return bool(entry.bucket.regathered)
        edge = entry.edge
        ends = self.choices[edge.source], self.choices[edge.target]
        return not more.moves_once(edge) or bool(more.each_time(edge)[ends])

    def _followed(self, entries: Iterable[Entry]) -> Iterator[tuple[int, Bucket]]:
        """Yield every bucket of gathered weights, with the call that follows it in each micro-batch."""
        place = 0
        for entry in entries:
            place += self._is_each_time(entry)
            if isinstance(entry, Gathered):
                yield place, entry.bucket

    # Forward.

    def _forward(self) -> None:
        self.calls.begin_ahead(self.places)
        ahead = self._buckets_ahead()
        on_their_way: dict[int, int] = {}
        for place, entry in enumerate(self.entries):
            for bucket in ahead.get(place, ()):
                on_their_way[id(bucket)] = self._gather(bucket, self.messages[id(bucket)].gathers()[0])
            if isinstance(entry, Moved):
                row = self.space.decisions[entry.edge.target].name
                forward = [each for each in entry.path.transfers if not each.backward]
                self.tasks.move(forward, row, self._share(entry))
            elif isinstance(entry, Gathered):
                for step, transfer in enumerate(self.messages[id(entry.bucket)].gathers()):
                    issued = on_their_way.get(id(entry.bucket)) if step == 0 else None
                    self.tasks.wait([self._gather(entry.bucket, transfer) if issued is None else issued])
            elif isinstance(entry, Arrived):
                self.calls.arrive(entry.number, backward=False)
            else:
                self.copies.enter(entry.number)
                self.calls.run(entry.number, backward=False)
                self.copies.send(entry.number)
        if self.part != "microbatch":
            self.calls.sum_losses()

    def _buckets_ahead(self) -> dict[int, list[Bucket]]:
        """Place in the order → the buckets whose gathers are issued there, ahead of their layer."""
        entries, depth = self.entries, self.memory.prefetch
        without_weights = {each.layer for each in entries if isinstance(each, Gathered)}
        anchors: dict[int, int] = {}
        for place, entry in enumerate(entries):
            if isinstance(entry, Gathered):
                without_weights.discard(entry.layer)
            elif entry.layer is not None and entry.layer not in without_weights and not self._casts_weight(entry):
                anchors.setdefault(entry.layer, place)
        found: dict[int, list[Bucket]] = defaultdict(list)
        for place, entry in enumerate(entries):
            if not depth or not isinstance(entry, Gathered):
                continue
            before = (anchors[n] for n in range(max(0, entry.layer - depth), entry.layer) if n in anchors)
            anchor = next((each for each in before if each < place), None)
            if anchor is not None:
                found[anchor].append(entry.bucket)
        return found

    def _casts_weight(self, entry: Entry) -> bool:
        return isinstance(entry, Call) and self.space.decisions[entry.number].name in self.space.weight_casts

    def _gather(self, bucket: Bucket, transfer: Transfer) -> int:
        return self.tasks.issue(transfer, bucket.layer, self.streams.get(transfer.axis, ""), weights=True)

    # Backward.

    def _backward(self) -> None:
        saved_by = self._regathered()
        regathered = dict.fromkeys(bucket for each in saved_by.values() for bucket in each)
        weights = Backward(self.tasks, regathered, self.memory.prefetch, self.streams)
        last_gradient: dict[int, list[Bucket]] = defaultdict(list)
        for bucket in self.reduced:
            last_gradient[min(self.uses.first(end) for end, _ in bucket.ends)].append(bucket)
        made = self._gradients_made()
        again: dict[str, list[Call | Arrived | Moved]] = defaultdict(list)
        for entry in self.entries:
            if not isinstance(entry, Gathered):
                number = entry.edge.target if isinstance(entry, Moved) else entry.number
                again[self.memory.lifetimes.segment[number]].append(entry)
        for place, entry in reversed(list(enumerate(self.entries))):
            if isinstance(entry, Moved):
                backward = [each for each in reversed(entry.path.transfers) if each.backward]
                if entry.edge.target not in self.unused:
                    row = self.space.decisions[entry.edge.target].name
                    self.tasks.move(backward, row, self._share(entry))
            elif isinstance(entry, Gathered):
                self._reduce(self.messages[id(entry.bucket)])
            else:
                self.copies.enter_backward(entry.number)
                for bucket in saved_by.get(entry.number, ()):
                    weights.use(bucket)
                if self.uses.is_made_again(entry.number, self.modes):
                    for each in again.pop(self.memory.lifetimes.segment[entry.number], ()):
                        self._run_again(each, weights, saved_by)
                self.tasks.wait(self.travelling.pop(entry.number, ()))
                if isinstance(entry, Arrived):
                    self.calls.arrive(entry.number, backward=True)
                else:
                    self.calls.run(entry.number, backward=True)
            for messages in self.held.get(place, ()):
                self._reduce(messages)
            for bucket in last_gradient.get(place, ()):
                self._reduce(self.messages[id(bucket)])
            for number in made.get(place, ()):
                self.on_host.take(number)
        self.tasks.wait(self.reductions.left_running)
        for messages in reversed(self.held.get(END, [])):
            self._reduce(messages)

    def _run_again(
        self, entry: Call | Arrived | Moved, weights: Backward, saved_by: Mapping[int, Sequence[Regathered]]
    ) -> None:
        """Run what the mode of its segment says of an entry again."""
        second = self.memory.second_forward
        if isinstance(entry, Moved):
            collectives = [each for each, _ in second.collectives_on(entry.edge, self.choices, self.modes)]
            row = self.space.decisions[entry.edge.target].name
            self.tasks.phase = "recomputation"
            if second.travels(entry.edge, self.choices, self.modes):
                *collectives, last = collectives
                self.tasks.move(collectives, row, self._share(entry))
                issued = self.tasks.issue(last, row, times=self._share(entry))
                for number in self.uses.takers(entry.edge):
                    self.travelling[number].append(issued)
            else:
                self.tasks.move(collectives, row, self._share(entry))
        elif second.runs_again(entry.number, self.memory.lifetimes.mode_of(entry.number, self.modes)) is not None:
            self.tasks.wait(self.travelling.pop(entry.number, ()))
        if not isinstance(entry, Moved) and second.is_rerun(entry.number, self.choices, self.modes):
            for bucket in saved_by.get(entry.number, ()):
                weights.use(bucket)
            self.tasks.phase = "recomputation"
            if isinstance(entry, Arrived):
                self.calls.arrive(entry.number, backward=False)
            else:
                self.calls.run(entry.number, backward=False)
        self.tasks.phase = "backward"

    def _reduce(self, messages: BucketMessages) -> None:
        if any(end not in self.unused for end, _ in messages.bucket.ends):
            self.reductions.issue(messages)

    def _gradients_made(self) -> dict[int, list[int]]:
        """Place in the order → the parameters whose gradients are there, and reduced, when the backward has run it."""
        found: dict[int, list[int]] = defaultdict(list)
        gathered = {
            source: place
            for place, entry in enumerate(self.entries)
            if isinstance(entry, Gathered)
            for source in entry.bucket.sources
        }
        for number, decision in enumerate(self.space.decisions):
            learns = decision.kind == "parameter" and decision.node.meta["tensor"].requires_grad
            if learns and self.once and number not in self.unused:
                found[gathered.get(number, self.uses.first(number))].append(number)
        return found

    def _regathered(self) -> dict[int, list[Regathered]]:
        """Call → the weights that are gathered again for its backward."""
        found: dict[int, list[Regathered]] = defaultdict(list)
        for entry in self.entries:
            if not isinstance(entry, Gathered) or not entry.bucket.regathered:
                continue
            messages = self.messages[id(entry.bucket)]
            saved = {
                call for position in entry.bucket.regathered for call in self.uses.keepers(messages.edges[position])
            }
            if not saved:
                continue
            gathers = messages.gathers(entry.bucket.regathered)
            last = max(self._waiting_at(number) for number in saved)
            bucket = Regathered(gathers, entry.layer, entry.bucket.layer, last)
            for number in saved:
                found[number].append(bucket)
        return found

    def _waiting_at(self, number: int) -> int:
        """Return the position from which a call's saved tensors are resident: its segment's end, if it runs again."""
        segment = self.memory.lifetimes.segment
        if not self.memory.second_forward.is_rerun(number, self.choices, self.modes):
            return self.places[number]
        return max(place for each, place in self.places.items() if segment[each] == segment[number])

    def _backward_transfers(self) -> Iterator[Transfer]:
        for entry in self.entries:
            if isinstance(entry, Moved) and entry.edge.target not in self.unused:
                yield from (each for each in entry.path.transfers if each.backward)
                again = self.memory.second_forward.collectives_on(entry.edge, self.choices, self.modes)
                yield from (each for each, _ in again)
            elif isinstance(entry, Gathered):
                if entry.bucket.regathered:
                    yield from self.messages[id(entry.bucket)].gathers(entry.bucket.regathered)
            elif isinstance(entry, Call) and entry.number not in self.unused:
                own = self.memory.second_forward.running(entry.number, self.choices, self.modes)
                yield from (each for each in own.transfers if each.backward)
                again = self.memory.second_forward.collectives_of(entry.number, self.choices, self.modes)
                yield from (each for each, _ in again)
        for messages in (*self.messages.values(), *(each for held in self.held.values() for each in held)):
            yield from (each.transfer for each in messages.reductions)

    def _share(self, entry: Moved) -> float:
        return self.space.share(self.space.rows_on(entry.edge), self.choices)
