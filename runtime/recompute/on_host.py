"""Handles that autograd saves for a segment with offloaded tensors: copies on the host, fetched back in time.

While a call of such a segment runs, a tensor that it saves and that may leave (`marks.OFFLOADABLE`: an activation that
no other segment uses) is copied to the host with all of its memory, once however many views of it are saved. Weights,
inputs, and tensors that other segments use are saved as usual. If torch.compile has made a layer one call, all that it
saves is offloaded except inputs, and outputs that others use. Calls run in stretches, each of one segment, or of none:

    forward     the tensors that a stretch has sent are freed when the stretch after the next begins, or the graph ends:
                until then copies may overlap compute
    backward    when the backward of a stretch begins, its own memory is fetched, if that did not happen yet, and that
                of the stretch before it, which the backward reaches next

On a GPU copies run on two streams of their own, out of and into pinned memory. Device memory is allocated and freed in
the order of the compute stream, which waits for the copies. So the memory at any moment does not depend on when copies
happen to end. On CPU ranks the same code copies within the host.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.optim.staging import Link
from autopar.runtime.recompute.marks import OF_OUTPUTS, OFFLOADABLE

Hold = Callable[[Tensor], object]
"""Function that returns the object that autograd saves for a tensor that is not offloaded."""


@functools.cache
def link_of(device: torch.device) -> Link:
    """Return the way between a device and the host, whose streams all graphs share."""
    return Link(device)


def host_memory(link: Link, num_bytes: int) -> Tensor:
    """Return the memory of the host for a copy."""
    return link.memory(num_bytes, torch.uint8)


class Copy:
    """The memory of tensors on the host, and on the device while it is back there."""

    def __init__(self, memory: torch.UntypedStorage, stretch: Stretch) -> None:
        """Begin to copy memory of the device."""
        self.link, self.stretch = link_of(memory.device), stretch
        self.handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._waiting: set[int] = set()
        """Handles, by their ids, that this backward has not taken yet."""
        self._back: torch.UntypedStorage | None = None
        self._arrived: torch.Event | None = None
        with torch.no_grad():
            whole = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
            self._host = host_memory(self.link, whole.numel())
            _copy(self._host, whole, self.link, self.link.down)
        self.left = self.link.mark(self.link.down)

    def fetch(self) -> None:
        """Begin to bring the memory back, unless it is there, or nobody needs it any more."""
        if self._back is not None or not self.handles:
            return
        with torch.no_grad():
            whole = torch.empty_like(self._host, device=self.link.device)
            _copy(whole, self._host, self.link, self.link.up)
        self._back, self._arrived = whole.untyped_storage(), self.link.mark(self.link.up)
        self._waiting = {id(each) for each in self.handles}

    def memory_for(self, handle: Handle) -> torch.UntypedStorage:
        """Return the memory on the device, which is let go when the last handle has had it."""
        self.fetch()
        memory = self._back
        assert memory is not None, "a copy without handles"
        _let_wait(self.link, self._arrived)
        self._waiting.discard(id(handle))
        if not self._waiting:
            self._back = self._arrived = None
        return memory

    def __del__(self) -> None:
        if self._back is not None:  # a backward that never came: its memory is taken again behind the copy
            _let_wait(self.link, self._arrived)


class Handle:
    """Object that autograd saves in place of an offloaded tensor: a view of a copy on the host."""

    __slots__ = ("__weakref__", "_copy", "_dtype", "_flipped", "_like")

    def __init__(self, copy: Copy, x: Tensor) -> None:
        self._copy, self._dtype, self._flipped = copy, x.dtype, (x.is_conj(), x.is_neg())
        self._like = (x.storage_offset(), tuple(x.shape), tuple(x.stride()))
        copy.handles.add(self)

    def tensor(self) -> Tensor:
        """Return the tensor as it was saved."""
        memory = self._copy.memory_for(self)
        with torch.no_grad():
            found = torch.empty(0, dtype=self._dtype, device=memory.device).set_(memory, *self._like)
            conjugated, negated = self._flipped
            found = torch.ops.aten._conj(found) if conjugated else found
            return torch.ops.aten._neg_view(found) if negated else found


class Pending:
    """Object that autograd saves for a tensor of a whole layer's call, until the outputs of that call are known."""

    __slots__ = ("held", "saved")

    def __init__(self, saved: Tensor) -> None:
        self.saved: Tensor | None = saved
        self.held: object = None

    def settle(self, hold: Hold) -> None:
        """Hold the tensor in that way."""
        assert self.saved is not None, "a tensor that was settled before"
        self.held, self.saved = hold(self.saved), None


class Stretch:
    """Calls one after the other of one segment that is offloaded: what they have sent to the host."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[torch.UntypedStorage, Copy]] = {}
        """Address → memory that is still on the device, kept alive so that no other gets its address."""
        self._copies: weakref.WeakSet[Copy] = weakref.WeakSet()

    def send(self, x: Tensor) -> Handle:
        """Have a tensor's memory copied, if it is not, for a handle of it."""
        memory = x.untyped_storage()
        if memory._cdata not in self._sent:
            self._sent[memory._cdata] = memory, Copy(memory, self)
            self._copies.add(self._sent[memory._cdata][1])
        return Handle(self._sent[memory._cdata][1], x)

    def let_go(self) -> None:
        """Hold nothing on the device any longer: what computes next waits until all is copied."""
        for _, copy in self._sent.values():
            _let_wait(copy.link, copy.left)
        self._sent.clear()

    def fetch(self) -> None:
        """Begin to bring back all that was sent."""
        for copy in self._copies:
            copy.fetch()


class OnHost:
    """One run of a graph of which segments are offloaded."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._may_leave: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._own: Stretch | None = None
        """Stretch of the calls that run; None if their segment is not offloaded."""
        self._before: Stretch | None = None
        self._number = -1
        self._entered: frozenset[int] | None = None
        """The memory of what the running call takes; None where none runs."""
        self._sends = self._makes_offloaded = False
        """True if what the running call saves is sent to the host; True if what it makes may be."""
        self._of_outputs: tuple[bool, ...] | None = None
        """True for each output of a running whole layer that may be offloaded; None for other calls."""
        self._pending: list[Pending] = []
        self._last: tuple[Any, ...] = ()
        """The autograd nodes of what the stretch has given last."""

    def enter(self, node: fx.Node, stretch: int, sends: bool, values: Mapping[fx.Node, Any]) -> None:
        """Start a call in the stretch of that number; `sends` says whether its saved tensors are offloaded."""
        if stretch != self._number:
            self._end_stretch()
            self._number = stretch
        if self._own is None and sends:
            self._own = Stretch()
        self._sends, self._makes_offloaded = sends, bool(node.meta.get(OFFLOADABLE))
        self._of_outputs = node.meta.get(OF_OUTPUTS)
        self._entered = frozenset(
            x.untyped_storage()._cdata for each in node.all_input_nodes for x in _tensors(values[each])
        )

    def leave(self, result: Any) -> None:
        """End the call."""
        assert self._entered is not None, "a call that was not entered"
        grad_fns = []
        outputs = [(result, self._makes_offloaded)]
        if self._of_outputs is not None:
            outputs = list(zip(result, self._of_outputs, strict=True))
        results = [(x, may) for output, may in outputs for x in _tensors(output)]
        self._settle({x.untyped_storage()._cdata: may for x, may in results})
        for x, may in results:
            memory = x.untyped_storage()
            if may and memory._cdata not in self._entered:
                self._may_leave[memory._cdata] = weakref.ref(memory)
            if x.grad_fn is not None:
                grad_fns.append(x.grad_fn)
        self._last = tuple(grad_fns) or self._last
        self._entered = None

    def hold(self, x: Tensor) -> object:
        """Return the object that autograd saves for a tensor: a handle if it is offloaded."""
        memory = x.untyped_storage()
        if self._entered is None or not self._sends or self._own is None or not memory.nbytes():
            return self._hold(x)
        if memory._cdata in self._entered:
            known = self._may_leave.get(memory._cdata)
            leaves = known is not None and known() is not None
        elif self._of_outputs is not None:
            self._pending.append(Pending(x))
            return self._pending[-1]
        else:
            leaves = self._makes_offloaded
        return self._own.send(x) if leaves else self._hold(x)

    def _settle(self, outputs: Mapping[int, bool]) -> None:
        """Send what a layer has saved, but for outputs that may not leave."""
        for each in self._pending:
            assert each.saved is not None and self._own is not None, "a layer that sends nothing"
            each.settle(self._own.send if outputs.get(each.saved.untyped_storage()._cdata, True) else self._hold)
        self._pending.clear()

    def close(self) -> None:
        """End the graph, whether it has run to its end or not."""
        self._end_stretch()
        if self._before is not None:
            self._before.let_go()
        self._before = None

    def _end_stretch(self) -> None:
        """End the stretch: free the device memory of the one before, and fetch both when the backward reaches this
        one.
        """
        if self._before is not None:
            self._before.let_go()
        near = [weakref.ref(each) for each in (self._own, self._before) if each is not None]
        if near:
            for each in self._last:
                each.register_prehook(partial(_fetch, near))
        self._before, self._own, self._last = self._own, None, ()


def _fetch(stretches: list[weakref.ref[Stretch]], _: Any) -> None:
    """Fetch the memory of the stretch that the backward has reached, and of the one before it."""
    for each in stretches:
        stretch = each()
        if stretch is not None:
            stretch.fetch()


def _copy(target: Tensor, source: Tensor, link: Link, stream: torch.cuda.Stream | None) -> None:
    """Copy on a stream of a link, behind what was computed so far."""
    if stream is None:
        target.copy_(source)
        return
    stream.wait_stream(torch.cuda.current_stream(link.device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)


def _let_wait(link: Link, mark: torch.Event | None) -> None:
    """Let the device compute nothing further before a copy has ended."""
    if mark is not None:
        torch.cuda.current_stream(link.device).wait_event(mark)  # pyright: ignore[reportArgumentType]


def _tensors(value: Any) -> Iterator[Tensor]:
    return (x for x in pytree.tree_leaves(value) if isinstance(x, Tensor))
