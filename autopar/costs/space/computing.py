"""Computation of one device for a call under a strategy, and its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.costs.hardware.profile import Hardware
from autopar.costs.pricing.operations import bandwidth, flops, forward_seconds
from autopar.costs.pricing.product_efficiency import Sides, full_rate_flops, sides_of
from autopar.costs.space.strategy import Strategy
from autopar.ir.sharding.mesh import Mesh
from autopar.ir.sharding.operation import Call, OpRule
from autopar.ir.sharding.rule import BoundRule


@dataclass(frozen=True, slots=True)
class Work:
    """Computation of a call, whichever strategy runs it: its FLOPs, and the sides if it is a product."""

    call: Call
    op: OpRule
    bound: BoundRule
    num_flops: int
    sides: Sides

    @classmethod
    def of(cls, call: Call, op: OpRule, bound: BoundRule) -> Work:
        return cls(call, op, bound, flops(call, op, bound), sides_of(op, bound))


def computing_seconds(strategy: Strategy, work: Work, mesh: Mesh, hardware: Hardware) -> float:
    """Seconds of what one device computes in the forward of a call."""
    call, op, bound, implementation = work.call, work.op, work.bound, strategy.implementation
    local = strategy.local_sizes(bound.sizes, mesh)
    num_flops = _local_flops(work.num_flops, strategy, call, bound, mesh)
    forward = forward_seconds(
        call,
        op,
        full_rate_flops(num_flops, op, work.sides, local, hardware, implementation),
        (strategy.inputs, strategy.outputs),
        mesh.sizes,
        hardware,
        bandwidth(op, bound, hardware),
        implementation,
        _scratch_bytes(strategy, call, bound, mesh),
        op.elementwise_bytes(call, local) if op.elementwise_bytes else 0,
    )
    return forward + (num_launches(strategy, call, bound.sizes, mesh) - 1) * hardware.op_latency_s


def num_launches(strategy: Strategy, call: Call, sizes: Mapping[str, int], mesh: Mesh) -> int:
    """Return the number of operations that one device starts in a forward; `sizes` are those of the call's factors."""
    launches = strategy.implementation.launches if strategy.implementation is not None else None
    return 1 if launches is None else launches(call, strategy.local_sizes(sizes, mesh))


def _local_flops(total: int, strategy: Strategy, call: Call, bound: BoundRule, mesh: Mesh) -> float:
    """Return the FLOPs of one device: its share of `total`, or those that the implementation states."""
    implementation = strategy.implementation
    if implementation is not None and implementation.flops is not None:
        return implementation.flops(call, strategy.local_sizes(bound.sizes, mesh))
    return total * (1 / strategy.num_parts(mesh))


def _scratch_bytes(strategy: Strategy, call: Call, bound: BoundRule, mesh: Mesh) -> int:
    """Return the bytes that one device reads and writes in addition to inputs and outputs."""
    implementation = strategy.implementation
    if implementation is None or implementation.scratch_bytes is None:
        return 0
    return implementation.scratch_bytes(call, strategy.local_sizes(bound.sizes, mesh))
