"""One search for any number of memory rows: the best of all choices, or a bound of them, whichever way it takes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.errors import TimeLimitError
from autopar.solver import deadline
from autopar.solver import search as searching
from autopar.solver.best_below import Best
from autopar.solver.bounds import core
from autopar.solver.bounds.prices import PATIENCE, Mixture
from autopar.solver.deadline import NEVER
from autopar.solver.oracles import MessageOracle
from autopar.solver.problem import Edge, Node, Problem
from autopar.solver.remaining import scip
from autopar.solver.search import Found, Stated, search
from autopar.solver.tolerances import EXACT, ROUNDING, Tolerances, is_closed
from tests.solver.random_problems import SHAPES, brute_force, layered_rows, random_rows, without_limit

CLOSE = 1e-7  # of the seconds: CP-SAT counts in rounded units
Way = Literal["cheap", "expensive", "messages", "ilp"]
WAYS: tuple[Way, ...] = ("cheap", "expensive", "messages", "ilp")
seeds, ways = st.integers(0, 2**31 - 1), st.sampled_from(WAYS)
shapes, counts = st.sampled_from(SHAPES), st.integers(0, 3)


@contextlib.contextmanager
def taking(way: Way) -> Iterator[None]:
    """Every evaluation of the whole is expensive, or the treewidth too high for one, or that of the rest, too."""
    with pytest.MonkeyPatch.context() as patch:
        if way == "expensive":
            patch.setattr(searching, "CHEAP_WORK", 0)
        if way in ("messages", "ilp"):
            patch.setattr(searching, "oracle_of", MessageOracle)
            patch.setattr(core, "MAX_BAG", 9)
        if way == "ilp":
            patch.setattr(searching, "CHEAP_WORK", -1)
        yield


def rows_of(seed: int, shape: str, count: int) -> list[Problem]:
    """Rows of a random problem, or the problem without any."""
    problems = random_rows(seed, shape, max(count, 1), 7)
    return problems if count else [without_limit(problems[0])]


def check(found: Found, problems: Sequence[Problem], best: float) -> None:
    """Check that the bound is no more than the optimum, and that choices fit and take the stated seconds."""
    assert found.bound <= best * (1 + CLOSE)
    if found.choices is not None:
        assert all(each.budget is None or each.fits(each.bytes_of(found.choices)) for each in problems)
        assert found.seconds == problems[0].seconds_of(found.choices) >= max(best * (1 - 1e-9), found.bound)


def check_best(found: Found, problems: Sequence[Problem], best: float) -> None:
    """Check that the choices are proven the best, or that there are none."""
    check(found, problems, best)
    assert (found.choices is None) == math.isinf(best)
    if found.choices is None:
        assert found.bound == math.inf
    else:
        assert found.seconds == pytest.approx(best, rel=CLOSE) and is_closed(found.seconds, found.bound, CLOSE)


@settings(deadline=None, max_examples=60)
@given(seed=seeds, shape=shapes, count=counts, way=ways, price=st.sampled_from([None, 0.003, 0.1]))
def test_the_answer_is_that_of_brute_force(seed: int, shape: str, count: int, way: Way, price: float | None) -> None:
    problems = rows_of(seed, shape, count)
    prices = () if price is None else (price,) * len(problems)
    with taking(way):
        one, other = (search(Stated(tuple(problems)), NEVER, EXACT, prices) for _ in range(2))
    check_best(one, problems, brute_force(problems))
    assert one == other and len(one.prices) == len(problems)


@settings(deadline=None, max_examples=20)
@given(seed=seeds, count=st.integers(1, 3), way=ways)
def test_on_equal_layers_too(seed: int, count: int, way: Way) -> None:
    problems = layered_rows(seed, 3, count)
    with taking(way):
        found = search(Stated(tuple(problems)), NEVER)
    check_best(found, problems, brute_force(problems))


@dataclass
class Lazy:
    """Rows of which the first is stated, and others once something exceeds them."""

    rows: Sequence[Problem]
    stated: list[int] = field(default_factory=lambda: [0])
    mixtures: list[Mixture] = field(default_factory=list)

    def problems(self) -> Sequence[Problem]:
        deadline.check_whole()
        return [self.rows[number] for number in self.stated]

    def fits(self, choices: tuple[int, ...]) -> bool:
        over = [number for number, each in enumerate(self.rows) if not each.fits(each.bytes_of(choices))]
        self.stated += [number for number in over if number not in self.stated]
        return not over

    def exceeds(self, mixture: Mixture) -> bool:
        self.mixtures.append(mixture)
        before = len(self.stated)
        for number, each in enumerate(self.rows):
            taken = sum(weight * each.bytes_of(choices) for choices, weight in mixture)
            if number not in self.stated and each.budget is not None and taken > each.budget:
                self.stated.append(number)
        return len(self.stated) > before


@settings(deadline=None, max_examples=60)
@given(seed=seeds, shape=shapes, count=st.integers(1, 3), way=ways)
def test_rows_that_are_stated_once_they_are_exceeded_leave_the_same_best(
    seed: int, shape: str, count: int, way: Way
) -> None:
    problems = rows_of(seed, shape, count)
    source = Lazy(problems)
    with taking(way):
        found = search(source, NEVER)
    check_best(found, problems, brute_force(problems))
    assert len(found.prices) == len(source.stated)
    for mixture in source.mixtures:
        assert mixture == () or sum(weight for _, weight in mixture) == pytest.approx(1.0)
        assert all(len(choices) == len(problems[0].nodes) for choices, _ in mixture)


@pytest.mark.parametrize("way", WAYS)
def test_a_row_that_nothing_exceeds_is_never_stated(way: Way) -> None:
    first, *_ = layered_rows(4, 4, 1)
    source = Lazy((first, without_limit(first)))
    with taking(way):
        assert search(source, NEVER).choices is not None
    assert source.stated == [0]


tolerances_of = st.sampled_from(
    [Tolerances(0.1), Tolerances(0.0, 0.1), Tolerances(counted=0.1), Tolerances(counted=math.inf)]
)


@settings(deadline=None, max_examples=50)
@given(seed=seeds, shape=shapes, count=counts, way=ways, tolerances=tolerances_of)
@example(seed=13518, shape="repeated", count=1, way="ilp", tolerances=Tolerances(0.1))
@example(seed=0, shape="hub", count=2, way="cheap", tolerances=Tolerances(0.0, 0.1))  # bounds of SCIP
def test_what_is_near_enough_is_no_further_from_the_best_than_it_says(
    seed: int, shape: str, count: int, way: Way, tolerances: Tolerances
) -> None:
    problems = rows_of(seed, shape, count)
    best = brute_force(problems)
    with taking(way), pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.solver.remaining.counting_ilp.EFFORT", 1e-9)  # no count has the time to prove anything
        found = search(Stated(tuple(problems)), NEVER, tolerances)
    check(found, problems, best)
    if not math.isinf(tolerances.counted) and best < math.inf:
        enough = max(tolerances.gap, tolerances.counted, tolerances.expensive if way != "cheap" else 0.0)
        assert found.choices is not None
        assert is_closed(found.seconds, found.bound, enough + scip.TOLERANCE)


@settings(deadline=None, max_examples=40)
@given(seed=seeds, shape=shapes, count=counts, way=ways, share=st.sampled_from([0.5, 0.9, 0.999, 1.001, 1.5]))
def test_a_cut_off_ends_it_where_nothing_is_faster(seed: int, shape: str, count: int, way: Way, share: float) -> None:
    problems = rows_of(seed, shape, count)
    best = brute_force(problems)
    if math.isinf(best):
        return
    cutoff = share * best
    with taking(way):
        found = search(Stated(tuple(problems)), NEVER, Tolerances(cutoff=cutoff))
    check(found, problems, best)
    if share > 1:
        check_best(found, problems, best)
    else:
        assert found.bound >= cutoff * (1 - 1e-9)


def test_a_bound_of_prices_as_high_as_the_cut_off_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = layered_rows(3, 6, 3)
    best = search(Stated(tuple(problems)), NEVER)
    monkeypatch.setattr(searching, "BestBelow", None)  # whoever goes on fails
    cut = search(Stated(tuple(problems)), NEVER, Tolerances(cutoff=0.9 * best.bound))
    assert 0.9 * best.bound <= cut.bound <= best.seconds


@pytest.mark.parametrize("count", [0, 1])
def test_prices_are_looked_for_by_rough_evaluations_of_wide_graphs(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    problems, tolerances, at = rows_of(3, SHAPES[0], count), list[float](), MessageOracle.at

    def noted(oracle: MessageOracle, *args: Any, **options: Any) -> tuple[float, tuple[int, ...] | None]:
        tolerances.append(options.get("near", args[3] if len(args) > 3 else ROUNDING))
        return at(oracle, *args, **options)

    monkeypatch.setattr(MessageOracle, "at", noted)
    with taking("messages"):
        found = search(Stated(tuple(problems)), NEVER)
    check_best(found, problems, brute_force(problems))
    assert tolerances[0] == (searching.PRICED_NEAR if count else ROUNDING)


@pytest.mark.parametrize("proven", [0.5, 2.5, 20.0])
def test_the_next_margin_is_twice_as_wide_as_the_rest_proves(monkeypatch: pytest.MonkeyPatch, proven: float) -> None:
    problems, margins = rows_of(3, SHAPES[0], 1), list[float]()

    def nothing(_: object, near: object, margin: float, reached: float, is_last: bool) -> Best:
        margins.append(margin)
        return Best(None, reached + margin, (0.0,), True, reached + proven * margin)

    monkeypatch.setattr(searching, "FIRST_MARGIN", 1e-5)
    monkeypatch.setattr(searching, "PRICED_NEAR", 0.0)
    monkeypatch.setattr(searching._Search, "_search_rest", nothing)
    monkeypatch.setattr(searching._Search, "mix", lambda state, *_: (-math.inf, state.at) if state.is_done() else None)
    with taking("expensive"):
        search(Stated(tuple(problems)), NEVER)
    expected = 2 * proven if 1 < proven < searching.WIDER / 2 else searching.WIDER
    assert margins[1] / margins[0] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("widest", [2e-4, 3e-3])
def test_the_widest_margin_that_is_narrow_enough_is_searched_to_the_end(
    monkeypatch: pytest.MonkeyPatch, widest: float
) -> None:
    problems, tried = rows_of(3, SHAPES[0], 1), list[tuple[float, bool]]()

    def narrow(_: object, near: object, margin: float, reached: float, to_the_end: bool) -> Best | None:
        tried.append((margin / reached, to_the_end))
        return Best(None, reached + margin, (0.0,), True, reached) if margin <= widest * reached else None

    monkeypatch.setattr(searching._Search, "_search_rest", narrow)
    monkeypatch.setattr(searching._Search, "mix", lambda state, *_: (-math.inf, state.at) if state.is_done() else None)
    monkeypatch.setattr(searching._Search, "by_ilp", lambda state: None)
    with taking("messages"):
        search(Stated(tuple(problems)), NEVER)
    assert any(widest - 1.1 * searching.PRICED_NEAR <= margin <= widest and end for margin, end in tried)


def test_messages_sweep_on_while_that_proves_more(monkeypatch: pytest.MonkeyPatch) -> None:
    problems, patience, by_ilp = rows_of(3, SHAPES[0], 1), list[int](), list[bool]()
    gains = iter([0.5, 0.25, 0.2, 0.2])

    def at(oracle: MessageOracle, *args: Any, **options: Any) -> tuple[float, tuple[int, ...] | None]:
        patience.append(oracle.patience)
        return 1e-3 * (1 - next(gains)), None

    monkeypatch.setattr(MessageOracle, "at", at)
    monkeypatch.setattr(searching._Search, "price", lambda state, *_, **__: setattr(state, "is_priced", True))
    monkeypatch.setattr(searching._Search, "_search_rest", lambda *_: None)
    monkeypatch.setattr(searching._Search, "by_ilp", lambda state: by_ilp.append(True))
    with taking("messages"):
        search(Stated(tuple(problems)), NEVER)
    assert patience == [PATIENCE << number for number in range(4)] and by_ilp


@settings(deadline=None, max_examples=40)
@given(seed=seeds, shape=shapes, count=st.integers(1, 3), way=ways, price=st.sampled_from((0.0, 0.01, 0.3)))
def test_a_search_may_begin_at_known_choices_and_prices_of_the_first_row(
    seed: int, shape: str, count: int, way: Way, price: float
) -> None:
    problems = rows_of(seed, shape, count)
    known = search(Stated(tuple(problems)), NEVER).choices
    with taking(way):
        found = search(Stated(tuple(problems)), NEVER, prices=(price,), known=known)
    check_best(found, problems, brute_force(problems))


@pytest.mark.parametrize("price", [1e-3, 5e-4])
def test_no_better_prices_are_looked_for_where_the_first_ones_nearly_prove_what_is_known(
    monkeypatch: pytest.MonkeyPatch, price: float
) -> None:
    nodes = tuple(Node(str(i), np.array([1.0, 2.0]), np.array([1000, 0])) for i in range(8))
    problem = Problem(nodes, tuple(Edge((i, i + 1), np.zeros((2, 2))) for i in range(7)), budget=4040)
    best_prices, looked = searching.best_prices, list[bool]()
    monkeypatch.setattr(searching, "best_prices", lambda *at, **by: looked.append(True) or best_prices(*at, **by))
    with taking("expensive"):
        found = search(Stated((problem,)), NEVER, prices=(price,), known=(0, 0, 0, 0, 1, 1, 1, 1))
    assert found.seconds == found.bound == pytest.approx(12.0)
    assert bool(looked) is (price < 1e-3)


@pytest.mark.parametrize("way", ["expensive", "messages"])
def test_equal_layers_that_change_alike_at_a_price_are_mixed(way: Way) -> None:
    nodes = tuple(Node(str(i), np.array([1.0, 2.0]), np.array([10, 0])) for i in range(8))
    edges = tuple(Edge((i, i + 1), np.zeros((2, 2))) for i in range(7))
    problem = Problem(nodes, edges, budget=45)
    with taking(way):
        state = searching._Search(Stated((problem,)), NEVER, EXACT, (), math.inf, None)
        state.begin(None)
    assert state.seconds == pytest.approx(4 * 1.0 + 4 * 2.0)


@settings(deadline=None, max_examples=60)
@given(seed=seeds, shape=shapes, count=counts, way=ways, looks=st.integers(0, 400), whole=st.booleans())
def test_whenever_time_is_over_what_is_known_by_then_is_returned(
    seed: int, shape: str, count: int, way: Way, looks: int, whole: bool
) -> None:
    problems = rows_of(seed, shape, count)
    source, best, shown = Lazy(problems), brute_force(problems), [0.0]

    def look() -> float:
        shown[0] += 1.0
        return shown[0]

    with taking(way), pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadline, "time", SimpleNamespace(monotonic=look))
        try:
            with deadline.lasting(float(looks) if whole else NEVER):
                found = search(source, float(looks))
        except TimeLimitError:
            assert whole or looks < 10, "only what comes before any bound may end without one"
            return
    check(found, problems, best)
    assert len(found.prices) <= len(source.stated)


def test_the_best_is_returned_though_there_is_no_time_to_state_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = rows_of(3, SHAPES[0], 1)
    source, known = Lazy(problems), search(Stated(tuple(problems)), NEVER).choices

    def late(*_: object) -> Sequence[Problem]:
        monkeypatch.setattr(source, "problems", late)
        raise TimeLimitError

    monkeypatch.setattr(searching._Search, "widen", late)
    found = search(source, NEVER, known=known)
    assert found.choices == known and found.seconds == problems[0].seconds_of(known or ())


def test_without_any_choices_it_ends_where_it_gives_up() -> None:
    node = Node("a", np.array([0.0, 1.0]), np.array([10, 0]))
    problem = Problem((node,) * 4, (), 25)
    found = search(Stated((problem,)), NEVER, gives_up=-math.inf)
    assert found.choices is None and found.bound <= brute_force([problem]) == 2.0
    enough = search(Stated((without_limit(problem),)), NEVER, gives_up=-math.inf)
    check_best(enough, [without_limit(problem)], 0.0)


@pytest.mark.parametrize("budget", [0, 10, 15, 35])
def test_where_nothing_takes_time_something_that_fits_is_found(budget: int) -> None:
    node = Node("a", np.zeros(2), np.array([10, 5]))
    problems = [Problem((node,) * 3, (), budget)] * 2
    check_best(search(Stated(tuple(problems)), NEVER), problems, 0.0 if budget >= 15 else math.inf)


def test_budgets_that_contradict_each_other_are_told_by_prices_that_prove_more_than_all_choices_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prices of such rows have no end: what they prove grows until no linear program takes their numbers."""
    rounds, search_rest = [], searching.BestBelow
    monkeypatch.setattr(searching, "BestBelow", lambda *given: rounds.append(1) or search_rest(*given))
    nodes = [Node(name, np.array([0.1, 0.2, 0.3]), np.array([10, 0, 5])) for name in "abcdef"]
    others = [Node(each.name, each.seconds, np.array([0, 10, 5])) for each in nodes]
    edges = tuple(Edge((n, n + 1), 0.01 * np.eye(3)) for n in range(5))
    problems = tuple([Problem(tuple(each), edges, 29) for each in (nodes, others)])
    assert all(brute_force([each]) < math.inf for each in problems) and brute_force(problems) == math.inf
    found = search(Stated(problems), NEVER)
    assert found.choices is None and found.bound == math.inf and len(rounds) < 8


def test_where_every_pair_is_forbidden_nothing_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    nodes = tuple(Node(name, np.zeros(2), np.ones(2, dtype=np.int64)) for name in "ab")
    problem = Problem(nodes, (Edge((0, 1), np.full((2, 2), np.inf)),), 5)
    found = search(Stated((problem, problem)), NEVER)
    assert found.choices is None and found.bound == math.inf
    assert not capfd.readouterr().err  # no linear program without an answer
