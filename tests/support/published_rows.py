"""Runs of made-up sizes, as tables of published steps have them, and predictions for them."""

from __future__ import annotations

from benchmarks.publications.planning import Predicted, RankBytes
from benchmarks.publications.prediction import Outcome
from benchmarks.publications.rows import Row, Shape

LLAMA = Shape("llama", 5, 64, 4, 2, 128, 256, tied=True)
LARGE = Shape("llama", 5, 2048, 16, 8, 8192, 32000)  # whose messages are its own, as those of all tables are


def row(**changes: object) -> Row:
    """A run of nanotron of made-up sizes."""
    given = {
        "source": "nanotron",
        "label": "a run",
        "framework": "nanotron",
        "shape": LLAMA,
        "sequence": 128,
        "micro_batch": 2,
        "accumulation": 3,
        "device": "h100_80gb",
        "seconds": 1.0,
        "sequence_parallel": True,
    }
    return Row(**{**given, **changes})  # type: ignore[arg-type]


def outcome(predicted_seconds: float, peak: float = 1.0, **changes: object) -> Outcome:
    """A row with a prediction that is made up."""
    given = row(**{"accumulation": 1, **changes})
    return Outcome(given, Predicted(predicted_seconds, 0.0, (RankBytes(round(peak), round(peak / 2)),), True))
