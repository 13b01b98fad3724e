"""Options by the names of their flags, as groups: tests join options of several places to one call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from autopar.compiler.arguments import GROUPS
from autopar.costs.pricing.optimizer import Optimizer
from autopar.planning.options.definition import options_of

_PLACES = {each.flat: (option, each.name) for option, group in GROUPS.items() for each in options_of(group)}


def by_flag(**flat: Any) -> dict[str, Any]:
    """Return options as `compile` and `plan` take them; fields are added to a group that is given, too.

    >>> by_flag(memory="1GB", recompute="full", strategy="zero3")
    {'strategy': 'zero3', 'memory': Memory(limit='1GB', recompute='full')}
    """
    found = {name: value for name, value in flat.items() if name not in _PLACES and name != "master_copies"}
    fields: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        if name in _PLACES and not isinstance(value, GROUPS.get(name, ())):
            option, field = _PLACES[name]
            fields.setdefault(option, {})[field] = value
    for option, specified in fields.items():
        given: Any = flat.get(option)
        group = GROUPS[option]
        found[option] = replace(cast(Any, given), **specified) if isinstance(given, group) else group(**specified)
    found |= {name: flat[name] for name in GROUPS if name not in found and isinstance(flat.get(name), GROUPS[name])}
    if "master_copies" in flat:
        optimizer = flat.get("optimizer", "adamw")
        made = Optimizer(optimizer) if isinstance(optimizer, str) else optimizer
        found["optimizer"] = replace(made, master_copies=flat["master_copies"])
    return found
