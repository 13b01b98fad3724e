"""The proof of a solution, checked without any search: one elimination at the price λ of memory that came with it.

L(λ) = min_x [seconds(x) + λ bytes(x)] − λ budget  ≤  seconds(x) of every x within the budget        (λ ≥ 0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.solver.oracles import lower_bound
from autopar.solver.problem import Problem


def verify(problem: Problem, choices: Sequence[int], multiplier: float) -> tuple[float, float]:
    """Seconds of the choices and the lower bound L(multiplier), in seconds; -inf if the treewidth is too high for one.

    Raises PlanError where the choices are forbidden or over the budget, or the multiplier is negative.
    """
    if not 0 <= multiplier < math.inf:
        raise PlanError(f"the price of memory is {multiplier} seconds per byte; give a finite number of at least 0.")
    seconds, num_bytes = problem.seconds_of(choices), problem.bytes_of(choices)
    if seconds == math.inf:
        raise PlanError("the choices contain a forbidden strategy or pair; solve the problem again.")
    if not problem.fits(num_bytes):
        raise PlanError(f"the choices take {num_bytes} bytes, the limit is {problem.budget}; solve the problem again.")
    return seconds, lower_bound(problem, multiplier)
