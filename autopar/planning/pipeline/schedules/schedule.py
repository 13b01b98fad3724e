"""The schedules of a pipeline: which rank runs which stage, and in which order its micro-batches.

The orders are PyTorch's own: its schedule classes are built on stages that are only numbers, so what is simulated is
what runs. Every rank has `chunks` stages. In a loop, stage s is on rank s mod ranks; in a V (zbv, dualpipev) the second
half of the stages runs back, and rank 0 has the first stage and the last.

    gpipe                    all forwards, then all backwards (Huang et al., NeurIPS 2019)
    1f1b                     one forward, one backward, after a warm-up (PipeDream-Flush; Narayanan et al., 2021)
    interleaved_1f1b         1f1b over several stages per rank (Narayanan et al., SC 2021)
    interleaved_zero_bubble  gradients of weights fill the bubble (ZB1P; Qi et al., ICLR 2024)
    zbv                      the same on a V of two stages per rank (Qi et al., ICLR 2024, section 6)
    dualpipev                a V whose forwards overlap backwards (DeepSeek-V3, 2024)
    pipedream                1f1b that updates a stage after every backward (Narayanan et al., SOSP 2019)
    pipedream_2bw            1f1b on the weights before the last update (PipeDream-2BW; Narayanan et al., ICML 2021)

`pipedream` runs in the order of 1f1b and is not PyTorch's. A stage updates its weights after each micro-batch, so the
forward of micro-batch i on rank r sees max(0, i + 1 - (ranks - r)) updates of this step. Its backward uses those same
weights, which were stashed; its gradient is applied to the newest. Stages do not agree on a version (no vertical sync).
The micro-batches of one step drain before the next step begins.

`pipedream_2bw` keeps two versions of the weights: W(t+1) = W(t) - ν ∇f(W(t-1)), with one update per batch. All stages
agree on a version. Its steps drain, too, so that its order is that of 1f1b.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from autopar.errors import PipelineError

_CLASSES: dict[str, str | None] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
    "pipedream": None,
    "pipedream_2bw": "Schedule1F1B",
}
"""Schedule → its class in torch.distributed.pipelining."""
NAMES = tuple(_CLASSES)
KINDS = ("F", "B", "I", "W")
"""Forward, whole backward, gradient of the input, gradient of the weights."""
RECEIVES = ("RECV_F", "RECV_B")
"""Kinds of receives from another rank: a forward's input, and a backward's gradient."""
_ONE_STAGE = ("gpipe", "1f1b", "pipedream", "pipedream_2bw")
_INTERLEAVED = ("interleaved_1f1b", "interleaved_zero_bubble")
_V = ("zbv", "dualpipev")
HALVING = ("interleaved_zero_bubble", *_V)
"""Make the gradients of inputs and those of weights apart."""
UPDATING_OTHERWISE = ("pipedream", "pipedream_2bw")
"""Update weights by every micro-batch, or a step later."""
_STAGES_FULL = ("1f1b", "pipedream_2bw", "dualpipev")
"""Need a micro-batch for every stage."""


@dataclass(frozen=True, slots=True)
class Action:
    """One computation or receive of a stage for one micro-batch; `kind` is one of KINDS or RECEIVES."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule by name, for `num_ranks` ranks with `chunks` stages each.

    Raises:
        PipelineError: A name that is unknown, or numbers that this schedule cannot run.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise PipelineError(
                f'Pipeline(schedule="{self.name}") is unknown. Use one of {", ".join(map(repr, NAMES))}.'
            )
        for what, found in (
            ("ranks", self.num_ranks),
            ("microbatches", self.num_microbatches),
            ("stages_per_rank", self.chunks),
        ):
            if found < 1:
                raise PipelineError(
                    f'"{self.name}" was given {what}={found}; it needs 1 or more. Use {what}=1 or more.'
                )
        self._check_chunks()
        self._check_microbatches()

    @property
    def num_stages(self) -> int:
        """Stages of all ranks together."""
        return self.num_ranks * self.chunks

    @property
    def torch_class(self) -> type | None:
        """The class of torch.distributed.pipelining that runs it; None for pipedream, which PyTorch does not have."""
        name = _CLASSES[self.name]
        if name is None:
            return None
        from torch.distributed.pipelining import schedules  # this imports torch._dynamo

        return getattr(schedules, name)

    @property
    def is_v(self) -> bool:
        """True if the second half of the stages runs back over the ranks."""
        return self.name in _V

    @property
    def halves_backwards(self) -> bool:
        """True if the gradients of inputs and those of weights are computed in separate actions."""
        return self.name in HALVING

    @property
    def updates_each(self) -> bool:
        """True if every micro-batch updates the weights, and saves the weights of its forward for its backward."""
        return self.name == "pipedream"

    @property
    def delays_updates(self) -> bool:
        """True if a step runs on the weights before the last update, of which a second version is resident."""
        return self.name == "pipedream_2bw"

    @property
    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """Computations of each rank, in order."""
        return _orders(self)

    @property
    def orders_with_receives(self) -> tuple[tuple[Action, ...], ...]:
        """Computations of each rank, and the receives that it posts, in order."""
        return _orders_with_receives(self)

    def rank_of(self, stage: int) -> int:
        """Return the rank that runs `stage`."""
        assert 0 <= stage < self.num_stages
        return min(stage, self.num_stages - 1 - stage) if self.is_v else stage % self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of `rank`, in the order of the model."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def in_flight(self, stage: int) -> int:
        """Return the most micro-batches whose forward `stage` has run and whose backward, weights included, it has
        not.
        """
        return self.most_waiting(self.rank_of(stage), {stage: 1})

    def most_waiting(self, rank: int, each: Mapping[int, int]) -> int:
        """Return the most that waits for its backward, weights included, on a rank of which stages save `each` a
        micro-batch.

        Stages that `each` does not name save nothing.
        """
        now = most = 0
        for step in self.orders[rank]:
            now += {"F": 1, "I": 0}.get(step.kind, -1) * each.get(step.stage, 0)
            most = max(most, now)
        return most

    def in_flight_at_once(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the maximal combinations of micro-batches that the stages of `rank` have in flight at once.

        Leaves out a combination if no stage has more in it than in another one, or than half way between two others.
        """
        return _in_flight_at_once(self, rank)

    def _check_chunks(self) -> None:
        if self.name in _ONE_STAGE and self.chunks != 1:
            raise PipelineError(
                f'"{self.name}" runs one stage per rank; found Pipeline(stages_per_rank={self.chunks}). '
                'Use Pipeline(stages_per_rank=1), or Pipeline(schedule="interleaved_1f1b") for several stages per rank.'
            )
        if self.is_v and self.chunks != 2:
            raise PipelineError(
                f'"{self.name}" needs two stages per rank; found Pipeline(stages_per_rank={self.chunks}). '
                "Use Pipeline(stages_per_rank=2)."
            )

    def _check_microbatches(self) -> None:
        found = self.num_microbatches
        if self.name in _STAGES_FULL and found < self.num_stages:
            raise PipelineError(
                f'"{self.name}" needs at least as many micro-batches as stages; found {found} micro-batches for '
                f'{self.num_stages} stages. Use microbatches={self.num_stages} or more, or Pipeline(schedule="gpipe").'
            )
        if self.name in _INTERLEAVED and not _fits_rounds(found, self.num_ranks):
            below = next(m for m in range(found, 0, -1) if _fits_rounds(m, self.num_ranks))
            above = next(m for m in range(found, 2 * found + self.num_ranks) if _fits_rounds(m, self.num_ranks))
            raise PipelineError(
                f'"{self.name}" runs micro-batches in equal rounds of at least {self.num_ranks}, one per rank; '
                f"{found} micro-batches do not divide into {found // self.num_ranks} rounds. "
                f"Use microbatches={below} or {above}."
            )


@cache
def _in_flight_at_once(schedule: Schedule, rank: int) -> tuple[tuple[int, ...], ...]:
    stages = schedule.stages_of(rank)
    now, states = dict.fromkeys(stages, 0), dict[tuple[int, ...], None]()
    for step in schedule.orders[rank]:
        now[step.stage] += {"F": 1, "I": 0}.get(step.kind, -1)
        states[tuple(now.values())] = None
    found = np.array(list(states))
    below = np.all(found[:, None] <= found[None, :], axis=2)
    most = found[np.sum(below, axis=1) == 1]  # below itself alone
    firsts, seconds = np.triu_indices(len(most), 1)
    pairs = most[firsts] + most[seconds]  # none is half way between itself and another, as none has less than another
    return tuple(tuple(each) for each in most.tolist() if not np.any(np.all(2 * np.array(each) <= pairs, axis=1)))


def _fits_rounds(num_microbatches: int, num_ranks: int) -> bool:
    """Return whether PyTorch's interleaved schedules take so many micro-batches: equal rounds, at least one per
    rank.
    """
    return num_microbatches % max(1, num_microbatches // num_ranks) == 0


@cache
def _orders(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(step for step in each if step.kind in KINDS) for each in schedule.orders_with_receives)


@cache
def _orders_with_receives(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Return the orders of all ranks, from PyTorch's class or, for pipedream, from those of 1f1b.

    Schedules of one stage per rank post each receive directly before the computation that reads it.
    """
    ranks = range(schedule.num_ranks)
    if schedule.updates_each:
        return tuple(_with_receives(schedule, _one_forward_one_backward(schedule, rank)) for rank in ranks)
    torch_class: Any = schedule.torch_class
    stages = [_stub(schedule, stage) for stage in schedule.stages_of(0)]
    if schedule.name in _ONE_STAGE:
        order = torch_class(stages[0], schedule.num_microbatches).pipeline_order
        return tuple(_with_receives(schedule, _steps(order[rank])) for rank in ranks)
    order = torch_class(stages, schedule.num_microbatches).pipeline_order_with_comms
    return tuple(_steps(order[rank]) for rank in ranks)


def _with_receives(schedule: Schedule, steps: Iterable[Action]) -> tuple[Action, ...]:
    found: list[Action] = []
    for step in steps:
        if step.stage != (0 if step.kind == "F" else schedule.num_stages - 1):
            found.append(Action(f"RECV_{step.kind}", step.stage, step.microbatch))
        found.append(step)
    return tuple(found)


def _stub(schedule: Schedule, stage: int) -> SimpleNamespace:
    """Build a stand-in for a stage with the numbers that PyTorch's schedules read, and no process group."""
    return SimpleNamespace(
        num_stages=schedule.num_stages,
        group_size=schedule.num_ranks,
        group_rank=schedule.rank_of(stage),
        stage_index=stage,
        submod=None,
    )


def _steps(actions: Iterable[Any]) -> tuple[Action, ...]:
    """Return PyTorch's actions of one rank as steps: computations and receives, overlapped pairs one after the other.

    Micro-batches are counted anew: every class runs them in order, but the order that 1F1B prints begins the last
    rank's forwards at 1 (torch 2.13; what it runs begins at 0).
    """
    given = [action for action in actions if action is not None]
    flat = [each for action in given for each in action.sub_actions or (action,)]
    seen: Counter[tuple[str, int]] = Counter()
    steps = []
    for action in flat:
        kind, stage = action.computation_type.value, action.stage_index
        if kind in RECEIVES:
            steps.append(Action(kind, stage, action.microbatch_index))
        if kind not in KINDS:
            continue
        backward = "F" if kind == "F" else "W" if kind == "W" else "B"  # B and I count the same micro-batches
        steps.append(Action(kind, stage, seen[backward, stage]))
        seen[backward, stage] += 1
        if kind == "B":
            seen["W", stage] += 1
    return tuple(steps)


def _one_forward_one_backward(schedule: Schedule, rank: int) -> tuple[Action, ...]:
    """Return 1F1B of one rank: `ranks - rank` forwards, alternating backwards and forwards, the other backwards."""
    num_microbatches = schedule.num_microbatches
    ahead = min(num_microbatches, schedule.num_ranks - rank)
    steps = [Action("F", rank, each) for each in range(ahead)]
    for each in range(num_microbatches):
        steps.append(Action("B", rank, each))
        if each + ahead < num_microbatches:
            steps.append(Action("F", rank, each + ahead))
    return tuple(steps)
