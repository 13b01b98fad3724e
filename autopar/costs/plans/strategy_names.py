"""The name of a strategy, as plans keep it: a choice per mesh axis, and "saved" where a gathered weight is kept.

"o -"           a call: factor o on the first axis, nothing on the second
"s - via ring"  the same by an implementation that is not the first of its rule
"S(0) I saved"   a parameter: its layout, gathered once and kept for the backward (ZeRO-2)
"S(1) together" a shared reshard: its layout, from which its consumers gather the tensor once for all of them
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.rule import VIA

_SAVED = " saved"
MOVED_TOGETHER = " together"
"""Suffix of the layout of a shared reshard, from which all consumers take the tensor."""


def strategy_name(choices: Sequence[str], saved: bool, implementation: str = "") -> str:
    """Return the name of a strategy with these choices."""
    return " ".join(choices) + (_SAVED if saved else "") + (f"{VIA}{implementation}" if implementation else "")


def implementations_of(names: Iterable[str]) -> frozenset[str]:
    """Return the names of implementations that some strategies run by.

    >>> implementations_of(["o -", "s - via ring"])
    frozenset({'ring'})
    """
    return frozenset(name.partition(VIA)[2] for name in names if VIA in name)


def is_saved(name: str) -> bool:
    """Return whether a strategy of this name saves the gathered copy of a sharded weight for the backward."""
    return name.endswith(_SAVED)


def layout_named(name: str) -> Layout:
    """Return the layout that names a strategy of a tensor (a parameter, an input, an output, a shared reshard)."""
    return Layout.parse(name.removesuffix(_SAVED).removesuffix(MOVED_TOGETHER))
