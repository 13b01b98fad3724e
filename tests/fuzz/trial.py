"""One case on one process and on simulated ranks."""

from __future__ import annotations

import random

import numpy as np

import autopar
from autopar.costs.space.space import Space
from tests.fuzz.case import Case
from tests.support.simulation.outcome import Outcome, judged
from tests.support.simulation.training import Pins, Steps, Training, train_alone, train_on_ranks

PLANNING_SECONDS = 10.0


def judge(case: Case, seconds: float = 120.0) -> Outcome:
    """Run a case both ways and compare; the ranks have so many seconds."""
    batches = [case.program.batch(step) for step in range(case.steps)]
    steps = Steps(batches, case.optimizer, case.num_microbatches, case.evaluated)

    def on_ranks() -> Training:
        model = case.program.build()
        for pattern, specified in case.annotations:
            autopar.annotate(model, pattern, **specified)
        mesh = dict(zip(case.axes, case.mesh, strict=True))
        options = {"time_limit": PLANNING_SECONDS, **case.options}
        return train_on_ranks(model, steps, mesh, options, lambda space, pins: _forced(case, space, pins))

    return judged(lambda: train_alone(case.program.build(), steps), on_ranks, seconds)


def _forced(case: Case, space: Space, pins: Pins) -> Pins:
    """The pins, and one strategy at random for a share of the decisions; the same one wherever the decision stands."""
    forced = dict(pins)
    for number, decision in enumerate(space.decisions):
        chance = random.Random(f"{case.seed} {decision.name}")
        allowed = pins[number] if number in pins else np.ones(len(decision.candidates.strategies), dtype=bool)
        if chance.random() < case.forced:
            forced[number] = np.zeros(len(allowed), dtype=bool)
            forced[number][chance.choice(np.flatnonzero(allowed).tolist())] = True
    return forced
