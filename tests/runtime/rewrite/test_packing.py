"""Products with all pieces of one weight become one product, which gives the same values and gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import autopar
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import built_in
from autopar.planning.settings import context_of
from autopar.runtime.implementations.experts import grouped_mm
from autopar.runtime.rewrite.packing import OUTPUT_DIM, pack_products
from autopar.runtime.rewrite.per_rank_graph import rewrite

aten = torch.ops.aten
ROWS = 5
PRODUCTS = [aten.linear.default, aten.matmul.default]


def pieces(target: Any, places: list[tuple[int, int]], has_bias: bool, width: int) -> tuple[fx.GraphModule, bool]:
    """A graph of products with these parts of a weight of this width, packed where it can be; and whether it was."""
    graph = fx.Graph()
    x, weight, bias = (graph.placeholder(name) for name in ("x", "weight", "bias"))
    outputs, widths = [], {}
    for start, end in places:
        part = graph.call_function(aten.slice.Tensor, (weight, OUTPUT_DIM[target], start, end))
        widths[part] = width
        added = graph.call_function(aten.slice.Tensor, (bias, 0, start, end)) if has_bias else None
        if target is aten.linear.default:
            product = graph.call_function(target, (x, part, *([added] if has_bias else [])))
        else:
            product = graph.call_function(target, (x, part))
            product = graph.call_function(aten.add.Tensor, (product, added)) if has_bias else product
        outputs.append(product)
    graph.output(tuple(outputs))
    pack_products(graph, widths)
    graph.lint()
    count = sum(node.target in OUTPUT_DIM for node in graph.nodes)
    return fx.GraphModule(torch.nn.Module(), graph), count == 1 < len(places)


def gradients(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor | None]:
    return list(torch.autograd.grad([y.square().sum() for y in outputs], inputs, allow_unused=True))


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(PRODUCTS), st.lists(st.integers(1, 4), min_size=2, max_size=4), st.booleans(), st.data())
def test_one_product_gives_the_values_and_gradients_of_its_pieces(
    target: Any, sizes: list[int], has_bias: bool, data: st.DataObject
) -> None:
    ends = list(itertools.accumulate(sizes))
    places = data.draw(st.permutations(list(zip([0, *ends], ends, strict=False))))
    module, packed = pieces(target, places, has_bias, ends[-1])
    assert packed
    shape = (ends[-1], ROWS) if OUTPUT_DIM[target] == 0 else (ROWS, ends[-1])
    x, weight, bias = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, ROWS), shape, ends[-1:])
    )
    in_columns = weight.T if OUTPUT_DIM[target] == 0 else weight
    whole = x @ in_columns + (bias if has_bias else 0)
    expected = tuple(whole[..., start:end] for start, end in places)
    found = module(x, weight, bias)
    torch.testing.assert_close(found, expected)
    inputs = [x, weight, bias] if has_bias else [x, weight]
    torch.testing.assert_close(gradients(found, inputs), gradients(expected, inputs))


@pytest.mark.parametrize("target", [grouped_mm, aten.bmm.default])
@pytest.mark.parametrize("transposed", [False, True])
def test_gate_and_up_of_experts_are_one_product(target: Any, transposed: bool) -> None:
    grouped = target is grouped_mm
    graph = fx.Graph()
    rows, weight, counts = (graph.placeholder(name) for name in ("rows", "weight", "counts"))
    outputs, widths = [], {}
    for start, end in ((3, 6), (0, 3)):
        part = graph.call_function(aten.slice.Tensor, (weight, 1 if transposed else 2, start, end))
        widths[part] = 6
        matrices = graph.call_function(aten.transpose.int, (part, 1, 2)) if transposed else part
        others: Any = (counts,) if grouped else ()
        options: Any = {"axes": {}, "sizes": {}} if grouped else {}
        outputs.append(graph.call_function(target, (rows, matrices, *others), options))
    graph.output(tuple(outputs))
    pack_products(graph, widths)
    graph.lint()
    assert [sum(node.target is each for node in graph.nodes) for each in (target, aten.slice.Tensor)] == [1, 0]
    shape = (7, 4) if grouped else (2, 7, 4)
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, (2, 4, 6)))
    given = w.transpose(1, 2) if transposed else w
    found = fx.GraphModule(torch.nn.Module(), graph)(x, given, torch.tensor([5, 2]))
    whole = torch.cat([x[:5] @ w[0], x[5:] @ w[1]]) if grouped else x @ w
    expected = whole[..., 3:], whole[..., :3]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, [x, w]), gradients(expected, [x, w]))


@pytest.mark.parametrize("places", [[(0, 2), (3, 6)], [(0, 2), (2, 5)], [(1, 3), (3, 6)], [(0, 4), (2, 6)], [(0, 6)]])
def test_pieces_that_leave_a_part_out_or_overlap_stay_apart(places: list[tuple[int, int]]) -> None:
    assert not pieces(aten.matmul.default, places, True, 6)[1]


def test_a_packed_projection_is_one_product_where_no_piece_is_split() -> None:
    model, inputs = built_in("tiny-gpt2", 8, 32, num_layers=1)
    found = {}
    for strategy in ("data_parallel", "megatron"):
        plan = autopar.plan(model, Mesh({"tp": 2}, "cpu"), inputs, strategy=strategy)
        graph = rewrite(context_of(plan).space, context_of(plan).choices).module.graph
        found[strategy] = sum(node.target is aten.matmul.default for node in graph.nodes)
    assert found == {"data_parallel": 4, "megatron": 6}  # with the projection of attention and the two of the MLP
