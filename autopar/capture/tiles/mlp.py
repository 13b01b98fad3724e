"""MLPs in tiles, where the user asks for them: `Memory(mlp_tiles=…)`.

    linear(x) → elementwise function, times another linear(x) or not → linear
        becomes  mlp_in_tiles(x, …, tiles)

Which function it is, is found by its values: a region of elementwise calls is run on numbers, and compared with the
activations that the operator has. So it does not matter how a model writes it (`x * x.sigmoid()` is silu). Nothing else
may read what lies between, which is nowhere any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from autopar.capture.passes.traced_graph import TracedGraph, arguments, aten, shape_of, value_of
from autopar.capture.tiles.tiled_losses import MOST, Fitting
from autopar.errors import CaptureError
from autopar.ir.program.operators.linear_cross_entropy import wide
from autopar.ir.program.operators.mlp_in_tiles import ACTIVATIONS, MLP_IN_TILES
from autopar.ir.program.program import Program

MlpTiles = int | Literal["auto"] | Fitting | None
"""A number of tiles; "auto": where memory asks for it; None: the model as it is."""
ELEMENTWISE = (
    *(aten.silu.default, aten.gelu.default, aten.relu.default, aten.sigmoid.default, aten.tanh.default),
    *(aten.erf.default, aten.exp.default, aten.neg.default, aten.square.default, aten.reciprocal.default),
    *(aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.clamp.default),
    *(aten.pow.Tensor_Scalar, aten.clamp_min.default, aten.threshold.default, aten.maximum.default),
)
"""Calls of which an activation, and its product with what it gates, may be made."""
PRODUCTS = (aten.linear.default, aten.matmul.default, aten.mm.default)
NEEDED = (
    "a linear layer, then silu, gelu or relu, times another linear layer of the same input or not, and a linear layer, "
    "with no dropout between and nothing else that reads what lies there"
)


@dataclass(frozen=True, slots=True)
class _Linear:
    """A product with a matrix of two dims, and the bias that is added."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool
    """True if the matrix has the shape (in, out)."""
    nodes: frozenset[fx.Node]
    """The calls that it is made of."""


@dataclass(frozen=True, slots=True)
class _Mlp:
    """An MLP that can be taken in tiles."""

    up: _Linear
    gate: _Linear | None
    down: _Linear
    activation: str


def takes_mlp_tiles(draft: TracedGraph) -> bool:
    """Return whether a model has an MLP that could run in tiles but does not yet."""
    return next(_mlps(draft), None) is not None


def has_mlp_tiles(program: Program) -> bool:
    """Return whether a captured model has an MLP in tiles."""
    return any(node.target is MLP_IN_TILES for node in program.graph.nodes)


def tiled_mlps(draft: TracedGraph, tiles: int | Fitting, training: bool) -> None:
    """Take all MLPs that can be in tiles; CaptureError for a number of these and a model in training with none."""
    found = list(_mlps(draft))
    if not found and training and isinstance(tiles, int):
        raise CaptureError(
            f"Memory(mlp_tiles={tiles}) computes MLPs tile by tile, and the forward has none that can be: needed is "
            f"{NEEDED}. Write it so, or leave mlp_tiles out."
        )
    for mlp in found:
        with draft.graph.inserting_before(mlp.down.node):
            new = _in_tiles(draft, mlp, _number(mlp, tiles))
        draft.replace(mlp.down.node, new)


def _number(mlp: _Mlp, tiles: int | Fitting) -> int:
    """Return the number of tiles; of those that are to fit, so few that these have no more bytes than gradients of
    weights.
    """
    if not isinstance(tiles, Fitting):
        return tiles
    x, products = value_of(mlp.up.x), 2 if mlp.gate is None else 3
    features, hidden = x.shape[-1], shape_of(mlp.up.node)[-1]
    rows = -(-x.numel() // (features * tiles.num_devices))
    worked_on = (products + 1) * rows * hidden * x.itemsize
    return min(-(-worked_on // (products * hidden * features * wide(x.dtype).itemsize)), MOST)


def _mlps(draft: TracedGraph) -> Iterator[_Mlp]:
    """Yield every MLP that can be computed in tiles; chained layers are part of one MLP each."""
    taken: set[fx.Node] = set()
    for node in draft.calls(*PRODUCTS, aten.add.Tensor):
        down = _linear_layer_of(node)
        found = None if down is None else _mlp(down)
        if found is not None and found.up.node not in taken:
            taken.add(node)
            yield found


def _mlp(down: _Linear) -> _Mlp | None:
    region, roots = _region(down.x)
    apart = all(set(node.users) <= {*region, down.node, *down.nodes} for node in region)
    same = [root.x for root in roots if _is_same_tensor(root.x, roots[0].x)]
    if not region or not apart or len(roots) not in (1, 2) or len(same) < len(roots):
        return None
    inside = {node for root in roots for node in root.nodes}
    if any(not set(node.users) <= region | inside for node in inside):
        return None
    computed = {value_of(node).dtype for node in (*region, roots[0].x, down.node)}
    shapes = {shape_of(node) for node in (*region, *(root.node for root in roots))}
    if len(computed) > 1 or len(shapes) > 1 or len(shape_of(down.x)) < 2:
        return None
    return _activation_by_values(down, roots)


def _region(h: fx.Node) -> tuple[set[fx.Node], list[_Linear]]:
    """Return the elementwise calls that make a tensor, and the linear layers behind; none where there is anything
    else.
    """
    region: set[fx.Node] = set()
    roots: dict[fx.Node, _Linear] = {}
    left = [h]
    while left:
        node = left.pop()
        if node in region or node in roots:
            continue
        root = _linear_layer_of(node)
        if root is not None:
            roots[node] = root
        elif node.target in ELEMENTWISE:
            region.add(node)
            left += node.all_input_nodes
        else:
            return set(), []
    return region, list(roots.values())


def _is_same_tensor(x: fx.Node, other: fx.Node) -> bool:
    """Return whether two nodes are one tensor, or equal casts of one, as autocast may make them twice."""
    cast_alike = x.target is aten.to.dtype is other.target and (x.args, x.kwargs) == (other.args, other.kwargs)
    return x is other or cast_alike


def _linear_layer_of(node: fx.Node) -> _Linear | None:
    """Return the linear layer that a call is, or ends with the sum of its bias; None for other calls."""
    if node.target is aten.linear.default:
        given = arguments(node)
        if len(shape_of(given["weight"])) != 2:
            return None
        return _Linear(node, given["input"], given["weight"], given["bias"], False, frozenset({node}))
    if node.target in (aten.matmul.default, aten.mm.default):
        x, matrix = node.args[:2]
        if not isinstance(x, fx.Node) or not isinstance(matrix, fx.Node):
            return None
        fits = len(shape_of(matrix)) == 2 and len(shape_of(x)) >= 2
        return _Linear(node, x, matrix, None, True, frozenset({node})) if fits else None
    return _with_bias(node) if node.target is aten.add.Tensor else None


def _with_bias(node: fx.Node) -> _Linear | None:
    """Return the product with a matrix, and the sum with a vector, that GPT-2's Conv1D is."""
    given = arguments(node)
    product, bias = given["self"], given["other"]
    if not isinstance(bias, fx.Node) or given["alpha"] != 1 or product.target not in PRODUCTS[1:]:
        return None
    found = _linear_layer_of(product)
    if found is None or len(product.users) > 1 or shape_of(bias) != shape_of(node)[-1:]:
        return None
    return _Linear(node, found.x, found.weight, bias, True, frozenset({node, product}))


def _activation_by_values(down: _Linear, roots: list[_Linear]) -> _Mlp | None:
    """Return the activation that some calls compute, found by its values on random numbers."""
    generator = torch.Generator().manual_seed(0)
    given = {root.node: 4 * torch.randn(512, dtype=torch.float64, generator=generator) for root in roots}
    found = _value_of(down.x, dict(given))
    orders = [(root, other) for root in roots for other in roots if (root is other) == (len(roots) == 1)]
    for name, activation in ACTIVATIONS.items():
        for inner, up in orders:
            gated = inner is not up
            expected = activation.of(given[inner.node]) * (given[up.node] if gated else 1)
            if torch.allclose(found, expected, rtol=1e-9, atol=1e-12):
                return _Mlp(up, inner if gated else None, down, name)
    return None


def _value_of(node: fx.Node, known: dict[fx.Node, Tensor]) -> Tensor:
    """Return the value of a node of elementwise calls, given the values of some nodes; fills `known`."""
    if node not in known:
        target: Callable[..., Tensor] = node.target  # type: ignore[assignment]
        known[node] = target(*map_arg(node.args, lambda each: _value_of(each, known)), **node.kwargs)
    return known[node]


def _in_tiles(draft: TracedGraph, mlp: _Mlp, tiles: int) -> fx.Node:
    module = mlp.down.node.meta["module"]

    def of(linear: _Linear | None) -> tuple[fx.Node | None, fx.Node | None]:
        """Return the weight (out, in), and the bias."""
        if linear is None:
            return None, None
        weight = draft.call(aten.t.default, linear.weight, module=module) if linear.transposed else linear.weight
        return weight, linear.bias

    weights = *of(mlp.up), *of(mlp.gate), *of(mlp.down)
    return draft.call(MLP_IN_TILES, mlp.up.x, *weights, mlp.activation, tiles, module=module)
