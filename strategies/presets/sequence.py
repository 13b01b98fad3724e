"""Presets that split the positions of every sequence, and differ in what attention does."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.errors import StrategyError
from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK
from autopar.ir.sharding.rule import TOGETHER, VIA, factors_of
from autopar.strategies.presets.expert_rows import along_rows
from autopar.strategies.presets.preset_axes import Parts, Positions
from autopar.strategies.presets.split import FREE, Wish
from autopar.strategies.roles import ATTENTION, RoledCall, RoledProgram
from autopar.strategies.rules.layers.ring_self_attention import NAME as RING_SELF_ATTENTION

HEADS, QUERIES, RING, WHOLE_ROWS = "column", "sequence", "ring", RING_SELF_ATTENTION
"""Roles that an axis may split in attention: heads, queries, or queries and keys together, by two implementations."""
SHARED_HEADS = "shared heads"
"""Heads that another axis splits, too: those of queries and of keys alike."""


def ulysses() -> Parts:
    """Positions split, heads instead of them in attention, by all-to-all (Jacobs et al., "DeepSpeed Ulysses", 2023).

    Over an axis c of positions and an axis d of the batch; parameters are whole:

        all_to_all/c = 4·L·(A + K)/(c·d)
        all_reduce/d_c = P + 12

    Where heads of keys and values do not divide over c, those of queries are split alone. Keys and values are gathered
    then, as by `gather_kv`, and the all-to-all is of 4·L·A/(c·d).
    """
    return Parts(positions=(Positions(HEADS),))


def gather_kv() -> Parts:
    """Split positions, those of queries too; attention gathers keys and values (context parallelism).

    Source: Dubey et al., "The Llama 3 Herd of Models", 2024. Over an axis c of positions and an axis d of the batch:

        all_gather/c = 2·L·K/d
        reduce_scatter/c = 2·L·K/d
        all_reduce/d_c = P + 12
    """
    return Parts(positions=(Positions(QUERIES),))


def ring() -> Parts:
    """Split positions; in attention keys and values travel around the ranks while these compute (ring attention).

    Source: Liu et al., "Ring Attention with Blockwise Transformers", 2023. Positions of causal self-attention are
    sharded by zigzag, so that all ranks compute as much. Keys and values are sent c-1 times forward and backward, and
    their gradients as often, in float32. Over an axis c of positions and an axis d of the batch; less under a window:

        permute/c = 6·L·K·(c-1)/(c·d)
        all_reduce/d_c = P + 12
    """
    return Parts(positions=(Positions(RING),))


def ring_self_attention() -> Parts:
    """Split positions; in attention keys travel around the ranks, then values (ring self-attention).

    Source: Li et al., "Sequence Parallelism", 2021. Each rank computes the whole rows of scores of its queries and
    saves them for the backward: for short texts, and as a baseline of `ring`. Over an axis c of positions and an axis d
    of the batch, keys and values are sent c-1 times forward and backward, and their gradients:

        permute/c = 4·L·K·(c-1)/(c·d)
        reduce_scatter/c = 2·L·K/d
        all_reduce/d_c = P + 12
    """
    return Parts(positions=(Positions(WHOLE_ROWS),))


def usp() -> Parts:
    """Split positions over two axes; attention splits heads on one and runs a ring on the other (USP).

    Source: Fang and Zhao, "USP", 2024; 2D attention of Gu et al., "LoongTrain", 2024. Heads are split over an axis
    named "sp" or "ulysses", else the last one; the ring over one named "cp", "context" or "ring",
    else the last of the others. Over axes c of the ring, u of the heads and d of the batch:

        all_to_all/u = 4·L·(A + K)/(c·d·u)
        permute/c = 6·L·K·(c-1)/(c·d·u)
        all_reduce/d_c_u = P + 12
    """
    return Parts(
        positions=(
            Positions(HEADS, ("sp", "ulysses"), "heads"),
            Positions(RING, ("cp", "context", "ring"), "the ring"),
        )
    )


def context_parallel() -> Parts:
    """Positions split, and in attention what takes the least time: a ring, gathered keys and values, or heads.

    Megatron's context parallelism, with the planner in place of its `cp_comm_type` (Megatron-LM; Dubey et al., "The
    Llama 3 Herd", 2024). A step moves what `ring`, `gather_kv` or `ulysses` says, or less.
    """
    return Parts(positions=(Positions(""),))


def check_attentions(
    strategy: str, graph: RoledProgram, ways: Mapping[str, str], parts: Mapping[str, int], strict: bool
) -> None:
    """Raise StrategyError if there is no attention, or (if `strict`) one that its axes cannot split.

    `parts` is the number of parts into which each axis, with others that split the same heads, splits an attention.
    """
    attentions = [call for call in graph.learned if call.is_attention]
    if ways and not attentions:
        raise StrategyError(f"{strategy}: no attention in this model. Use megatron_sequence, or split the batch.")
    for call in attentions if strict else ():
        for axis, way in ways.items():
            _check_attention(strategy, call, way, parts[axis], axis)


def positions_wish(graph: RoledProgram, way: str, parts: int) -> Wish:
    """Positions split on an axis, and in attention what `way` says; `parts` as in `check_attentions`."""

    def wish(call: RoledCall) -> str | None:
        return _in_attention(call, way, parts) if call.is_attention else call.factor_of("sequence")

    return along_rows(graph, wish)


def _in_attention(call: RoledCall, way: str, parts: int) -> str | None:
    """Return the factor of a call that an axis splits, or factors that it splits together; FREE if unspecified.

    Where heads of keys and values do not divide into so many parts these are heads of queries alone.
    """
    if way in (RING, WHOLE_ROWS):
        name = next((choice.name for choice in call.op.choices if TOGETHER in choice.name), None)
        if way == RING or name is None:
            return name
        return f"{name}{VIA}{way}" if any(each.name == way for each in call.op.implementations) else None
    factor = call.factor_of(HEADS if way == SHARED_HEADS else way) if way else FREE
    return (call.fitting(factor, parts) if factor and way == HEADS else None) or factor


def _check_attention(strategy: str, call: RoledCall, way: str, parts: int, axis: str) -> None:
    """Raise StrategyError where a call cannot be split by its heads, by its queries, or as a ring."""
    if not way:
        return
    what = {HEADS: "heads", SHARED_HEADS: "heads", QUERIES: "queries"}.get(way, "queries and keys")
    others = " or ".join(each for each in ("gather_kv", "ulysses") if each != strategy)
    factor = _in_attention(call, way, parts)
    if factor is None:
        why = _why_no_ring(call) if way in (RING, WHOLE_ROWS) else "has none"
        raise StrategyError(
            f"{strategy} splits the {what} of attention over {axis}; {call.name} {why}. "
            f"Use {others} or megatron_sequence."
        )
    for each in factors_of(factor):
        if call.bound.sizes[each] % parts:
            raise StrategyError(
                f"{strategy} splits the {what} of attention into {parts} parts over {axis}; {call.name} has "
                f"{_number_of(call, each)}. Use an axis whose size divides them."
            )


def _number_of(call: RoledCall, factor: str) -> str:
    """Return the size of a factor as text; for heads, the numbers of query heads and of key and value heads."""
    queries = [call.bound.sizes[name] for name, members in call.bound.rule.products if members[0] == factor]
    found = call.bound.sizes[factor]
    return f"{queries[0]} of queries and {found} of keys and values" if queries else f"{found} of them"


def _why_no_ring(call: RoledCall) -> str:
    """Why keys and values do not travel to the queries of an attention."""
    if call.call.target not in ATTENTION:
        return "is no scaled_dot_product_attention"
    given = call.call.arguments
    if given["query"].shape[-2] != given["key"].shape[-2]:
        return f"has {given['query'].shape[-2]} queries and {given['key'].shape[-2]} keys, and not as many of both"
    if call.call.target is ATTENTION_BY_MASK:
        return "has a mask that is worked out block by block, and never has whole rows; ring takes it"
    if given["attn_mask"] is not None and given["attn_mask"].requires_grad:
        return "has a mask with a gradient, for which keys are whole"
    if given["dropout_p"] > 0 and (given["attn_mask"] is None or given["attn_mask"].dtype is torch.bool):
        return "has dropout, which is worked out block by block, and never has whole rows; ring takes it"
    return (
        "has a mask of numbers, which may hide all keys of a query by large ones, so that keys are whole; give a mask "
        "of truth values"
    )
