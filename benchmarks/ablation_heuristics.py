"""The heuristics of the solver and the memory limit by name, each with what switches it off (see `ablation`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import numpy as np

from autopar.planning.memory_limit import least_peak, moments
from autopar.solver import best_below, oracles, search
from autopar.solver.bounds import message_passing
from autopar.solver.elimination import bucket_elimination, distinct_tables
from autopar.solver.presolve import presolved
from autopar.solver.presolve.contraction import Contracted
from autopar.solver.problem import Problem
from autopar.solver.remaining.remaining_choices import Counted
from autopar.solver.tolerances import ROUNDING

Patch = tuple[object, str, object]
"""A module or class, the name of what it has, and what stands in its place."""


def off(*patches: Patch) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes a context in which these stand in place of their originals."""

    def context() -> AbstractContextManager[Any]:
        stack = ExitStack()
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        return stack

    return context


def _none_contracted(problems: Sequence[Problem]) -> list[Contracted]:
    every = {node.num_strategies: np.arange(node.num_strategies) for node in problems[0].nodes}
    members = tuple({number: every[node.num_strategies]} for number, node in enumerate(problems[0].nodes))
    return [Contracted(each, members) for each in problems]


HEURISTICS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    # presolve and orders of elimination
    "contraction": off((presolved, "contract_each", _none_contracted)),
    "other orders": off((bucket_elimination, "ORDERS", ((True, False),))),
    "order of the whole": off((oracles.EliminationOracle, "order_of", lambda self, left: None)),
    "surroundings": off((distinct_tables, "SURROUNDINGS", 0)),
    # prices
    "mixtures": off((search._Search, "mix", lambda self, mixture, bound: None)),
    "rough evaluations": off((search, "PRICED_NEAR", ROUNDING)),
    # high treewidth
    "arc consistency": off((message_passing, "Domains", lambda *args: None)),
    "slow sweeps": off((oracles, "WORTHWHILE", 0.0)),
    # counts
    "branch and bound": off((best_below, "branch_and_bound", lambda *args: Counted(None, -math.inf, False))),
    # the memory limit
    "moments of mixtures": off((moments.Moments, "exceeds", lambda self, mixture: False)),
    "fixing of peaks": off((least_peak._Search, "by_fixing", lambda self: None)),
}
