"""Lookup of a decision by name: a module, a parameter or an operation, with `*` as in annotations.

A module stands for the call of its own that computes most. If it only contains other modules, these must be named.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from autopar.costs.plans.decision_rows import is_main
from autopar.costs.space.space import Space
from autopar.errors import InputError
from autopar.ir.program.paths import is_below
from autopar.planning.annotations.matching import Catalog, operation_of
from autopar.planning.annotations.offered import is_weighted

SHOWN = 6  # names in an error


def decision_named(space: Space, name: str) -> int:
    """Return the one decision that a name means; InputError with names close to it where it means none or several.

    In this order, the first that finds something: whole names of modules, of parameters and of decisions, then the
    end of such a name.
    """
    if not isinstance(name, str) or not name:
        raise InputError(f"{name!r} is no name; give that of a module, a parameter or an operation.")
    catalog = Catalog(space)
    for pattern in (name, f"*.{name}"):
        modules = [path for path in catalog.modules if path and fnmatchcase(path, pattern)]
        if modules:
            return _main_call(catalog, _single_name(modules, name, "modules"))
        parameters = [each for each in catalog.parameters if fnmatchcase(each, pattern)]
        if parameters:
            return catalog.parameters[_single_name(parameters, name, "parameters")]
        decisions = [each for each in space.index if fnmatchcase(each, pattern)]
        if decisions:
            return space.index[_single_name(decisions, name, "operations")]
    known = (*(path for path in catalog.modules if path), *catalog.parameters, *space.index)
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"Close to it are {', '.join(near)}." if near else f"The modules are {_listed(catalog.modules[1:])}."
    raise InputError(f"{name!r} names no module, parameter or operation of the model. {hint}")


def _single_name(found: Sequence[str], name: str, kind: str) -> str:
    if len(found) == 1:
        return found[0]
    raise InputError(f"{name!r} names {len(found)} {kind}: {_listed(found)}. Name one of them.")


def _main_call(catalog: Catalog, module: str) -> int:
    """Return the call of a module that computes most, its own before those of modules inside."""
    decisions = catalog.space.decisions
    own = [number for number in catalog.calls if catalog.module(number) == module]
    inside = [number for number in catalog.calls if is_below(catalog.module(number), module)]
    for calls in (own, inside):
        for main in (
            [number for number in calls if is_weighted(decisions[number])],
            [number for number in calls if is_main(operation_of(decisions[number]))],
        ):
            if len({catalog.module(number) for number in main}) == 1:
                return max(main, key=lambda number: float(decisions[number].candidates.seconds.max()))
            if main:
                raise InputError(
                    f"{module} holds several modules: {_listed([catalog.module(n) for n in main])}. Name one of them."
                )
    if own or inside:
        return max(own or inside, key=lambda number: float(decisions[number].candidates.seconds.max()))
    parameters = [name for name in catalog.parameters if is_below(name, module)]
    raise InputError(f"{module} computes nothing by itself; name one of its parameters: {_listed(parameters)}.")


def _listed(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - SHOWN} more" if len(distinct) > SHOWN else ""
    return ", ".join(distinct[:SHOWN]) + more
