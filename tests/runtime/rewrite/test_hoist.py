"""Work on weights that runs once per step, and work that stays in every micro-batch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.testing import assert_close

from autopar.runtime.collectives import gradient_buckets, layout_moves
from autopar.runtime.collectives.mesh_axes import record_traffic, use_mesh
from autopar.runtime.rewrite.hoist import Hoisted, hoist
from tests.support.ranks import Ranks, mesh

aten = torch.ops.aten
WIDTH = 6


def graph_of(make: Callable[[fx.Graph, dict[str, fx.Node]], Any], *names: str) -> fx.Graph:
    """A graph with these placeholders and what `make` returns as its output."""
    graph = fx.Graph()
    placeholders = {name: graph.placeholder(name) for name in names}
    graph.output(make(graph, placeholders))
    return graph


def targets(module: fx.GraphModule) -> list[str]:
    """The names of the functions that a graph calls."""
    called = [node.target for node in module.graph.nodes if node.op == "call_function"]
    return [getattr(target, "__name__", str(target)) for target in called]


def placeholders(module: fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if node.op == "placeholder"]


def _layer(graph: fx.Graph, given: dict[str, fx.Node]) -> Any:
    call = graph.call_function
    low = call(aten.to.dtype, (given["w"], torch.float64))
    moved = call(layout_moves.all_reduce, (low, "x"))
    bias = call(aten.to.dtype, (given["b"], torch.float64))
    x = call(aten.to.dtype, (given["x"], torch.float64))
    y = call(layout_moves.all_reduce, (call(aten.linear.default, (x, moved, bias)), "x"))
    return call(aten.tanh.default, (y,)), given["table"]


def test_weights_are_cast_and_moved_outside_and_activations_inside() -> None:
    found = hoist(graph_of(_layer, "w", "b", "table", "x"), ["w", "b"])
    assert found.parameters == ("w", "b") and found.others == ("table", "x")
    assert targets(found.weights) == ["to.dtype", "all_reduce", "to.dtype"]
    assert targets(found.body) == ["to.dtype", "linear.default", "all_reduce", "tanh.default"]
    assert placeholders(found.weights) == ["w", "b"]
    assert placeholders(found.body)[2:] == ["table", "x"] and len(placeholders(found.body)) == 4


def _bucket(regather: tuple[int, ...]) -> Callable[[fx.Graph, dict[str, fx.Node]], Any]:
    def make(graph: fx.Graph, given: dict[str, fx.Node]) -> Any:
        call = graph.call_function
        weights = (given["a"], given["b"])
        both = call(gradient_buckets.gather_parameters, ("x", (0, 1), (WIDTH, WIDTH), *weights), {"regather": regather})
        first, second = (call(operator.getitem, (both, i)) for i in range(2))
        y = call(aten.tanh.default, (call(aten.linear.default, (given["x"], first)),))
        return (call(aten.sum.default, (call(aten.linear.default, (y, second)),)),)

    return make


@pytest.mark.parametrize("regather", [(), (0, 1)])
def test_a_bucket_is_gathered_once_unless_it_is_gathered_again_in_the_backward(regather: tuple[int, ...]) -> None:
    found = hoist(graph_of(_bucket(regather), "a", "b", "x"), ["a", "b"])
    gathers = ["gather_parameters", "getitem", "getitem"]
    assert targets(found.weights) == ([] if regather else gathers)
    assert targets(found.body)[:3] == (gathers if regather else targets(found.body)[:3])
    assert ("gather_parameters" in targets(found.body)) == bool(regather)


def test_of_a_bucket_only_what_is_gathered_again_is_gathered_in_every_micro_batch() -> None:
    found = hoist(graph_of(_bucket((1,)), "a", "b", "x"), ["a", "b"])
    (once,) = (node for node in found.weights.graph.nodes if node.target is gradient_buckets.gather_parameters)
    (again,) = (node for node in found.body.graph.nodes if node.target is gradient_buckets.gather_parameters)
    assert [str(each) for each in once.args] == ["x", "(0,)", f"({WIDTH},)", "a"] and not once.kwargs
    assert [str(each) for each in again.args] == ["x", "(1,)", f"({WIDTH},)", "b"]
    assert again.kwargs == {"regather": (0,)}
    assert [node.args[1] for node in found.body.graph.nodes if node.target is operator.getitem] == [0]


def _mixed(graph: fx.Graph, given: dict[str, fx.Node]) -> Any:
    call = graph.call_function
    cast = call(aten.to.dtype, (given["w"], torch.float64))
    doubled = call(aten.mul.Tensor, (given["w"], 2.0))
    moved = call(layout_moves.all_reduce, (doubled, "x"))
    alone = call(aten.ones.default, ([2],))
    return cast, given["w"], moved, alone, given["unused"]


def test_what_is_computed_from_weights_is_computed_for_every_micro_batch() -> None:
    found = hoist(graph_of(_mixed, "w", "unused"), ["w", "unused"])
    assert targets(found.weights) == ["to.dtype", "ones.default"]
    assert targets(found.body) == ["mul.Tensor", "all_reduce"]
    assert found.parameters == ("w", "unused")


def _with_tables(graph: fx.Graph, given: dict[str, fx.Node]) -> Any:
    call = graph.call_function
    angles = call(aten.mul.Tensor, (call(aten.arange.default, (4,)), given["rates"]))
    table = call(layout_moves.split, (call(aten.cos.default, (angles,)), "x", 0))
    noise = call(aten.mul.Tensor, (call(aten.rand.default, ([4],)), table))
    changed = call(aten.add.Tensor, (given["count"], 1))
    x = call(aten.mul.Tensor, (call(aten.mul.Tensor, (given["x"], table)), given["w"]))
    return x, noise, changed


def test_constants_and_slices_of_them_are_computed_once() -> None:
    graph = graph_of(_with_tables, "w", "rates", "count", "x")
    found = hoist(graph, ["w"], constants=["rates"])
    assert targets(found.weights) == ["arange.default", "mul.Tensor", "cos.default", "split"]
    assert targets(found.body) == ["rand.default", "mul.Tensor", "add.Tensor", "mul.Tensor", "mul.Tensor"]
    assert found.parameters == ("w", "rates") and found.others == ("count", "x")
    assert "arange.default" in targets(hoist(graph, ["w"]).weights), "of nothing that is given"
    assert "cos.default" not in targets(hoist(graph, ["w"]).weights), "of a buffer that may change"


def _packed(graph: fx.Graph, given: dict[str, fx.Node]) -> Any:
    call = graph.call_function
    up = call(aten.slice.Tensor, (given["w"], 0, 0, 2))
    gate = call(aten.transpose.int, (call(aten.slice.Tensor, (given["w"], 0, 2, 4)), 0, 1))
    return call(layout_moves.all_to_all, (call(aten.transpose.int, (up, 0, 1)), "x", 1, 0, 2)), gate


def test_a_view_of_a_weight_that_moves_is_moved_once_and_another_is_taken_for_every_micro_batch() -> None:
    found = hoist(graph_of(_packed, "w"), ["w"])
    assert targets(found.weights) == ["slice.Tensor", "transpose.int", "all_to_all"]
    assert targets(found.body) == ["slice.Tensor", "transpose.int"]


def test_a_weight_enters_as_it_is_and_as_it_was_moved_where_both_are_used() -> None:
    found = hoist(graph_of(_mixed, "w", "unused"), ["w", "unused"])
    assert len(placeholders(found.body)) == 4  # w, its cast, the parameter that is an output itself, and a constant
    w, unused = torch.randn(3), torch.randn(2)
    dtypes = [each.dtype for each in found.weights(w, unused)]
    assert dtypes == [torch.float32, torch.float32, torch.float64, torch.float32]


def test_a_parameter_that_nothing_uses_is_taken_and_not_handed_on() -> None:
    graph = graph_of(lambda graph, given: (given["x"],), "w", "x")
    found = hoist(graph, ["w"])
    assert found.parameters == ("w",) and found.weights(torch.ones(2)) == ()
    assert placeholders(found.body) == ["x"]


def test_metadata_stays_with_the_nodes() -> None:
    graph = graph_of(_layer, "w", "b", "table", "x")
    for number, node in enumerate(graph.nodes):
        node.meta["number"] = number
    found = hoist(graph, ["w", "b"])
    numbers = [node.meta["number"] for node in found.body.graph.nodes if node.op != "output"]
    originals = {node.meta["number"]: node for node in graph.nodes}
    for node, number in zip(found.body.graph.nodes, numbers, strict=False):
        if node.op == "call_function":
            assert originals[number].target is node.target


def _both_ways(regather: tuple[int, ...]) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
    """Gradients over three micro-batches, of the whole graph and of its halves; what each of them moved."""
    line = mesh((2,), ("x",))
    graph = graph_of(_bucket(regather), "a", "b", "x")
    wholes, halves = fx.GraphModule(torch.nn.Module(), graph), hoist(graph, ["a", "b"])
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(2)]
    micros = torch.randn(3, 4, WIDTH, generator=generator)
    rank = line.get_rank()
    weights = [full[0].chunk(2, 0)[rank].clone().requires_grad_(), full[1].chunk(2, 1)[rank].clone().requires_grad_()]
    with use_mesh(line):
        with record_traffic() as often:
            for x in micros:
                wholes(*weights, x)[0].backward()
        expected = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        with record_traffic() as once:
            _accumulate(halves, weights, micros)
    for weight, gradient in zip(weights, expected, strict=True):
        assert_close(weight.grad, gradient)
    return dict(often.calls), dict(once.calls)


def _accumulate(halves: Hoisted, weights: list[Tensor], micros: Tensor) -> None:
    moved = halves.weights(*weights)
    leaves = [each.detach().requires_grad_() for each in moved]
    for x in micros:
        halves.body(*leaves, x)[0].backward()
    gradients = [leaf.grad for leaf in leaves]
    torch.autograd.backward(moved, gradients)


@pytest.mark.parametrize(("regather", "messages"), [((), 1), ((1,), 1 + 3)])
def test_both_parts_together_give_the_gradients_of_the_whole_and_move_weights_once(
    ranks: Ranks, regather: tuple[int, ...], messages: int
) -> None:
    for often, once in ranks.run(_both_ways, regather):
        assert often == {("all_gather", "x"): 3, ("reduce_scatter", "x"): 3}
        assert once == {("all_gather", "x"): messages, ("reduce_scatter", "x"): messages}
