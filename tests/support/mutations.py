"""JSON changed at a random place, as a file that was damaged or made up."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**63, -(2**70), 10**250, 0.5, -0.5, 1e308, 5e-324, math.nan, math.inf),
    *("", "x", "I", "S(0)", "S(99)", "dp", "[]", "1/0", "9**9**9**9", "(" * 100_000, "\ud800", "\0", "a" * 200_000),
    *([], [[]], [1, 2, 3], {}, {"x": 1}, [None] * 5, {"value": 1}),
)


def _places(values: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything below the root."""
    if not isinstance(values, dict | list):
        return []
    keys = list(values) if isinstance(values, dict) else list(range(len(values)))
    return [found for key in keys for found in ((*path, key), *_places(values[key], (*path, key)))]


def mutated(values: Any, source: random.Random) -> Any:
    """A copy in which one or two places hold something else, or nothing, or what stands elsewhere."""
    changed = copy.deepcopy(values)
    for _ in range(source.choice((1, 1, 2))):
        places = _places(changed)
        # First a depth, as most places are deep.
        depth = source.choice(sorted({len(place) for place in places}))
        *above, key = source.choice([place for place in places if len(place) == depth])
        parent = changed
        for each in above:
            parent = parent[each]
        what = source.choice(("odd", "odd", "delete", "other", "add"))
        if what == "delete":
            del parent[key]
        elif what == "add" and isinstance(parent, dict):
            parent[source.choice(("x", "", "\ud800", "format"))] = source.choice(ODD)
        elif what == "other":
            other = changed
            for each in source.choice(places):
                other = other[each]
            parent[key] = copy.deepcopy(other)
        else:
            parent[key] = copy.deepcopy(source.choice(ODD))
    return changed
