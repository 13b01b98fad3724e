"""Memory by part, as papers show it for Megatron's models, compared with the parts of a plan.

A device of the first stage saves activations of as many layers as the model has, L/p layers for each of p micro-batches
in flight, and 1 + (p - 1)/(p m) times as much with m stages on each device (Korthikanti et al., 2205.05198, section
4.2.3). So the model is planned without a pipeline for activations.
What selective recomputation computes again there, attention from scores to their product with values, fused attention
computes again: it stands for it.

autopar draws dropout again in the backward, where Megatron saves a mask of a byte for each element: these are added.

    18 bytes of a parameter: 2 in float16, 4 of its gradient, 12 of the optimizer with the copy in float32
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from autopar.costs.hardware.profile import Hardware
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.memory.moments import FORWARD
from autopar.costs.plans.plan import Plan
from autopar.planning.best_plan import best_plan
from benchmarks.publications.depths import Depths, moments, standing_bytes
from benchmarks.publications.planning import captured, request_of
from benchmarks.publications.rows import GIB, Row, Shape
from benchmarks.publications.strategies import pinned

COLUMNS = frozenset(("figure", "mode", "quantity", "value", "unit"))
TENSOR, SEQUENCE = 8, 2048
MODELS: Mapping[str, tuple[int, int, int, int, int, int]] = {
    # Layers, hidden, heads, devices of the pipeline, stages of each, samples of a micro-batch: table 3 of the paper.
    "megatron-22B": (48, 6144, 64, 1, 1, 4),
    "gpt3-175B": (96, 12288, 96, 8, 3, 1),
    "turing-530B": (105, 20480, 128, 35, 3, 1),
    "megatron-1T": (128, 25600, 160, 64, 1, 1),
}
MODES = {
    # Sequence parallelism, fused attention in place of selective recomputation, recomputation.
    "none": (False, False, "none"),
    "seq": (True, False, "none"),
    "sel": (False, True, "none"),
    "seqsel": (True, True, "none"),
    "full": (False, False, "full"),
}


@dataclass(frozen=True, slots=True)
class Part:
    """A figure's value and the plan's, in GiB or in percent; None with the reason if there is none."""

    model: str
    mode: str
    quantity: str
    measured: float
    predicted: float | None
    unit: str
    reason: str = ""


def is_of_parts(path: str | Path) -> bool:
    """Return whether the columns of a CSV file are those of a table of memory parts."""
    with Path(path).open(newline="") as file:
        return set(next(csv.reader(file), ())) >= COLUMNS


def parts(path: str | Path, hardware: Hardware) -> tuple[Part, ...]:
    """The lines of a table of parts."""
    with Path(path).open(newline="") as file:
        return tuple(_part(cells, hardware) for cells in csv.DictReader(file))


def _part(cells: Mapping[str, str], hardware: Hardware) -> Part:
    model, mode, quantity = cells["model"], cells["mode"], cells["quantity"]
    specified = model, mode, quantity, float(cells["value"])
    if model not in MODELS or mode not in MODES:
        return Part(*specified, None, cells["unit"], "a model or a mode that the benchmark does not build")
    if quantity == "parameters and optimizer":
        return Part(*specified, _stored(model, hardware) / GIB, "GiB")
    own = _activations(model, mode, hardware)
    if cells["unit"] == "%":
        return Part(*specified, 100 * own / _activations(model, "none", hardware), "%")
    return Part(*specified, own / GIB, "GiB")


def _depths(model: str, mode: str, hardware: Hardware, layers: int) -> Depths:
    sequence_parallel, flash, recompute = MODES[mode]
    _, hidden, heads, _, _, samples = MODELS[model]
    shape = Shape("gpt", layers, hidden, heads, heads, 4 * hidden, 51200, True, flash, 0.1)
    row = Row(
        *("korthikanti", model, "korthikanti", shape, SEQUENCE, samples, 2, "a100-80gb"),
        tp=TENSOR,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        precision="fp16-mixed",
    )
    requested = pinned(row)

    def plan(count: int) -> Plan:
        program = captured(replace(shape, layers=count), requested.sequence, requested.batch, requested.precision)
        request = request_of(requested, hardware)
        return best_plan(request, request.space(program, requested.mesh(hardware.name)))

    return Depths.of(plan, layers, requested.gathered)


@cache
def _activations(model: str, mode: str, hardware: Hardware) -> float:
    """Bytes that all layers save of one micro-batch, without those of the embedding and the head."""
    depths = _depths(model, mode, hardware, MODELS[model][0])
    assert depths.shorter is not None
    layers, _, _, devices, chunks, _ = MODELS[model]
    more = 1 + (devices - 1) / (devices * chunks) if chunks > 1 else 1.0
    return more * layers * (_kept(depths.longer) - _kept(depths.shorter) + _masks(model, mode))


def _masks(model: str, mode: str) -> int:
    """Bytes of a layer's masks of dropout: behind attention and MLP, and on its probabilities where those are saved."""
    sequence_parallel, flash, recompute = MODES[mode]
    _, hidden, heads, _, _, samples = MODELS[model]
    if recompute == "full":
        return 0
    between = 2 * samples * SEQUENCE * hidden // (TENSOR if sequence_parallel else 1)
    return between + (0 if flash else samples * SEQUENCE**2 * heads // TENSOR)


def _kept(plan: Plan) -> float:
    """Return the bytes that the forward saves: bytes at its end, less those at its beginning."""
    forward = moments(plan, Microbatches())[FORWARD]
    return float(forward[-1] - forward[0])


def _stored(model: str, hardware: Hardware) -> float:
    """Bytes of the parameters of a stage's layers, with their gradients and the optimizer's state."""
    layers, _, _, devices, _, _ = MODELS[model]
    depths = _depths(model, "none", hardware, layers)
    assert depths.shorter is not None
    longer, shorter = (standing_bytes(each, Microbatches(2)) for each in (depths.longer, depths.shorter))
    return layers / devices * (longer - shorter)
