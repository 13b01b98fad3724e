"""Parameters that several ranks of a pipeline hold: tied weights whose uses stand on different stages.

Each holder has a gradient of its own uses. The gradient of the parameter is their sum, which every holder computes in
the order of the ranks, so that equal parameters stay equal. Hooks behind its accumulation see the sum alone.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.ranks.backends import HOST

Holders = Mapping[str, tuple[int, ...]]
"""Parameter → the ranks of the pipeline that hold it, in order; two at least."""


def holders_of(parameters: Sequence[Sequence[str]]) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several ranks hold; `parameters` are the names that each rank holds."""
    names = dict.fromkeys(name for each in parameters for name in each)
    found = {name: tuple(rank for rank, each in enumerate(parameters) if name in each) for name in names}
    return {name: ranks for name, ranks in found.items() if len(ranks) > 1}


class SharedGradients:
    """Gradients of the parameters that several ranks of a pipeline hold, for one kind of input."""

    def __init__(self, holders: Holders, group: dist.ProcessGroup, hosts: dist.ProcessGroup) -> None:
        """`hosts` is a group of the same ranks for tensors of the CPU."""
        self._holders, self._group, self._hosts = holders, group, hosts
        self._learned: frozenset[str] | None = None
        """Parameters that get a gradient on one rank at least, which every step of the graphs gives the same."""

    @contextlib.contextmanager
    def summed(self, root: nn.Module) -> Iterator[None]:
        """Sum over their holders the gradients that the block adds; every rank of the group enters it.

        Gradients from before the block are sums already, and the block's are added to them, in place.
        """
        here = dist.get_rank(self._group)
        held = {name: root.get_parameter(name) for name, ranks in self._holders.items() if here in ranks}
        held = {name: parameter for name, parameter in held.items() if parameter.requires_grad}
        before = {name: parameter.grad for name, parameter in held.items()}
        for parameter in held.values():
            parameter.grad = None
        try:
            with _hooks_held_back(held.values()):
                yield
            if self._learned is None:
                self._learned = _with_gradient(self._holders, held, self._hosts)
            for name, parameter in held.items():
                if name in self._learned:  # a weight that the loss does not use has no gradient
                    _sum(parameter, self._holders[name], here, self._group)
        finally:
            for name, parameter in held.items():
                earlier, found = before[name], parameter.grad
                parameter.grad = found if earlier is None else earlier if found is None else earlier.add_(found)
        for name, parameter in held.items():
            if name in self._learned:
                for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                    hook(parameter)


@contextlib.contextmanager
def _hooks_held_back(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Have no hook run inside the block that waits for gradients of some parameters."""
    hooks = [each for each in (p._post_accumulate_grad_hooks for p in parameters) if each]
    before = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, own in zip(hooks, before, strict=True):
            each.update(own)


def _with_gradient(holders: Holders, held: Mapping[str, nn.Parameter], hosts: dist.ProcessGroup) -> frozenset[str]:
    """Return the names of those that have a gradient on one rank at least."""
    if not holders:
        return frozenset()
    here = [name in held and held[name].grad is not None for name in holders]
    found = torch.tensor(here, dtype=torch.int32, device=HOST)
    dist.all_reduce(found, dist.ReduceOp.MAX, hosts)
    return frozenset(itertools.compress(holders, found.tolist()))


def _sum(parameter: nn.Parameter, ranks: Sequence[int], here: int, group: dist.ProcessGroup) -> None:
    own = _local(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)).contiguous()
    parts = {rank: own if rank == here else torch.empty_like(own) for rank in ranks}
    peers = [rank for rank in ranks if rank != here]
    sends = [dist.P2POp(dist.isend, own, group=group, group_peer=rank) for rank in peers]
    receives = [dist.P2POp(dist.irecv, parts[rank], group=group, group_peer=rank) for rank in peers]
    for work in dist.batch_isend_irecv([*sends, *receives]):
        work.wait()
    parameter.grad = _in_layout_of(torch.stack([parts[rank] for rank in ranks]).sum(0), parameter)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _in_layout_of(local: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
