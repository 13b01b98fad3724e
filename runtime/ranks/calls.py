"""The ranks agree on every call of a model, and on every backward, before one of them sends anything in it.

Graphs are made for one kind of call (shapes, mode, frozen parameters …): ranks in different ones would wait for each
other's collectives, or mix them. Each rank expects a next event: the one that followed last time, or that came twice in
a row. As all ranks have the same past, they expect the same, which costs a comparison. Anything else is announced in
the store, and waits there for the others: all of them announce the same, or somebody announces something else, or a
rank went on as it expected. That one may wait in a collective by now; its thread (`Watch`) answers for it. A rank that
finds a difference raises it, and the watch ends the others with the same message.

The first calls of a kind (CHECKED) are announced though they are expected, with checksums of the inputs that should be
equal.

    {event}/count/{digest} how many ranks announce a kind
    {event}/kinds, {event}/kind/{number} how many kinds are announced; one of them, and by which rank
    {event}/values/{part}  the first rank that holds a part of the batch (all of it: ""), and its checksums
    {event}/outcome        "agreed", "differ", or the rank that went on as expected
    pending                an event for which a rank waits
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from autopar.errors import InputError
from autopar.runtime.lengths.length_buckets import COMMON
from autopar.runtime.ranks.checksums import Projections, are_close
from autopar.runtime.ranks.failure import IN_STEP, Watch
from autopar.runtime.ranks.heartbeats import read

CHECKED = frozenset((1, 2, *(10**power for power in range(1, 10))))
"""Numbers of the calls of a kind that are announced in any case, counted from 1."""
MAX_RUN = 64
"""Length beyond which runs of equal events count as equally long."""
ASSERT_SECONDS = 0.2  # between two looks at `pending`, for which threads look each second
LONGEST_PAUSE = 0.02  # seconds between two looks at the outcome

Specified = Mapping[str, str | list[str]]
"""Description of a call by name of an input or option; lists are compared element by element."""
EVENT, VALUES, ADVICE = "event", "values", "advice"
THE_OUTPUT = "the output"
"""The name of an output that is the only one."""
HOW_TO_READ = (
    "Outputs returned with a loss are gathered when they are first used, by all ranks: use them on every rank, for "
    "example before `if rank == 0:`."
)
HOW_TO_COMPUTE_LOSSES = (
    "Ranks that get the same output must compute the same loss from it. Compute the loss of all samples, or give each "
    'rank its own samples and compile with inputs="local".'
)
HOW_TO_GIVE_NUMBERS = (
    "A number is one for the whole batch: give every rank the same, as by summing counts over the ranks (all_reduce)."
)
HOW_TO_GIVE_PARTS = (
    "A plain tensor is the whole of an input, equal on every rank. To give each rank its own part of the batch, use "
    'autopar.compile(..., inputs="local") or DTensor.from_local(part, mesh, [Shard(0)]).'
)
PART = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d, ]+)\](?P<form> as .*)")
"""The description of an input that is given in parts."""
NUMBER = re.compile(r"-?(\d+\.?\d*(e[+-]?\d+)?|inf)|nan")
DIFFERENTLY = "the ranks were called differently"
OPTIONS = {"mode", "modules in another mode", "hooks", "frozen parameters", "autocast", "gradients", "Python state"}


Values = Mapping[str, Mapping[str, int | Projections]]
"""A part of the batch → what tells the values of tensors that all ranks with this part hold alike: checksums of inputs,
projections of gradients, which rounding may change. "" is the part of all."""


class Calls:
    """Agreement of all ranks of a watch on the call that they make next."""

    def __init__(self, watch: Watch, check_inputs: bool | None = None) -> None:
        """`check_inputs`: whether inputs are compared in every call, or in none; None: in the first calls."""
        self._watch = watch
        self._checked_always = check_inputs
        self._numbers: dict[Hashable, int] = {}
        self._specified: list[Specified] = []
        self._given: dict[int, Specified] = {}
        """A kind → the values of its last call that are compared in every call."""
        self._times: list[int] = []
        self._last_is_checked = False
        """Return whether values are compared in the last call, and in its backwards."""
        self._event = 0  # number of events so far
        self._followed_by: dict[tuple[int, int], int] = {}
        """(kind, how often in a row) → the kind of the event after that."""
        self._run = (-1, 0)
        self._expected: int | None = None
        self._announced: deque[int] = deque(maxlen=MAX_RUN)
        self._written: list[str] = []
        self.is_quiet = False
        """True if ranks have agreed on all that they do now."""
        watch.on_poll = self._answer

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Agree on no backward inside the block, because ranks have agreed on all of it."""
        self.is_quiet = True
        try:
            yield
        finally:
            self.is_quiet = False

    def agree(
        self,
        kind: Hashable,
        say: Callable[[], Specified],
        values: Callable[[], Values],
        numbers: Mapping[str, str] | None = None,
    ) -> None:
        """Begin a call of a kind, on all ranks; nothing inside of another call.

        `numbers`, in words, are no part of the kind, and compared in every call: announced when they change.

        Raises InputError where another rank does something else, and PeerError where it fails.
        """
        if not self._watch.many or self._watch.depth > 1:
            return
        gradients = torch.is_grad_enabled()
        number = self._number((kind, gradients), lambda: {**say(), "gradients": "on" if gradients else "off"})
        checked = self._checked_always
        if checked is None:
            checked = self._times[number] + 1 in CHECKED
        self._last_is_checked = checked
        self._enter_call(number, values() if checked else None, numbers or {})
        self._times[number] += 1

    def backwards(self) -> Backwards:
        """Return what agrees on the backwards of the call that was agreed upon last."""
        return Backwards(self, self._watch, self._last_is_checked)

    def gather(self, output: str) -> None:
        """Agree that every rank uses `output` for the first time, before it is gathered; nothing inside a call.

        Raises InputError where another rank does something else, and PeerError where it fails.
        """
        if not self._watch.many or self._watch.depth:
            return
        event = f"to gather {output}, which it uses for the first time"
        with self._watch:
            self._enter_call(self._number(("gather", output), lambda: {EVENT: event, ADVICE: HOW_TO_READ}), None)

    def enter(self, output: str, values: Values | None) -> None:
        """Agree that a gradient enters by `output`, with equal values on ranks that hold the same part."""
        event = "a backward" if output == THE_OUTPUT else f"a backward from {output}"
        self._enter_call(self._number(("gradient", output), lambda: {EVENT: event}), values)

    def _number(self, kind: Hashable, say: Callable[[], Specified]) -> int:
        """Return the number of a kind of event; announce it to other ranks as `say` returns the first time it comes."""
        number = self._numbers.get(kind)
        if number is None:
            number = self._numbers[kind] = len(self._specified)
            self._specified.append(say())
            self._times.append(0)
        return number

    def _enter_call(self, number: int, values: Values | None, given: Specified | None = None) -> None:
        given = given or {}
        try:
            if number != self._expected or values is not None or given != self._given.get(number, {}):
                self._announce(number, values, given)
                self._followed_by[self._run] = number
            self._given[number] = given
        finally:
            self._event += 1
        last, length = self._run
        self._run = number, min(length + 1, MAX_RUN) if number == last else 1
        # A call that repeated is expected to repeat, until the length of its run is known.
        self._expected = self._followed_by.get(self._run, number if self._run[1] > 1 else None)

    def _announce(self, number: int, values: Values | None, given: Specified) -> None:
        """Announce what this rank calls next, and wait until all ranks have announced the same."""
        event, store, watch = self._event, self._watch.store, self._watch
        self._announced.append(event)
        written: list[str] = []
        mine = {**self._specified[number], **given}
        for part, sums in (values or {}).items():
            written.append(f"{event}/values/{part}")
            first = store.compare_set(written[-1], "", json.dumps([watch.rank, sums])).decode()
            mine |= _unequal(sums, *json.loads(first))
        digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()[:16]
        count = store.add(f"{event}/count/{digest}", 1)
        if count == 1:
            kind = store.add(f"{event}/kinds", 1)
            store.set(f"{event}/kind/{kind}", json.dumps([watch.rank, mine]))
            written += [f"{event}/count/{digest}", f"{event}/kinds", f"{event}/kind/{kind}"]
            if kind == 2:
                store.compare_set(f"{event}/outcome", "", "differ")
        if count == len(watch.ranks):
            store.compare_set(f"{event}/outcome", "", "agreed")
            written.append(f"{event}/outcome")
        outcome = self._outcome(event)
        if outcome == "differ":
            raise InputError(_difference(*(json.loads(store.get(f"{event}/kind/{kind}")) for kind in (1, 2))))
        if outcome != "agreed":
            assert self._expected is not None, "a rank goes on where it expects something"
            expected = {**self._specified[self._expected], **self._given.get(self._expected, {})}
            raise InputError(_difference((int(outcome), expected), (watch.rank, mine)))
        for key in self._written:  # keys of the previous announcement, which every rank has left
            store.delete_key(key)
        self._written = written

    def _outcome(self, event: int) -> str:
        store, key, pause, asserted = self._watch.store, f"{event}/outcome", 0.0005, False
        look_again = time.monotonic() + ASSERT_SECONDS
        while not store.check([key]):
            self._watch.check()
            if time.monotonic() > look_again:
                look_again += ASSERT_SECONDS
                pending = read(store, "pending")
                if not pending or int(pending) > event:
                    store.set("pending", str(event))
                    asserted = True
                self._watch.check_patience()
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE)
        if asserted:
            store.compare_set("pending", str(event), "")
        return store.get(key).decode()

    def _answer(self, store: Store) -> None:
        """Say for what others wait that this rank went on as it expected; called by the thread of the watch."""
        pending = read(store, "pending")
        if pending and int(pending) < self._event and int(pending) not in self._announced:
            store.compare_set(f"{pending}/outcome", "", str(self._watch.rank))


class Backwards:
    """The backwards of one call: all ranks agree on every output by which a gradient enters, before anything moves."""

    def __init__(self, calls: Calls, watch: Watch, checked: bool) -> None:
        self._calls, self._watch, self._checked = calls, watch, checked
        self._running = False

    def enter(self, output: str, values: Callable[[], Values]) -> None:
        """Agree on a gradient; its values are compared if those of the call's inputs were.

        Raises InputError where another rank does something else, and PeerError where it fails.
        """
        if not self._watch.many or self._calls.is_quiet:
            return
        if not self._running:  # one backward may enter by several outputs
            self._running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)
            self._watch.backward_begins()
        try:
            self._watch.check()
            self._calls.enter(output, values() if self._checked else None)
        except BaseException as error:
            self._running = False
            if not self._watch.depth:
                self._watch.failed_by(error)
            raise

    def _ended(self) -> None:
        self._running = False


def _unequal(sums: Mapping[str, int | Projections], first_rank: int, first: Mapping[str, Any]) -> Specified:
    """Describe values that differ from those of the first rank with the same part."""
    names = [name for name, found in sums.items() if not are_close(found, first.get(name))]
    return {VALUES: f"other values of {', '.join(names)} than rank {first_rank}"} if names else {}


def _difference(one: tuple[int, Specified], other: tuple[int, Specified]) -> str:
    """Describe the differences between two ranks' calls, and what to do."""
    (rank, mine), (other_rank, theirs) = sorted((one, other), key=lambda each: each[0])
    if EVENT in mine or EVENT in theirs:
        here, there = (each.get(EVENT, "another call of the model") for each in (mine, theirs))
        if here == there:
            which, what = (rank, mine[VALUES]) if VALUES in mine else (other_rank, theirs[VALUES])
            return f"the ranks begin different backwards: rank {which} with {what}. {HOW_TO_COMPUTE_LOSSES}"
        advice = mine.get(ADVICE) or theirs.get(ADVICE) or IN_STEP
        return f"the ranks are out of step: rank {rank} begins {here}, rank {other_rank} {there}. {advice}"
    names = [name for name in dict.fromkeys((*mine, *theirs)) if mine.get(name) != theirs.get(name)]
    names = [name for name in names if name != VALUES]  # other shapes have other values, too
    if not names and VALUES not in mine and VALUES not in theirs:
        return (
            f"{DIFFERENTLY}: rank {other_rank} has other modules or hooks than rank {rank}, or changed them in another "
            "call. Change the model alike on every rank."
        )
    if not names:
        which, what = (rank, mine[VALUES]) if VALUES in mine else (other_rank, theirs[VALUES])
        return f"{DIFFERENTLY}: rank {which} with {what}. {HOW_TO_GIVE_PARTS}"
    here = ", ".join(_difference_text(name, mine, theirs) for name in names)
    there = ", ".join(_difference_text(name, theirs, mine) for name in names)
    return f"{DIFFERENTLY}: rank {rank} with {here}; rank {other_rank} with {there}. {_advice(names, mine, theirs)}"


def _difference_text(name: str, mine: Specified, other: Specified) -> str:
    """Describe the value of a name; of a list, only the elements that the other rank lacks."""
    value = mine.get(name, "none")
    if isinstance(value, list):
        rest = [each for each in value if each not in other.get(name, ())]
        value = ", ".join((*rest[:3], *([f"{len(rest) - 3} more"] if len(rest) > 3 else ()))) or "none of these"
    return f"{name}: {value}"


def _advice(names: Sequence[str], mine: Specified, other: Specified) -> str:
    if {*names} <= OPTIONS:
        return f"Set {' and '.join(names)} alike on every rank."
    static = [name for name in names if any(str(each.get(name)).startswith("static ") for each in (mine, other))]
    if static:
        return (
            f"Give the static argument {static[0]} the same values on every rank, with parts of the batch, too: they "
            "are constants of one graph."
        )
    if all(_is_number(mine.get(name)) and _is_number(other.get(name)) for name in names):
        return HOW_TO_GIVE_NUMBERS
    dims = [_dims_that_differ(mine.get(name), other.get(name)) for name in names]
    if all(dims):
        return _padding_advice(names, frozenset().union(*dims))
    return (
        "Every rank needs inputs of the same shapes: give each the whole batch, or parts of equal size as DTensors or "
        'with inputs="local" (where the last batch is smaller, drop_last=True).'
    )


def _is_number(mine: object) -> bool:
    return isinstance(mine, str) and NUMBER.fullmatch(mine) is not None


def _dims_that_differ(one: object, other: object) -> frozenset[int]:
    """Return the dims in which two parts of a batch differ in size; none if anything else differs, too."""
    found, theirs = (PART.fullmatch(each) if isinstance(each, str) else None for each in (one, other))
    if found is None or theirs is None or found["form"] != theirs["form"] or found["dtype"] != theirs["dtype"]:
        return frozenset()
    sizes, others = (each["shape"].split(", ") for each in (found, theirs))
    if len(sizes) != len(others):
        return frozenset()
    return frozenset(dim for dim, (size, its) in enumerate(zip(sizes, others, strict=True)) if size != its)


def _padding_advice(names: Sequence[str], dims: frozenset[int]) -> str:
    """Return what to do if the parts of ranks differ in these dims alone."""
    inputs = [re.findall(r"\w+", name)[-1] for name in names]
    unknown = [name for name in inputs if name not in COMMON]
    padding = f", padding={{{', '.join(f'{name!r}: …' for name in inputs)}}}" if unknown else ""
    if dims == {0}:
        return (
            "Only numbers of samples differ: give every rank as many, for example with drop_last=True, or pad the "
            f'missing ones with Run(buckets=autopar.Buckets(batches="largest"{padding})).'
        )
    if 0 in dims:
        return f'Only sizes differ, which Run(buckets=autopar.Buckets(batches="largest"{padding})) pads alike.'
    option = f"autopar.Buckets({padding.removeprefix(', ')})" if unknown else '"auto"'
    return f"Only lengths differ, which Run(buckets={option}) pads alike on all ranks."
