"""Computation of one device for a call under a strategy, and its time."""

from __future__ import annotations

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
    bytes_per_s: float

    @classmethod
    def of(cls, call: Call, op: OpRule, bound: BoundRule, hardware: Hardware) -> Work:
        return cls(call, op, bound, flops(call, op, bound), sides_of(op, bound), bandwidth(op, bound, hardware))


def computing_seconds(strategy: Strategy, work: Work, mesh: Mesh, hardware: Hardware) -> float:
    """Return the seconds of what one device computes in the forward of a call."""
    call, op, bound, implementation = work.call, work.op, work.bound, strategy.implementation
    local = strategy.local_sizes(bound.sizes, mesh)
    stated = implementation.flops(call, local)
    num_flops = work.num_flops * (1 / strategy.num_parts(mesh)) if stated is None else stated
    forward = forward_seconds(
        call,
        op,
        full_rate_flops(num_flops, op, work.sides, local, hardware, implementation),
        (strategy.inputs, strategy.outputs),
        mesh.sizes,
        hardware,
        work.bytes_per_s,
        implementation,
        local,
    )
    return forward + (implementation.launches(call, local) - 1) * hardware.op_latency_s
