"""Parameters as they are stored, under their original names, and their local parts as the graph takes them."""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed._local_tensor import local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding

from autopar.ir.program.operators.derivatives import called_directly, once_differentiable
from autopar.ir.sharding.layout import Layout
from autopar.runtime.collectives.direct import applied_eagerly
from autopar.runtime.collectives.left_running import LAST, Pending, Wait, run_at_once, share_reductions
from autopar.runtime.collectives.reused_weights import ReusedBuckets


@register_sharding(torch.ops.aten._is_any_true.default)
def _of_a_gathered_tensor(x: Any) -> Any:
    """Let `torch.autograd.detect_anomaly` look for NaN in gradients that are DTensors."""
    return [([Replicate()], [Replicate()])]


def placements_of(layout: Layout) -> tuple[Placement, ...]:
    """Return DTensor placements of a layout of I and S."""
    assert all(placement.kind in "IS" for placement in layout), f"{layout} is no layout to store a tensor in"
    return tuple(Shard(placement.dim) if placement.is_split else Replicate() for placement in layout)


def distribute(tensor: torch.Tensor, layout: Layout, mesh: DeviceMesh, columns_first: bool = False) -> DTensor:
    """Return a tensor in a storage layout; rank 0's values count, and a meta tensor stays meta.

    With `columns_first`, the parts of a matrix that divides are stored transposed.
    """
    placements = placements_of(layout)
    if tensor.is_meta:
        local = torch.empty(_unpadded_shape(tensor.shape, layout, mesh), dtype=tensor.dtype, device="meta")
        stored = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
        )
    else:
        # A copy: what is not split would share memory with the original, which training must not change.
        stored = distribute_tensor(tensor.detach().to(mesh.device_type, copy=True), mesh, placements)
    if columns_first and layout.divides(tensor.shape, mesh.shape):
        transposed = stored._local_tensor.T.contiguous().T
        stored = DTensor.from_local(
            transposed, mesh, placements, run_check=False, shape=stored.shape, stride=stored.stride()
        )
    return stored


@dataclass(frozen=True, slots=True)
class Storage:
    """Storage of a model's parameters and buffers on this rank.

    If `layouts` splits any parameter, all parameters become DTensors, because optimizers and clipping do not mix
    DTensors and plain tensors. Otherwise they become plain tensors, which cost no dispatch. Parameters without a layout
    are stored as `whole`. Buffers become plain tensors. Plain tensors are equal on every rank, with the values of the
    first rank.
    """

    mesh: DeviceMesh
    layouts: Mapping[str, Layout]
    whole: Layout
    wanted: Callable[[str], bool] = lambda name: True
    """First name of a tensor → False if the tensor is left out, under all its names."""
    agreed: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    """The values of a tensor that count; called for each one, of those left out too."""
    stores: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype
    """The dtype in which a parameter of a dtype is stored."""
    columns_first: frozenset[str] = frozenset()
    """Matrices whose parts are stored transposed (`rewrite.stored_order`)."""

    @property
    def splits(self) -> bool:
        return any(placement.is_split for layout in self.layouts.values() for placement in layout)

    def of(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Map first names to the parameters and buffers of `model` that this rank stores."""
        made = {name: self.parameter(name, each) for name, each in model.named_parameters()}
        made |= {name: self._values(name, each, self.whole) for name, each in model.named_buffers()}
        return {name: each for name, each in made.items() if each is not None}

    def parameter(self, name: str, given: torch.Tensor) -> nn.Parameter | None:
        """Return a parameter as it is stored, with the hooks and the attributes of the one given."""
        values = self._values(name, given, self.layouts.get(name, self.whole), self.splits)
        if values is None:
            return None
        stored = nn.Parameter(values.to(self.stores(values.dtype)), requires_grad=given.requires_grad)
        carry_over(given, stored)
        return stored

    def filled(self, name: str, given: nn.Parameter) -> nn.Parameter | None:
        """Return the stored form of a parameter that replaces another: itself if stored whole, with the agreed values.

        Returns None if this rank does not store it.
        """
        if self.splits or isinstance(given, DTensor) or given.is_meta:
            return self.parameter(name, given.full_tensor() if isinstance(given, DTensor) else given)
        values = self._values(name, given, self.whole)
        if values is None:
            return None
        given.data.copy_(values)
        return given

    def _values(self, name: str, given: torch.Tensor, layout: Layout, distributed: bool = False) -> torch.Tensor | None:
        values = self.agreed(given)
        if not self.wanted(name):
            return None
        stored = distribute(values, layout, self.mesh, distributed and name in self.columns_first)
        return stored if distributed else stored.to_local()


def carry_over(given: torch.Tensor, stored: torch.Tensor) -> None:
    """Give `stored` the hooks of `given` (the very dicts, so that their handles remove them) and its attributes."""
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(given, hooks, None):
            setattr(stored, hooks, getattr(given, hooks))
    for name, value in vars(given).items():
        if name not in vars(stored):
            setattr(stored, name, value)


def ties_of(root: nn.Module) -> dict[str, str]:
    """Map every further name of a tied parameter to its first name."""
    first: dict[int, str] = {}
    named = nn.Module.named_parameters(root, remove_duplicate=False)
    return {name: first[id(p)] for name, p in named if first.setdefault(id(p), name) != name}


def tie(root: nn.Module, ties: Mapping[str, str]) -> None:
    """Make parameters one again that `nn.Module.to_empty` and the like have replaced one by one."""
    for name, first in ties.items():
        path, _, leaf = name.rpartition(".")
        root.get_submodule(path).register_parameter(leaf, root.get_parameter(first))


def as_stored(root: nn.Module, state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a state dict in the kind of tensors that `root` stores.

    Where it stores DTensors, whole tensors of a parameter's shape are split as that parameter. Where it stores plain
    tensors, DTensors are gathered, which all ranks of their mesh do together.
    """
    stored = dict(nn.Module.named_parameters(root, remove_duplicate=False))
    distributed = any(isinstance(parameter, DTensor) for parameter in stored.values())

    def split(name: str, value: Any) -> Any:
        if not distributed:
            return value.full_tensor() if isinstance(value, DTensor) else value
        parameter = stored.get(name)
        plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if not plain or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
            return value
        mesh = parameter.device_mesh
        value = value.detach().to(mesh.device_type)
        return distribute_tensor(value, mesh, parameter.placements, src_data_rank=None)

    found = OrderedDict((name, split(name, value)) for name, value in state.items())
    found._metadata = getattr(state, "_metadata", {})  # pyright: ignore[reportAttributeAccessIssue]
    return found


class SharedParts:
    """The rank's parts of parameters in the autograd graph, which steps share while parameters stay where they are.

    Their nodes save nothing, so that any number of backwards may use them. If a node of one step hands them what it has
    started, each step has nodes of its own (`Pending.is_shared`), and the parts get a new place in the graph.
    """

    def __init__(self) -> None:
        self._places: list[object] | None = None
        self._taken: dict[int, torch.Tensor] = {}
        self._reductions = Pending()
        self.gathered = ReusedBuckets()

    def of(self, parameters: Sequence[torch.Tensor], waits: bool) -> dict[int, torch.Tensor]:
        """Return the part of each parameter, by its `id`, but for those whose gradients a hook takes one by one.

        If it `waits`, its backward waits for the reductions of gradients.
        """
        places = _places(parameters)
        if places is None:
            return _taken_together(parameters, Pending() if waits else None, {})
        stay = places == self._places
        if not stay or not self._reductions.is_shared:
            self._reductions = Pending()
            before = self._taken if stay else {}
            self._taken = _taken_together(parameters, self._reductions if waits else None, before)
            self._places = places
            if not stay:
                share_reductions(self._taken.values())
        return self._taken


def _places(parameters: Sequence[torch.Tensor]) -> list[object] | None:
    """Return where the values of parameters that learn are; None if steps may not share nodes of autograd."""
    if torch._C._are_functorch_transforms_active() or local_tensor_mode() is not None:
        return None
    places: list[object] = []
    for p in parameters:
        if not p.requires_grad:
            continue
        if p._post_accumulate_grad_hooks:
            return None
        local = p._local_tensor if isinstance(p, DTensor) else p
        places.append((id(p), id(local), local.data_ptr(), local.shape, local.stride()))
    if parameters and parameters[0].is_cuda:  # nodes run on the stream on which they were made
        places.append(torch.cuda.current_stream())
    return places


def _taken_together(
    parameters: Sequence[torch.Tensor], reductions: Pending | None, before: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return the parts that come from one node of autograd, or two, by the `id` of their parameter.

    Parts that were taken `before` are the same tensors, with a new place in the graph.
    """
    together = [p for p in parameters if p.requires_grad and not p._post_accumulate_grad_hooks]
    stored = [p for p in together if isinstance(p, DTensor)]
    plain = [p for p in together if not isinstance(p, DTensor)] if reductions is not None else ()
    taken: dict[int, torch.Tensor] = {}
    if stored:
        parts = [before[id(p)] for p in stored] if before else [p._local_tensor.detach() for p in stored]
        taken.update(zip(map(id, stored), applied_eagerly(_LocalParts, reductions, parts, *stored), strict=True))
    if plain:
        taken.update(zip(map(id, plain), applied_eagerly(Wait, reductions, *plain), strict=True))
    if reductions is not None:
        for group in (stored, plain):
            if group:
                node: Any = taken[id(group[0])].grad_fn
                node._set_sequence_nr(LAST)
    return taken


def local_parts(
    parameters: Sequence[torch.Tensor],
    local_shapes: Sequence[tuple[int, ...]],
    shared: SharedParts | None,
    waits: bool,
) -> list[torch.Tensor]:
    """Return the rank's parts of stored parameters, padded with zeros to the shapes that a graph takes.

    What `DTensor.to_local` does for one parameter is done for all of them in one node of the autograd graph, but for
    those whose gradients a hook takes one by one. If parts are `shared` and it `waits`, its backward waits for the
    reductions of gradients; then plain parameters, too, come from one node.
    """
    enabled = torch.is_grad_enabled()
    taken: dict[int, torch.Tensor] = {}
    if enabled:
        taken = _taken_together(parameters, None, {}) if shared is None else shared.of(parameters, waits)
    parts = []
    for p, shape in zip(parameters, local_shapes, strict=True):
        if id(p) in taken:
            part = taken[id(p)]
        elif not isinstance(p, DTensor):
            part = p
        elif not (enabled and p.requires_grad):
            part = p._local_tensor.detach()
        else:
            part = _taken_alone(p, shape)
        parts.append(part if part.shape == shape else _padded(part, shape))
    return parts


def _taken_alone(parameter: DTensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the rank's padded part, whose gradient reaches the parameter as soon as it is there."""
    (part,) = _LocalParts.apply(None, [parameter._local_tensor.detach()], parameter)
    run_at_once(part.grad_fn)
    if part.shape == shape:
        return part
    padded = _padded(part, shape)
    run_at_once(padded.grad_fn)
    return padded


@called_directly
class _LocalParts(torch.autograd.Function):
    """DTensors → their local tensors; gradients become DTensors that lie as their parameters do.

    `reductions` are those that the backward waits for (`left_running`); None if a node of their own does.

    A gradient that nobody watches is added to `.grad` here: autograd would detach it first, and dispatch that for each
    parameter in Python.
    """

    @staticmethod
    def forward(
        ctx: Any, reductions: Pending | None, parts: Sequence[torch.Tensor], *parameters: DTensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parameters, ctx.stored = parameters, [p._local_tensor for p in parameters]
        ctx.reductions = reductions
        return tuple(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if ctx.reductions is not None:
            ctx.reductions.wait()
        found: list[DTensor | None] = [None] * len(grads)
        given: set[tuple[int, int]] = set()
        for i, (grad, p) in enumerate(zip(grads, ctx.parameters, strict=True)):
            if grad is None:
                continue
            stride = p._local_tensor.stride()
            if grad.stride() != stride:
                grad = torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
            offset = grad.storage_offset()  # under LocalTensorMode it differs by rank
            place = grad.untyped_storage()._cdata, offset if isinstance(offset, int) else 0
            if place in given:  # for example, two added weights get one gradient: each needs its own
                grad = grad.clone()
            given.add(place)
            watched = p._backward_hooks or p._post_accumulate_grad_hooks
            adds = p.is_leaf and not watched and not torch.is_grad_enabled()
            if adds and _is_executed(ctx.next_functions[i][0]):
                before = p.grad
                if before is None:
                    p.grad = DTensor.__new__(DTensor, grad, p._spec, requires_grad=False)
                    continue
                if (
                    isinstance(before, DTensor)
                    and before._spec == p._spec
                    and (before.dtype == grad.dtype and before.device == grad.device)
                ):
                    before._local_tensor.add_(grad)
                    continue
            # Same as `DTensor()`, in half the time: its `__init__` does nothing.
            found[i] = DTensor.__new__(DTensor, grad, p._spec, requires_grad=False)
        return None, None, *found


def _is_executed(node: Any) -> bool:
    """Return whether the backward that runs adds a gradient to this leaf, and does not return it."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # raised for a leaf that torch.autograd.grad differentiates
        return False


def _padded(local: torch.Tensor, local_shape: tuple[int, ...]) -> torch.Tensor:
    """Return a part with zeros at the end of each dim that is too short."""
    padding: list[int] = []
    for have, want in zip(reversed(local.shape), reversed(local_shape), strict=True):
        padding += [0, want - have]
    return torch.nn.functional.pad(local, padding)


def _unpadded_shape(shape: torch.Size, layout: Layout, mesh: DeviceMesh) -> tuple[int, ...]:
    """Return this rank's part of a shape, where the last parts of a dim that does not divide are smaller."""
    local = list(shape)
    for axis, placement in enumerate(layout):
        if placement.is_split:
            part = -(-local[placement.dim] // mesh.size(axis))
            start = min(part * mesh.get_local_rank(axis), local[placement.dim])
            local[placement.dim] = min(part, local[placement.dim] - start)
    return tuple(local)
