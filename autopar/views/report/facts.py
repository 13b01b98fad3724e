"""Named facts about a plan, for the head of a table or page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from autopar.console.tables import Fact
from autopar.console.units import format_bytes, format_count, format_seconds, format_share
from autopar.costs.hardware.load import is_profile_of
from autopar.costs.hardware.reserved import Reserved
from autopar.costs.plans.plan import Plan
from autopar.costs.plans.workload import FLOP_CONVENTION, Workload
from autopar.ir.program.folding import ranges
from autopar.ir.program.paths import is_number
from autopar.ir.program.recompute_segments import OFFLOAD
from autopar.ir.sharding.mesh import Mesh
from autopar.views.inspection.timeline import compared_with_the_sum

REDUCED_EACH = "reduced by every micro-batch, and added up in parts"
SOLVERS = {
    "elimination": "exact elimination",
    "messages": "message passing",
    "prices": "prices of memory",
    "counts": "counting of equal layers",
    "ilp": "integer program",
}
"""Words for the parts of `Plan.solver`."""


SMALL = 0.005  # share of a step below which differences are not reported
MOST = 4
"""Differences that are told."""
OF_SECONDS = ("speed", "one device")
"""Facts that the step's seconds are needed for."""


def plan_facts(plan: Plan) -> list[Fact]:
    """List what a plan is for, what its step takes, and how it runs."""
    workload = workload_facts(plan.workload, plan.mesh)
    facts = [fact for fact in workload if fact.name not in OF_SECONDS]
    facts.append(Fact("step", f"{format_seconds(plan.step_seconds)} predicted, {proof(plan)}"))
    facts += [fact for fact in workload if fact.name in OF_SECONDS]
    if plan.context is not None:
        simulated, apart = timeline_words(plan)
        facts.append(Fact("timeline", simulated + (f"\nnext to the sum: {apart}" if apart else "")))
    limit = "no limit set" if plan.memory_limit is None else f"limit {format_bytes(plan.memory_limit)}"
    lines = [f"{plan.reserved.both(plan.peak_bytes)} per device predicted at the peak, {limit}"]
    if plan.memory is not None:
        parts = sorted(plan.memory.parts.items(), key=lambda part: -part[1])
        lines.append(", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in parts if num_bytes))
    facts.append(Fact("memory", "\n".join((*lines, *reserved_words(plan.peak_bytes, plan.reserved)))))
    if plan.host:
        facts.append(Fact("host", host_words(plan.host)))
    recomputed, offloaded = modes(plan)
    if recomputed:
        facts.append(Fact("recomputed", f"in the backward: {recomputed}"))
    if offloaded:
        facts.append(Fact("offloaded", f"saved on the host for the backward: {offloaded}"))
    if plan.prefetch:
        layers = "1 layer" if plan.prefetch == 1 else f"{plan.prefetch} layers"
        facts.append(Fact("weights", f"gathered {layers} ahead of their use"))
    if plan.reduce_each:
        facts.append(Fact("gradients", REDUCED_EACH))
    return [*facts, Fact("solver", solver_words(plan.solver))]


def reserved_words(tensors: int, reserved: Reserved) -> list[str]:
    """Say in a line what a device holds besides tensors; no line if it holds nothing."""
    parts = reserved.parts(tensors).items()
    words = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in parts)
    return [f"besides tensors: {words}"] if words else []


def proof(plan: Plan) -> str:
    """Say how far the step is proven to be the shortest."""
    if plan.mode == "manual":
        return "as annotated (manual)"
    if plan.gap == 0:
        return "proven optimal"
    if not plan.bound:
        return "no lower bound is known"
    gap = f"optimality gap {format_share(plan.gap)}"
    if plan.step_seconds < plan.bound:  # costs that hide less than this plan's timeline; the step has no such bound
        return f"{gap} of the sum of costs, {format_seconds(plan.seconds)}"
    return f"{gap}: no plan costs less than {format_seconds(plan.bound)} in sum"


def workload_facts(workload: Workload | None, mesh: Mesh) -> list[Fact]:
    """List model, inputs, optimizer, speed and the step of one device; nothing of a plan that does not know them."""
    if workload is None:
        return []
    return [
        Fact("model", _model(workload)),
        Fact("inputs", _inputs(workload)),
        Fact("optimizer", workload.optimizer),
        *_profile(workload, mesh),
        Fact("speed", _speed(workload, mesh)),
        Fact("one device", _one_device(workload)),
    ]


def _model(workload: Workload) -> str:
    name = workload.model or "model"
    count = format_count(workload.num_parameters)
    return f"{name}, {count} parameters in {workload.parameters or 'no dtype'}, computed in {workload.compute}"


def _inputs(workload: Workload) -> str:
    given = ", ".join(f"{name} {info}" for name, info in workload.inputs.items()) or "none"
    return given if workload.microbatches == 1 else f"{workload.microbatches} micro-batches of {given}"


def _profile(workload: Workload, mesh: Mesh) -> list[Fact]:
    if not workload.device or is_profile_of(mesh.hardware, workload.device):
        return []
    here = f"{mesh.hardware}, of another device than the one of this run, {workload.device}"
    return [Fact("profile", f"{here}: predictions are of {mesh.hardware}")]


def _speed(workload: Workload, mesh: Mesh) -> str:
    tokens = workload.tokens_per_second
    samples = workload.samples_per_second
    digits = ",.0f" if samples >= 1000 else ".4g"  # "g" alone writes 10,000 as 1e+04
    rate = f"{samples:{digits}} samples/s" if tokens is None else f"{tokens:,.0f} tokens/s"
    share = format_share(workload.mfu(mesh.num_devices))
    peak = f"the peak of {mesh.hardware} in {workload.compute}"
    return f"{rate}; MFU {share} of {peak} ({FLOP_CONVENTION})" if workload.flops else rate


def _one_device(workload: Workload) -> str:
    one = workload.one_device
    if not one.fits:
        needed, capacity = format_bytes(one.num_bytes + one.reserved_bytes), format_bytes(one.capacity)
        return f"does not fit: needs {needed} of {capacity} without recomputation"
    times = f", {one.seconds / workload.seconds:.3g} times this step" if workload.seconds else ""
    return f"{format_seconds(one.seconds)} without communication{times}; {format_bytes(one.num_bytes)}"


def host_words(host: Mapping[str, int]) -> str:
    """Say how many bytes are in host memory, and what they are."""
    parts = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in host.items())
    return f"{format_bytes(sum(host.values()))} of its memory per device: {parts}"


def modes(plan: Plan) -> tuple[str, str]:
    """Return the name the segments that are recomputed, with their mode, and those saved on the host; numbered ones as
    ranges.
    """
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for segment, mode in plan.recompute.items():
        stem, _, number = segment.rpartition(".")
        names[mode, stem].append(number)
    words = {
        key: f"{key[1]}.{ranges(sorted(map(int, numbers)))}".removeprefix(".")
        if all(map(is_number, numbers))
        else ", ".join(f"{key[1]}.{number}".removeprefix(".") for number in numbers)
        for key, numbers in names.items()
    }
    again = [f"{mode} in {found}" for (mode, _), found in words.items() if mode not in ("none", OFFLOAD)]
    away = [found for (mode, _), found in words.items() if mode == OFFLOAD]
    return ", ".join(again), ", ".join(away)


def solver_words(solver: str) -> str:
    """Put the name of a solver in words.

    >>> solver_words("prices + counts")
    'prices of memory, counting of equal layers'
    """
    return ", ".join(dict.fromkeys(SOLVERS.get(part, part) for part in solver.split(" + ")))


def timeline_words(plan: Plan) -> tuple[str, str]:
    """Return the step, and its largest differences from the sum, "" where they are small; PlanError for a loaded
    plan.
    """
    found = plan.timeline()
    hidden = f"; {format_seconds(found.hidden)} of collectives hidden" if found.hidden > SMALL * found.seconds else ""
    apart = [
        f"{name} {'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"
        for name, seconds in compared_with_the_sum(plan, found).items()
        if abs(seconds) > SMALL * found.seconds
    ]
    parts = f"computing {format_seconds(found.computing)}, waiting {format_seconds(found.waiting)}"
    return f"{format_seconds(found.seconds)} simulated: {parts}{hidden}", ", ".join(apart[:MOST])
