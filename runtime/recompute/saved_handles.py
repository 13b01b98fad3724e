"""Claims that autograd saves for a recomputed segment: references to values that its second run makes.

While a call of such a segment runs, the tensors that autograd saves are replaced by claims: on a value that the segment
has made (whose memory the claim does not hold), or on something that the call has made for its own backward. After the
segment has run, the claims tell which calls must run again. These tell which tensors must be saved: tensors from
outside, and results that the mode saves (`Mark.saved`: of products in the mode "selective", of collectives unless it is
"full"). The first claim that the backward asks for runs the calls again, one by one, each on detached inputs and in the
surroundings of the first run. A claim has its value until the backward that asks for it lets go of the claim. Only in a
backward that retains the graph the tensors from outside stay, and a second backward runs the segment once more.

Gathered weights are saved as `Regather` does it, offloaded tensors as `on_host` does.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.runtime.collectives.layout_moves import Travelling
from autopar.runtime.collectives.mesh_axes import current_axes, use_axes
from autopar.runtime.collectives.regather import Regather, Regathered, saving_node
from autopar.runtime.collectives.reused_weights import ReusedBucket
from autopar.runtime.implementations.randomness import randomness, use_randomness
from autopar.runtime.recompute.generators import generators_at, states_of
from autopar.runtime.recompute.marks import CHANGED, Mark
from autopar.runtime.recompute.on_host import Handle, Pending
from autopar.runtime.recompute.prepared_calls import RunCall, tensors_of

next_node = torch._C._autograd._get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]
retains_graph = torch._C._autograd._get_current_graph_task_keep_graph  # pyright: ignore[reportAttributeAccessIssue]
Key = tuple[fx.Node, str, int]
"""(call, "output" or "saved", position): a result of a call, or a tensor it saved for its own backward."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Claim:
    """Object that autograd saves in place of a tensor: a view of a value that the frame makes again."""

    frame: Frame
    key: Key
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    """One for each rank where ranks are played in one process."""
    dtype: torch.dtype
    value: Tensor | Travelling | None = None
    """The value, once the second run has made it."""

    def of(self, value: Tensor) -> Tensor:
        """Return the tensor that was saved, given the value that the claim is on."""
        if self.key[1] == "saved":
            return value
        if self.dtype != value.dtype:  # saved as real or complex numbers, made as the other
            empty = torch.empty(0, dtype=self.dtype, device=value.device)
            return empty.set_(value.untyped_storage(), self.offset, self.size, self.stride)
        return value.as_strided(self.size, self.stride, self.offset)


@dataclass(slots=True)
class _Saving:
    """The call that runs now, whose saved tensors are claimed."""

    frame: Frame
    node: fx.Node
    role: Mark
    entered: set[int]
    """The storages of its inputs."""
    since: int
    """The sequence number of the first node of autograd that the call may make."""
    num_saved: int = 0
    open: list[tuple[_Claim, Tensor]] = field(default_factory=list)
    """Claims whose tensor is known when the call has returned: one of its outputs, or its own."""


class Claims(torch.autograd.graph.saved_tensors_hooks):
    """Inside the block, what calls of a recomputed segment save is claimed; all else is saved as by `Regather`."""

    def __init__(self) -> None:
        super().__init__(self._pack, _unpacked)
        self._saving: _Saving | None = None
        self.hold_saved: Callable[[Tensor], object] | None = None
        """Function that saves the tensors of calls whose segment is not recomputed; None: as all others."""
        self._weights: dict[int, Frame] = {}
        """Storage → the frame of the weight that lies there."""

    def run_alone(self, step: RunCall, role: Mark, values: dict[fx.Node, Any]) -> Any:
        """Run a call that is computed again on its own, for whoever uses it."""
        frame = Frame()
        result = self.run(frame, step, role, values)
        frame.close(self.hold, whole=True)
        self._weights[_address(result)] = frame
        return result

    def hold(self, x: Tensor, since: int = 0) -> object:
        """Return the object to save for a tensor that no call of the current segment has made (`Regather.hold`)."""
        if self._weights:
            frame = self._weights.get(_address(x))
            key = frame.maker_of(x) if frame is not None else None
            if frame is not None and key is not None:
                return frame.claim(key, x)
        return Regather.hold(x, since)

    def run(self, frame: Frame, step: RunCall, role: Mark, values: dict[fx.Node, Any]) -> Any:
        """Run a call of a segment for the first time."""
        given = list(map(values.__getitem__, step.inputs))
        entered = set()
        for value in given:
            for x in (value,) if isinstance(value, Tensor) else tensors_of(value):
                if isinstance(x, Tensor):
                    entered.add(x.untyped_storage()._cdata)
        saving = self._saving = _Saving(frame, step.node, role, entered, next_node())
        if not role.saved:
            frame.enter(step, given)
        try:
            result = step.run(*given)
        finally:
            self._saving = None
        if not role.saved:
            frame.leave(saving, result)
        return result

    def _pack(self, x: Tensor) -> object:
        saving = self._saving
        if saving is None:
            return self.hold(x, saving_node(x)) if self.hold_saved is None else self.hold_saved(x)
        number, saving.num_saved = saving.num_saved, saving.num_saved + 1
        frame, address = saving.frame, x.untyped_storage()._cdata
        made = frame.makers.get(address)  # `maker_of`, without a call
        # A view of the same memory restores no tensor that is conjugated or negated.
        if made is not None and made[0]() is not None and not x.is_conj() and not x.is_neg():
            return frame.claim(made[1], x)
        if address in saving.entered or saving.role.saved:
            return self.hold(x, max(saving.since, saving_node(x)))
        claim = frame.claim((saving.node, "saved", number), x)
        saving.open.append((claim, x))
        return claim


def _tensor_of(held: object) -> Tensor:
    """Return the tensor behind a saved handle."""
    if isinstance(held, Pending):
        held = held.held
    if isinstance(held, Handle):
        return held.tensor()
    return held.frame.meet(held) if isinstance(held, _Claim) else Regather.given_back(held)


def _unpacked(held: object) -> Tensor:
    """Return the tensor behind a saved handle to autograd, which makes another one of it."""
    if ReusedBucket.left:
        ReusedBucket.empty_left()
    if isinstance(held, Tensor):
        return held
    return Regather.unpacked(held) if isinstance(held, Regathered) else _tensor_of(held)


class Frame:
    """One run of one segment: what it has made, what its second run begins with, and what that has made."""

    def __init__(self) -> None:
        self._order: dict[fx.Node, RunCall] = {}
        """Calls that may run again."""
        self.makers: dict[int, tuple[weakref.ref[torch.UntypedStorage], Key]] = {}
        self._given: dict[fx.Node, Any] = {}
        """Until the segment ends: everything that a second run could begin with."""
        self._claims: list[weakref.ref[_Claim]] = []
        self._held: dict[fx.Node, _Held] = {}
        self._generators: dict[fx.Node, dict[str, Tensor]] = {}
        self._learning: set[Key] = set()
        """Keys of the results that require a gradient."""
        self._is_whole = False
        """True if calls may claim something of it after its end."""
        self._since = next_node()
        self._axes = current_axes()
        self._randomness = randomness()

    def enter(self, step: RunCall, given: list[Any]) -> None:
        """Note what a call takes, before its first run."""
        for node, value in zip(step.inputs, given, strict=True):
            if node not in self._order:
                self._given[node] = value
        if step.takes_key and self._randomness.deterministic:  # the default generator draws, not one of the call's own
            self._generators[step.node] = states_of(given)
        self._order[step.node] = step

    def leave(self, saving: _Saving, result: Any) -> None:
        """Note what a call has made."""
        makers = self.makers
        for position, x in enumerate((result,) if isinstance(result, Tensor) else tensors_of(result)):
            if isinstance(x, Tensor):
                if x.requires_grad:
                    self._learning.add((saving.node, "output", position))
                storage = x.untyped_storage()
                address = storage._cdata
                if address not in saving.entered and (address not in makers or makers[address][0]() is None):
                    makers[address] = (weakref.ref(storage), (saving.node, "output", position))
        for claim, x in saving.open:
            key = self.maker_of(x)
            if key is not None and not x.is_conj() and not x.is_neg():
                claim.key = key

    def maker_of(self, x: Tensor) -> Key | None:
        """Return the key of the segment's result of which the tensor is a view; None if there is none."""
        made = self.makers.get(x.untyped_storage()._cdata)
        return made[1] if made is not None and made[0]() is not None else None

    def claim(self, key: Key, x: Tensor) -> _Claim:
        claim = _Claim(self, key, tuple(x.shape), x.stride(), x.storage_offset(), x.dtype)
        self._claims.append(weakref.ref(claim))
        return claim

    def _claimed(self) -> list[_Claim]:
        """Return the claims that autograd still holds."""
        found = [claim for each in self._claims if (claim := each()) is not None]
        self._claims = list(map(weakref.ref, found))
        return found

    def close(self, hold: Callable[[Tensor, int], object], whole: bool = False) -> None:
        """End the first run: hold only the inputs of the second one (of all calls, if `whole`)."""
        self._is_whole = whole
        again = set(self._order) if whole else {claim.key[0] for claim in self._claimed()}
        begins: set[fx.Node] = set()
        for node, step in reversed(self._order.items()):
            if node in again:
                for each in step.inputs:
                    (again if each in self._order else begins).add(each)
        self._order = {node: step for node, step in self._order.items() if node in again}
        self._generators = {node: state for node, state in self._generators.items() if node in again}
        self._held = {
            node: _Held.of(value, hold(value, self._since), node.meta.get(CHANGED, False))
            for node, value in self._given.items()
            if node in begins
        }
        self._given.clear()
        if not whole:
            self.makers.clear()

    def meet(self, claim: _Claim) -> Tensor:
        """Return the tensor behind a claim; the first one in a backward runs the segment again."""
        retains = retains_graph()
        if claim.value is None:
            with self._surroundings():
                self._run_again()
            if not (retains or self._is_whole):
                self._held.clear()  # all that is still claimed is made
        value = claim.value.arrived() if isinstance(claim.value, Travelling) else claim.value
        assert value is not None, f"{claim.key} was not made again"
        if retains and self._held:
            claim.value = None
        return claim.of(value)

    def _run_again(self) -> None:
        """Run the calls again: those that save something for the backward with autograd, and no others.

        A gather is waited for when its result is first used, be it by the backward.
        """
        values: dict[fx.Node, Any] = {node: held.value() for node, held in self._held.items()}
        last_use = {each: step for step in self._order.values() for each in step.inputs}
        claims, number = self._claimed(), 0
        still_open, again = {claim.key for claim in claims}, dict[Key, Tensor | Travelling]()
        saving = {node for node, kind, _ in still_open if kind == "saved"}

        def pack(x: Tensor) -> None:
            """Take what the running call saves for its own backward, where that is claimed."""
            nonlocal number
            key = (step.node, "saved", number)
            number += 1
            if key in still_open:
                again[key] = x.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, _no_backward):
            for step in self._order.values():
                number = 0
                given = list(map(values.__getitem__, step.inputs))
                for position, value in enumerate(given):
                    if isinstance(value, Travelling):
                        given[position] = value.arrived()
                torch._C._set_grad_enabled(step.node in saving)
                if step.gather is not None:
                    result = step.gather(*given)
                elif step.node in self._generators:
                    with generators_at(self._generators[step.node]):
                        result = step.run(*given)
                else:
                    result = step.run(*given)
                if step.node in saving:
                    result = _detached(result)
                values[step.node] = result
                for position, x in enumerate(tensors_of(result)):
                    key = (step.node, "output", position)
                    if isinstance(x, Tensor) and not x.requires_grad and key in self._learning:
                        x.requires_grad_()
                    if key in still_open:
                        again[key] = x
                for each in step.inputs:
                    if last_use[each] is step:
                        values.pop(each, None)
        for claim in claims:
            claim.value = again[claim.key]
        again.clear()  # nodes of the second run refer to `pack` as long as they are there

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Enter the surroundings of the segment's first run: the mesh, the seed of that step, gradients, no
        autocast.
        """
        random = self._randomness
        with contextlib.ExitStack() as stack:
            stack.enter_context(use_axes(self._axes))
            stack.enter_context(use_randomness(random.seed, random.step, random.deterministic))
            stack.enter_context(torch.enable_grad())
            for kind in {held.device_type for held in self._held.values()} | {"cpu"}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor that a second run begins with, without the graph of the segment."""

    what: object
    version: int | None
    """None where the first run has changed it: running statistics, of which a second run gets a copy."""
    requires_grad: bool
    device_type: str

    @classmethod
    def of(cls, x: Tensor, what: object, changed: bool) -> _Held:
        version = None if changed else 0 if x.is_inference() else x._version
        return cls(what, version, x.requires_grad, x.device.type)

    def value(self) -> Tensor:
        if self.version is None:
            return _tensor_of(self.what).clone()
        if isinstance(self.what, Tensor) and self.version != (0 if self.what.is_inference() else self.what._version):
            raise RuntimeError(
                f"a tensor of shape {list(self.what.shape)} was changed in place after the forward (version "
                f"{self.what._version}, expected {self.version}), and the backward needs it to compute a segment "
                "again; call backward() before changing parameters or inputs."
            )
        x = _tensor_of(self.what)
        if x.requires_grad == self.requires_grad:
            return x
        return (x if isinstance(self.what, Regathered) else x.detach()).requires_grad_(self.requires_grad)


def _no_backward(_: object) -> Tensor:
    raise AssertionError("the second run of a segment has no backward")


def _detached(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach().requires_grad_(result.requires_grad)
    return pytree.tree_map_only(Tensor, _detached, result)


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata
