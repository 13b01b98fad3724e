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
from autopar.planning.planner import Solved, fetched_ahead, formulations_of, plan_of, written
from autopar.solver.oracles import lower_bound


@dataclass(slots=True)
class StageFinisher:
    """Writes down the plans of stages, one after the other."""

    search: StageSearch
    deadline: float
    ahead: dict[int, tuple[Answer, int]] = field(default_factory=dict)
    """Known stage (by identity) → its choices and the layers that they fetch ahead."""
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
            return plan_of(search.solve(program, stage, storage))[0]
        return self._plan_like(searched, program, number, stage)

    def _plan_like(self, searched: SearchedStage, program: Program, number: int, stage: int) -> Plan:
        """Return the plan of a stage by the choices of a known one of equal structure."""
        search, made = self.search, searched.made
        assert made is not None
        space, pins = search.narrowed(program, search.planned.request.storage)
        settings = search.settings(stage).lasting(search.planned.request.settings.search.time_limit)
        formulation = formulations_of(search.memory_of(space, stage), settings)[-1]
        own = Solved(formulation, pins, settings, made.answer)
        if id(searched) not in self.ahead:
            answer, model = fetched_ahead(made.answer, made.formulation.memory, made.settings)
            self.ahead[id(searched)] = answer, model.prefetch
        answer, prefetch = self.ahead[id(searched)]
        found = _answer_on(answer, made, own, formulation.memory.fetching_ahead(prefetch))
        if (
            settings.tensor_limit is not None and found.peak_bytes > settings.tensor_limit
        ):  # fetched ahead it does not fit
            prefetch = made.formulation.memory.prefetch
            found = _answer_on(made.answer, made, own, formulation.memory.fetching_ahead(prefetch))
        if (searched.runs, searched.budget) != (search.runs[stage], search.budgets[stage]):
            found = self._bounded(found, own, number)
        return written(own, found, formulation.memory.fetching_ahead(prefetch))[0]

    def _bounded(self, found: Answer, own: Solved, structure: int) -> Answer:
        """Return the answer with a bound for its own stage: choices of another one may not be the best here."""
        problem = own.formulation.problem(own.pins)
        if structure not in self.bounds:
            try:
                self.bounds[structure] = lower_bound(problem, 0.0, self.deadline)
            except TimeLimitError:
                self.bounds[structure] = 0.0
        return replace(found, problem=problem, multiplier=0.0, bound=min(found.seconds, self.bounds[structure]))


def _answer_on(answer: Answer, made: Solved, own: Solved, model: MemoryModel) -> Answer:
    """Return an answer in the words of another stage of equal structure, with what it takes there."""
    names = dict(zip(made.formulation.memory.lifetimes.segments, model.lifetimes.segments, strict=True))
    modes = {names[name]: mode for name, mode in answer.modes.items()}
    peak, use, fullest = memory_use(model, answer.choices, modes)
    return replace(answer, modes=modes, peak_bytes=peak, memory=use, fullest=fullest)
