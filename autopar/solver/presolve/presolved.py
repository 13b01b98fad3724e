"""A problem made smaller, whatever its memory rows, and the way back: pruned, and joined where little is to choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.solver.presolve.contraction import Contracted, contract_each
from autopar.solver.presolve.pruning import Pruned, prune_each
from autopar.solver.problem import Problem


@dataclass(frozen=True, slots=True, eq=False)
class Presolved:
    """One smaller problem per memory row; nodes and strategies are the same in all of them.

    They depend on seconds alone, so that they stay the same where a row is added.
    """

    problems: tuple[Problem, ...]
    pruned: Pruned
    contracted: Contracted

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> Presolved:
        """Presolve one problem with a memory row each; every node must have a strategy that is allowed."""
        pruned = prune_each(problems)
        contracted = contract_each([each.problem for each in pruned])
        return cls(tuple([each.problem for each in contracted]), pruned[0], contracted[0])

    def extend(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the choices of the original problem from those of the smaller one."""
        return self.pruned.extend(self.contracted.extend(choices))

    def restrict(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the choices of the smaller problem from those of the original one, none of which may be forbidden."""
        return self.contracted.restrict(self.pruned.restrict(choices))
