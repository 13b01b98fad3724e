"""The best plan whose memory is within a limit at every moment of a step.

The bytes at one moment are one row of the problem, and the limit on one moment, or on a weighted sum of moments, is a
condition that every plan within the limit meets: the best choice under it is a lower bound (a surrogate relaxation,
Glover 1965), and if it is within the limit at every other moment too, it is the best plan. So:

1. Solve with the limit where the backward begins, the fullest moment of most plans. At high treewidth the limit makes
   solving expensive, and may not matter: solve without it. Find the plan's fullest moment.
2. Solve with a row for each of the moments that an answer, or what prices mix, was over the limit at (`several_rows`).
   Where elimination takes seconds, that is done in what the first bound leaves (`narrowed`), and 3 and 4 are left out;
   what is not near enough then is solved again by a restricted master problem over all visited choices
   (`restricted_search`).
3. Where that leaves more open than is allowed, solve with the limit on the sum of moments, with weights, that all
   answers so far exceed the most (Karwan & Rardin 1979). The bytes by which the answer exceeds the limit somewhere are
   subtracted from the limit of the row: so answers are found that fit, and cost little more.
4. When no sum of moments closes in, further answers are those to two harder questions: with the limit on the largest
   bytes of each choice, and with tighter limits on the sum. The best of them is taken; its optimality gap is reported.
   If there is none, the least peak of any plan is computed (`least_peak`).

Once the time is over, the best answer that fits is returned, or an error says that none was found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autopar.console.units import format_share
from autopar.costs.memory.moments import MemoryRow, PricedMemory
from autopar.errors import CutOffError, InfeasibleError, PlanError, TimeLimitError, warn_user
from autopar.planning.formulation import Formulation, Pins
from autopar.planning.memory_limit import answers
from autopar.planning.memory_limit.answers import Answer, Found, Places, in_each_mode, share, smaller_ones
from autopar.planning.memory_limit.narrowed import Narrowed
from autopar.planning.memory_limit.refusal import Modes
from autopar.planning.memory_limit.restricted_search import RestrictedSearch
from autopar.planning.settings import Settings
from autopar.solver.deadline import after, grace, is_over, seconds_until, why_over
from autopar.solver.elimination.bucket_elimination import CHEAP_WORK
from autopar.solver.infeasibility import MemoryLimitError
from autopar.solver.low_treewidth import Tolerances, without_warnings
from autopar.solver.memory_rows.fixings import FixingSearch
from autopar.solver.memory_rows.several_rows import solve_rows
from autopar.solver.prepared import Prepared
from autopar.solver.problem import Solution
from autopar.solver.solve import bound_at, is_wide, solve, solve_narrow, solve_prepared

MAX_SUMS = 6  # sums of moments that are tried before the largest of them
SUM_PARTS = 100  # parts into which the weights of a sum are divided
MAX_MOMENTS = 24  # moments that the largest is taken over
MAX_LIMITS, FIRST_LIMITS = 8, 2  # limits below the true one that are tried: at the end, and until anything fits
CLOSE = 1e-4  # of the limit: limits that differ by less are the same
ROUGHLY = 1e-4  # of the seconds: how far from the best an answer to a harder question may be
FEW_CALLS = 256  # of a model that is planned to the end: rows for all its moments are no more than the search takes
STOP_GAP = 1e-3  # of the seconds: default optimality gap if a smaller one is expensive
WIDE_GAP = 5e-3  # of the seconds: default optimality gap at high treewidth
FIRST_GAP = 1.0  # of the seconds: an answer that is over the limit elsewhere need not be proven
FIRST_SHARE = 0.5  # of the time, at most, goes to the limit at one moment
START_GAP = 2e-3  # of the seconds: an answer further from the best is no help; a nearer one is a good start
HALF = 0.5  # of the time that is left, at most, goes to each sum of moments, and to all until one fits
SPARE = 0.08  # of the time, beyond it, at most, to say what the least is that was found


def best_within(formulation: Formulation, pins: Pins, modes: Modes | None, settings: Settings) -> Answer:
    """Return the fastest choice within the memory limit of the settings, if any; `modes` None excludes recomputation.

    Without a gap the optimum is searched. For many calls a choice within a thousandth of it suffices if a smaller gap
    is expensive: if elimination takes seconds, and counts of equal parts take longer (five thousandths at high
    treewidth). If that is not proven, the bound is below the seconds, and a RuntimeWarning says so. `brief_counts`:
    none counts long. InfeasibleError where no choice is within the limit, with the least that one needs, and
    TimeLimitError where none was found in time. With a cut-off (in seconds) CutOffError where memory costs time and
    none is found to be faster than that, or none is within the limit: what pays nothing for memory is an answer.
    """
    limit, brief_counts, cutoff = settings.tensor_limit, settings.brief_counts, settings.cutoff
    solver, gap, time_limit = settings.search.solver, settings.search.gap, settings.search.time_limit
    is_rough = gap is None and (brief_counts or len(formulation.memory.lifetimes.calls) > FEW_CALLS)
    stop_gap, start_gap, wide_gap = (STOP_GAP, START_GAP, WIDE_GAP) if is_rough else (gap or 0.0,) * 3
    deadline, spare = after(time_limit), SPARE * time_limit
    search = _Search(
        formulation, pins, deadline, spare, solver, gap or 0.0, stop_gap, brief_counts, start_gap, wide_gap, cutoff
    )
    forced = None if modes is None or not all(modes.values()) else modes
    found = search.cached(limit, forced) or search.where_the_backward_begins(limit, modes)
    if limit is None or found is None:
        found = search.without_a_limit(limit, forced)
        if limit is None or found.peak_bytes <= limit:
            return found
    search.check(found.bound if found.multiplier or found.peak_bytes > limit else -math.inf)
    if found.peak_bytes > limit:
        with without_warnings():
            found = search.stated(search.at_every_moment(found, limit, modes), found.row, limit, modes)
        search.check(found.bound)
    if share(found) > stop_gap:
        why = f"{why_over()}: " if is_over(search.deadline) else ""
        most = f"at most {format_share(share(found))} of its step could be saved"
        message = f"{why}the plan is within the limit at every moment, but not proven best: {most}."
        warn_user(message, RuntimeWarning)
    return found


@dataclass(frozen=True, slots=True)
class _Search(RestrictedSearch):
    solver: str
    gap: float
    stop_gap: float
    """Gap at which a search may stop if closing more of it would be expensive."""
    brief_counts: bool
    """True if no count may take long."""
    start_gap: float
    """Gap at which an answer on a graph of high treewidth is a good starting point, and counts stop."""
    wide_gap: float
    """Gap that is enough on a graph of high treewidth once the best given the fixed nodes is known (`several_rows`)."""
    cutoff: float = math.inf
    """Seconds of a plan that is known: what is no faster is not looked for."""
    prepared: dict[MemoryRow | None, Prepared] = field(default_factory=dict)
    """The problem that was solved last, by its row."""
    aside: list[Answer] = field(default_factory=list)
    """Fitting answers, far from proven, that were set aside when the search for a proof went on elsewhere."""

    def solve(
        self,
        row: MemoryRow | None,
        limit: int | None,
        modes: Modes | None,
        gap: float = 0.0,
        near: Answer | None = None,
    ) -> Answer:
        """Return the best under one row and a limit per moment; `near` may have a similar price of memory."""
        gap, left = max(gap, self.gap), self._seconds_left * (HALF if row else 1)
        if self.solver == "ilp":
            problem = self._problem(row, limit, modes)
            return self._answer(problem, solve(problem, solver="ilp", time_limit=left), modes, row)
        price = 0.0 if row is None or near is None else near.price / row.total
        prepared = self._prepared(row, limit, modes)
        tolerances = Tolerances(max(gap, self.stop_gap), max(gap, self.counted))
        solution = solve_prepared(prepared, time_limit=left, gap=gap, price=price, tolerances=tolerances)
        return self._answer(prepared.problem, solution, modes, row)

    def without_a_limit(self, limit: int | None, modes: Modes | None) -> Answer:
        """Return the best without the limit, or where that would not fit, choices near it."""
        found = self.solve(None, limit, modes, 0.0 if limit is None else self.start_gap)
        fits = limit is None or found.peak_bytes <= limit
        if limit and fits and share(found):
            found = self.solve(None, limit, modes)
        # A search that the deadline ended is repeated if there is more time.
        is_near = share(found) <= (self.gap if fits else self.start_gap)
        is_cached = is_near and self.prepared and is_wide(self.prepared[None].elimination)
        return self.cache(found, limit, modes) if is_cached else found

    @property
    def counted(self) -> float:
        """Gap at which an answer is enough if counts take long (`Tolerances`); infinite in a hurried search."""
        return math.inf if self.brief_counts else self.stop_gap

    def _prepared(self, row: MemoryRow | None, limit: int | None, modes: Modes | None) -> Prepared:
        """Return the problem with a row and a limit, ready to be solved; that of the row before is kept."""
        if row not in self.prepared:
            self.prepared.clear()
            self.prepared[row] = Prepared.of(self._problem(row, limit, modes), self.deadline)
        return self.prepared[row].within(None if row is None or limit is None else row.total * limit)

    def check(self, bound: float) -> None:
        """Raise CutOffError where a bound proves that no answer is faster than the cut-off."""
        if self.cutoff < math.inf and bound >= self.cutoff:
            raise CutOffError(bound)

    def at_every_moment(self, first: Answer, limit: int, modes: Modes | None) -> Answer:
        """Return the best answer that fits, where `first`, which lacks the limit or has it at one moment, does not."""
        found = Found(first)
        found.meet(self._bytes_of(first))
        found.fitting += self.of_fewer_bytes(first, limit)
        if self.gap and not found.is_proven(self.gap):  # many answers are near enough
            found.fitting += self.by_tighter_limits(first, limit, modes, FIRST_LIMITS)
        if not found.is_proven(self.stop_gap):
            # What is far from the best is no help: within its margin little can be left out.
            distant, found.fitting = ([], found.fitting) if found.is_proven(START_GAP) else (found.fitting, [])
            if self.brief_counts and not distant:
                found.fitting += self.first_answer(limit, modes)
                if not found.fitting:
                    self.check(math.inf)  # one of many plans, that may do without: little fits, if anything
            self.by_all_rows(found, limit, modes)
            found.fitting += distant + self.aside
            if self._is_expensive(first) and not found.is_proven(self.stop_gap):
                found.fitting += self.by_restricted_master(
                    found, limit, modes, HALF * self.stop_gap * found.proof.bound
                )
        self.check(found.proof.bound)
        # At high treewidth sums prove no more than all rows did.
        near = self.stop_gap if first.row is not None or not self.stop_gap else max(self.stop_gap, WIDE_GAP)
        if found.is_proven(max(near, ROUGHLY)) or (found.fitting and self._is_expensive(first)):
            return found.best
        try:
            self.by_sums(found, limit, modes)
        except MemoryLimitError as error:
            self.check(math.inf)
            smallest, conflict = self.smallest(self.pins, modes), error.conflict if self.pins else None
            raise InfeasibleError(self.refusal(limit, modes, smallest, conflict), smallest.peak_bytes) from error
        if not found.fitting:
            least_bytes = min(int(taken.max()) for taken in found.taken)
            found.fitting.append(self.smallest_answer(limit, modes, least_bytes))
        self.check(found.proof.bound)
        if found.is_proven(self.gap) or is_over(self.deadline):
            return found.best
        if not self.by_all_rows(found, limit, modes) and not found.is_proven(ROUGHLY):
            found.fitting += self.by_worst_moments(set(found.moments), limit, modes)
            found.fitting += self.by_tighter_limits(found.proof, limit, modes, MAX_LIMITS)
        return found.best

    def of_fewer_bytes(self, answer: Answer, limit: int) -> list[Answer]:
        """Return the fastest fitting one of the smaller choices known with an answer; [] if none fits."""
        fitting = (each for each in smaller_ones(answer, self.formulation.memory) if each.peak_bytes <= limit)
        return list(itertools.islice(fitting, 1))

    def where_the_backward_begins(self, limit: int | None, modes: Modes | None) -> Answer | None:
        """Return the best with the limit at the last call; None if there is no limit, price or cheap search."""
        last = len(self.formulation.memory.lifetimes.calls) - 1
        if limit is None or last < 0 or self.solver != "auto" or self.cutoff <= 0:
            return None
        self.check(self.bound_elsewhere(limit, modes))
        row = MemoryRow(((last, 1),))
        exact = Tolerances(self.stop_gap, self.counted, self.cutoff)
        prepared = self._prepared(row, limit, modes)
        first: Solution | None = None
        with without_warnings():
            try:
                solution = solve_narrow(prepared, FIRST_SHARE * self._seconds_left, FIRST_GAP, exact)
            except (MemoryLimitError, TimeLimitError) as error:  # a plan without a limit says better what is needed
                self.check(math.inf if isinstance(error, MemoryLimitError) else -math.inf)
                return None  # without the limit there may be time enough
            if solution is not None and solution.gap > self.gap and self._taken(solution.choices, modes).max() <= limit:
                again = prepared, self._seconds_left, self.gap, exact, solution.multiplier
                with suppress(TimeLimitError):
                    first, solution = solution, solve_narrow(*again) or solution
        if solution is None:
            return None
        found = self._answer(prepared.problem, solution, modes, row)
        if first is not None and found.peak_bytes > limit:
            self.aside.append(self._answer(prepared.problem, first, modes, row))
        return found

    def bound_elsewhere(self, limit: int, modes: Modes | None) -> float:
        """Return the bound that memory prices of another plan of the same model prove; -inf without a cut-off."""
        near = self.formulation.near
        if near is None or math.isinf(self.cutoff):
            return -math.inf
        return bound_at(self._prepared(near.row, limit, modes), near.price, self.deadline)

    def _priced(self, proof: Answer) -> PricedMemory:
        """Return the moments and prices of a proof, or of another plan, or of the start of the backward."""
        if proof.row is not None:
            return PricedMemory(proof.row, proof.multiplier)
        last = MemoryRow(((len(self.formulation.memory.lifetimes.calls) - 1, 1),))
        return self.formulation.near or PricedMemory(last, proof.multiplier)

    @property
    def _seconds_left(self) -> float:
        return max(seconds_until(self.deadline), grace())

    def by_all_rows(self, found: Found, limit: int, modes: Modes | None) -> bool:
        """Look for the best with a row for every moment; True where one fits, or rows came to be too many."""
        start = self._priced(found.proof)
        prices = {place: start.price * weight for place, weight in start.row.weights}
        places = Places({*prices, *found.moments}, limit, lambda choices: self._taken(choices, modes))
        places.add(found.taken[-1])
        halfway = self.deadline - HALF * seconds_until(self.deadline)
        visited = in_each_mode(found.first, modes or {}, self.formulation.memory.lifetimes.modes)
        narrowed = self._narrowed(found.first, limit, modes)
        gap, most = max(self.gap, self.stop_gap), (1 + answers.ROUNDING) * self.cutoff
        counted = self.counted if found.first.row else max(self.counted, self.start_gap)
        tolerances = Tolerances(self.stop_gap, counted, self.cutoff, wide_gap=self.wide_gap)
        for _ in range(MAX_MOMENTS):
            if is_over(until := self.deadline if found.fitting else halfway):
                return bool(found.fitting)
            numbers, rows = places.rows()
            problems = self.formulation.problems(self.pins, rows, limit, modes)
            at = [prices.get(place, 0.0) for place in numbers]
            incumbent = min((answer.seconds for answer in found.fitting), default=math.inf)
            left, is_wide = max(seconds_until(until), grace()), found.first.row is None
            if narrowed is None:
                best = solve_rows(
                    problems, at, incumbent, left, self.gap, tolerances, visited, is_wide, most, places.add_mixed
                )
            else:
                best = narrowed.best(problems, at, incumbent, after(left), gap, tolerances, visited, places.add_mixed)
            found.near += best.visited
            self.check(best.bound)
            prices = dict(zip(numbers, best.prices, strict=True))
            found.proof = self._proven(found.proof, prices, best.bound)
            if best.choices is None:
                if best.is_over_elsewhere:
                    continue
                if narrowed is None or not narrowed.may_be_further(incumbent):
                    return bool(found.fitting)
                narrowed = None
                continue
            seconds, num_bytes = problems[0].cost_of(best.choices)
            proven = min(best.bound, seconds), "multipliers + counts", found.proof.multiplier
            solution = Solution(best.choices, seconds, num_bytes, *proven)
            answer = self._answer(found.proof.problem, solution, modes, found.proof.row)
            if answer.peak_bytes <= limit:
                found.fitting.append(answer)
                if not best.is_over_elsewhere and (self.stop_gap or not narrowed or found.is_proven(self.gap)):
                    return True
            visited.append(best.choices)
            found.meet(self._bytes_of(answer))
            places.add(found.taken[-1])
        return True

    def _is_expensive(self, first: Answer) -> bool:
        """Return whether elimination of the first answer's problem takes seconds; sums of moments need many of them."""
        prepared = self.prepared.get(first.row)
        return prepared is not None and prepared.elimination is not None and prepared.elimination.work > CHEAP_WORK

    def _narrowed(self, first: Answer, limit: int, modes: Modes | None) -> Narrowed | None:
        """Return a search within the fixings by the first answer's bound if elimination takes seconds; else None."""
        if (row := first.row) is None or not first.multiplier or not self._is_expensive(first):
            return None
        return Narrowed(lambda: FixingSearch(self._prepared(row, limit, modes), first.multiplier, self.deadline))

    def _proven(self, proof: Answer, prices: Mapping[int, float], bound: float) -> Answer:
        """Return the proof with a better bound, if prices of moments prove one; its problem is not stated yet."""
        if bound <= proof.bound:
            return proof
        if not (row := answers.row_of(prices)).weights:  # counts alone prove it
            return replace(proof, bound=bound)
        return replace(proof, bound=bound, multiplier=sum(prices.values()) / row.total, row=row)

    def by_worst_moments(self, places: set[int], limit: int, modes: Modes | None) -> list[Answer]:
        """Return the best choices that fit even with all of them at their largest at once; [] if there is none."""
        while len(places) <= MAX_MOMENTS and not is_over(self.deadline):
            row = MemoryRow(tuple((place, 1) for place in sorted(places)), worst=True)
            try:
                found = self.solve(row, limit, modes, ROUGHLY)
            except PlanError:
                return []
            if found.peak_bytes <= limit:
                return [found]
            places = places | {found.fullest}
        return []

    def by_sums(self, found: Found, limit: int, modes: Modes | None) -> None:
        """Answers under the limit on sums of moments, until one fits or the sums repeat; raises MemoryLimitError."""
        if not found.fitting:
            found.fitting += self.by_tighter_limits(found.proof, limit, modes, FIRST_LIMITS)
        tried: set[MemoryRow] = set()
        halfway = self.deadline - HALF * seconds_until(self.deadline)  # the least that is needed is yet to be found
        while len(tried) < MAX_SUMS and not is_over(self.deadline if found.fitting else halfway):
            row = found.heaviest(SUM_PARTS)
            if row in tried:
                break
            tried.add(row)
            try:
                answer = self.solve(row, limit, modes, near=found.proof)
            except TimeLimitError:
                break
            if found.is_proven(ROUGHLY) and answer.bound <= found.proof.bound:
                break  # sums prove no more
            if found.proof.row is None or answer.bound > found.proof.bound:
                found.proof = answer
            if answer.peak_bytes <= limit:
                found.fitting.append(answer)
                break
            if not found.fitting:
                found.fitting += self.by_tighter_limits(answer, limit, modes, FIRST_LIMITS)
            found.meet(self._bytes_of(answer))

    def by_tighter_limits(self, loose: Answer, limit: int, modes: Modes | None, count: int) -> list[Answer]:
        """Answers with less than the limit at the moments where `loose` has the limit, which takes more elsewhere.

        The bytes by which an answer exceeds the limit somewhere are subtracted from the limit; half of them if that is
        too tight.
        """
        if loose.row is None:
            return []
        found: list[Answer] = []
        low, high = 0, limit  # the most that was found to be too tight, and the least that was too loose
        tighter = limit - (loose.peak_bytes - limit)
        for _ in range(count):
            if is_over(self.deadline) or high - low <= CLOSE * limit:
                break
            tighter = tighter if low < tighter < high else (low + high) // 2
            try:
                answer = self.solve(loose.row, tighter, modes, ROUGHLY, loose)
            except PlanError:
                low, tighter = tighter, (tighter + high) // 2
                continue
            over = answer.peak_bytes - limit
            if over <= 0:
                found.append(answer)
                low = tighter
            elif fitting := self.of_fewer_bytes(answer, limit):
                return found + fitting
            else:
                high = tighter
            tighter -= over
        return found
