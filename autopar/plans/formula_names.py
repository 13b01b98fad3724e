"""What the formulas of a plan are called, and whether those that a file gives are whole and have values.

"seconds", "flops", "parameter_bytes", "memory"  what is formulated; "memory/activations", "all_reduce/dp": a part of it
"all_reduce_over_dp", "bucketed3_…"              the seconds of a collective by its `bytes`, which others call
"whole"                                          a list of what must be whole
"fixed: heads"                                   no formula: the reason why a symbol cannot vary
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from autopar.errors import MeshError, PlanError
from autopar.plans.expressions import EXACT, Numbers, evaluate
from autopar.sharding.mesh import Mesh

WHOLE, FIXED = "whole", "fixed: "
"""The formula of what must be whole; before a symbol, the reason why it cannot vary."""
MEMORY = "memory"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
MAX_RATE, MAX_TOGETHER = 1000, 2**19
"""Characters of the formula of a collective's seconds, which is computed for each call of it, and of all formulas."""
_RATE = re.compile(rf"(?:bucketed([0-9]{{1,6}})_)?({'|'.join(COLLECTIVES)})_over_(\w+)")
_NEEDED = ("seconds", "flops", WHOLE, "all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def rate_name(collective: str, axis: str, bucketed: int) -> str:
    """The function that gives the seconds of a collective by its bytes, in a message of so many parameters."""
    return f"{f'bucketed{bucketed}_' if bucketed else ''}{collective}_over_{axis}"


def is_rate(name: str) -> bool:
    """Whether it is the name of a collective's seconds."""
    return _RATE.fullmatch(name) is not None


def rate_of(name: str) -> tuple[str, str, int]:
    """What `rate_name` was given.

    >>> rate_of("bucketed3_all_reduce_over_dp")
    ('all_reduce', 'dp', 3)
    """
    found = _RATE.fullmatch(name)
    assert found is not None, f"{name} is the name of no rate"
    bucketed, collective, axis = found.groups()
    return collective, axis, int(bucketed or 0)


def public(formulas: Mapping[str, str]) -> list[str]:
    """The names under which formulas are asked for."""
    return [name for name in formulas if name != WHOLE and not name.startswith(FIXED) and not is_rate(name)]


def parts_of(formulas: Mapping[str, str]) -> list[str]:
    """The texts of what must be whole."""
    text = formulas[WHOLE].strip()
    if not (text.startswith("[") and text.endswith("]")):
        raise PlanError(f"not a list of formulas: {text[:80]!r}; give what Plan.save wrote.")
    return text[1:-1].split(", ") if text != "[]" else []


def rates(formulas: Mapping[str, str], numbers: Numbers) -> dict[str, Callable[..., Any]]:
    """The times of collectives as functions of their bytes."""

    def function(text: str) -> Callable[[Any], Any]:
        return lambda num_bytes: evaluate(text, {"bytes": num_bytes}, numbers)

    return {name: function(text) for name, text in formulas.items() if is_rate(name)}


def check_formulas(formulas: Mapping[str, str], symbols: Mapping[str, int], mesh: Mesh) -> None:
    """Raise PlanError, with its name, for a formula that is missing, is none, or has no value at the symbols."""
    if not formulas:
        return
    missing = [name for name in _NEEDED if name not in formulas]
    if missing:
        raise PlanError(f"formulas lacks {missing[0]!r}")
    if sum(map(len, formulas.values())) > MAX_TOGETHER:
        raise PlanError(f"formulas has more than {MAX_TOGETHER} characters together")
    numbers = EXACT.with_functions(rates(formulas, EXACT))
    values = {name: EXACT.of(value) for name, value in symbols.items()}
    for name, text in formulas.items():
        try:
            _check(name, text, values, numbers, mesh, formulas)
        except (PlanError, MeshError) as error:
            raise PlanError(f"formulas.{name}: {error}") from error


def _check(
    name: str, text: str, values: Mapping[str, Any], numbers: Numbers, mesh: Mesh, formulas: Mapping[str, str]
) -> None:
    if name.startswith(FIXED):
        return
    if name == WHOLE:
        for part in parts_of(formulas):
            evaluate(part, values)
    elif is_rate(name):
        mesh.positions(rate_of(name)[1])
        if len(text) > MAX_RATE:
            raise PlanError(f"it has {len(text)} characters; seconds of a collective may have {MAX_RATE}.")
        evaluate(text, {"bytes": EXACT.of(1)})
    else:
        evaluate(text, values, numbers)
