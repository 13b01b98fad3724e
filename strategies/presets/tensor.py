"""Presets that split the matrix products of every block over one axis, as Megatron-LM does."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import StrategyError, warn_user
from autopar.ir.sharding.mesh import Mesh
from autopar.ir.sharding.rule import VIA
from autopar.strategies.presets.expert_rows import along_rows, in_blocks_of_experts
from autopar.strategies.presets.preset_axes import Columns, Parts, Storage
from autopar.strategies.presets.regions import COLUMN, OUTER, ROW, Regions, product_of, regions_of
from autopar.strategies.presets.split import FREE, Wish
from autopar.strategies.roles import RoledCall, RoledProgram
from autopar.strategies.rules.products.chunked import AGAIN, NAME, leading_factors, together
from autopar.strategies.rules.products.chunked import COLUMN as ENTERING


def megatron() -> Parts:
    """Columns and rows of every block over one axis, the batch over the others (Shoeybi et al., "Megatron-LM", 2019).

    A block is summed once forward and once backward, the table's rows once, and the input of the head once. The loss
    joins three numbers a token. Over an axis t of columns and rows and an axis d of the batch:

        all_reduce/t = (4·L + 2)·A/d + 3·R/d
        all_reduce/d = (P - N)/t + N + 12

    In a forward alone what puts out results themselves, as the head of generation, is a column, too, and gathered.

    A projection of queries, keys and values in one weight (GPT-2) is stored whole, because every part of it holds parts
    of all three. Its gradient is all-reduced over t, too.

    Where heads of keys and values do not divide over t, those of queries are split alone. Every device projects keys
    and values whole then; their gradients are summed, 2·L·K/d more by all-reduce over t.
    """
    return Parts(tensor=Columns())


def fsdp_megatron() -> Parts:
    """Megatron on one axis, ZeRO-3 on the others (2-D parallel training: Dubey et al., "The Llama 3 Herd", 2024).

    Over an axis t of columns and rows and an axis d of the batch:

        all_reduce/t = (4·L + 2)·A/d + 3·R/d
        all_gather/d = (2·(P - N) - T)/t + 2·N
        reduce_scatter/d = (P - N)/t + N
        all_reduce/d = 12
    """
    return Parts(tensor=Columns(), storage=Storage(regather=True))


def megatron_sequence() -> Parts:
    """Megatron, with positions split over the same axis between blocks (sequence parallelism).

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022. Over an axis t
    and an axis d of the batch; what goes into a block is gathered, what comes out is reduced in parts:

        all_gather/t = (4·L + 2)·A/d
        reduce_scatter/t = (4·L + 2)·A/d
        all_reduce/d_t = N
        all_reduce/t = 3·R/d
        all_reduce/d = (P - N)/t + 12
    """
    return Parts(tensor=Columns("sequence"))


def async_tensor_parallel() -> Parts:
    """`megatron_sequence` with each product in chunks, which overlap with gathers and reductions.

    One chunk is multiplied while the next is gathered, or the last one reduced. Source: Wang et al., "Overlap
    Communication with Dependent Computation via Decomposition", 2023.

    Over an axis t and an axis d of the batch:

        all_gather/t = (4·L + 2)·A/d
        reduce_scatter/t = (4·L + 2)·A/d
        all_reduce/d_t = N
        all_reduce/t = 3·R/d
        all_reduce/d = (P - N)/t + 12
    """
    return Parts(tensor=Columns("sequence", NAME))


def megatron_regather() -> Parts:
    """`megatron_sequence` without saved gathered inputs: the backward gathers them again, as Megatron-LM does.

    The gather overlaps with the product for the gradient of its input. Source: Korthikanti et al., MLSys 2023.

    Over an axis t and an axis d of the batch:

        all_gather/t = (6·L + 3)·A/d
        reduce_scatter/t = (4·L + 2)·A/d
        all_reduce/d_t = N
        all_reduce/t = 3·R/d
        all_reduce/d = (P - N)/t + 12
    """
    return Parts(tensor=Columns("sequence", AGAIN))


def tensor_wish(strategy: str, graph: RoledProgram, regions: Regions, columns: Columns, parts: int) -> Wish:
    """Columns, rows and what lies between on an axis of `parts` devices; products by the implementation named."""
    wish = with_results(graph, in_blocks(graph, regions, columns.between))
    return in_chunks(graph, regions.factors, wish, parts, columns.products) if columns.products else wish


def found_regions(strategy: str, graph: RoledProgram, mesh: Mesh, axis: str) -> Regions:
    """The regions of a model; StrategyError where there are none, a warning where an attention stays whole."""
    regions = regions_of(graph, mesh.size(axis))
    if not regions.names(COLUMN) and not regions.names(ROW):
        found = "; ".join(f"{name}: {why}" for name, why in list(regions.reasons.items())[:3])
        raise StrategyError(
            f"{strategy} needs pairs of matrix products with nothing between them that needs their outputs whole; "
            f"found none that divide into {mesh.size(axis)} parts over {axis}"
            f"{f' ({found})' if found else ', as the model has no product by a weight'}. "
            "Use a smaller axis, or a preset that splits the batch."
        )
    whole = [call.name for call in graph.learned if call.is_attention and regions.by_call.get(call.name) == OUTER]
    if whole:
        reasons = dict.fromkeys(regions.reasons.values())
        warn_user(
            f"{strategy}: attention stays whole on {axis} in {len(whole)} calls ({whole[0]} …): "
            f"{'; '.join(list(reasons)[:2])}. Its work is repeated on {mesh.size(axis)} devices.",
        )
    return regions


def in_blocks(graph: RoledProgram, regions: Regions, between: str) -> Wish:
    """Columns, rows, what lies between, and the largest table that the inputs look up (the vocabulary).

    Where tokens lie in parts between blocks, how they come to columns of experts and home again is left to the planner.
    """
    table, experts = vocabulary(graph), in_blocks_of_experts(graph)
    with_columns = {experts[name].dispatch for name in regions.factors if name in experts} if between else set()

    def wish(call: RoledCall) -> str | None:
        if call.name in table:
            return "k"
        if call.name in regions.factors:
            return regions.factors[call.name]
        if call.name in experts and experts[call.name].dispatch in with_columns:
            return FREE
        return call.factor_of(between)

    return along_rows(graph, wish) if between else wish


def with_results(graph: RoledProgram, wish: Wish) -> Wish:
    """The same, and in a forward alone columns of products whose outputs are results, of which no pair is made."""
    if graph.program.learns:
        return wish

    def also(call: RoledCall) -> str | None:
        product = product_of(graph, call)
        if product is None or graph.users.get((call.name, 0)):
            return wish(call)
        return wish(call) or product.column

    return also


def vocabulary(graph: RoledProgram) -> frozenset[str]:
    """The lookups by inputs in the largest table there is: token embeddings, not types or positions."""
    lookups = {
        call.name: call.bound.sizes.get("k", 0) for call in graph.learned if call.is_lookup and not call.weight_only
    }
    return frozenset(name for name, size in lookups.items() if size == max(lookups.values()))


def in_chunks(graph: RoledProgram, products: Mapping[str, str], wish: Wish, parts: int, name: str) -> Wish:
    """The same wish, but for products between split positions, where columns and rows divide into so many parts.

    They run by the implementation of that name where it offers what is wished. `products` are those of which an axis
    splits columns or rows, with the factor. Columns gather their inputs if nothing else takes these whole: a plain
    gather serves all that do.
    """

    def can(call: RoledCall, factor: str | None) -> bool:
        offers = (choice.name for each in call.op.implementations if each.name == name for choice in each.choices)
        if factor is None or call.name not in products or together(call.call, factor) not in offers:
            return False
        rows = leading_factors(call.call)[-1]
        return call.factor_of("sequence") == rows and not any(call.bound.sizes[f] % parts for f in (rows, factor))

    def gathers(call: RoledCall) -> bool:
        """Return whether all products of the input gather it in chunks, and all else takes it in parts."""

        def fits(other: RoledCall, position: int) -> bool:
            factor = wish(other)
            if position == 0 and other.node.target is call.node.target:
                return factor == ENTERING and can(other, factor)
            return factor == other.factor_of("sequence")

        return all(fits(*use) for use in graph.users[call.inputs[0]])

    def found(call: RoledCall) -> str | None:
        factor = wish(call)
        if factor is None or not can(call, factor) or (factor == ENTERING and not gathers(call)):
            return factor
        return f"{together(call.call, factor)}{VIA}{name}"

    return found
