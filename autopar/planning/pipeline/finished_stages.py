"""The plans of the stages of a cut, from results of its search.

A stage solved before is not solved again. Stages of equal structure take each other's choices, by the position of calls
and segments in their graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.peak import memory_use
from autopar.costs.plans.plan import Plan
from autopar.errors import TimeLimitError
from autopar.ir.program.program import Program
from autopar.ir.sharding.layout import Layout
from autopar.planning.memory_limit.answers import Answer
from autopar.planning.pipeline.stage_search import SearchedStage, StageSearch
from autopar.planning.planner import Solved, draft_of, fetched_ahead, formulations_of
from autopar.solver.deadline import NEVER, until
from autopar.solver.oracles import lower_bound
from autopar.solver.problem import Problem


@dataclass(slots=True)
class StageFinisher:
    """Writes down the plans of stages, one after the other."""

    search: StageSearch
    deadline: float
    ahead: dict[int, int] = field(default_factory=dict)
    """Known stage (by identity) → the layers that its choices fetch ahead."""
    bounds: dict[int, float] = field(default_factory=dict)
    """Structure → seconds that no choices take less than, whatever the memory."""

    def plan(self, first: int, end: int, stage: int, storage: Mapping[str, Layout]) -> Plan:
        """Return the plan of a stage; it is solved where `storage` says of its parameters what the search did not
        know.
        """
        search = self.search
        (program, number), stored = search.program(first, end), search.planned.request.storage
        searched = None
        if not any(name in storage and name not in stored for name in program.parameters):
            searched = search.fastest(first, end, stage)
        if searched is None:
            return draft_of(search.solve(program, stage, storage)).written()
        return self._plan_like(searched, program, number, stage)

    def _plan_like(self, searched: SearchedStage, program: Program, number: int, stage: int) -> Plan:
        """Return the plan of a stage by the choices of a known one of equal structure."""
        search, made = self.search, searched.made
        assert made is not None
        space, pins = search.narrowed(program, search.planned.request.storage)
        settings = search.settings(stage).lasting(search.planned.request.settings.search.time_limit)
        formulation = formulations_of(search.memory_of(space, stage), settings)[-1]
        answer, limit = _answer_on(made, formulation.memory), settings.tensor_limit
        if id(searched) not in self.ahead:
            self.ahead[id(searched)] = fetched_ahead(made.answer, made.formulation.memory, made.settings).prefetch
        memory = formulation.memory.fetching_ahead(self.ahead[id(searched)])
        if limit is not None and memory_use(memory, answer.choices, answer.modes)[0] > limit:
            memory = formulation.memory.fetching_ahead(made.formulation.memory.prefetch)
        if (searched.runs, searched.budget) != (search.runs[stage], search.budgets[stage]):
            with until(NEVER):
                answer = self._bounded(answer, formulation.problem(pins), number)
        return draft_of(Solved(formulation, pins, settings, answer), memory).written()

    def _bounded(self, found: Answer, problem: Problem, structure: int) -> Answer:
        """Return the answer with a bound for its own stage: choices of another one may not be the best here."""
        if structure not in self.bounds:
            try:
                self.bounds[structure] = lower_bound(problem, 0.0, self.deadline)
            except TimeLimitError:
                self.bounds[structure] = 0.0
        return replace(found, problem=problem, multiplier=0.0, bound=min(found.seconds, self.bounds[structure]))


def _answer_on(made: Solved, memory: MemoryModel) -> Answer:
    """Return an answer in the words of another stage of equal structure."""
    names = dict(zip(made.formulation.memory.lifetimes.segments, memory.lifetimes.segments, strict=True))
    return replace(made.answer, modes={names[name]: mode for name, mode in made.answer.modes.items()})
