"""A plan as tables that a person reads: what each module does on each mesh axis, what it moves and what it costs.

Equal choices in numbered modules are one line ("model.layers.0-31.mlp.up_proj", 32 calls), with seconds and bytes of
all of them together, so that the columns add up to the plan's predictions. Calls that neither compute much nor move
anything (views, elementwise) are one line at the end, unless the table is verbose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tabulate import tabulate

from autopar.plans.plan import Plan
from autopar.plans.rows import PlanRow, is_main
from autopar.program.folding import folded, ranges
from autopar.program.paths import is_number
from autopar.program.recompute_segments import OFFLOAD
from autopar.report.timeline_words import timeline_words
from autopar.units import format_bytes, format_seconds

REDUCED_EACH = "gradients reduced by every micro-batch, and added up in parts"
MODULE_WIDTH = 42
MOVED_WIDTH = 30
SHORT_NAMES = {"scaled_dot_product_attention": "sdpa", "attention_by_mask": "attention"}

Transfers = tuple[tuple[Any, ...], ...]
"""(collective, axis, bytes, …) each."""


@dataclass(frozen=True, slots=True)
class _Line:
    """Calls of one kind with equal choices; `module` is its path, numbers folded into ranges."""

    module: tuple[str, ...]
    operation: str
    roles: tuple[str, ...]
    layout: str
    storage: str
    count: int
    seconds: float
    transfers: Transfers


def plan_table(plan: Plan, verbose: bool = False) -> str:
    """The plan as text: a header, choices by module, traffic by collective, calls without a rule, notes."""
    lines, rest = _lines(plan, verbose)
    sections = [
        _header(plan),
        _choices(plan, _folded(lines), rest, verbose),
        _traffic(plan),
        _unruled(plan),
        "\n".join(f"note: {note}" for note in plan.notes),
    ]
    return "\n\n".join(section for section in sections if section)


def _header(plan: Plan) -> str:
    limit = "no limit set" if plan.memory_limit is None else f"limit {format_bytes(plan.memory_limit)}"
    return "\n".join(
        (
            f"plan for the mesh {plan.mesh} ({plan.mesh.num_devices} devices, hardware {plan.mesh.hardware})",
            f"  step     {format_seconds(plan.seconds)} predicted, bound {format_seconds(plan.bound)}, "
            f"{plan.certificate}",
            *_timeline(plan),
            f"  memory   {format_bytes(plan.peak_bytes)} per device predicted at the peak, {limit}",
            *_parts(plan),
            *_on_host(plan),
            *_modes(plan),
            *_moved_weights(plan),
            f"  solver   {plan.solver}",
        )
    )


def _timeline(plan: Plan) -> list[str]:
    """The step as a timeline, and its largest differences from the sum that the solver makes least."""
    if plan.context is None:
        return []
    simulated, apart = timeline_words(plan)
    return [f"  timeline {simulated}", *([f"           beside the sum: {apart}"] if apart else [])]


def _parts(plan: Plan) -> list[str]:
    """What the memory at the peak is, largest first, in lines."""
    if plan.memory is None:
        return []
    parts = sorted(plan.memory.parts.items(), key=lambda part: -part[1])
    words = [f"{name} {format_bytes(num_bytes)}" for name, num_bytes in parts if num_bytes]
    return [f"           {', '.join(words[start : start + 4])}" for start in range(0, len(words), 4)]


def _on_host(plan: Plan) -> list[str]:
    """What is in host memory."""
    return [f"  host     {host_words(plan.host)}"] if plan.host else []


def host_words(host: Mapping[str, int]) -> str:
    """The bytes that are in host memory, and what they are."""
    parts = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in host.items())
    return f"{format_bytes(sum(host.values()))} of its memory per device: {parts}"


def _modes(plan: Plan) -> list[str]:
    """How segments are computed again in the backward, and which save on the host, numbered ones as ranges."""
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for segment, mode in plan.recompute.items():
        stem, _, number = segment.rpartition(".")
        names[mode, stem].append(number)
    words = {
        key: f"{key[1]}.{ranges(sorted(map(int, numbers)))}".removeprefix(".")
        if all(map(is_number, numbers))
        else ", ".join(f"{key[1]}.{number}".removeprefix(".") for number in numbers)
        for key, numbers in names.items()
    }
    again = [f"{mode} in {found}" for (mode, _), found in words.items() if mode not in ("none", OFFLOAD)]
    away = [found for (mode, _), found in words.items() if mode == OFFLOAD]
    return [
        *([f"  computed again in the backward: {', '.join(again)}"] if again else []),
        *([f"  saved on the host for the backward: {', '.join(away)}"] if away else []),
    ]


def _moved_weights(plan: Plan) -> list[str]:
    """How far ahead weights are gathered, and that every micro-batch reduces gradients."""
    layers = "1 layer" if plan.prefetch == 1 else f"{plan.prefetch} layers"
    found = [f"  weights gathered {layers} ahead of their use"] if plan.prefetch else []
    return [*found, f"  {REDUCED_EACH}"] if plan.reduce_each else found


def _lines(plan: Plan, verbose: bool) -> tuple[list[_Line], list[PlanRow]]:
    """The lines in the order of the model, and the rows that no line shows."""
    position = {row.name: number for number, row in enumerate(plan.rows)}
    first_call: dict[str, int] = {}
    for row in plan.rows:
        if row.kind == "call":
            first_call.setdefault(row.module, position[row.name])

    def place(row: PlanRow) -> int:
        """A hub, "linear_3/hub", stands behind the call that made its tensor."""
        return position.get(row.name.split("/")[0], position[row.name])

    storages = _storages(plan)
    shown = [row for row in plan.rows if verbose or _is_main(row) or (row.transfers and row.kind != "parameter")]
    placed = [
        (place(row), _line(row, storages.pop(row.module, "") if row.kind == "call" else ""))
        for row in sorted(shown, key=place)
    ]
    for module, storage in () if verbose else storages.items():
        line = _Line(tuple(module.split(".")), "(parameters)", ("",) * plan.mesh.ndim, "", storage, 1, 0.0, ())
        placed.append((first_call.get(module, -1), line))
    names = {row.name for row in shown}
    return [line for _, line in sorted(placed, key=lambda each: each[0])], [r for r in plan.rows if r.name not in names]


def _is_main(row: PlanRow) -> bool:
    return row.kind == "call" and is_main(row.operation)


def _line(row: PlanRow, storage: str) -> _Line:
    operation = f"({row.kind})" if row.kind != "call" else SHORT_NAMES.get(row.operation, row.operation)
    path = tuple(row.module.split("."))
    return _Line(path, operation, row.roles, row.layout, storage, 1, row.seconds, row.transfers)


def _storages(plan: Plan) -> dict[str, str]:
    """Module → how its parameters are stored, one line of text where they are stored alike."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for row in plan.rows:
        if row.kind == "parameter":
            module, _, name = row.module.rpartition(".")
            kept = ",\nkept" if plan.is_kept(row.name) else ""
            found[module][name] = _storage(row.layout, plan.mesh.names) + kept
    return {
        module: (
            next(iter(by_name.values()))
            if len(set(by_name.values())) == 1
            else "\n".join(f"{name} {text}" for name, text in by_name.items())
        )
        for module, by_name in found.items()
    }


def _storage(layout: str, axes: Sequence[str]) -> str:
    """A layout as people say it: "S(0) on dp" (one axis a line), "whole"."""
    split = [
        f"{part} on {axis}" for part, axis in zip(layout.split(), axes, strict=True) if part.startswith(("S", "Z"))
    ]
    return ",\n".join(split) or "whole"


def _folded(lines: Iterable[_Line]) -> list[_Line]:
    """Lines that differ only in numbers of their module path become one, with the sums of their columns."""
    kinds = ((".".join(line.module), (line.operation, line.roles, line.layout, line.storage), line) for line in lines)
    return [
        replace(
            fold.items[0],
            module=fold.path,
            count=sum(line.count for line in fold.items),
            seconds=sum(line.seconds for line in fold.items),
            transfers=_summed(transfer for line in fold.items for transfer in line.transfers),
        )
        for fold in folded(kinds)
    ]


def _summed(transfers: Iterable[tuple[Any, ...]]) -> Transfers:
    total: dict[tuple[str, str], int] = defaultdict(int)
    for collective, axis, num_bytes, *_ in transfers:
        total[collective, axis] += num_bytes
    return tuple((collective, axis, num_bytes) for (collective, axis), num_bytes in total.items())


def _choices(plan: Plan, lines: Sequence[_Line], rest: Sequence[PlanRow], verbose: bool) -> str:
    """The table of choices, with what it leaves out and the total as its last lines."""
    blank = [""] * plan.mesh.ndim
    layout = [""] if verbose else []
    table = [
        [
            _shortened(".".join(line.module)) or "(model)",
            line.operation,
            *line.roles,
            *([line.layout] if verbose else []),
            line.storage,
            line.count,
            format_seconds(line.seconds) if line.seconds else "",
            _moved(line.transfers),
        ]
        for line in lines
    ]
    for name, rows in _leftovers(rest):
        seconds, moved = sum(row.seconds for row in rows), _summed(t for row in rows for t in row.transfers)
        table.append([name, "", *blank, *layout, "", len(rows), format_seconds(seconds), _moved(moved)])
    table.append(["total", "", *blank, *layout, "", len(plan.rows), format_seconds(plan.seconds), ""])
    headers = ["module", "operation", *plan.mesh.names, *(["layout"] if verbose else []), "stored"]
    return tabulate(
        table,
        headers=[*headers, "calls", "time", "moved per step"],
        tablefmt="simple",
        colalign=["left"] * len(headers) + ["right", "right", "left"],
        disable_numparse=True,
    )


def _leftovers(rest: Sequence[PlanRow]) -> list[tuple[str, list[PlanRow]]]:
    """Rows without a line of their own, in two kinds."""
    parameters = [row for row in rest if row.kind == "parameter"]
    others = [row for row in rest if row.kind != "parameter"]
    kinds = (("(all other: views, elementwise …)", others), ("(optimizer step)", parameters))
    return [(name, rows) for name, rows in kinds if rows]


def _shortened(path: str) -> str:
    """A path that is too long loses its first modules."""
    while len(path) > MODULE_WIDTH and "." in path.removeprefix("…."):
        path = f"….{path.removeprefix('….').partition('.')[2]}"
    return path


def _moved(transfers: Transfers) -> str:
    """Transfers as text, filled into lines of MOVED_WIDTH."""
    lines: list[str] = []
    for collective, axis, num_bytes in _summed(transfers):
        word = f"{collective} {axis} {format_bytes(num_bytes)}"
        if lines and len(lines[-1]) + 2 + len(word) <= MOVED_WIDTH:
            lines[-1] += f", {word}"
        else:
            lines.append(word)
    return ",\n".join(lines)


def _traffic(plan: Plan) -> str:
    """Bytes per step and device by collective and axis."""
    collectives = sorted({collective for collective, _ in plan.traffic})
    if not collectives:
        return "no bytes are moved"
    moved_over = {axis for _, axis in plan.traffic}
    axes = [*plan.mesh.names, *(axis for axis in plan.mesh.joined if axis in moved_over)]
    table = [
        [name, *(_count(plan, [name], [axis]) for axis in axes), _count(plan, [name], axes)] for name in collectives
    ]
    if len(collectives) > 1:
        table.append(["total", *(_count(plan, collectives, [axis]) for axis in axes), _count(plan, collectives, axes)])
    headers = ["moved per step", *axes, "total"]
    alignment = ["left", *["right"] * (len(headers) - 1)]
    return tabulate(table, headers=headers, tablefmt="simple", colalign=alignment, disable_numparse=True)


def _count(plan: Plan, collectives: Iterable[str], axes: Sequence[str]) -> str:
    total = sum(plan.traffic.get((collective, axis), 0) for collective in collectives for axis in axes)
    return format_bytes(total) if total else "-"


def _unruled(plan: Plan) -> str:
    """Calls that run replicated because no rule fits them, by operation and reason."""
    operation = {row.name: row.operation for row in plan.rows}
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, reason in (plan.unruled or {}).items():
        groups[operation.get(name, name), reason].append(name)
    if not groups:
        return ""
    table = [[name, len(calls), calls[0], reason] for (name, reason), calls in groups.items()]
    text = tabulate(
        table,
        headers=["operation", "calls", "first call", "reason"],
        maxcolwidths=[None, None, 30, 60],
        disable_numparse=True,
    )
    return f"calls that run replicated because no rule fits them:\n{text}"
