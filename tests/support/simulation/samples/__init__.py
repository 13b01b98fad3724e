"""Sample calls of every operation that has a rule, and of some that have none."""

from __future__ import annotations

from typing import Any

from tests.support.simulation.samples import (
    linalg,
    losses,
    matmul,
    network,
    places,
    pointwise,
    random,
    recurrent,
    reduction,
    view,
)
from tests.support.simulation.samples.draw import Samples

SAMPLES: dict[Any, Samples] = {
    **pointwise.SAMPLES,
    **view.SAMPLES,
    **reduction.SAMPLES,
    **matmul.SAMPLES,
    **network.SAMPLES,
    **random.SAMPLES,
    **linalg.SAMPLES,
    **losses.SAMPLES,
    **places.SAMPLES,
    **recurrent.SAMPLES,
}
