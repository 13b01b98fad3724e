"""Where the products of a preset run in chunks beside their collectives, or gather again what they have gathered."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.sharding.rule import VIA
from autopar.strategies.presets.split import Wish
from autopar.strategies.roles import RoledCall, RoledProgram
from autopar.strategies.rules.products.chunked import COLUMN, leading_factors, together


def in_chunks(graph: RoledProgram, products: Mapping[str, str], wish: Wish, parts: int, name: str) -> Wish:
    """The same wish, but for products between split positions, where columns and rows divide into so many parts.

    They run by the implementation of that name where it offers what is wished. `products` are those of which an axis
    splits columns or rows, with the factor. What goes into columns is gathered by them where nothing else takes it
    whole: a plain gather serves all that do.
    """

    def can(call: RoledCall, factor: str | None) -> bool:
        offers = (choice.name for each in call.op.implementations if each.name == name for choice in each.choices)
        if factor is None or call.name not in products or together(call.call, factor) not in offers:
            return False
        rows = leading_factors(call.call)[-1]
        return call.factor_of("sequence") == rows and not any(call.bound.sizes[f] % parts for f in (rows, factor))

    def gathers(call: RoledCall) -> bool:
        """Whether all products of the input gather it in chunks, and all else takes it in parts."""

        def fits(other: RoledCall, position: int) -> bool:
            factor = wish(other)
            if position == 0 and other.node.target is call.node.target:
                return factor == COLUMN and can(other, factor)
            return factor == other.factor_of("sequence")

        return all(fits(*use) for use in graph.users[call.inputs[0]])

    def found(call: RoledCall) -> str | None:
        factor = wish(call)
        if factor is None or not can(call, factor) or (factor == COLUMN and not gathers(call)):
            return factor
        return f"{together(call.call, factor)}{VIA}{name}"

    return found
