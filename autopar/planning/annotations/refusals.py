"""Error messages for annotations that no candidate strategy of a decision satisfies.

Every `why_…` gives the end of an error: what was found, what was needed, what to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from autopar.costs.space.space import Decision, Space
from autopar.costs.space.strategy import Strategy
from autopar.ir.program.calls import module_of
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.annotation import FACTOR, NODE, Slices, Specified
from autopar.ir.sharding.layout import P
from autopar.ir.sharding.rule import TOGETHER, VIA, factors_of
from autopar.planning.annotations.matching import Matches, operation_of
from autopar.planning.annotations.offered import offered_roles, offered_slices, output_shapes

_SHOWN = 6
_WHAT_A_ROLE_SPLITS = {
    "data": "samples",
    "column": "outputs",
    "row": "inputs",
    "sequence": "positions",
    "expert": "experts",
}


def why_no_role(space: Space, calls: Sequence[int], axis: str, role: str) -> str:
    """Return why none of the calls can be split by a role on an axis."""
    num_parts = space.mesh.size(axis)
    for number in calls:
        decision = space.decisions[number]
        factors = [factor for factor, each in decision.roles.items() if each == role]
        if factors and decision.candidates.bound is not None:
            size = decision.candidates.bound.sizes[factors[0]]
            return (
                f'{_place(decision)}: "{role}" on axis {axis} splits {size} {_WHAT_A_ROLE_SPLITS[role]} into '
                f"{num_parts} parts; {_divisors(size)}. Use an axis of such a size, or one of "
                f"{_quoted(_offered(space, [number], axis))}."
            )
    found = ", ".join(dict.fromkeys(operation_of(space.decisions[number]) for number in calls))
    return (
        f'nothing it matches has a "{role}"; the operations found there ({found or "none"}) offer '
        f"{_quoted(_offered(space, calls, axis))} on axis {axis}. "
        f"Use one of these, or annotate an operation with a {role}."
    )


def why_no_row_of_first_layer(decision: Decision) -> str:
    """Return why the first layers of an MLP in tiles cannot be split by their inputs."""
    return (
        f'{_place(decision)}: an MLP in tiles has the inputs of its first layers whole; give these "column", or leave '
        "mlp_tiles out."
    )


def why_no_operation_named(found: Matches, pattern: str, axis: str) -> str:
    """Return why what a pattern matches has no factors."""
    if found.kind == "parameter":
        return (
            f"{pattern} is a parameter, and only operations have factors; "
            f"say along which dim it is stored, as in {axis}=0."
        )
    return (
        f'a factor belongs to the rule of an operation, and "{pattern}" is a module; '
        f'name operations in it, as in "{pattern}.linear", or one node, as in "{NODE}linear_default", or give a role.'
    )


def why_no_factor(space: Space, decision: Decision, axis: str, factor: str) -> str:
    """Return why one operation cannot be split by a factor of its rule on an axis."""
    index, bound, num_parts = space.mesh.index(axis), decision.candidates.bound, space.mesh.size(axis)
    assert bound is not None
    offered = dict.fromkeys(_named(strategy, index) for strategy in decision.candidates.strategies)
    words = _quoted(f"{FACTOR}{each}" for each in offered if factors_of(each))
    for each in factors_of(factor.removeprefix(TOGETHER)):
        size = bound.sizes.get(each, num_parts)
        if size % num_parts:
            return (
                f'{_place(decision)}: "{FACTOR}{factor}" on axis {axis} splits {size} into {num_parts} parts; '
                f"{_divisors(size)}. Use an axis of such a size, or one of {words}."
            )
    return f'the rule of {decision.name} is "{bound.rule}", which offers {words} on axis {axis}. Name one of these.'


def _named(strategy: Strategy, axis: int) -> str:
    """Return the choice on an axis, with the implementation where that has a name."""
    name = strategy.implementation.name
    return f"{strategy.choices[axis]}{VIA}{name}" if name else strategy.choices[axis]


def why_no_dim(space: Space, numbers: Sequence[int], pattern: str, specified: Specified) -> str:
    """Return why there is no tensor with such a dim."""
    if not numbers:
        return f'"{pattern}" gives no value that is used elsewhere; annotate the operation that makes the value.'
    shapes = dict.fromkeys(
        f"{_place(space.decisions[n])} {list(output_shapes(space.decisions[n])[0])}" for n in numbers
    )
    return f"there is no dim {specified}; found {_first_few(shapes)}. Dims count from 0, or from -1 at the end."


def why_no_split(space: Space, decision: Decision, axis: str, specified: Specified) -> str:
    """Return why a tensor cannot have a placement on one axis."""
    offered = dict.fromkeys(_placement_words(space, decision, axis))
    shape = next(
        (s for s in output_shapes(decision) if isinstance(specified, int) and -len(s) <= specified < len(s)), ()
    )
    where = f"{_place(decision)} {list(output_shapes(decision)[0])}"
    if isinstance(specified, int) and shape[specified] % space.mesh.size(axis):
        size = shape[specified]
        return (
            f"{where}: dim {specified} on axis {axis} splits {size} into {space.mesh.size(axis)} parts; "
            f"{_divisors(size)}. Use an axis of such a size, or {_first_few(offered)}."
        )
    wanted = "be equal everywhere" if specified is None else f"be split along dim {specified}"
    return f"{where} cannot {wanted} on axis {axis}; it can have {_first_few(offered)}. Use one of these."


def why_no_operation(space: Space, calls: Sequence[int], wanted: Slices) -> str:
    """Return why slices fit no operation."""
    found = dict.fromkeys(_signature(space.decisions[number]) for number in calls)
    ranks = ", ".join(str(len(each)) for each in wanted)
    return (
        f"it states slices of {len(wanted)} tensors with {ranks} dims; found {_first_few(found)}. "
        "Give a tuple per tensor input with a number per dim."
    )


def why_no_slices(space: Space, decision: Decision, wanted: Slices) -> str:
    """Return why an operation cannot be sliced so."""
    offered = dict.fromkeys(str(e[: len(wanted)]) for e in offered_slices(decision, space.mesh.sizes) if e is not None)
    return (
        f"{_place(decision)}: {_signature(decision)} on the mesh {space.mesh} cannot be cut into {wanted}. "
        f"Use one of {_first_few(offered)}."
    )


def why_no_storage(space: Space, found: Matches, axes: Sequence[str]) -> str:
    """Return why no parameter can be stored split."""
    if not found.parameters:
        return f"it matches {found.kind}s without parameters, and storage is about parameters; name some."
    shapes = dict.fromkeys(
        f"{_place(space.decisions[number])} {list(output_shapes(space.decisions[number])[0])}"
        for number in found.parameters
    )
    num_parts = math.prod(space.mesh.size(axis) for axis in axes)
    return (
        f"none can be stored in {num_parts} parts over {', '.join(axes)}; found {_first_few(shapes)}. "
        "Leave storage out here."
    )


def why_no_layout(space: Space, decision: Decision, dims: Mapping[str, int | None]) -> str:
    """Return why the output of a call cannot be split along dims, one per axis."""
    shape = output_shapes(decision)[0]
    for dim, size in enumerate(shape):
        axes = [axis for axis, each in dims.items() if each == dim]
        num_parts = math.prod(space.mesh.size(axis) for axis in axes)
        if size % num_parts:
            return (
                f"dim {dim} of {size} does not divide into {num_parts} parts over {', '.join(axes)}; "
                f"{_divisors(size)}. Constrain another dim, or use axes of such a size."
            )
    found = _first_few(dict.fromkeys(str(strategy.outputs[0]) for strategy in decision.candidates.strategies))
    return f"a tensor of shape {list(shape)} can have {found} on the mesh {space.mesh}. Constrain it to one of these."


def contradiction(space: Space, decision: Decision, text: str, other: str) -> str:
    """Return the error message for two annotations that together leave a decision no strategy."""
    if text == other:
        return (
            f"{text} says things of {_place(decision)} that exclude each other on the mesh {space.mesh}: "
            f"each can hold, but not all. {_no_zigzag(space, decision)}Leave one out."
        )
    return (
        f"{text} contradicts {other}: {_place(decision)} cannot satisfy both on the mesh {space.mesh}. "
        "Remove one of them."
    )


def _no_zigzag(space: Space, decision: Decision) -> str:
    """Return a hint to pad causal positions if they do not split into two zigzag shards per device, else ""."""
    zigzag_factors = sorted({factor for strategy in decision.candidates.strategies for factor in strategy.zigzag})
    pieces = 2 * space.mesh.num_devices
    sizes = (
        [decision.candidates.bound.sizes[factor] for factor in zigzag_factors]
        if decision.candidates.bound is not None
        else []
    )
    size = next((size for size in sizes if size % pieces), None)
    if size is None:
        return ""
    return (
        "Positions of causal attention are zigzag-sharded, two chunks on each device of the axes that split them: for "
        f"all axes pad its {size} positions to {-(-size // pieces) * pieces}. "
    )


def _place(decision: Decision) -> str:
    """Return a decision's location for messages: its module, a parameter's placeholder, or the operation itself."""
    if decision.candidates.call is None:
        return decision.name
    return module_of(decision.node) or operation_of(decision)


def _signature(decision: Decision) -> str:
    """Return a call with its inputs: `linear(float32[2, 8], float32[4, 8])`."""
    call = decision.candidates.call
    inputs: tuple[TensorInfo, ...] = call.inputs if call is not None else ()
    return f"{operation_of(decision)}({', '.join(map(str, inputs))})"


def _offered(space: Space, calls: Iterable[int], axis: str) -> list[str]:
    """Return the roles that some of the calls offer on an axis."""
    index = space.mesh.index(axis)
    found = {role for number in calls for role in offered_roles(space.decisions[number])[:, index]}
    return [role for role in (*_WHAT_A_ROLE_SPLITS, "replicated") if role in found]


def _placement_words(space: Space, decision: Decision, axis: str) -> list[str]:
    """Return the placements of a decision's first output on an axis, as annotations say them."""
    index = space.mesh.index(axis)
    placements = [strategy.outputs[0][index] for strategy in decision.candidates.strategies]
    return [f"{axis}={p.dim}" if p.is_split else f"{axis}=None" for p in placements if p is not P]


def _divisors(size: int) -> str:
    found = [divisor for divisor in range(2, size + 1) if size % divisor == 0]
    if not found:
        return "it cannot be split"
    return f"{size} is divisible by {', '.join(map(str, found[:_SHOWN]))}{' …' if len(found) > _SHOWN else ''}"


def _quoted(words: Iterable[str]) -> str:
    return ", ".join(f'"{word}"' for word in words) or "nothing"


def _first_few(texts: Iterable[str]) -> str:
    found = list(texts)
    return ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
