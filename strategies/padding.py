"""Dims of a program's tensors that may be split unevenly: those that come from parameters alone, all the way.

A parameter may be padded in every dim, an input from outside in none. The output of a call may be padded if its rule
lets the padding of its inputs through (see `ir.sharding.padding`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.sharding.padding import padded_factors
from autopar.strategies.roles import RoledProgram, Value
from autopar.strategies.ruled import RuledCall


@dataclass(frozen=True, slots=True)
class Padding:
    """Dims and factors of a program that may be padded."""

    dims: Mapping[Value, frozenset[int]]
    """Dims of every tensor that may be padded."""
    factors: Mapping[str, frozenset[str]]
    """Factors of every call that may be padded."""

    @classmethod
    def of(cls, graph: RoledProgram) -> Padding:
        """Return the padding of a program, found in one pass and cached."""
        facts = graph.program.facts
        if "padding" not in facts:
            facts["padding"] = _followed(graph)
        return facts["padding"]


def _followed(graph: RoledProgram) -> Padding:
    nowhere: frozenset[int] = frozenset()
    dims = {
        value: frozenset(range(len(info.shape))) if value[0] in graph.parameters else nowhere
        for value, info in graph.infos.items()
    }
    factors: dict[str, frozenset[str]] = {}
    for call in graph.calls.values():
        found = _padded_factors(call.ruled, tuple([dims[value] for value in call.inputs]))
        factors[call.name] = found
        for position, term in enumerate(call.out_terms):
            dims[call.name, position] = frozenset(dim for dim, names in enumerate(term.dims) if names[0] in found)
    return Padding(dims, factors)


@functools.lru_cache(maxsize=8192)
def _padded_factors(found: RuledCall, padded: tuple[frozenset[int], ...]) -> frozenset[str]:
    """Return the factors of a call that may be padded; of equal calls once."""
    return padded_factors(found.call, found.op, found.bound, padded, found.op.padded)
