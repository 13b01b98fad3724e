"""Computation and parameter moves of a whole program on one device: the basis of overlap before there is a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import fx

from autopar.costs.hardware.overlap import OverlappedWork, Pass
from autopar.costs.hardware.profile import Hardware
from autopar.costs.pricing.operations import backward_share, bandwidth, flops, forward_seconds
from autopar.costs.pricing.product_efficiency import full_rate_flops, sides_of
from autopar.ir.program.calls import is_cast
from autopar.ir.program.effects import calls_meanwhile
from autopar.ir.program.program import Program, info_of
from autopar.ir.sharding.layout import replicated
from autopar.ir.sharding.operation import Call, OpRule, is_view
from autopar.ir.sharding.rule import BoundRule
from autopar.strategies.roles import RoledProgram


def overlapped_of(program: Program, hardware: Hardware) -> OverlappedWork:
    """Return the computation and moves of all calls and parameters; cached by program and hardware."""
    known: dict[Hardware, OverlappedWork] = program.facts.setdefault("beside", {})
    if hardware not in known:
        counts = Counter(each.ruled for each in RoledProgram.of(program).calls.values() if not is_view(each.call))
        computed = [
            (count, seconds_alone(each.call, each.op, each.bound, hardware), backward_share(each.call, each.op))
            for each, count in counts.items()
        ]
        weights = list(weights_of(program))
        gathered = sum(elements * used.itemsize for elements, used, _ in weights)
        summed = sum(elements * dtype.itemsize for elements, _, dtype in weights if dtype is not None)
        backward = sum(count * share for count, _, share in computed)
        known[hardware] = OverlappedWork(
            Pass(sum(n * seconds for n, seconds, _ in computed), counts.total() * hardware.op_latency_s, gathered),
            Pass(sum(n * seconds * share for n, seconds, share in computed), backward * hardware.op_latency_s, summed),
            len(weights),
        )
    return known[hardware]


def meanwhile_of(program: Program, hardware: Hardware) -> dict[fx.Node, OverlappedWork]:
    """Return the computation of the calls that run while rows of experts travel, by what sends these."""
    known: dict[Hardware, dict[fx.Node, OverlappedWork]] = program.facts.setdefault("computed meanwhile", {})
    if hardware not in known:
        ruled, known[hardware] = RoledProgram.of(program).calls, {}
        for exchange, nodes in calls_meanwhile(program).items():
            calls = [ruled[node.name] for node in nodes]
            known[hardware][exchange] = work_of([(each.call, each.op, each.bound) for each in calls], hardware)
    return known[hardware]


def work_of(calls: Iterable[tuple[Call, OpRule, BoundRule]], hardware: Hardware) -> OverlappedWork:
    """Return the computation of calls, without moves of parameters."""
    calls = [each for each in calls if not is_view(each[0])]
    forward = [seconds_alone(*each, hardware) for each in calls]
    shares = [backward_share(call, op) for call, op, _ in calls]
    backward = sum(seconds * share for seconds, share in zip(forward, shares, strict=True))
    latency = hardware.op_latency_s
    return OverlappedWork(Pass(sum(forward), len(calls) * latency), Pass(backward, sum(shares) * latency))


def seconds_alone(call: Call, op: OpRule, bound: BoundRule, hardware: Hardware) -> float:
    """Return the seconds of the forward of a whole call on one device, without the latency."""
    whole = ([replicated(0)] * len(call.inputs), [replicated(0)] * len(call.outputs))
    num_flops = full_rate_flops(flops(call, op, bound), op, sides_of(op, bound), bound.sizes, hardware)
    speed = bandwidth(op, bound, hardware)
    return forward_seconds(call, op, num_flops, whole, (), hardware, speed) - hardware.op_latency_s


def weights_of(program: Program) -> Iterator[tuple[int, torch.dtype, torch.dtype | None]]:
    """Yield each parameter's elements, its compute dtype, and the dtype in which its gradient is summed, if any."""
    parameters = set(program.parameters.values())
    for name, node in program.placeholders().items():
        if name in parameters:
            yield info_of(node).num_elements, *dtypes_of(program, node)


def dtypes_of(program: Program, parameter: fx.Node) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the dtype in which a parameter (its placeholder) is used, and that in which its gradient is summed.

    The latter is None if it has no gradient.
    """
    info = info_of(parameter)
    used = next((info_of(user).dtype for user in parameter.users if is_cast(user)), info.dtype)
    return used, (program.reduced or used) if info.requires_grad else None
