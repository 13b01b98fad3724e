"""A warning where micro-batches change what a model computes: BatchNorm normalizes each of them by its own mean."""

from __future__ import annotations

import torch

from autopar.errors import warn_user
from autopar.ir.program.calls import module_of
from autopar.ir.program.program import Program

SHOWN = 3
_TRAINING = 5  # position of the argument of aten.batch_norm that says whether statistics are those of its input


def warn_of_batch_statistics(program: Program, num_microbatches: int) -> bool:
    """Warn where calls of a program take statistics of a micro-batch; whether any does."""
    nodes = [node for node in program.graph.nodes if node.target is torch.ops.aten.batch_norm.default]
    taking = [module_of(node) or node.name for node in nodes if node.args[_TRAINING]]
    if num_microbatches == 1 or not taking:
        return False
    named = ", ".join(taking[:SHOWN]) + (f" and {len(taking) - SHOWN} more" if len(taking) > SHOWN else "")
    warn_user(
        f"train_step splits a batch into {num_microbatches} micro-batches, and batch_norm in {named} takes the mean "
        "and the variance of each micro-batch, not of the batch, as under gradient accumulation: losses and running "
        "statistics are those of smaller batches. Use fewer micro-batches or larger batches, put these modules into "
        "eval() before compiling, or use a norm that does not look at other samples.",
    )
    return True
