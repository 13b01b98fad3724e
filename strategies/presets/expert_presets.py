"""Presets for mixtures of experts: which axes divide the experts, and what else these axes divide.

Sorted experts (dropless) and dense ones (a capacity for each, by einsum or bmm) alike: an axis of experts splits the
tokens everywhere else, rows of tokens go to the ranks of their experts by all-to-all, and come home by another.

    attention, norms, router, head     tokens, or columns and rows of Megatron
    dispatch, experts, combine         experts; over other axes tokens, or columns and rows

Beside the symbols of all presets, of a model whose every layer has experts (three matrices each, as Llama's MLP):

    X  weights of all experts          M  tokens once for each of their experts [tokens, experts of a token, features]
    Q  weights of routers              G  gates [tokens, experts of a token]
    E  number of experts
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.errors import StrategyError, warn_user
from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH, OF_EXPERT
from autopar.ir.sharding.mesh import Mesh
from autopar.ir.sharding.rule import TOGETHER
from autopar.strategies.presets.all_tokens import experts_of_all_tokens
from autopar.strategies.presets.expert_rows import in_blocks_of_experts
from autopar.strategies.presets.preset_axes import Columns, Parts, Taken
from autopar.strategies.presets.regions import COLUMN, OUTER, ROW, Regions, product_of
from autopar.strategies.presets.split import FREE, Wish
from autopar.strategies.roles import EXPERT, RoledCall, RoledProgram


def expert_data() -> Parts:
    """The batch split over all axes, experts over one of them (E+D; Lepikhin et al., "GShard", 2020).

    Over an axis e of experts and an axis d of the batch alone:

        all_to_all/e = 4·L·M/(d·e) + 8·L·E
        all_reduce/d_e = P - X + 12
        all_reduce/d = X/e
    """
    return Parts(experts="exchanged")


def expert_model() -> Parts:
    """Split experts, and elsewhere the batch, over one axis, and columns and rows over the other (E+M).

    Source: Rajbhandari et al., "DeepSpeed-MoE", 2022. Over an axis e of experts and an axis t of columns and rows,
    those of experts too. Rows of tokens are multiplied by columns and return as partial results; if links along e are
    slower, rows travel with their features split:

        all_to_all/e = 4·L·M/e + 8·L·E
        all_reduce/t = (3·L + 2)·A/e + L·(A + G)/e + 3·R/e
        all_reduce/e = (P - N - X - Q)/t + N + Q + 12
    """
    return Parts(tensor=Columns(), experts="exchanged", left=False)


def expert_data_model() -> Parts:
    """`expert_model` on each part of the batch (E+D+M; Fedus et al., "Switch Transformers", 2022).

    Over an axis d of the batch alone, an axis e of experts and an axis t of columns and rows:

        all_to_all/e = 4·L·M/(d·e) + 8·L·E
        all_reduce/t = (3·L + 2)·A/(d·e) + L·(A + G)/(d·e) + 3·R/(d·e)
        all_reduce/d_e = (P - N - X - Q)/t + N + Q + 12
        all_reduce/d = X/(e·t)
    """
    return Parts(tensor=Columns(), experts="exchanged", left=True)


def expert_folded() -> Parts:
    """Megatron, and experts over the same devices in their own way (Liu et al., "MoE Parallel Folding", 2025).

    Experts are whole, and divided over all axes; where one is called after them, over that one and the tensor axis.
    Tokens part over t on their way to the experts, and are gathered behind them. Over an axis t of columns and rows and
    an axis d of the batch, both of experts:

        all_to_all/d_t = 4·L·M/(d·t) + 8·L·E
        all_gather/t = L·(2·A + G)/d
        all_reduce/t = (2·L + 2)·A/d + 3·R/d
        all_reduce/d = (P - N - X - Q)/t + N + Q + 12
    """
    return Parts(tensor=Columns(), experts="folded")


def tokens_parted(strategy: str, graph: RoledProgram, mesh: Mesh, taken: Taken, strict: bool) -> Mapping[str, str]:
    """Return the role of the dim along which tokens part on each axis of experts.

    Raises StrategyError if there are no experts, or (if `strict`) these or their tokens do not divide.
    """
    _need_experts(strategy, graph, mesh, taken.experts)
    roles = dict.fromkeys(taken.samples, "data") | dict.fromkeys(taken.positions, "sequence")
    roles |= {axis: _tokens_over(graph, mesh, axis) for axis in taken.experts if axis == taken.tensor}
    if strict:
        _need_tokens(strategy, graph, mesh, roles)
    return {axis: roles[axis] for axis in taken.experts}


def whole_next_to_experts(
    strategy: str, graph: RoledProgram, regions: Regions, mesh: Mesh, axis: str, wish: Wish
) -> Wish:
    """Columns and rows on an axis that has no experts of its own: rows on their way to these and home are left free."""
    _warn_of_whole_experts(strategy, graph, regions, mesh, axis)
    free = _ways_to_columns(graph, regions) | _ways_home(graph, regions)
    return lambda call: FREE if call.name in free else wish(call)


def at_experts(graph: RoledProgram, parted: str, elsewhere: Wish) -> Wish:
    """Rows exchanged on an axis of experts, whose tokens part by the role `parted`, and a wish for all else."""
    exchanged = exchanged_factors(graph, parted)
    return lambda call: exchanged.get(call.name) or elsewhere(call)


def _tokens_over(graph: RoledProgram, mesh: Mesh, axis: str) -> str:
    """The role of the dim along which tokens part on the tensor axis: positions where these divide, else samples."""
    positions = [call.factor_of("sequence") for call in _ends(graph)]
    divide = [f and call.bound.sizes[f] % mesh.size(axis) == 0 for call, f in zip(_ends(graph), positions, strict=True)]
    return "sequence" if divide and all(divide) else "data"


def _ends(graph: RoledProgram) -> list[RoledCall]:
    return [call for call in graph.learned if call.call.target in (DISPATCH, COMBINE)]


def exchanged_factors(graph: RoledProgram, parted: str) -> Mapping[str, str]:
    """Call → the factor by which an axis divides it that brings rows of tokens to their experts and home.

    `parted` is the role of the dim of tokens that the axis splits at both ends.
    """
    found: dict[str, str] = {}
    blocks = in_blocks_of_experts(graph)
    for call in graph.learned:
        if call.weight_only:
            continue
        tokens, expert, block = call.factor_of("data"), call.factor_of(EXPERT), blocks.get(call.name)
        if call.call.target in (DISPATCH, COMBINE):
            tokens = call.factor_of(parted)
            found[call.name] = f"{tokens}{TOGETHER}{expert}" if tokens else f"{expert}"
        elif expert:
            kept = all(term.dim_of(expert) is not None for term in call.out_terms)
            found[call.name] = expert if kept or block or not tokens else tokens
        elif block and block.rows:
            found[call.name] = block.rows
    return {**found, **experts_of_all_tokens(graph)}


def _ways_to_columns(graph: RoledProgram, regions: Regions) -> frozenset[str]:
    """The calls that send rows to columns of experts: whole, or in parts of their features that are gathered there."""
    blocks = in_blocks_of_experts(graph)
    return frozenset(blocks[name].dispatch for name in regions.names(COLUMN) if name in blocks)


def _ways_home(graph: RoledProgram, regions: Regions) -> frozenset[str]:
    """The calls from a row of experts to where tokens are joined, whose outputs may stay partial until then.

    Among them are those that take the biases which are added on the way.
    """
    found: set[str] = set()
    partial: set[str] = set()
    blocks = in_blocks_of_experts(graph)
    for call in graph.learned:
        if EXPERT not in call.roles.values() and call.name not in blocks:
            continue
        made = {name for name, _ in call.inputs}
        if regions.by_call.get(call.name) == ROW:
            partial.add(call.name)
        elif made & partial and regions.by_call.get(call.name) == OUTER:
            found |= {
                call.name,
                *(name for name in made if name in blocks and graph.calls[name].call.target is OF_EXPERT),
            }
            partial.add(call.name)
    return frozenset(found)


def _products_of_experts(graph: RoledProgram) -> list[tuple[RoledCall, str]]:
    """The products with a matrix per expert, each with the factor of its experts."""
    found = []
    for call in graph.learned:
        product = product_of(graph, call)
        weight = call.in_terms[product.weight].factors if product else ()
        found += [(call, factor) for factor in weight if call.roles.get(factor) == EXPERT]
    return found


def _need_experts(strategy: str, graph: RoledProgram, mesh: Mesh, experts: tuple[str, ...]) -> None:
    """Raise StrategyError where the model has no experts, or they do not divide over their axes."""
    products = _products_of_experts(graph)
    if not products:
        raise StrategyError(
            f"{strategy} divides experts, products of tokens with a matrix for each expert [experts, in, out]; the "
            "model has none, or they were not recognised. Use data_parallel, megatron or fsdp_megatron."
        )
    parts = _num_parts(mesh, experts)
    for call, factor in products:
        if call.bound.sizes[factor] % parts:
            raise StrategyError(
                f"{strategy} splits experts into {parts} parts over {', '.join(experts)}; {call.name} has "
                f"{call.bound.sizes[factor]} of them. Use axes whose sizes divide them."
            )


def _need_tokens(strategy: str, graph: RoledProgram, mesh: Mesh, parted: Mapping[str, str]) -> None:
    """Raise StrategyError where the tokens of experts do not divide over the axes that split them; role by axis."""
    for role in dict.fromkeys(parted.values()):
        split = tuple(axis for axis, each in parted.items() if each == role)
        parts = _num_parts(mesh, split)
        for call in _ends(graph):
            factor = call.factor_of(role)
            if factor and call.bound.sizes[factor] % parts:
                raise StrategyError(
                    f"{strategy} splits the tokens of experts into {parts} parts over {', '.join(split)}; {call.name} "
                    f"has {call.bound.sizes[factor]} along {factor}. Use a batch, or a length, that {parts} divides."
                )


def _warn_of_whole_experts(strategy: str, graph: RoledProgram, regions: Regions, mesh: Mesh, axis: str) -> None:
    whole = [call.name for call, _ in _products_of_experts(graph) if regions.by_call[call.name] == OUTER]
    if whole:
        reason = next((regions.reasons[name] for name in whole if name in regions.reasons), "no pair of products")
        warn_user(
            f"{strategy}: experts stay whole on {axis} in {len(whole)} calls ({whole[0]} …): {reason}. "
            f"Their work is repeated on {mesh.size(axis)} devices.",
        )


def _num_parts(mesh: Mesh, names: tuple[str, ...]) -> int:
    return math.prod(mesh.size(axis) for axis in names)
