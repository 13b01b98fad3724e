"""The workload of a plan: the model and its inputs as captured, model FLOPs, and the step of one device alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from autopar.costs.hardware.profile import dtype_name
from autopar.costs.hardware.reserved import NOTHING, Reserved
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.peak import memory_use
from autopar.costs.plans.workload import OneDevice, Workload
from autopar.costs.pricing.model_flops import batch_of, model_flops
from autopar.costs.pricing.optimizer import Optimizer
from autopar.costs.space.call_candidates import Candidates
from autopar.ir.program.program import Program, TensorInfo, info_of
from autopar.ir.program.recompute_segments import MODES
from autopar.ir.sharding.layout import P, R

WITHOUT_OPTIMIZER = "none: the forward alone"


def workload(memory: MemoryModel, seconds: float, limit: int | None, reserved: Reserved = NOTHING) -> Workload:
    """Describe what a step computes that takes so many seconds with all of its micro-batches.

    Args:
        memory: The model of memory of the whole model.
        seconds: Predicted seconds of the step.
        limit: Bytes that a device may hold; None: those of the hardware profile.
        reserved: Memory of a device besides tensors.
    """
    space, runs = memory.space, memory.microbatches.count
    program, hardware = space.program, space.hardware
    flops = model_flops(program)
    samples, tokens = batch_of(program)
    dtypes: Counter[str] = Counter()
    placeholders = program.placeholders()
    for name in program.parameters.values():
        info = info_of(placeholders[name])
        dtypes[dtype_name(info.dtype)] += info.num_elements
    stored = " and ".join(name for name, _ in dtypes.most_common())
    computed = max(flops, key=lambda dtype: flops[dtype], default=None)
    return Workload(
        model=program.model,
        num_parameters=dtypes.total(),
        inputs=_inputs(program),
        microbatches=runs,
        samples=samples * runs,
        tokens=None if tokens is None else tokens * runs,
        parameters=stored,
        compute=stored if computed is None else dtype_name(computed),
        optimizer=_words(space.optimizer) if program.learns else WITHOUT_OPTIMIZER,
        seconds=seconds,
        flops=sum(flops.values()) * runs,
        ideal_seconds=sum(count / hardware.flops_of(dtype) for dtype, count in flops.items()) * runs,
        one_device=_one_device(memory, limit, replace(reserved, communicator_bytes=0)),
    )


def _inputs(program: Program) -> dict[str, str]:
    used = zip(program.input_names, program.input_values, strict=False)
    return {name: str(value) for name, value in used if isinstance(value, TensorInfo)}


def _words(optimizer: Optimizer) -> str:
    words = [optimizer.name]
    words += ["float32 master copies"] if optimizer.master_copies else []
    words += ["stepping in the backward"] if optimizer.in_backward else []
    words += ["state on the host"] if optimizer.offload is not None else []
    return ", ".join(words)


def _one_device(memory: MemoryModel, limit: int | None, reserved: Reserved) -> OneDevice:
    """Price the step with every call and tensor whole: seconds without moves, bytes without recomputation."""
    space, _ = memory.space.widened()
    decisions = space.decisions
    # Equal calls share their candidates.
    whole = {each: _whole(*each) for each in {(d.kind, d.candidates) for d in decisions}}
    choices = [whole[each.kind, each.candidates] for each in decisions]
    seconds = dict.fromkeys(("call", "parameter"), 0.0)
    for decision, choice in zip(decisions, choices, strict=True):
        if decision.kind in seconds:
            seconds[decision.kind] += float(decision.candidates.seconds[choice])
    if memory.space.kept is not None:  # arrays of these strategies alone are smaller than those of all
        masks = {n: np.arange(len(d.candidates.strategies)) == choices[n] for n, d in enumerate(decisions)}
        memory, choices = memory.on(space.keeping(masks)), [0] * len(decisions)
    peak, _, _ = memory_use(memory, choices, dict.fromkeys(memory.lifetimes.segments, MODES[0]))
    capacity = space.hardware.memory_bytes if limit is None else limit
    computing = memory.microbatches.count * seconds["call"]
    return OneDevice(computing + seconds["parameter"], peak, capacity, reserved.on_device(peak) - peak)


def _whole(kind: str, candidates: Candidates) -> int:
    """Return the number of the strategy that splits nothing, best with equal gradients on all devices.

    Grouped products have it as an implementation of its own alone. A tensor that arrives split has none: the only one.
    """

    def rank(number: int) -> tuple[bool, int]:
        """Return whether a strategy splits something; then whether it is an implementation, or how many axes sum."""
        strategy = candidates.strategies[number]
        if kind == "call":
            return any(choice != "-" for choice in strategy.choices), strategy.implemented
        layout = strategy.outputs[0]
        return any(placement.is_split or placement is P for placement in layout), layout.count(R)

    return min(range(len(candidates.strategies)), key=rank)
