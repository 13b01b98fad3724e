"""Evaluation on a pipeline: a batch without micro-batches, stage after stage, and its outputs on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.implementations.randomness import Randomness
from autopar.runtime.module.executable import Surroundings
from autopar.runtime.module.inputs import Arguments
from autopar.runtime.module.stored import StoredModule
from autopar.runtime.pipeline.executable import Pipeline
from autopar.runtime.pipeline.stage import received_tensors, result_tensors


def evaluated(
    pipeline: Pipeline,
    root: StoredModule,
    arguments: Arguments,
    group: dist.ProcessGroup,
    random: Randomness,
) -> list[Any]:
    """Return the flat outputs of a batch on every rank: stage after stage, each on its rank."""
    schedule, here = pipeline.schedule, dist.get_rank(group)
    last = pipeline.programs[-1]
    sent: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    for number, executable in pipeline.executables.items():
        program = executable.program
        given = {**executable.constants, **executable.weights_of(root), **executable.buffers_of(root)}
        given.update(executable.inputs_of(arguments))
        if number and schedule.rank_of(number - 1) != here:
            device = executable.mesh.device_type
            sent = tuple(torch.empty_like(each, device=device) for each in received_tensors(executable))
            for each in sent:
                dist.recv(each, group=group, group_src=schedule.rank_of(number - 1))
        given.update(zip(program.received, sent, strict=True))
        with Surroundings(executable, random):
            outputs = executable.graph.runner(root.compilation)(*map(given.__getitem__, executable.local.placeholders))
        executable.write_buffers(root, outputs)
        sent = tuple(each.contiguous() for each in outputs[: program.num_sent])
        if number < schedule.num_stages - 1 and schedule.rank_of(number + 1) != here:
            for each in sent:
                dist.send(each, group=group, group_dst=schedule.rank_of(number + 1))
    source = schedule.rank_of(schedule.num_stages - 1)
    executable = next(iter(pipeline.executables.values()))
    shapes = result_tensors(last.output[: last.num_outputs], pipeline.result_layouts, executable.mesh.shape)
    results = list(outputs[: last.num_outputs]) if here == source else shapes
    for place, layout in enumerate(pipeline.result_layouts):
        if layout is not None:
            value = results[place]
            value = (
                value.contiguous() if here == source else torch.empty_like(value, device=executable.mesh.device_type)
            )
            dist.broadcast(value, group=group, group_src=source)
            results[place] = value
    return results
