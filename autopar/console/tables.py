"""Tables and lists of facts as text that fits the terminal."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

NARROWEST, WITHOUT_TERMINAL = 80, 120
"""Columns that a table needs at least, and those of output that goes to no terminal."""
BETWEEN, INDENT = "  ", "  "
_GLUED = re.compile(r"(?<=\d) (?=(?:[kMGT]?B|m?s|µs)\b)")
"""The space between a number and its unit, at which no line is broken."""
_GLUE = "\0"


class Fact(NamedTuple):
    """A named statement about a plan."""

    name: str
    text: str


def terminal_width() -> int:
    """Return the columns of the terminal, or of the environment variable COLUMNS; at least `NARROWEST`."""
    return max(shutil.get_terminal_size((WITHOUT_TERMINAL, 0)).columns, NARROWEST)


def wrapped(text: str) -> str:
    """Break the lines of a text at the width of the terminal, the second and later lines of each indented."""
    found: list[str] = []
    for line in text.splitlines():
        if len(line) <= terminal_width():  # with the spaces of a table in it
            found.append(line)
        else:
            first, *rest = _broken(line, terminal_width() - len(INDENT))
            found += [first, *(INDENT + each for each in rest)]
    return "\n".join(found)


def fact_lines(facts: Sequence[Fact]) -> list[str]:
    """Lay out facts with their names in a column, each text below itself."""
    column = max((len(fact.name) for fact in facts), default=0)
    room = terminal_width() - len(INDENT) - column - len(BETWEEN)
    return [
        f"{INDENT}{'' if number else fact.name:<{column}}{BETWEEN}{line}"
        for fact in facts
        for number, line in enumerate(_filled(fact.text, room))
    ]


def fitted_table(
    rows: Sequence[Sequence[object]],
    headers: Sequence[str],
    right: Collection[int] = (),
    shorten: Mapping[int, Callable[[str, int], str]] | None = None,
) -> str:
    """Lay out a table no wider than the terminal: its widest columns are wrapped until it fits.

    Args:
        rows: The cells of each row.
        headers: The name of each column.
        right: Columns that are aligned right; they hold numbers, of which only the header is wrapped.
        shorten: Column → what brings a cell to a width in place of wrapping it.
    """
    table = [[str(cell) for cell in row] for row in rows]
    widths = _widths(table, headers, right)
    ways = shorten or {}
    lines = _laid_out([_filled(name, width) for name, width in zip(headers, widths, strict=True)], widths, right)
    lines.append(BETWEEN.join("-" * width for width in widths))
    for row in table:
        cells = [
            ways[n](cell, width).splitlines() if n in ways else _filled(cell, width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines += _laid_out(cells, widths, right)
    return "\n".join(lines)


def _widths(table: Sequence[Sequence[str]], headers: Sequence[str], right: Collection[int]) -> list[int]:
    """Find the widths of all columns: as wide as their cells, the widest less where these do not fit."""
    cells = [
        max((len(line) for row in table for line in row[number].splitlines()), default=0)
        for number in range(len(headers))
    ]
    widths = [max(width, len(name)) for width, name in zip(cells, headers, strict=True)]
    room = terminal_width() - len(BETWEEN) * (len(headers) - 1)
    if sum(widths) > room:
        for number in right:
            widths[number] = max(cells[number], *map(len, headers[number].split() or [""]))
    flexible = [number for number in range(len(headers)) if number not in right]
    while sum(widths) > room and max((widths[number] for number in flexible), default=1) > 1:
        widths[max(flexible, key=lambda number: widths[number])] -= 1
    return widths


def _laid_out(cells: Sequence[Sequence[str]], widths: Sequence[int], right: Collection[int]) -> list[str]:
    """Lay the lines of a row's cells next to each other."""
    height = max((len(cell) for cell in cells), default=0)
    lines = []
    for place in range(height):
        parts = [cell[place] if place < len(cell) else "" for cell in cells]
        aligned = [
            part.rjust(width) if number in right else part.ljust(width)
            for number, (part, width) in enumerate(zip(parts, widths, strict=True))
        ]
        lines.append(BETWEEN.join(aligned).rstrip())
    return lines


def _filled(text: str, width: int) -> list[str]:
    return [line for paragraph in text.splitlines() for line in _broken(paragraph, width)]


def _broken(line: str, width: int) -> list[str]:
    """Break a line between words, and words that are too long behind a comma, a dot or an underscore."""
    lines = [""]
    for word in _GLUED.sub(_GLUE, line).split():
        for number, part in enumerate(_parts(word, width)):
            if not lines[-1]:
                lines[-1] = part
            elif number == 0 and len(lines[-1]) + 1 + len(part) <= width:
                lines[-1] += f" {part}"
            else:
                lines.append(part)
    return [each.replace(_GLUE, " ") for each in lines]


def _parts(word: str, width: int) -> Iterator[str]:
    while len(word) > width:
        end = max((word.rfind(mark, 0, width) for mark in (_GLUE, ",", ".", "_")), default=-1) + 1 or width
        yield word[:end].rstrip(_GLUE)
        word = word[end:]
    yield word
