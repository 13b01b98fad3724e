"""Computation and communication of an optimizer step for one parameter in its storage layout.

A step reads and writes gradient, weight and state at memory bandwidth. For matrices (`autopar.optim`) it adds

    muon     five iterations of 4 s²l + 2 s³ FLOPs, s ≤ l, on the whole matrix, which is gathered in bfloat16
    galore   4 mnr FLOPs divided as the matrix is; the basis is gathered over axes that split the long dim; what is
             projected is reduce-scattered over those that split the short one, and gathered to go back

The renewal of GaLore's basis, which happens once in many steps, is not counted. `offload` prices a step on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.costs.hardware.collectives import Transfer
from autopar.costs.hardware.profile import Hardware
from autopar.costs.pricing.moves import Move, MovedTensor, transfers
from autopar.costs.pricing.offload import host_step
from autopar.costs.pricing.operations import local_elements
from autopar.costs.pricing.optimizer import Optimizer
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.layout import I, Layout, P, Placement, S
from autopar.ir.sharding.mesh import Mesh

ITERATIONS = 5  # Newton-Schulz iterations: the default of torch.optim.Muon
ITERATED = torch.bfloat16  # dtype of the iteration and of its gathers


def step_seconds(
    info: TensorInfo, layout: Layout, mesh: Mesh, hardware: Hardware, optimizer: Optimizer, matrix: bool
) -> float:
    """Return the seconds of the step of a parameter, without what it moves."""
    each = optimizer.step_bytes(info, matrix)
    if not each:
        return 0.0
    elements = local_elements(info, layout, mesh.sizes)
    if optimizer.offload is not None:
        return elements * host_step(info, hardware, optimizer).seconds + hardware.op_latency_s
    computing = step_flops(info, elements, optimizer, matrix) / step_peak(info, hardware, optimizer)
    return elements * each / hardware.memory_bytes_per_s + hardware.op_latency_s + computing


def step_flops(info: TensorInfo, elements: int, optimizer: Optimizer, matrix: bool) -> int:
    """Return the FLOPs of a device that stores so many elements of a parameter, without elementwise ones."""
    if not matrix:
        return 0
    if optimizer.name == "galore":
        return 4 * elements * optimizer.rank
    short, long = sorted(info.shape)
    return ITERATIONS * (4 * short * short * long + 2 * short * short * short)


def step_peak(info: TensorInfo, hardware: Hardware, optimizer: Optimizer) -> float:
    """Return the FLOP/s of these: Muon iterates in bfloat16."""
    dtype = ITERATED if optimizer.name == "muon" else info.dtype
    return hardware.flops_of(dtype) * hardware.product_efficiency


def step_working_bytes(info: TensorInfo, optimizer: Optimizer, matrix: bool) -> int:
    """Return the peak working bytes of a step of a matrix, resident ones excluded, whatever its layout.

    muon     6 sl + 4 s², s ≤ l: the matrix whole three times in bfloat16, plus two squares
    galore   a renewal: the gradient whole, as it is and in float32, and two factors in float32, sl and s²
    """
    if not matrix:
        return 0
    short, long = sorted(info.shape)
    if optimizer.name == "muon":
        return ITERATED.itemsize * (3 * short * long + 2 * short * short)
    size, wide = info.dtype.itemsize, torch.float32.itemsize
    whole = size + wide * (size != wide)
    return whole * short * long + wide * (short * long + short * short)


def step_transfers(
    info: TensorInfo, layout: Layout, mesh: Mesh, optimizer: Optimizer, matrix: bool
) -> tuple[Transfer, ...]:
    """Return the collectives of a step, in order; sizes of the mesh and of the parameter may be symbols."""
    if not matrix or not layout.is_split:
        return ()
    if optimizer.name == "muon":
        return _gathers(info.shape, ITERATED, layout, mesh)
    long = 0 if info.shape[0] >= info.shape[1] else 1
    rows, columns = info.shape[long], info.shape[1 - long]
    basis = _with_placements(layout, long, S(1), S(0))
    sums = _with_placements(layout, long, S(0), P)
    inside = (rows, optimizer.rank)
    return (
        *_gathers((columns, optimizer.rank), info.dtype, basis, mesh, _with_placements(layout, long, I, S(0))),
        *_changes(inside, info.dtype, sums, _with_placements(layout, long, S(0), S(1)), mesh, range(len(layout))),
        *_gathers(
            inside,
            info.dtype,
            _with_placements(layout, long, S(0), S(1)),
            mesh,
            _with_placements(layout, long, S(0), I),
        ),
    )


def _with_placements(layout: Layout, long: int, on_long: Placement, on_short: Placement) -> Layout:
    """Return a layout with other placements on the axes that split the long dim of a matrix, and that split its short
    one.
    """
    return Layout(I if not each.is_split else on_long if each.dim == long else on_short for each in layout)


def _gathers(
    shape: Sequence[int], dtype: torch.dtype, layout: Layout, mesh: Mesh, after: Layout | None = None
) -> tuple[Transfer, ...]:
    """Return the all-gathers, the inner axis first, of a matrix that by default no axis splits afterwards."""
    target = Layout(I for _ in layout) if after is None else after
    return _changes(shape, dtype, layout, target, mesh, range(len(layout) - 1, -1, -1))


def _changes(
    shape: Sequence[int], dtype: torch.dtype, before: Layout, after: Layout, mesh: Mesh, axes: Sequence[int]
) -> tuple[Transfer, ...]:
    """Return the collectives that take a matrix from one layout to another, an axis at a time."""
    tensor, found, here = MovedTensor(tuple(shape), dtype, False), [], before
    for axis in axes:
        if here[axis] is not after[axis]:
            there = here.replace(axis, after[axis])
            found += transfers(Move((axis,), here, there), tensor, mesh, False)
            here = there
    return tuple(found)
