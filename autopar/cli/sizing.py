"""`autopar plan` with a question the other way round: how many devices, how large a batch, how long a sequence."""

from __future__ import annotations

import argparse

import torch

from autopar.api import sizing
from autopar.cli import planning
from autopar.cli.planning import requested, show_plan
from autopar.console.names import AUTO
from autopar.errors import InputError
from autopar.models.named import named


def plan(options: argparse.Namespace) -> int:
    """Print the plan that the options ask for, or that of the size that they ask for, with the sizes tried."""
    if options.tokens is None and options.days is None and options.largest is None:
        return planning.plan(options)
    answer = sized(options)
    show_plan(answer.plan, options)
    print(f"\n{answer}")
    return 0


def sized(options: argparse.Namespace) -> sizing.Sized:
    """Return the size that the options ask for."""
    for_deadline = options.tokens is not None or options.days is not None
    if for_deadline and options.largest is not None:
        raise InputError("--largest and --tokens are two questions; ask one of them at a time.")
    if options.mesh not in (None, AUTO) or options.compare or options.inference or options.plan_cache:
        raise InputError(
            "--tokens and --largest plan training on the best mesh of several sizes; leave --mesh, --compare, "
            "--inference and --plan-cache out."
        )
    model, example_inputs = named(options.model, options.batch, options.sequence, options.layers)
    wanted = requested(options)
    with torch.autocast("cpu", torch.bfloat16, enabled=options.bfloat16):
        if options.largest is not None:
            if options.devices is None:
                raise InputError("--largest is of a number of devices; give --devices.")
            if options.largest == "sequence":
                return sizing.largest_sequence(model, example_inputs, devices=options.devices, **wanted)
            wanted["microbatches"] = options.microbatches or 1
            return sizing.largest_batch(model, example_inputs, devices=options.devices, **wanted)
        if options.tokens is None or options.days is None or options.devices is not None:
            raise InputError("--tokens and --days go together, and ask for the number of devices; leave --devices out.")
        return sizing.least_devices(model, example_inputs, tokens=options.tokens, days=options.days, **wanted)
