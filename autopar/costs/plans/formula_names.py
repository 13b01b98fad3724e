"""Names of a plan's formulas, and checks that the formulas of a file are complete and have values.

"seconds", "flops", "parameter_bytes", "memory"  what is formulated; "memory/activations", "all_reduce/dp": a part of it
"all_reduce_over_dp"                             the seconds of a collective by its `bytes`, which others call
"last_host_over_dp"                              the seconds for which its ranks wait for the last host
"exposed3x1_all_reduce_over_dp"                  the share of them that computing does not hide, of messages of three
                                                 parameters, moved once, by the `part` of each that moves
"forward_computing", … (`OVERLAPPED`)                compute and moves that overlap, which such shares name
"whole"                                          a list of what must be whole
"fixed: heads"                                   no formula: the reason why a symbol cannot vary
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from autopar.costs.plans.expressions import EXACT, Numbers, evaluate
from autopar.errors import MeshError, PlanError
from autopar.ir.sharding.mesh import Mesh

WHOLE, FIXED = "whole", "fixed: "
"""The formula of what must be whole; before a symbol, the reason why it cannot vary."""
MEMORY = "memory"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
LAST_HOST = "last_host"
SIDES = (
    ("backward_computing", "backward_latency", "gradient_size"),
    ("forward_computing", "forward_latency", "weight_size"),
)
"""Symbols of computation shared by all devices, latency on each, bytes moved: for gradients, for weights."""
OVERLAPPED = (*SIDES[0], *SIDES[1], "num_weights")
MAX_RATE, MAX_TOGETHER = 1000, 2**19
"""Characters of the formula of a collective's seconds, which is computed for each call of it, and of all formulas."""
_RATE = re.compile(rf"(?:exposed([0-9]{{1,6}})x([12])_)?({'|'.join((*COLLECTIVES, LAST_HOST))})_over_(\w+)")
_NEEDED = ("seconds", "flops", WHOLE, "all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def rate_name(collective: str, axis: str, together: int = 0, passes: int = 1) -> str:
    """Return the function that gives the seconds of a collective by its bytes; of so many parameters, the exposed
    share.
    """
    return f"{f'exposed{together}x{passes}_' if together else ''}{collective}_over_{axis}"


def is_rate(name: str) -> bool:
    """Return whether `name` is that of a collective's seconds."""
    return _RATE.fullmatch(name) is not None


def rate_of(name: str) -> tuple[str, str, int, int]:
    """Return the arguments that `rate_name` was given.

    >>> rate_of("exposed3x2_all_gather_over_dp")
    ('all_gather', 'dp', 3, 2)
    """
    found = _RATE.fullmatch(name)
    assert found is not None, f"{name} is the name of no rate"
    together, passes, collective, axis = found.groups()
    return collective, axis, int(together or 0), int(passes or 1)


def public(formulas: Mapping[str, str]) -> list[str]:
    """Return the names under which formulas are requested."""
    return [name for name in formulas if name != WHOLE and not name.startswith(FIXED) and not is_rate(name)]


def whole_texts(formulas: Mapping[str, str]) -> list[str]:
    """Return the texts of what must be whole."""
    text = formulas[WHOLE].strip()
    if not (text.startswith("[") and text.endswith("]")):
        raise PlanError(f"not a list of formulas: {text[:80]!r}; give what Plan.save wrote.")
    return text[1:-1].split(", ") if text != "[]" else []


def rates(formulas: Mapping[str, str], symbols: Mapping[str, Any], numbers: Numbers) -> dict[str, Callable[..., Any]]:
    """Return the times of collectives by their bytes, and exposed shares by parts, at these values of the symbols."""

    @functools.cache
    def overlapped() -> dict[str, Any]:
        return {name: evaluate(formulas[name], symbols, numbers) for name in OVERLAPPED if name in formulas}

    def function(text: str) -> Callable[[Any], Any]:
        return lambda given: evaluate(text, {**overlapped(), "bytes": given, "part": given}, numbers)

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
    values = {name: EXACT.of(value) for name, value in symbols.items()}
    numbers = EXACT.with_functions(rates(formulas, values, EXACT))
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
        for part in whole_texts(formulas):
            evaluate(part, values)
    elif is_rate(name):
        mesh.positions(rate_of(name)[1])
        if len(text) > MAX_RATE:
            raise PlanError(f"it has {len(text)} characters; seconds of a collective may have {MAX_RATE}.")
        rates({**formulas, name: text}, values, EXACT)[name](EXACT.of(1))
    else:
        evaluate(text, values, numbers)
