"""Plans of a whole model made of an estimate, with which its exact search begins.

An estimate without a pipeline is one plan of the blocks of a shorter model, or a mixture of two. Every block of the
whole model takes the choices of the block that stands for it: the last ones those of the plan that takes more memory,
whose saved tensors the backward frees first. Bytes of an estimate are near those of the whole model's plan, not equal:
there are mixtures with more of these blocks and with fewer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autopar.costs.memory.lifetimes import Lifetimes
from autopar.costs.space.space import Space
from autopar.planning.mesh_estimates.block_use import BlockUse, strategies_of
from autopar.planning.pipeline.block_costs import block_of_decisions
from autopar.planning.pipeline.stages.blocks import blocks_of
from autopar.planning.settings import Start, WarmStart


def warm_start(uses: Sequence[BlockUse], shares: Sequence[float]) -> WarmStart:
    """Return plans near a mixture, the fastest first.

    Args:
        uses: Plans of the blocks, the one that takes most memory last.
        shares: Their shares in all blocks.
    """
    num_larger = round(shares[-1] * len(uses[-1].forward))

    def choices(space: Space, lifetimes: Lifetimes) -> Iterator[Start]:
        whole = blocks_of(space.program)
        if len(whole) != len(uses[0].forward) or any(use.short is not uses[0].short for use in uses):
            return
        try:
            made = _choices(space, [strategies_of((use,), whole) for use in (uses[0], uses[-1])])
        except (KeyError, ValueError):  # other nodes or strategies, as of the model in tiles
            return
        homes = [0 if home is None else home for home in block_of_decisions(space, whole)]
        for count in _around(num_larger, len(whole)):
            is_larger = [home >= len(whole) - count for home in homes]
            modes = {
                name: (uses[-1] if larger else uses[0]).mode
                for name, larger in zip(lifetimes.segment, is_larger, strict=True)
                if name
            }
            yield tuple([made[larger][number] for number, larger in enumerate(is_larger)]), modes

    return WarmStart(uses[-1].zigzag_axes, uses[-1].waited, choices)


def _choices(space: Space, plans: Sequence[Mapping[str, frozenset[str]]]) -> list[list[int]]:
    """Return, for each plan, the number of the strategy of each decision by its name.

    KeyError or ValueError where one is not offered.
    """
    numbers: dict[int, dict[str, int]] = {}
    found: list[list[int]] = [[] for _ in plans]
    for decision in space.decisions:
        strategies = decision.candidates.strategies
        if id(decision.candidates) not in numbers:  # equal layers share theirs
            numbers[id(decision.candidates)] = {str(each): n for n, each in reversed([*enumerate(strategies)])}
        for choices, names in zip(found, plans, strict=True):
            (name,) = names[decision.name] if len(strategies) > 1 else numbers[id(decision.candidates)]
            choices.append(numbers[id(decision.candidates)][name])
    return found


def _around(count: int, most: int) -> list[int]:
    """Return 0, a number, the most, and numbers at distances from it that double, the largest first."""
    distances = [2**power for power in range(most.bit_length())]
    near = {count, *(count + each for each in distances), *(count - each for each in distances)}
    return sorted({0, most, *(each for each in near if 0 < each < most)}, reverse=True)
