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
from autopar.costs.space.space import Decision
from autopar.costs.space.unsharded import overlapped_of
from autopar.ir.program.program import Program, TensorInfo, info_of
from autopar.ir.program.recompute_segments import MODES

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
    every, _ = memory.space.widened()
    space = every.keeping({number: _whole(decision) for number, decision in enumerate(every.decisions)})
    runs = memory.microbatches.count
    found = overlapped_of(space.program, space.hardware)
    passes = (found.forward, found.backward) if space.program.learns else (found.forward,)
    computing = sum(each.seconds + each.latency for each in passes)
    stepping = sum(
        float(decision.candidates.seconds[0]) for decision in space.decisions if decision.kind == "parameter"
    )
    modes = dict.fromkeys(memory.lifetimes.segments, MODES[0])
    peak, _, _ = memory_use(memory.on(space), (0,) * len(space.decisions), modes)
    capacity = space.hardware.memory_bytes if limit is None else limit
    return OneDevice(computing * runs + stepping, peak, capacity, reserved.on_device(peak) - peak)


def _whole(decision: Decision) -> np.ndarray:
    """Return a mask of the strategy that splits nothing; of a tensor that arrives split, of its only one."""
    found = 0
    for number, strategy in enumerate(decision.candidates.strategies):
        if decision.kind == "call":
            is_whole = not strategy.implemented and all(choice == "-" for choice in strategy.choices)
        else:
            is_whole = all(placement in ("I", "R") for placement in str(strategy.outputs[0]).split())
        if is_whole:
            found = number
            break
    return np.arange(len(decision.candidates.strategies)) == found
