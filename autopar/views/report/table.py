"""A plan as tables that a person reads: what each module does on each mesh axis, what it moves and what it costs.

Equal choices in numbered modules are one line ("model.layers.0-31.mlp.up_proj", 32 calls), with seconds and bytes of
all of them together, so that the columns add up to the plan's predictions. Calls that neither compute much nor move
anything (views, elementwise) are one line at the end, unless the table is verbose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.console.tables import fact_lines, fitted_table, wrapped
from autopar.console.units import format_bytes, format_seconds
from autopar.costs.plans.decision_rows import ROLES, KeptWhole, PlanRow, advice_on_rules, is_main
from autopar.costs.plans.difference import signed_seconds
from autopar.costs.plans.plan import Plan
from autopar.ir.program.folding import folded
from autopar.views.report.comparison_table import comparison_text
from autopar.views.report.facts import SMALL, plan_facts

MODULE_WIDTH = 42
PINNED, SHARED, SAVED = " *", "(shared reshard)", "saved"
TERMS = {
    **{role: f"the axis splits {words}" for role, words in ROLES.items()},
    "dim ": "the axis splits that dim of the output",
    "inner dim": "the axis splits a dim that the output has not",
    SHARED: "one reshard of a tensor for several consumers",
    SAVED: "the gathered weight is saved for the backward; others are gathered again there",
    PINNED: "pinned by an annotation",
}
"""Words of the table → what they mean."""
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
    pinned: bool = False


def plan_table(plan: Plan, verbose: bool = False) -> str:
    """Return the plan as text: a header, choices by module, traffic by collective, calls without a rule, notes."""
    lines, rest = _lines(plan, verbose)
    sections = [
        _header(plan),
        _choice_table(plan, folded_lines := _folded(lines), rest, verbose),
        _legend(plan, folded_lines),
        _traffic_text(plan),
        kept_whole_text(plan.kept_whole),
        "\n".join(wrapped(f"note: {note}") for note in plan.notes),
        *(comparison_text(plan.comparison) if plan.comparison else ()),
    ]
    return "\n\n".join(section for section in sections if section)


def _header(plan: Plan) -> str:
    mesh = plan.mesh
    title = f"plan for the mesh {mesh} ({mesh.num_devices} devices, hardware {mesh.hardware})"
    return "\n".join((wrapped(title), *fact_lines(plan_facts(plan))))


def _lines(plan: Plan, verbose: bool) -> tuple[list[_Line], list[PlanRow]]:
    """Return the lines in the order of the model, and the rows that no line shows."""
    position = {row.name: number for number, row in enumerate(plan.rows)}
    first_call: dict[str, int] = {}
    for row in plan.rows:
        if row.kind == "call":
            first_call.setdefault(row.module, position[row.name])

    def place(row: PlanRow) -> int:
        """Return the sort key of a line; a shared reshard follows the call that made its tensor."""
        return position.get(row.name.split("/")[0], position[row.name])

    storages = _storage_by_module(plan)
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
    operation = SHORT_NAMES.get(row.operation, row.operation) if row.kind == "call" else kind_words(row.kind)
    path = tuple(row.module.split("."))
    return _Line(path, operation, row.splits, row.layout, storage, 1, row.seconds, row.transfers, row.pinned)


def kind_words(kind: str) -> str:
    """Return the kind of a decision that is no call, in words."""
    return SHARED if kind == "shared_reshard" else f"({kind})"


def _storage_by_module(plan: Plan) -> dict[str, str]:
    """Return the module → how its parameters are stored, one line of text where they are stored alike."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for row in plan.rows:
        if row.kind == "parameter":
            module, _, name = row.module.rpartition(".")
            saved = f",\n{SAVED}" if plan.is_saved(row.name) else ""
            found[module][name] = _storage(row.layout, plan.mesh.names) + saved + PINNED * row.pinned
    return {
        module: (
            next(iter(by_name.values()))
            if len(set(by_name.values())) == 1
            else "\n".join(f"{name} {text}" for name, text in by_name.items())
        )
        for module, by_name in found.items()
    }


def _storage(layout: str, axes: Sequence[str]) -> str:
    """Return a layout as people say it: "dim 0 on dp, tp" (one dim a line), "whole"."""
    split: dict[str, list[str]] = defaultdict(list)
    for part, axis in zip(layout.split(), axes, strict=True):
        if part.startswith(("S", "Z")):
            split[part[2:-1]].append(axis)
    return ",\n".join(f"dim {dim} on {', '.join(names)}" for dim, names in split.items()) or "whole"


def _folded(lines: Iterable[_Line]) -> list[_Line]:
    """Join lines that differ only in numbers of their module path, and sum their columns."""
    kinds = (
        (".".join(line.module), (line.operation, line.roles, line.layout, line.storage, line.pinned), line)
        for line in lines
    )
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


def _choice_table(plan: Plan, lines: Sequence[_Line], rest: Sequence[PlanRow], verbose: bool) -> str:
    """Return the table of choices, with what it leaves out and the total as its last lines."""
    blank = [""] * plan.mesh.ndim
    layout = [""] if verbose else []
    table = [
        [
            ".".join(line.module) or "(model)",
            line.operation + PINNED * line.pinned,
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
    if abs(plan.host_seconds) > SMALL * plan.seconds:
        table.append(["(launches)", "", *blank, *layout, "", "", signed_seconds(plan.host_seconds), ""])
    table.append(["total", "", *blank, *layout, "", len(plan.rows), format_seconds(plan.seconds), ""])
    headers = ["module", "operation", *plan.mesh.names, *(["layout"] if verbose else []), "stored"]
    right = (len(headers), len(headers) + 1)
    return fitted_table(table, [*headers, "calls", "time", "moved per step"], right, {0: _shortened})


def _legend(plan: Plan, lines: Sequence[_Line]) -> str:
    """Explain the words of the table that occur in it."""
    words = {PINNED} if any(line.pinned or PINNED in line.storage for line in lines) else set()
    for line in lines:
        words |= {line.operation, *line.roles, *line.storage.replace(PINNED, "").split()}
    there = [term for term in TERMS if term in words or (term == "dim " and any("dim " in word for word in words))]
    moved_over = {axis for _, axis in plan.traffic}
    names = plan.mesh.names
    joined = {name: [names[each] for each in axes] for name, axes in plan.mesh.joined.items() if name in moved_over}
    meanings = {term.strip(): TERMS[term] for term in there}
    meanings |= {name: f"moved by one collective over {' and '.join(axes)}" for name, axes in joined.items()}
    return "\n".join(wrapped(f"{term}: {words}") for term, words in meanings.items())


def _leftovers(rest: Sequence[PlanRow]) -> list[tuple[str, list[PlanRow]]]:
    """Return the rows without a line of their own, in two kinds."""
    parameters = [row for row in rest if row.kind == "parameter"]
    others = [row for row in rest if row.kind != "parameter"]
    kinds = (("(all other: views, elementwise …)", others), ("(optimizer step)", parameters))
    return [(name, rows) for name, rows in kinds if rows]


def _shortened(path: str, width: int) -> str:
    """Return the cell shortened: a path loses its first modules, then its first letters; other words lose their
    last.
    """
    if path.startswith("("):
        return path if len(path) <= width else f"{path[: width - 1]}…"
    while len(path) > min(width, MODULE_WIDTH) and "." in path.removeprefix("…."):
        path = f"….{path.removeprefix('….').partition('.')[2]}"
    return path if len(path) <= width else f"…{path[len(path) - width + 1 :]}"


def _moved(transfers: Transfers) -> str:
    return ",\n".join(
        f"{collective} {axis} {format_bytes(num_bytes)}" for collective, axis, num_bytes in _summed(transfers)
    )


def _traffic_text(plan: Plan) -> str:
    """Return the bytes per step and device by collective and axis."""
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
    return fitted_table(table, headers, range(1, len(headers)))


def _count(plan: Plan, collectives: Iterable[str], axes: Sequence[str]) -> str:
    total = sum(plan.traffic.get((collective, axis), 0) for collective in collectives for axis in axes)
    return format_bytes(total) if total else "-"


KEPT_WHOLE_HEADERS = ("operation", "calls", "first call", "FLOPs", "step", "bytes", "reason")
KEPT_WHOLE_TITLE = "calls that every device computes whole because no rule fits them"


def kept_whole_row(each: KeptWhole) -> list[str]:
    """Return the cells of an operation without a rule, in the columns of KEPT_WHOLE_HEADERS."""
    flops = "?" if each.flops_share is None else f"{each.flops_share:.1%}"
    shares = flops, f"{each.seconds_share:.1%}", format_bytes(each.num_bytes)
    return [each.operation, str(each.calls), each.module or each.first, *shares, each.reason]


def kept_whole_text(found: Sequence[KeptWhole]) -> str:
    """Return the operations that no rule fits with their shares of the step, and the advice on the longest."""
    if not found:
        return ""
    table = fitted_table([kept_whole_row(each) for each in found], KEPT_WHOLE_HEADERS, (1, 3, 4, 5))
    return f"{KEPT_WHOLE_TITLE}:\n{table}\n{wrapped(advice_on_rules(found[0].operation))}"
