"""Presets that split the batch over every axis and differ in how parameters are stored."""

from __future__ import annotations

from autopar.console.names import JOINED
from autopar.errors import warn_user
from autopar.ir.program.program import Program
from autopar.ir.sharding.annotation import Annotation
from autopar.ir.sharding.mesh import Mesh
from autopar.strategies.presets.preset_axes import Parts, Storage
from autopar.strategies.presets.split import Split, whole
from autopar.strategies.roles import RoledProgram


def fully_replicated(program: Program, mesh: Mesh, strict: bool = True) -> tuple[Annotation, ...]:
    """Every device computes everything: nothing is split and nothing is sent.

    It is what all others are measured by: the memory and the time of one device.
    """
    split = Split(RoledProgram.of(program), mesh, "fully_replicated")
    for axis in mesh.names:
        split.along(axis, whole)
    return split.annotations()


def data_parallel() -> Parts:
    """The batch split over all axes, parameters whole: DDP (Li et al., "PyTorch Distributed", VLDB 2020).

    On any model, over an outer axis n and an inner one m:

        all_reduce/n_m = P + 12
    """
    return Parts()


def zero1() -> Parts:
    """Optimizer state in parts (Rajbhandari et al., "ZeRO", SC 2020).

    Its annotations are those of `zero2`. In `train_step` gradients of micro-batches add up whole, and are reduced once
    a step. Those of one batch are reduced as they are made; a warning says so.
    """
    return Parts(storage=Storage(regather=False))


def zero2() -> Parts:
    """Optimizer state and gradients in parts; weights are gathered once and saved for the backward (ZeRO, SC 2020).

    In `train_step` every micro-batch reduces its gradients, which add up in parts.
    Over an outer axis n and an inner one m, for parameters that can be stored in n·m parts (the others are whole, and
    their gradients are all-reduced):

        all_gather/n_m = P
        reduce_scatter/n_m = P
        all_reduce/n_m = 12
    """
    return Parts(storage=Storage(regather=False))


OF_TRAINING = frozenset((zero1.__name__, zero2.__name__))
"""Presets that divide nothing of a forward alone."""
REDUCE_EACH = frozenset((zero2.__name__,))
"""Presets by which every micro-batch reduces the gradients of weights that are stored in parts."""


def parts_named(strategy: str | None) -> tuple[str, ...]:
    """Return the presets that a strategy joins; of one preset it alone, and none of None."""
    return tuple(strategy.split(JOINED)) if strategy else ()


def warn_of_gradients(strategy: str | None, num_microbatches: int) -> None:
    """Warn if gradients are not resident whole, as ZeRO-1 has them: those of one batch are reduced as they are made."""
    if zero1.__name__ in parts_named(strategy) and num_microbatches == 1:
        warn_user(
            f"{strategy}: gradients of a batch are reduced as they are made, and held in parts. So this is zero2, "
            "which moves the same bytes; with microbatches=2 and more they add up whole.",
        )


def zero3() -> Parts:
    """Parameters in parts as well, gathered for the forward and again for the backward (ZeRO, SC 2020; FSDP).

    Over an outer axis n and an inner one m, for parameters that can be stored in n·m parts:

        all_gather/n_m = 2·P - U
        reduce_scatter/n_m = P
        all_reduce/n_m = 12
    """
    return Parts(storage=Storage(regather=True))


def hsdp() -> Parts:
    """ZeRO-3 over one axis, plain data parallel over the others (Zhao et al., "PyTorch FSDP", VLDB 2023).

    Over an axis r of replicas, and an axis s over which parameters are stored:

        all_reduce/r = P/s
        all_gather/s = 2·P - U
        reduce_scatter/s = P
        all_reduce/r_s = 12
    """
    return Parts(storage=Storage(regather=True, replicas=True))
