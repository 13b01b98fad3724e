"""Parts that the pages of plans share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def html_table(names: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] | None = None) -> str:
    """Return a table of cells that are HTML already; the columns of `numbers` (all but the first) are aligned right."""
    right = set(range(1, len(names)) if numbers is None else numbers)
    kind = ['class="number"' if column in right else "" for column in range(len(names))]
    head = "".join(f"<th {kind[i]}>{name}</th>" for i, name in enumerate(names))
    lines = ("<tr>" + "".join(f"<td {kind[i]}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
