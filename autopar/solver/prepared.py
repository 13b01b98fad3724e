"""A problem made ready to be solved: pruned, joined, and its elimination compiled.

None of that depends on the memory limit, so that searches which ask the same with one limit after the other do it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError
from autopar.solver.elimination.bucket_elimination import Elimination, narrow_elimination
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.infeasibility import describe_conflict
from autopar.solver.lagrangian import Visited
from autopar.solver.presolve.contraction import Contracted, contract
from autopar.solver.presolve.reduction import Pruned, prune
from autopar.solver.problem import Problem


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A problem, what it was made smaller by, and how what is left is eliminated."""

    problem: Problem
    pruned: Pruned
    contracted: Contracted
    tables: Tables
    elimination: Elimination | None
    """None if the treewidth is too high."""
    visited: Visited = field(default_factory=Visited)
    """Results of elimination at memory prices, whatever the limit."""

    @classmethod
    def of(cls, problem: Problem, deadline: float) -> Prepared:
        """InfeasibleError where some node has no strategy that is allowed; why is looked for until the deadline."""
        if problem.forbidden_node is not None:
            raise InfeasibleError(describe_conflict(problem, deadline))
        pruned = prune(problem)
        if pruned.problem.forbidden_node is not None:
            raise InfeasibleError(describe_conflict(problem, deadline))
        contracted = contract(pruned.problem)
        tables = Tables(contracted.problem)
        return cls(problem, pruned, contracted, tables, narrow_elimination(contracted.problem, tables))

    @property
    def smaller(self) -> Problem:
        """Problem that is left to be solved."""
        return self.contracted.problem

    def within(self, budget: int | None) -> Prepared:
        """Return the same with another limit."""
        if budget == self.problem.budget:
            return self
        return replace(
            self,
            problem=replace(self.problem, budget=budget, is_sound=True),
            pruned=replace(self.pruned, problem=replace(self.pruned.problem, budget=budget, is_sound=True)),
            contracted=replace(self.contracted, problem=replace(self.contracted.problem, budget=budget, is_sound=True)),
        )

    def extend(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the choices of the problem from those of what is left of it."""
        return self.pruned.extend(self.contracted.extend(choices))
