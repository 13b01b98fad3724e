"""Reshard paths: the shortest, priced forward and backward, and carried out to the right value and gradient."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from autopar.costs.hardware.collectives import Transfer, rearranging_seconds, transfer_seconds
from autopar.costs.hardware.load import load
from autopar.costs.hardware.overlap import OverlappedWork, Pass
from autopar.costs.hardware.profile import Link
from autopar.costs.pricing.message_sizes import Sharing
from autopar.costs.pricing.moves import Move, MovedTensor, in_bucket, transfers
from autopar.costs.pricing.reshard import COPY_TIE, ReshardPath, reshard_table
from autopar.ir.sharding.layout import I, Layout, P, Placement, R, S, Z
from autopar.ir.sharding.mesh import Mesh
from autopar.runtime.collectives.mesh_axes import use_mesh
from autopar.runtime.rewrite.moves import move_call
from tests.support.simulation.simulate import from_ranks, local_values, simulate

MESH = Mesh({"dp": 2, "tp": 2})
SHAPE = (4, 8)
HARDWARE = load("cpu")
PLACEMENTS = (I, R, P, S(0), S(1), Z(1))
LAYOUTS = tuple(Layout(pair) for pair in itertools.product(PLACEMENTS, repeat=2))
KEPT = tuple(Layout(pair) for pair in itertools.product((I, R, S(0), S(1), Z(1)), repeat=2))


def table(requires_grad: bool = True):
    tensor = MovedTensor(SHAPE, torch.float32, requires_grad)
    return reshard_table(tensor, frozenset((0, 1)), MESH, HARDWARE, zigzag_dims=frozenset((1,)))


def coordinates(rank: int) -> tuple[int, int]:
    return divmod(rank, 2)


def scatter(whole: torch.Tensor, layout: Layout, gradient: bool) -> list[torch.Tensor]:
    """Return each rank's part of a value (or gradient) in a layout; partial parts are random and sum to the whole."""

    def divided(parts: list[torch.Tensor], axis: int) -> list[torch.Tensor]:
        placement: Placement = layout[axis].transposed if gradient else layout[axis]
        found: list[torch.Tensor] = []
        for part in parts:
            if placement.zigzag:
                first, second, third, last = part.chunk(4, placement.dim)
                found += [torch.cat([first, last], placement.dim), torch.cat([second, third], placement.dim)]
            elif placement.is_split:
                found += part.chunk(2, placement.dim)
            elif placement is P:
                noise = torch.randn_like(part)
                found += [noise, part - noise]
            else:
                found += [part, part]
        return found

    return divided(divided([whole], 0), 1)


def gather(parts: list[torch.Tensor], layout: Layout, gradient: bool) -> torch.Tensor:
    """The whole value (or gradient) from what each rank holds; equal parts are checked to be equal."""

    def joined(pieces: list[torch.Tensor], axis: int) -> torch.Tensor:
        placement = layout[axis].transposed if gradient else layout[axis]
        if placement.zigzag:
            first, last, second, third = (each for piece in pieces for each in piece.chunk(2, placement.dim))
            return torch.cat([first, second, third, last], placement.dim)
        if placement.is_split:
            return torch.cat(pieces, placement.dim)
        if placement is P:
            return pieces[0] + pieces[1]
        torch.testing.assert_close(pieces[0], pieces[1])
        return pieces[0]

    return joined([joined(parts[:2], 1), joined(parts[2:], 1)], 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_paths_carry_value_and_gradient(source: Layout) -> None:
    number = LAYOUTS.index(source)
    check_paths(source, LAYOUTS[number % 8 :: 8])


@pytest.mark.slow
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_every_path_carries_value_and_gradient(source: Layout) -> None:
    check_paths(source, LAYOUTS)


def check_paths(source: Layout, targets: tuple[Layout, ...]) -> None:
    """Run the paths on four simulated ranks."""
    torch.manual_seed(0)
    paths = table()
    with simulate(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=MESH.names)
        for target in targets:
            whole, grad = torch.randn(SHAPE, dtype=torch.float64), torch.randn(SHAPE, dtype=torch.float64)
            given_value = from_ranks(scatter(whole, source, False), requires_grad=True)
            moved: torch.Tensor = given_value
            with use_mesh(mesh):
                for move in paths.path(source, target).moves:
                    call = move_call(move, SHAPE, MESH)
                    moved = call.function(moved, *call.args, **call.kwargs)
            torch.testing.assert_close(gather(local_values(moved), target, False), whole, msg=f"{source} → {target}")
            moved.backward(from_ranks(scatter(grad, target, True)))
            found = gather(local_values(given_value.grad), source, True)
            torch.testing.assert_close(found, grad, msg=f"gradient of {source} → {target}")


def message_seconds(path: ReshardPath) -> float:
    """The seconds that paths make least: without what is copied for messages, but for ties."""
    return path.seconds - (1 - COPY_TIE) * sum(rearranging_seconds(each, HARDWARE) for each in path.transfers)


@given(*[st.sampled_from(LAYOUTS)] * 3)
def test_a_detour_never_costs_less(a: Layout, b: Layout, c: Layout) -> None:
    paths = table()
    cost = lambda x, y: message_seconds(paths.path(x, y))  # noqa: E731
    assert cost(a, c) <= cost(a, b) + cost(b, c) + 1e-12


def test_no_path_moves_more_to_save_a_copy() -> None:
    """Check that P → S(1) scatters positions directly.

    Scattering samples and exchanging them for positions would copy an eighth, but move an eighth more.
    """
    tensor, mesh = MovedTensor((16, 8192, 8192), torch.bfloat16, True), Mesh({"tp": 8})
    path = reshard_table(tensor, frozenset((0, 1)), mesh, load("h100")).path(Layout((P,)), Layout((S(1),)))
    assert [each.collective for each in path.transfers] == ["reduce_scatter", "all_gather"]
    copied = 2 * 2 * 16 * 8192 * 8192
    assert [(each.packed, each.unpacked) for each in path.transfers] == [(copied, 0), (0, copied)]
    alone = sum(transfer_seconds(replace(each, packed=0, unpacked=0), mesh, load("h100")) for each in path.transfers)
    hardware = load("h100")
    copies = 2 * (copied / hardware.memory_bytes_per_s + hardware.op_latency_s)
    assert path.seconds == pytest.approx(alone + copies, rel=1e-5)


@given(*[st.sampled_from(KEPT)] * 2)
def test_the_way_back_of_the_gradient_costs_what_the_transposed_way_costs(a: Layout, b: Layout) -> None:
    paths = table()
    assert paths.path(a, b).seconds == pytest.approx(paths.path(b.transposed, a.transposed).seconds, abs=1e-8)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS))
def test_the_path_is_the_shortest_of_all_short_walks(a: Layout, b: Layout) -> None:
    """Brute force over all walks of at most three moves cannot beat the table."""
    paths = table()
    best = math.inf
    frontier = {a: 0.0}
    for _ in range(3):
        reached: dict[Layout, float] = {}
        for layout, cost in frontier.items():
            for after in LAYOUTS:
                path = paths.path(layout, after)
                if len(path.moves) == 1:
                    reached[after] = min(reached.get(after, math.inf), cost + message_seconds(path))
        frontier = reached
        best = min(best, frontier.get(b, math.inf))
    if a != b and math.isfinite(best):
        assert message_seconds(paths.path(a, b)) <= best + 1e-12


def test_a_value_without_a_gradient_moves_nothing_backward() -> None:
    paths = table(requires_grad=False)
    for a, b in itertools.product((Layout((I, S(0))), Layout((S(1), I)), Layout((P, I))), repeat=2):
        assert not any(transfer.backward for transfer in paths.path(a, b).transfers)


def test_a_split_dim_is_not_touched_below_an_inner_axis() -> None:
    both = Layout((S(0), S(0)))
    for target in LAYOUTS:
        moves = table().path(both, target).moves
        if moves and moves[0].axes == (0,):
            assert moves[0].before[1] is not S(0)


def test_a_regathered_parameter_is_gathered_twice() -> None:
    kept = MovedTensor(SHAPE, torch.float32, True, bucketed=True)
    freed = MovedTensor(SHAPE, torch.float32, True, bucketed=True, regather=True)
    names = {}
    for tensor in (kept, freed):
        paths = reshard_table(tensor, frozenset((0, 1)), MESH, HARDWARE)
        (move,) = paths.path(Layout((S(0), I)), Layout((R, I))).moves
        names[tensor.regather] = [t.collective for t in transfers(move, tensor, MESH, tensor.regather)]
    assert names[False] == ["all_gather", "reduce_scatter"]
    assert names[True] == ["all_gather", "reduce_scatter", "all_gather"]


def test_a_weight_to_be_gathered_again_is_gathered_where_sums_are_faster() -> None:
    """Check that `regather` gathers a weight with all_gather even if all_reduce is faster, as with gloo.

    An all-reduce of a part among zeros also makes the whole weight, but saves it for the backward.
    """
    links = tuple(
        replace(link, efficiencies=replace(link.efficiencies, all_gather=0.01, reduce_scatter=0.01))
        for link in HARDWARE.links
    )
    found = {}
    for regather in (False, True):
        tensor = MovedTensor((1 << 10, 1 << 10), torch.float32, True, bucketed=True, regather=regather)
        paths = reshard_table(tensor, frozenset((0,)), MESH, replace(HARDWARE, links=links))
        path = paths.path(Layout((S(0), I)), Layout((R, I)))
        found[regather] = ({t.collective for t in path.transfers}, any(path.regathered))
    assert found == {False: ({"all_reduce"}, False), True: ({"all_gather", "reduce_scatter"}, True)}


def test_a_parameter_pays_the_latency_of_a_move_that_no_bucket_takes() -> None:
    alone = MovedTensor(SHAPE, torch.float32, True, sharing=Sharing(reduced=100))
    bucketed = replace(alone, bucketed=True)
    seconds = {}
    for tensor in (alone, bucketed):
        paths = reshard_table(tensor, frozenset(), MESH, HARDWARE)
        for source, target in ((I, R), (P, I)):  # a gradient reduced in the backward, a sum made in the forward
            path = paths.path(Layout((source, I)), Layout((target, I)))
            seconds[tensor.bucketed, source] = path.seconds
            assert [message is not None for message in path.messages] == [tensor.bucketed and source is I]
    assert seconds[True, I] < seconds[False, I] / 10
    assert seconds[True, P] == seconds[False, P]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [(I, R, True), (S(0), R, True), (S(0), I, False), (S(0), S(1), False), (P, S(0), False), (R, I, False)],
)
def test_buckets_take_gathers_for_use_and_reductions_of_gradients(
    source: Placement, target: Placement, expected: bool
) -> None:
    move = Move((0,), Layout((source, I)), Layout((target, I)))
    assert bool(in_bucket(move, MovedTensor(SHAPE, torch.float32, True, bucketed=True))) is expected
    assert not in_bucket(move, MovedTensor(SHAPE, torch.float32, True))


CUBE = Mesh({"dp": 2, "cp": 2, "tp": 4})


PARAMETER = MovedTensor(
    (16, 32),
    torch.float32,
    True,
    bucketed=True,
)
BYTES_ALONE = replace(HARDWARE, links=(Link("wire", None, 0.0, 1e9),))
WHOLE_BYTES = 16 * 32 * 4
GATHERED = ("all_gather", "reduce_scatter")


def parameter_path(source: str, target: str, mesh: Mesh = MESH, tensor: MovedTensor = PARAMETER) -> ReshardPath:
    return reshard_table(tensor, frozenset((0, 1)), mesh, BYTES_ALONE).path(Layout.parse(source), Layout.parse(target))


def moved(path: ReshardPath) -> list[tuple[str, str, int]]:
    return [(t.collective, t.axis, t.num_bytes) for t in path.transfers]


@pytest.mark.parametrize(
    ("mesh", "source", "target", "collectives", "joined", "num_bytes"),
    [
        (MESH, "I I", "R R", ("all_reduce",), "dp_tp", WHOLE_BYTES),
        (CUBE, "I S(0) I", "R S(0) R", ("all_reduce",), "dp_tp", WHOLE_BYTES // 2),
        (CUBE, "I I I", "R R R", ("all_reduce",), "dp_cp_tp", WHOLE_BYTES),
        (MESH, "S(1) S(1)", "R R", GATHERED, "dp_tp", WHOLE_BYTES),
        (CUBE, "S(0) S(0) S(0)", "S(0) R R", GATHERED, "cp_tp", WHOLE_BYTES // 2),  # outer parts stay
        (CUBE, "S(0) S(1) S(0)", "R S(1) R", GATHERED, "dp_tp", WHOLE_BYTES // 2),  # so do those of another dim
    ],
    ids=str,
)
def test_a_parameter_moves_over_joined_axes_at_once(
    mesh: Mesh, source: str, target: str, collectives: tuple[str, ...], joined: str, num_bytes: int
) -> None:
    path = parameter_path(source, target, mesh)
    assert len(path.moves) == 1 and path.together
    assert moved(path) == [(collective, joined, num_bytes) for collective in collectives]


def test_a_joined_gather_of_a_weight_is_done_again_and_of_a_frozen_one_has_no_backward() -> None:
    again = parameter_path("S(0) S(0)", "R R", tensor=replace(PARAMETER, regather=True))
    assert [t.collective for t in again.transfers] == ["all_gather", "reduce_scatter", "all_gather"]
    assert again.regathered == (True,)
    frozen = parameter_path("S(0) S(0)", "I I", tensor=replace(PARAMETER, requires_grad=False))
    assert moved(frozen) == [("all_gather", "dp_tp", WHOLE_BYTES)]


@pytest.mark.parametrize(
    ("mesh", "source", "target"),
    [
        (MESH, "S(0) S(1)", "R R"),  # of two dims
        (MESH, "S(0) I", "R R"),  # a gather and a reduction
        (MESH, "I S(0)", "R R"),
        (CUBE, "S(0) S(0) S(0)", "R S(0) R"),  # not the innermost
        (Mesh({"a": 2, "b": 2, "a_b": 1}), "I I I", "R R I"),  # an axis has the name that they would have
        (Mesh({"dp": 2, "tp": 1}), "I I", "R R"),  # one device in a line
    ],
    ids=str,
)
def test_what_is_not_one_collective_moves_axis_by_axis(mesh: Mesh, source: str, target: str) -> None:
    path = parameter_path(source, target, mesh)
    assert all(len(move.axes) == 1 for move in path.moves)
    assert {axis for _, axis, _ in moved(path)} <= set(mesh.names)


def test_an_activation_moves_axis_by_axis() -> None:
    for source, target in (("I I", "R R"), ("S(0) S(0)", "R R")):
        path = parameter_path(source, target, tensor=replace(PARAMETER, bucketed=False))
        assert all(len(move.axes) == 1 for move in path.moves)


def test_a_dim_that_does_not_divide_is_split_once_and_gathered_over_one_axis() -> None:
    tensor = replace(PARAMETER, shape=(15, 32), padded=frozenset((0,)))
    paths = reshard_table(tensor, frozenset((0,)), MESH, HARDWARE)
    assert Layout.parse("S(0) S(0)") not in paths.index
    path = paths.path(Layout.parse("S(0) I"), Layout.parse("R R"))
    assert {axis for _, axis, _ in moved(path)} == {"dp", "tp"}


def test_a_path_without_moves_prints_as_a_dash() -> None:
    tensor = MovedTensor((4, 4), torch.float32, True)
    mesh = Mesh({"x": 2})
    path = reshard_table(tensor, frozenset({0}), mesh, load("cpu")).path(Layout((S(0),)), Layout((S(0),)))
    assert (str(path), path.moves) == ("-", ())


OVERLAPPED = OverlappedWork(Pass(1e3, 0.0, 10**6), Pass(1e3, 0.0, 10**6), 10)
"""More computing than any message lasts."""


@pytest.mark.parametrize(("source", "target"), [("S(0) S(1)", "R R"), ("S(1) S(0)", "R R"), ("S(0) I", "R R")])
def test_computing_hides_the_first_gather_and_the_last_reduction_of_a_weight(source: str, target: str) -> None:
    hardware = replace(HARDWARE, communication_share=0.25)
    tensor = MovedTensor(SHAPE, torch.float32, True, bucketed=True, sharing=Sharing(overlapped=OVERLAPPED))
    layouts = Layout.parse(source), Layout.parse(target)

    def moving(transfer: Transfer) -> float:
        """Without copies, which are packed together for all weights of a message."""
        return transfer_seconds(replace(transfer, packed=0, unpacked=0), MESH, hardware)

    path = reshard_table(tensor, frozenset((0, 1)), MESH, hardware).path(*layouts)
    assert len(path.moves) == 2 and path.together

    def seconds(first: Move, second: Move) -> float:
        ahead = [t for t in transfers(second, tensor, MESH, False) if not (first.gathers or t.backward)]
        found = transfers(first, tensor, MESH, False), transfers(second, tensor, MESH, False)
        return 0.25 * sum(map(moving, (*found[0], *ahead))) + sum(moving(t) for t in found[1] if t not in ahead)

    assert path.moves[0].gathers == (source != "S(0) I"), "the parts are summed, not the whole"
    assert path.seconds == pytest.approx(seconds(*path.moves), abs=3e-9)
    shortest = min(
        seconds(first, second)
        for axis in range(2)
        for first in [Move((axis,), layouts[0], layouts[0].replace(axis, R))]
        for second in [Move((1 - axis,), first.after, layouts[1])]
        if layouts[0][axis] is not R
    )
    assert path.seconds == pytest.approx(shortest, abs=3e-9)


@pytest.mark.parametrize("mesh", [MESH, CUBE], ids=str)
@pytest.mark.parametrize("reduced", [None, torch.float32])
def test_reductions_behind_the_one_gather_of_a_path_are_those_of_its_transfers(
    mesh: Mesh, reduced: torch.dtype | None
) -> None:
    tensor = replace(PARAMETER, dtype=torch.bfloat16, reduced=reduced)
    found = reshard_table(tensor, frozenset((0, 1)), mesh, HARDWARE)
    several = 0
    for source, target in itertools.product(found.layouts, repeat=2):
        here, there, expected = found.index[source], found.index[target], 0.0
        if math.isfinite(found.seconds[here, there]):
            path = found.path(source, target)
            names = [each.collective for each in path.transfers]
            if path.together and names.count("all_gather") == 1:
                pairs = [*zip(path.transfers, path.messages, strict=True)][names.index("all_gather") :]
                expected = sum(transfer_seconds(t, mesh, HARDWARE, each) for t, each in pairs if t.backward)
                several += expected > 0
        assert found.reduction_seconds[here, there] == pytest.approx(expected)
    assert several > 10


def test_a_table_keeps_no_matrix_of_all_layouts_beyond_its_targets() -> None:
    mesh = Mesh({"dp": 2, "cp": 2, "tp": 2})
    tensor = MovedTensor((8, 16), torch.float32, True, bucketed=True, regather=True)
    found = reshard_table(tensor, frozenset((0, 1)), mesh, load("h100"), targets=(Layout.parse("R R R"),))
    arrays = list[np.ndarray]()
    for each in vars(found).values():
        owned = (getattr(each, field.name) for field in fields(each)) if is_dataclass(each) else (each,)
        arrays += (array if array.base is None else array.base for array in owned if isinstance(array, np.ndarray))
    assert len(arrays) > 6 and max(array.size for array in arrays) < len(found.layouts) ** 2


@pytest.mark.parametrize("is_weight", [False, True])
def test_a_table_to_some_targets_has_the_paths_of_the_table_to_all(is_weight: bool) -> None:
    mesh = Mesh({"dp": 2, "cp": 2, "tp": 2})
    tensor = MovedTensor((8, 16), torch.float32, True, bucketed=is_weight, regather=is_weight)
    targets = tuple(map(Layout.parse, ("R R P", "S(0) I S(1)", "I I R")))
    some, every = (
        reshard_table(tensor, frozenset((0, 1)), mesh, load("h100"), targets=each) for each in (targets, None)
    )
    left, right = ([table.column[layout] for layout in targets] for table in (some, every))
    for name in ("seconds", "forward_seconds", "last_gather_seconds", "reduction_seconds"):
        np.testing.assert_array_equal(getattr(some, name)[:, left], getattr(every, name)[:, right], name)
    for source, target in itertools.product(every.layouts, targets):
        if np.isfinite(every.seconds[every.index[source], every.column[target]]):
            assert some.path(source, target) == every.path(source, target)
