"""Predictions for rows, by several processes, stored on disk: a repeated row is not planned again.

A prediction is kept under a digest of the pinned strategy, the cuts, the numbers of the hardware, and the sources of
autopar and of this package but for what only reads and reports.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass
from functools import cache
from pathlib import Path

import torch

import autopar
from autopar.costs.hardware.profile import Hardware
from autopar.errors import AutoparError
from autopar.files.replace import replace_text
from benchmarks.publications.planning import Predicted, RankBytes, predicted
from benchmarks.publications.rows import Row
from benchmarks.publications.strategies import Pinned, Unexpressed, cuts, pinned

HERE = Path(__file__).parent
PLANNED_BY = ("depths.py", "kernels.py", "models.py", "planning.py", "repeated.py", "rows.py")
"""Files of this package on which predictions depend; what strategies.py says is in the key."""
HardwareOf = Callable[[Row], Hardware]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row with its prediction, or with the reason why it has none."""

    row: Row
    predicted: Predicted | None
    reason: str = ""

    @property
    def seconds(self) -> float:
        """The predicted step of all micro-batches."""
        assert self.predicted is not None, self.reason
        return self.predicted.seconds(self.row.accumulation)


@dataclass(frozen=True, slots=True)
class _Requested:
    """Planning problem that is solved once for all rows that share it."""

    pinned: Pinned
    counts: tuple[int, ...]
    hardware: Hardware
    whole: bool

    @property
    def key(self) -> str:
        specified = json.dumps(
            [asdict(self.pinned), self.counts, repr(astuple(self.hardware)), self.whole], sort_keys=True
        )
        return hashlib.sha256(f"{sources()}{specified}".encode()).hexdigest()


@cache
def sources() -> str:
    """A digest of all that plans are made by."""
    found = hashlib.sha256()
    package = Path(autopar.__file__).parent
    own = [HERE / name for name in PLANNED_BY]
    for folder in (package, package.parent / "strategies", package.parent / "runtime"):
        own += [path for path in sorted(folder.rglob("*.py")) if path.is_file()]
    for path in own:
        found.update(path.read_bytes())
    return found.hexdigest()


def outcomes(
    rows: Sequence[Row],
    hardware_of: HardwareOf,
    jobs: int = 1,
    store: Path | None = None,
    whole: bool = False,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Outcome]:
    """The outcome of every row, in their order."""
    requested: list[_Requested | str] = [_requested(row, hardware_of, whole) for row in rows]
    wanted = list(dict.fromkeys(each for each in requested if isinstance(each, _Requested)))
    found: dict[_Requested, Predicted | str] = {}
    for number, (each, answer) in enumerate(_answers(wanted, jobs, store), 1):
        found[each] = answer
        progress(number, len(wanted))
    answers = [found[each] if isinstance(each, _Requested) else each for each in requested]
    return [
        Outcome(row, None, answer) if isinstance(answer, str) else Outcome(row, answer)
        for row, answer in zip(rows, answers, strict=True)
    ]


def _requested(row: Row, hardware_of: HardwareOf, whole: bool) -> _Requested | str:
    """Return the planning problem of a row, or the reason why the row has none."""
    try:
        return _Requested(pinned(row), cuts(row) if row.pp > 1 else (row.shape.layers,), hardware_of(row), whole)
    except Unexpressed as reason:
        return str(reason)


def _answers(
    wanted: Sequence[_Requested], jobs: int, store: Path | None
) -> Iterator[tuple[_Requested, Predicted | str]]:
    """Predictions, those on disk first."""
    missing = []
    for each in wanted:
        kept = _kept(store, each)
        if kept is None:
            missing.append(each)
        else:
            yield each, kept
    for each, answer in _planned(missing, jobs):
        _keep(store, each, answer)
        yield each, answer


def _planned(missing: Sequence[_Requested], jobs: int) -> Iterator[tuple[_Requested, Predicted | str]]:
    """Yield the predictions, planned in groups that share one capture of the model."""
    groups: dict[object, list[_Requested]] = defaultdict(list)
    for each in missing:
        specified = each.pinned
        groups[specified.shape, specified.sequence, specified.batch, specified.precision].append(each)
    if jobs <= 1:
        for group in groups.values():
            yield from ((each, _plan(each)) for each in group)
        return
    with ProcessPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for group, answers in zip(groups.values(), pool.map(_plan_all, groups.values()), strict=True):
            yield from zip(group, answers, strict=True)


def _plan_all(group: Sequence[_Requested]) -> list[Predicted | str]:
    return [_plan(each) for each in group]


def _plan(requested: _Requested) -> Predicted | str:
    """A prediction, or what autopar refuses the strategy with."""
    try:
        return predicted(requested.pinned, requested.counts, requested.hardware, requested.whole)
    except AutoparError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"


def _kept(store: Path | None, requested: _Requested) -> Predicted | str | None:
    path = None if store is None else store / f"{requested.key}.json"
    if path is None or not path.exists():
        return None
    found = json.loads(path.read_text())
    if isinstance(found, str):
        return found
    return Predicted(**{**found, "ranks": tuple(RankBytes(**rank) for rank in found["ranks"])})


def _keep(store: Path | None, requested: _Requested, answer: Predicted | str) -> None:
    if store is not None:
        os.makedirs(store, exist_ok=True)
        replace_text(store / f"{requested.key}.json", json.dumps(answer if isinstance(answer, str) else asdict(answer)))
