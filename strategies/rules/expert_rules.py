"""Experts: which of tokens, experts and features a mesh axis divides.

Legend in `ir.program.operators.expert_operators`.

    choice   x, index     rows, counts, ids, route   weight   weights → y     own communication
    t        S(0), S(0)   S(0), P, S(0), S(0)        I → R    S(0) → S(0)     -
    x        R, I         S(0), S(0), S(0), I        S(0)     R → P           -
    t+x      S(0), S(0)   S(0), S(0), S(0), S(0)     S(0)     S(0) → S(0)     all-to-all at both ends
    d        S(1), I      S(1), I, I, I              -        R → S(1)        -
    R        R, I         R, I, I, I                 -        -               -
    o, k     -            S(1) of rows               S(2), S(1)

t divides tokens and leaves all experts to every rank (data parallelism); x divides experts, of which every rank sees
all tokens; t+x divides both, so that rows travel to their experts and home (GShard, Lepikhin et al. 2020). There is a t
for every leading dim of the tokens (a, b, …), of which the first two are samples and positions. The data determine a
rank's rows under x and t+x: no move splits or joins them. Where counts and route lie tells the choices apart, so that
both ends, and all between, make the same one. Under R parts of gradients, as columns leave them, come back with the
tokens, which are fewer than their rows.

A capacity is one of each sample: where t divides positions, the numbers of all its tokens' experts are gathered first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.ir.program.operators.capacity import WITHIN_CAPACITY, padded_rows
from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH, GROUPED_MM, OF_EXPERT
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.layout import I, P, Placement, R, S
from autopar.ir.sharding.operation import Call, Collective, Implementation, LocalSizes, OpRule
from autopar.ir.sharding.rule import PASS_REPLICATED, TOGETHER, WHOLE, Choice
from autopar.strategies.notation import Entry, batch_names, rule, term

EXPERTS = "x"
COUNT_BYTES = 8


def dispatch(call: Call) -> OpRule:
    """Every leading dim of the tokens may be divided, each alone or together with the experts."""
    dims = tokens_of(call.inputs[1].shape)
    names = " ".join(dims)
    rows = f"({names} k)"

    def choice(name: str, x: Placement, index: Placement, *outputs: Placement) -> Choice:
        return Choice(name, (x, index), (*outputs, I))

    split = [
        found
        for dim, name in enumerate(dims)
        for found in (
            choice(name, S(dim), S(dim), S(0), P, S(0), S(dim)),
            choice(name + TOGETHER + EXPERTS, S(dim), S(dim), S(0), S(0), S(0), S(dim)),
        )
    ]
    return OpRule(
        f"{names} d, {names} _ -> {rows} d, x, {rows}, {names} _, _",
        (Dispatch(),),
        choices=(
            *split,
            choice(EXPERTS, R, R, S(0), S(0), S(0), I),
            choice("d", S(len(dims)), R, S(1), I, I, I),
            choice(PASS_REPLICATED, R, R, R, I, I, I),
        ),
    )


def within_capacity(call: Call) -> str:
    """The samples: which rows of one are dropped follows from all of its positions."""
    whole = [WHOLE] * (len(call.inputs[0].shape) - 1)
    dims = term([*batch_names(1), *whole])
    return rule([dims], [dims])


def grouped_mm(call: Call) -> OpRule:
    """Rows, experts, and both dims of the experts' matrices."""
    flops = 2 * call.inputs[0].num_elements * call.inputs[1].shape[-1]
    return OpRule(
        "~r k, x k o, x -> r o",
        (Implementation("experts:grouped_mm"),),
        flops=flops,
        choices=(Choice("r", (S(0), R, P), (S(0),)), Choice(EXPERTS, (S(0), S(0), S(0)), (S(0),))),
    )


def of_expert(call: Call) -> OpRule:
    """Rows, experts, and the dims of what each of them has; it reads, and multiplies nothing by the counts."""
    dims = batch_names(len(call.inputs[0].shape) - 1)
    return OpRule(
        f"x {' '.join(dims)}, r, _ -> r {' '.join(dims)}",
        (Implementation("experts:of_expert"),),
        choices=(Choice("r", (R, S(0), P), (S(0),)), Choice(EXPERTS, (S(0), S(0), S(0)), (S(0),))),
    )


def combine(call: Call) -> OpRule:
    """The dims of `dispatch`, and partial rows, which give partial tokens."""
    dims = tokens_of(call["route"].shape)
    names = " ".join(dims)
    weighted = call["weights"] is not None

    def choice(name: str, rows: Placement, slots: Placement, counts: Placement, y: Placement) -> Choice:
        weights = (slots,) if weighted else ()
        return Choice(name, (rows, *weights, slots, counts, R), (y,))

    split = [
        found
        for dim, name in enumerate(dims)
        for found in (
            choice(name, S(0), S(dim), P, S(dim)),
            choice(name + TOGETHER + EXPERTS, S(0), S(dim), S(0), S(dim)),
        )
    ]
    weights = f"{names} _, " if weighted else ""
    return OpRule(
        f"~({names} k) d, {weights}{names} _, x, _ -> {names} d",
        (Combine(),),
        choices=(*split, choice(EXPERTS, S(0), R, S(0), P)),
    )


def tokens_of(index: tuple[int, ...]) -> list[str]:
    """A factor for each leading dim of the tokens."""
    return batch_names(len(index) - 1)


def _exchanged(call: Call, sizes: LocalSizes, rows: TensorInfo) -> tuple[Collective, ...]:
    """Rows go over the axes that divide tokens and experts together, and their gradients come back.

    Uneven as rows are, these are the bytes of a rank's own tokens: exact, but where another axis divides experts alone,
    of whose share of the rows they are the mean. Padded rows are equally many everywhere.
    """
    *leading, num_experts_of_token = call["index" if call.target is DISPATCH else "route"].shape
    slots = math.prod(sizes[name] for name in batch_names(len(leading))) * num_experts_of_token
    num_bytes = slots * sizes["d"] * _reached(call, sizes) // _num_experts(call) * rows.dtype.itemsize
    moved = Collective("all_to_all", TOGETHER + EXPERTS, num_bytes)
    if (padded := call["padded"]) is not None:
        message = padded_rows(slots, _num_experts(call) // sizes[EXPERTS], padded)
        of_message = message * sizes["d"] * rows.dtype.itemsize
        moved = replace(moved, num_bytes=sizes.get(TOGETHER + EXPERTS, 1) * of_message, unpadded=num_bytes)
    return (moved, replace(moved, backward=True)) if rows.requires_grad else (moved,)


def _reached(call: Call, sizes: LocalSizes) -> int:
    """The experts that a rank's rows may go to."""
    return sizes[EXPERTS] * sizes.get(TOGETHER + EXPERTS, 1)


def _num_experts(call: Call) -> int:
    return call.outputs[1].shape[0] if call.target is DISPATCH else call["counts"].shape[0]


@dataclass(frozen=True, slots=True)
class Dispatch(Implementation):
    """Rows sent to their experts."""

    function: str = "experts:dispatch"
    in_halves: bool = True

    def traffic(self, call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
        """Return the collectives of a dispatch: first the number of rows for each expert, then the rows."""
        counts = Collective("all_to_all", TOGETHER + EXPERTS, COUNT_BYTES * _reached(call, sizes))
        return (counts, *_exchanged(call, sizes, call.outputs[0]))


@dataclass(frozen=True, slots=True)
class Combine(Implementation):
    """Rows sent home, and made tokens."""

    function: str = "experts:combine"
    in_halves: bool = True
    saves_moved: bool = True

    def traffic(self, call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
        return _exchanged(call, sizes, call.inputs[0])


RULES: dict[object, Entry] = {
    WITHIN_CAPACITY: within_capacity,
    DISPATCH: dispatch,
    GROUPED_MM: grouped_mm,
    OF_EXPERT: of_expert,
    COMBINE: combine,
}
