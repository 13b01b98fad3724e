"""Buckets of parameters: exact gradients however they are requested, started early and waited for late."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.costs.space.parameter_buckets import MOST_RUNNING
from autopar.runtime.collectives import gradient_buckets
from autopar.runtime.collectives.gradient_buckets import gather_parameters, reduce_gradients
from autopar.runtime.collectives.left_running import Pending
from autopar.runtime.collectives.mesh_axes import record_traffic, use_mesh
from autopar.runtime.collectives.regather import Regather
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.simulate import from_ranks, local_values, simulate

WIDTH = 6


def _weights(count: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(count)]


def _input(rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))


def _forward(x: Tensor, weights: Any) -> Tensor:
    for weight in weights:
        x = torch.tanh(torch.nn.functional.linear(x, weight))
    return x.square().sum()


def _expected(world_size: int, **keywords: Any) -> list[Tensor]:
    """Gradients on one process that sees the inputs of all ranks."""
    weights = _weights(**keywords)
    loss = sum((_forward(_input(rank), weights) for rank in range(world_size)), torch.zeros(()))
    return list(torch.autograd.grad(loss, weights))


def _bucketed(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Two buckets at the entry, as the rewritten graph has them."""
    return _forward(x, (*reduce_gradients("x", *weights[:2]), *reduce_gradients("x", *weights[2:])))


def _reduced_in_every_way() -> dict[str, list[Tensor]]:
    line = mesh((2,), ("x",))
    x, weights = _input(line.get_rank()), _weights()
    with use_mesh(line), record_traffic() as traffic:
        loss = _bucketed(x, weights)
        found = {"grad": list(torch.autograd.grad(loss, weights, retain_graph=True))}
        found["some"] = list(torch.autograd.grad(loss, weights[1:3], retain_graph=True))
        loss.backward(retain_graph=True)
        loss.backward()
        found["twice"] = [w.grad.clone() for w in weights if w.grad is not None]
        _bucketed(x, weights).backward()
        found["thrice"] = [w.grad for w in weights if w.grad is not None]
    # 2 buckets in 5 backwards.
    assert traffic.num_bytes == {("all_reduce", "x"): 5 * 4 * WIDTH * WIDTH * 4}
    assert traffic.calls["all_reduce", "x"] == 10
    return found


def _detached_once() -> None:
    line = mesh((2,), ("x",))
    x, weights = _input(line.get_rank()), _weights()
    with use_mesh(line):
        with _Detached() as detached:
            before = reduce_gradients("x", *weights)
        assert detached.count == len(weights)
        assert not any(each._is_view() for each in before)
        loss = _forward(x, before)
        reduce_gradients("x", *weights)
        loss.backward()
        loss = _forward(x, reduce_gradients("x", *weights))
        with torch.no_grad():
            weights[1].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class _Detached(TorchDispatchMode):
    """Mode that counts the calls of `detach`."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.detach.default
        return func(*args, **(kwargs or {}))


def test_weights_are_detached_once_and_a_step_between_changes_none(ranks: Ranks) -> None:
    ranks.run(_detached_once)


def test_bucketed_gradients_are_exact_however_often_they_are_requested(ranks: Ranks) -> None:
    expected = _expected(2)
    for found in ranks.run(_reduced_in_every_way):
        torch.testing.assert_close(found["grad"], expected)
        torch.testing.assert_close(found["some"], expected[1:3])
        torch.testing.assert_close(found["twice"], [2 * g for g in expected])
        torch.testing.assert_close(found["thrice"], [3 * g for g in expected])


def _recorded(event: str, log: list[str]) -> Any:
    return lambda *_: log.append(event)


def _events() -> list[str]:
    """Return the events in the backward of two buckets of two layers each, in order."""
    line = mesh((2,), ("x",))
    log: list[str] = []
    weights = _weights()
    started, waited = gradient_buckets._all_reduce_in_place, Pending.wait
    gradient_buckets._all_reduce_in_place = lambda *args: (log.append("start"), started(*args))[1]
    Pending.wait = lambda self: (log.append("wait"), waited(self))[1]
    try:
        with use_mesh(line):
            inside = (*reduce_gradients("x", *weights[:2]), *reduce_gradients("x", *weights[2:]))
            x = _input(line.get_rank())
            for number, weight in enumerate(inside):
                x = torch.tanh(torch.nn.functional.linear(x, weight))
                assert x.grad_fn is not None
                x.grad_fn.register_hook(_recorded(f"layer {number}", log))
            x.sum().backward()
    finally:
        gradient_buckets._all_reduce_in_place, Pending.wait = started, waited
    return log


def test_a_reduction_starts_while_the_backward_goes_on_and_is_waited_for_at_its_end(ranks: Ranks) -> None:
    for events in ranks.run(_events):
        assert events == ["layer 3", "layer 2", "start", "layer 1", "layer 0", "start", "wait", "wait"]


def _running() -> list[int]:
    """Return the number of running buckets after each of four has started, and after the backward."""
    line = mesh((2,), ("x",))
    counts: list[int] = []
    started = gradient_buckets.started
    gradient_buckets.started = lambda *args: (started(*args), counts.append(len(Pending.running)))[0]
    try:
        with use_mesh(line):
            x = _input(line.get_rank())
            for weight in _weights():
                part = weight.detach()[: WIDTH // 2].requires_grad_()
                x = torch.tanh(torch.nn.functional.linear(x, *gather_parameters("x", (0,), (WIDTH,), part)))
            x.sum().backward()
    finally:
        gradient_buckets.started = started
    return [*counts, len(Pending.running)]


def test_the_oldest_scattering_is_waited_for_when_too_many_run(ranks: Ranks) -> None:
    assert ranks.run(_running) == [[1, MOST_RUNNING, MOST_RUNNING, MOST_RUNNING, 0]] * 2


def _chained(count: int, is_ready: int) -> list[Tensor]:
    """Gradients of weights that are gathered over `x` and reduced over `y`, when all of them are there at once.

    Before that, weights that are gathered over `x` only, and of which the second rank of `y` has fewer rows.
    """
    grid = mesh((2, 2), ("x", "y"))
    place = grid.get_local_rank("y")
    scale = float(1 + grid.get_rank())
    weights = [torch.full((2, 3), float(number), requires_grad=True) for number in range(count)]
    short = [torch.ones(2 - place, 3, requires_grad=True) for _ in range(is_ready)]
    with use_mesh(grid):
        moved: list[Tensor] = []
        for shard in short:
            whole_rows = torch.nn.functional.pad(shard, [0, 0, 0, 1]) if place else shard
            moved += gather_parameters("x", (1,), (6,), whole_rows)
        for weight in weights:
            moved += gather_parameters("x", (0,), (4,), *reduce_gradients("y", weight))
        gradients = [torch.full_like(each, scale * 10**number) for number, each in enumerate(moved)]
        torch.autograd.backward(moved, gradients)
    return [weight.grad for weight in (*short, *weights) if weight.grad is not None]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("padded", [1, 2, 3])
def test_ranks_that_pad_start_their_collectives_in_the_order_of_those_that_do_not(
    ranks: Ranks, count: int, padded: int
) -> None:
    for rank, found in enumerate(ranks.run(_chained, count, padded, world_size=4)):
        column = rank % 2  # of the ranks 0 to 3, given the scales 1 to 4
        over_x = float((1 + column) + (3 + column))
        for number, gradient in enumerate(found):
            expected = (over_x if number < padded else 1 + 2 + 3 + 4) * 10**number
            torch.testing.assert_close(gradient, torch.full_like(gradient, expected))


def _reduced_in_place() -> tuple[Tensor, list[int]]:
    """The gradient of a parameter, and where it lay before it was reduced and after."""
    line = mesh((2,), ("x",))
    places: list[int] = []
    (weight,) = _weights(1)
    with use_mesh(line):
        (inside,) = reduce_gradients("x", weight, in_place=True)
        for each in (inside, weight):
            each.register_hook(lambda gradient: places.append(gradient.data_ptr()))
        torch.nn.functional.linear(_input(line.get_rank()), inside).square().sum().backward()
    assert weight.grad is not None
    return weight.grad, places


def test_a_gradient_that_is_nobody_elses_is_reduced_where_it_lies(ranks: Ranks) -> None:
    (weight,) = _weights(1)
    loss = sum((torch.nn.functional.linear(_input(rank), weight).square().sum() for rank in range(2)), torch.zeros(()))
    (expected,) = torch.autograd.grad(loss, [weight])
    for gradient, (before, after) in ranks.run(_reduced_in_place):
        torch.testing.assert_close(gradient, expected)
        assert before == after


def _mixed() -> tuple[list[Tensor | None], dict[tuple[str, str], int]]:
    """A bucket of two dtypes with a frozen parameter, one that is not used and one that is no leaf."""
    line = mesh((2,), ("x",))
    a, c = torch.ones(3, requires_grad=True), torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    frozen, unused = torch.ones(4), torch.ones(5, requires_grad=True)
    with use_mesh(line), record_traffic() as traffic:
        a2, c2, frozen2, _, d = reduce_gradients("x", a, c, frozen, unused, a * 2)
        assert not frozen2.requires_grad
        ((a2.sum() + c2.sum() + frozen2.sum() + d.sum()) * (line.get_rank() + 1)).backward()
    return [a.grad, c.grad, frozen.grad, unused.grad], dict(traffic.num_bytes)


def test_a_bucket_of_many_kinds(ranks: Ranks) -> None:
    for (a, c, frozen, unused), traffic in ranks.run(_mixed):
        torch.testing.assert_close(a, torch.full((3,), 9.0))
        torch.testing.assert_close(c, torch.full((2,), 3.0, dtype=torch.bfloat16))
        assert frozen is None
        assert unused is None
        assert traffic == {("all_reduce", "x"): 4 * (3 + 3) + 2 * 2}


def test_a_bucket_on_simulated_ranks() -> None:
    with simulate(2), use_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("x",))):
        x = from_ranks([_plain_input(0), _plain_input(1)])
        weights = [from_ranks([w] * 2, requires_grad=True) for w in WEIGHTS]
        found = [local_values(g) for g in torch.autograd.grad(_bucketed(x, weights), weights)]
    for by_rank, expected in zip(found, _expected(2), strict=True):
        for gradient in by_rank:
            torch.testing.assert_close(gradient, expected)


WEIGHTS = [w.detach() for w in _weights()]
INPUTS = [_input(0), _input(1)]


def _plain_input(rank: int) -> Tensor:
    return INPUTS[rank]


SHAPES = ((4, 6), (6, 5), (3, 7), (5,))
DIMS = (0, 1, 0, 0)  # the last three do not divide


def _whole_parameters() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(shape) for shape in SHAPES]


def _shards(rank: int, k: int = 2) -> list[Tensor]:
    """This rank's shards, with sevens in the padding."""
    shards = []
    for whole, dim in zip(_whole_parameters(), DIMS, strict=True):
        shape = list(whole.shape)
        shape[dim] = -shape[dim] % k
        padded = torch.cat([whole, torch.full(shape, 7.0)], dim)
        shards.append(padded.chunk(k, dim)[rank].contiguous().requires_grad_())
    return shards


def _use(a: Tensor, b: Tensor, c: Tensor, d: Tensor, scale: float) -> Tensor:
    x = torch.nn.functional.linear(torch.ones(2, 6), a) @ torch.ones(4, 6) * scale
    return (torch.tanh(x @ b) + d).square().sum() + (c.t() @ c).sin().sum() * scale


def _gathered(regather: tuple[int, ...]) -> dict[str, Any]:
    line = mesh((2,), ("x",))
    rank = line.get_rank()
    shards = _shards(rank)
    sizes = tuple(shape[dim] for shape, dim in zip(SHAPES, DIMS, strict=True))
    with use_mesh(line), record_traffic() as traffic:
        with Regather():
            whole = gather_parameters("x", DIMS, sizes, *shards, regather=regather)
            loss = _use(*whole, scale=rank + 1.0)
        values = [w.detach().clone() for w in whole]
        alive = [weakref.ref(w.untyped_storage()) for w in whole]
        del whole
        gc.collect()
        kept = sum(ref() is not None for ref in alive)
        loss.backward(retain_graph=True)
        once = dict(traffic.num_bytes)
        first = [s.grad.clone() for s in shards if s.grad is not None]
        loss.backward()
    twice = [s.grad for s in shards if s.grad is not None]
    return {
        "values": values, "first": first, "twice": twice, "kept": kept, "once": once, "traffic": dict(traffic.num_bytes)
    }  # fmt: skip


@pytest.mark.parametrize("regather", [(), (0, 1, 2, 3), (1, 3)])
def test_parameters_gathered_in_a_bucket(ranks: Ranks, regather: tuple[int, ...]) -> None:
    whole = [w.requires_grad_() for w in _whole_parameters()]
    loss = _use(*whole, scale=1.0) + _use(*whole, scale=2.0)
    expected = torch.autograd.grad(loss, whole)
    found = ranks.run(_gathered, regather)
    numel = again = 0
    for i, dim in enumerate(DIMS):
        values = [each["values"][i] for each in found]
        torch.testing.assert_close(values, [whole[i].detach()] * 2)
        joined = torch.cat([each["first"][i] for each in found], dim)
        size = SHAPES[i][dim]
        torch.testing.assert_close(joined.narrow(dim, 0, size), expected[i])
        assert not joined.narrow(dim, size, joined.shape[dim] - size).any()
        torch.testing.assert_close([each["twice"][i] for each in found], [2 * each["first"][i] for each in found])
        numel += math.prod(joined.shape)
        again += math.prod(joined.shape) if i in regather else 0
    for each in found:
        # The backward needs b and c: a multiplies ones, d is added.
        assert each["kept"] == 2 - len({1, 2}.intersection(regather))
        assert each["once"] == {("all_gather", "x"): 4 * (numel + again), ("reduce_scatter", "x"): 4 * numel}
        assert each["traffic"] == {("all_gather", "x"): 4 * (numel + 2 * again), ("reduce_scatter", "x"): 8 * numel}


def _storages() -> tuple[list[Tensor], int]:
    """Vectors of a number per rank and a matrix, gathered together, and how many storages they have."""
    line = mesh((2,), ("x",))
    rank = line.get_rank()
    shards = (torch.full((1,), float(rank)), torch.full((1,), float(rank)), torch.full((3, 1), float(rank)))
    with use_mesh(line):
        whole = gather_parameters("x", (0, 0, 1), (2, 2, 2), *shards)
    return list(whole), len({each.untyped_storage().data_ptr() for each in whole})


def test_gathered_weights_have_storages_of_their_own(ranks: Ranks) -> None:
    for whole, num_storages in ranks.run(_storages):
        row = torch.tensor([0.0, 1.0])
        torch.testing.assert_close(whole, [row, row, row.expand(3, 2)])
        assert num_storages == 3


def _frozen_gather() -> list[Any]:
    line = mesh((2,), ("x",))
    first, second = torch.ones(2, 3), torch.ones(2, 3, requires_grad=True)
    with use_mesh(line), record_traffic() as traffic:
        a, b = gather_parameters("x", (0, 0), (4, 4), first, second)
        assert (a.requires_grad, b.requires_grad) == (False, True)
        (a * b).sum().backward()
    return [first.grad, second.grad, dict(traffic.num_bytes)]


def test_a_frozen_parameter_is_gathered_and_gets_no_gradient(ranks: Ranks) -> None:
    for first, second, traffic in ranks.run(_frozen_gather):
        assert first is None
        torch.testing.assert_close(second, torch.full((2, 3), 2.0))
        assert traffic == {("all_gather", "x"): 2 * 4 * 12, ("reduce_scatter", "x"): 4 * 12}


def _compiled() -> tuple[list[Tensor], list[Tensor]]:
    line = mesh((2,), ("x",))
    rank = line.get_rank()
    sizes = tuple(shape[dim] for shape, dim in zip(SHAPES, DIMS, strict=True))

    def step(*parameters: Tensor) -> Tensor:
        shards, weights = parameters[:4], list(parameters[4:])
        whole = gather_parameters("x", DIMS, sizes, *shards, regather=tuple(range(len(shards))))
        return _use(*whole, scale=rank + 1.0) + _bucketed(_input_of_rank, weights)

    _input_of_rank = _input(rank)
    found = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        parameters = [*_shards(rank), *_weights()]
        with use_mesh(line):
            loss = function(*parameters)
        found.append([loss, *torch.autograd.grad(loss, parameters)])
    return found[0], found[1]


def test_buckets_compile_into_one_graph(ranks: Ranks) -> None:
    for eager, compiled in ranks.run(_compiled, timeout=300):
        torch.testing.assert_close(eager, compiled)


def _summed_in_own_buckets() -> tuple[Tensor, Tensor]:
    """Gradients of a sum of two weights, each in a bucket of its own: autograd gives both the same tensor."""
    line = mesh((2,), ("x",))
    one, other = _weights(2)
    with use_mesh(line):
        moved = reduce_gradients("x", one)[0] + reduce_gradients("x", other)[0]
        _forward(_input(line.get_rank()), (moved,)).backward()
    assert one.grad is not None and other.grad is not None
    return one.grad, other.grad


def test_a_gradient_that_two_buckets_get_is_reduced_once_in_each(ranks: Ranks) -> None:
    one, other = _weights(2)
    sum((_forward(_input(rank), (one + other,)) for rank in range(2)), torch.zeros(())).backward()
    for found in ranks.run(_summed_in_own_buckets):
        torch.testing.assert_close(found, (one.grad, other.grad))
