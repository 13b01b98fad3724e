"""One transformer layer under a strategy: the layout of each tensor over four devices, and the collectives between.

Everything is read from a plan. A rectangle is a tensor: its rows are tokens, in one block per sample, its columns
features. A colour is a device's part. Grey is a whole copy on every device; a hatch is a sum of which each has a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.patches import Patch, Rectangle

import autopar
from autopar.costs.plans.decision_rows import Moved, PlanRow
from autopar.costs.plans.plan import Plan
from autopar.ir.sharding.layout import Placement, parse_placement
from autopar.models import built_in
from benchmarks.pictures.style import COLOURS, INK, WHOLE, save

DEVICES = 4
SAMPLES = 4
LAYER = "layers.0"
GAP = 0.9
SIDES = {False: "#c8524f", True: "#3d9aa6"}
"""Colours of the collectives of the forward (False) and of the backward (True)."""
SMALL = {"ha": "center", "fontsize": 7.5, "linespacing": 1.1}


@dataclass(frozen=True, slots=True)
class Station:
    """An operation of a layer whose output is drawn, with the weights that it reads."""

    label: str
    module: str
    operation: str
    dims: str = "bsf"
    """A letter per dim: b samples, s positions, t rows of tokens, f features, and "-" for a dim inside of features."""
    weights: tuple[str, ...] = ()
    weight_label: str = ""
    weight_dims: str = "oi"
    """Outputs and inputs, behind experts ("e") where there are some."""
    last: bool = False
    """True if the last such call is meant, not the first behind the station before."""
    width: float = 1.0


ATTENTION = (
    Station("norm", "input_layernorm", "mul", last=True),
    Station("q, k, v", "self_attn.q_proj", "linear", weights=("q_proj", "k_proj", "v_proj"), weight_label="W q, k, v"),
    Station("attention", "self_attn", "scaled_dot_product_attention", "bfs-"),
    Station("output", "self_attn.o_proj", "linear", weights=("o_proj",), weight_label="W output"),
    Station("add", "", "add"),
    Station("norm", "post_attention_layernorm", "mul", last=True),
)
DENSE = (
    *ATTENTION,
    Station("gate · up", "mlp", "mul", weights=("gate_proj", "up_proj"), weight_label="W gate, up", width=1.4),
    Station("down", "mlp.down_proj", "linear", weights=("down_proj",), weight_label="W down"),
    Station("add", "", "add", last=True),
)
EXPERTS = (
    *ATTENTION,
    Station("dispatch", "mlp.experts", "dispatch", "tf"),
    Station("experts", "mlp.experts", "grouped_mm", "tf", ("experts.gate_up_proj",), "W of experts", "eoi", last=True),
    Station("combine", "mlp.experts", "combine", "tf"),
    Station("add", "", "add", last=True),
)
STRATEGIES = {
    "data-parallel": ("data_parallel", "dp", "llama-1b", DENSE),
    "zero3": ("zero3", "dp", "llama-1b", DENSE),
    "megatron": ("megatron", "tp", "llama-1b", DENSE),
    "megatron-sequence": ("megatron_sequence", "tp", "llama-1b", DENSE),
    "ulysses": ("ulysses", "sp", "llama-1b", DENSE),
    "experts": ("expert_data", "ep", "tiny-moe", EXPERTS),
}
"""Picture → strategy, mesh axis, model, and stations of a layer."""


def draw(name: str, path: Path) -> None:
    """Plan one layer under the strategy of a picture, and draw it."""
    strategy, axis, model_name, stations = STRATEGIES[name]
    model, inputs = built_in(model_name, batch=SAMPLES, sequence=2048, num_layers=1)
    plan = autopar.plan(model, autopar.Mesh({axis: DEVICES}, hardware="h100"), inputs, strategy=strategy)
    bytes_of = {name: each.numel() * each.element_size() for name, each in model.named_parameters()}
    figure = drawn(plan, bytes_of, stations)
    save(figure, path, f"A transformer layer under {strategy} on {DEVICES} devices")
    pyplot.close(figure)


def rows_in_order(plan: Plan) -> list[PlanRow]:
    """Return the calls of the layer in their order, each followed by the shared reshards of its output."""
    own = [row for row in plan.rows if LAYER in row.module and row.kind != "parameter"]
    place = {row.name: number for number, row in enumerate(own)}
    return sorted(own, key=lambda row: (place.get(row.name.split("/")[0].split(":")[0], -1), place[row.name]))


def find(rows: Sequence[PlanRow], station: Station, behind: int) -> int:
    """Return the position of a station's row."""
    module = f"{LAYER}.{station.module}" if station.module else LAYER
    found = [
        number
        for number, row in enumerate(rows)
        if number > behind and row.module.endswith(module) and row.operation == station.operation and row.kind == "call"
    ]
    assert found, f"no {station.operation} in {module} behind row {behind}"
    return found[-1 if station.last else 0]


def split_collectives(rows: Sequence[PlanRow], bytes_of: dict[str, int]) -> tuple[list[Moved], list[Moved]]:
    """Return the collectives of activations and those of weights, told apart by their bytes."""
    activations: list[Moved] = []
    weights: list[Moved] = []
    for row in rows:
        weight = bytes_of.get(f"{row.module}.weight")
        for moved in row.transfers:
            if moved.num_bytes == weight:
                weights.append(moved)
            elif moved.num_bytes > DEVICES * 1024:  # counts and sums of scalars are left out
                activations.append(moved)
    return activations, weights


def words(moved: Sequence[Moved], backward: bool) -> str:
    """Return the names of the collectives of the forward or of the backward, a line each."""
    return "\n".join(dict.fromkeys(each.collective.replace("_", "-") for each in moved if each.backward == backward))


def stored(plan: Plan, weights: Sequence[str]) -> Placement:
    """Return the placement in which weights are stored, the same for all of them."""
    found = {
        row.layout
        for row in plan.rows
        if row.kind == "parameter" and LAYER in row.module
        for each in weights
        if row.module.removesuffix(".weight").endswith(each)
    }
    assert len(found) == 1, f"{weights} are stored as {found}"
    return parse_placement(found.pop())


def drawn(plan: Plan, bytes_of: dict[str, int], stations: Sequence[Station]) -> Any:
    """Return the figure of a plan's layer."""
    rows = rows_in_order(plan)
    figure, axes = pyplot.subplots(figsize=(10.5, 3.4))
    left, behind = 0.0, -1
    for number, station in enumerate(stations):
        at = find(rows, station, behind)
        moved, of_weights = split_collectives(rows[behind + 1 : at + 1], bytes_of)
        if number:
            _arrow(axes, left - GAP, left, moved)
        _tensor(axes, left, 0.0, station.width, 1.0, parse_placement(rows[at].layout), station.dims)
        middle = left + station.width / 2
        axes.text(middle, 1.08, station.label, ha="center", va="bottom")
        if station.weights:
            _tensor(axes, middle - 0.3, -1.0, 0.6, 0.6, stored(plan, station.weights), station.weight_dims)
            axes.text(middle, -0.36, station.weight_label, ha="center", va="bottom", fontsize=8)
            for backward, y in ((False, -1.06), (True, -1.27)):
                axes.text(middle, y, words(of_weights, backward), va="top", color=SIDES[backward], **SMALL)
        left, behind = left + station.width + GAP, at
    axes.set(xlim=(-0.1, left - GAP + 0.1), ylim=(-2.0, 1.35))
    axes.axis("off")
    _legend(axes)
    return figure


def _arrow(axes: Any, start: float, end: float, moved: Sequence[Moved]) -> None:
    """Draw the way to the next tensor with the collectives on it."""
    style = {"arrowstyle": "->", "color": INK, "lw": 1}
    axes.annotate("", (end - 0.06, 0.5), (start + 0.06, 0.5), arrowprops=style)
    middle = (start + end) / 2
    axes.text(middle, 0.56, words(moved, False).replace("-", "-\n"), va="bottom", color=SIDES[False], **SMALL)
    axes.text(middle, 0.44, words(moved, True).replace("-", "-\n"), va="top", color=SIDES[True], **SMALL)


def _tensor(axes: Any, x: float, y: float, width: float, height: float, layout: Placement, dims: str) -> None:
    """Draw a tensor in the colours of the devices that hold its parts."""
    assert not layout.zigzag, "zigzag-sharded positions are not drawn"
    outline = {"edgecolor": INK, "linewidth": 0.8}
    if not layout.is_split:
        hatch = "////" if layout.kind == "P" else None
        axes.add_patch(Rectangle((x, y), width, height, facecolor=WHOLE, alpha=0.55, hatch=hatch, **outline))
    else:
        for device in range(DEVICES):
            for left, top, right, bottom in _parts(dims[layout.dim], device):
                corner = (x + left * width, y + (1 - bottom) * height)
                size = ((right - left) * width, (bottom - top) * height)
                axes.add_patch(Rectangle(corner, *size, facecolor=COLOURS[device], linewidth=0))
        axes.add_patch(Rectangle((x, y), width, height, fill=False, **outline))
    if "b" in dims:
        for sample in range(1, SAMPLES):
            edge = y + height * sample / SAMPLES
            axes.plot([x, x + width], [edge, edge], color="white", linewidth=0.8)


def _parts(dim: str, device: int) -> list[tuple[float, float, float, float]]:
    """Return the parts of the unit square (left, top, right, bottom) that a device holds if a dim is split."""
    first, last = device / DEVICES, (device + 1) / DEVICES
    if dim in "fi":
        return [(first, 0.0, last, 1.0)]
    if dim == "s":
        return [(0.0, (sample + first) / SAMPLES, 1.0, (sample + last) / SAMPLES) for sample in range(SAMPLES)]
    assert dim in "bteo", f"a split of {dim} is not drawn"
    return [(0.0, first, 1.0, last)]


def _legend(axes: Any) -> None:
    """Name the colours in one row."""
    devices = [Patch(facecolor=COLOURS[each], label=f"device {each}") for each in range(DEVICES)]
    whole = Patch(facecolor=WHOLE, alpha=0.55, edgecolor=INK, label="whole on each")
    partial = Patch(facecolor=WHOLE, alpha=0.55, edgecolor=INK, hatch="////", label="partial sums")
    sides = [
        Patch(facecolor=SIDES[False], label="collective, forward"),
        Patch(facecolor=SIDES[True], label="collective, backward"),
    ]
    style = {"loc": "lower center", "ncols": 8, "frameon": False, "fontsize": 8, "handlelength": 1.0}
    axes.legend(handles=[*devices, whole, partial, *sides], columnspacing=1.0, **style)
