"""A forward's own `torch.autograd.grad` becomes the calls that compute the gradient.

While a model is traced such a use is one call of the graph. Here it is replaced, from its outputs back to its inputs,
by the backward of each call in between, in operations that have a derivative again (double backward).

Readers of its inputs read them through `needs_gradient`, in place of `x.requires_grad_()`, so that calls know whether
they are differentiated; that goes afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from autopar.capture.inlining.recorded import Recorded
from autopar.capture.passes.refused_calls import where
from autopar.capture.passes.traced_graph import TracedGraph, aten, is_write, set_call, value_of
from autopar.errors import CaptureError
from autopar.ir.program.gradient_hooks import GRADIENT_HOOK

GRADIENT = Recorded("autopar_gradient")
"""A use of torch.autograd.grad: its number, its outputs, their gradients, and its inputs."""
NEEDS_GRADIENT = Recorded("autopar_needs_gradient")
"""`x.requires_grad_()`, of x alone."""
Key = tuple[fx.Node, int | None]
"""A tensor of the graph: a call, and which of its outputs; None where it has one."""

IN_PARTS = {
    op: parts
    for op, parts in decomposition_table.items()
    if "_backward" in op.name() or op in (aten.native_layer_norm.default, aten.native_group_norm.default)
}
"""Backward operations of PyTorch → what computes the same by operations that have rules and derivatives."""


def needs_gradient(x: Tensor) -> Tensor:
    """Return the tensor that a forward sees after `x.requires_grad_()`."""
    return x.detach().requires_grad_()


@dataclass(frozen=True, slots=True, eq=False)
class GradientCall:
    """One use of torch.autograd.grad, called with its outputs, their gradients and its inputs, one after the other."""

    num_outputs: int
    create_graph: bool
    location: str
    """File and line of the user's call."""

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = tensors[2 * self.num_outputs :]
        return tuple(torch.empty_like(x).requires_grad_(self.create_graph) for x in inputs)

    @property
    def __name__(self) -> str:
        return "torch.autograd.grad"

    def refused(self, found: str) -> CaptureError:
        return CaptureError(f"the forward calls torch.autograd.grad ({self.location}), {found}.")


def gradients(draft: TracedGraph) -> None:
    """Replace every GradientCall, the first one first, and then all of `needs_gradient`."""
    for node in draft.calls():
        if isinstance(node.target, GradientCall):
            _replace(draft, node, node.target)
    for node in draft.calls(needs_gradient):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        draft.replace(node, source)


def _replace(draft: TracedGraph, node: fx.Node, call: GradientCall) -> None:
    num = call.num_outputs
    tensors: list[Any] = list(node.args)
    outputs, given, inputs = tensors[:num], tensors[num : 2 * num], tensors[2 * num :]
    between = _nodes_between(draft, outputs, inputs)
    _random_numbers_apart(draft, between, call)
    found: dict[Key, fx.Node] = {}
    with draft.graph.inserting_before(node):
        for output, gradient in zip(outputs, given, strict=True):
            _add(draft, found, _tensor_given(output), gradient)
        for each in reversed(between):
            if each.op == "call_function":
                _add_gradients_of_inputs(draft, each, found, frozenset(between), call)
        results = [found.get(_tensor_given(x)) for x in inputs]
        if not call.create_graph:
            results = [None if x is None else draft.call(aten.detach.default, x) for x in results]
    for user in list(node.users):
        assert user.target is operator.getitem
        result = results[user.args[1]]  # type: ignore[index]
        if result is None:
            raise call.refused("of a tensor that its outputs do not depend on; leave that tensor out")
        draft.replace(user, result)
    draft.graph.erase_node(node)


def _nodes_between(draft: TracedGraph, outputs: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes on a differentiable path from an input to an output, both included, in order."""
    above: set[fx.Node] = set()
    left = list(outputs)
    while left:
        node = left.pop()
        if node not in above:
            above.add(node)
            left += node.all_input_nodes
    found: dict[fx.Node, None] = {}
    for node in draft.graph.nodes:
        follows = (
            node.op == "call_function"
            and _is_differentiated(node)
            and not found.keys().isdisjoint(node.all_input_nodes)
        )
        if node in above and (node in inputs or follows):
            found[node] = None
    return list(found)


def _is_differentiated(node: fx.Node) -> bool:
    values = pytree.tree_leaves(node.meta["val"])
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _random_numbers_apart(draft: TracedGraph, between: list[fx.Node], call: GradientCall) -> None:
    """Let dropout be a product with a mask that is drawn once; CaptureError for other random calls, and for hooks."""
    for node in between:
        target = node.target
        if target is GRADIENT_HOOK:
            raise call.refused("through a tensor with a hook (register_hook), which would not see this gradient")
        if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
            continue
        if target is not aten.dropout.default:
            if _draws_random_numbers(node):
                raise call.refused(f"through {target}, which draws random numbers; draw them apart")
            continue
        x, *options = node.args
        assert isinstance(x, fx.Node)
        with draft.graph.inserting_before(node):
            module = node.meta["module"]
            ones = draft.call(aten.ones_like.default, x, module=module)
            mask = draft.call(aten.dropout.default, ones, *options, module=module)
        set_call(node, aten.mul.Tensor, x, mask)


def _draws_random_numbers(node: fx.Node) -> bool:
    named = {argument.name: place for place, argument in enumerate(node.target._schema.arguments)}  # type: ignore[union-attr]
    place = named.get("dropout_p")
    return place is None or (len(node.args) > place and bool(node.args[place])) or bool(node.kwargs.get("dropout_p"))


def _tensor_given(node: fx.Node) -> Key:
    """Return the tensor that a node gives; of several outputs the one that it takes."""
    if node.target is operator.getitem:
        source, place = node.args
        assert isinstance(source, fx.Node) and isinstance(place, int)
        return source, place
    return node, None


def _add(draft: TracedGraph, found: dict[Key, fx.Node], key: Key, gradient: fx.Node) -> None:
    before = found.get(key)
    found[key] = gradient if before is None else draft.call(aten.add.Tensor, before, gradient)


def _add_gradients_of_inputs(
    draft: TracedGraph, node: fx.Node, found: dict[Key, fx.Node], between: frozenset[fx.Node], call: GradientCall
) -> None:
    if node.target is operator.getitem:
        return
    value = node.meta["val"]
    keys: list[Key] = [(node, None)] if isinstance(value, Tensor) else [(node, place) for place in range(len(value))]
    given = {place: found[key] for place, key in enumerate(keys) if key in found}
    wanted = [source for source in node.all_input_nodes if source in between]
    if not given or not wanted:
        return
    try:
        graph, places = _traced(draft, node, given, wanted)
    except (RuntimeError, NotImplementedError) as error:
        text = next(iter(str(error).strip().splitlines()), "")
        raise call.refused(f"through {node.target} in {where(node.meta['module'])}, which has none ({text})") from error
    gradients_of = _append_gradients(draft, graph, node, [*node.all_input_nodes, *given.values()])
    for source, place in zip(wanted, places, strict=True):
        if place is not None:
            _add(draft, found, _tensor_given(source), gradients_of[place])


def _traced(
    draft: TracedGraph, node: fx.Node, given: Mapping[int, fx.Node], wanted: Sequence[fx.Node]
) -> tuple[fx.Graph, list[int | None]]:
    """Return the backward of a call as a graph of its inputs and the gradients of its outputs.

    The graph gives the outputs of the call, and then the gradients; also which of these each of `wanted` gets.
    """
    sources = node.all_input_nodes
    places: list[int | None] = []

    def backward(*tensors: Tensor) -> list[Tensor]:
        inputs = dict(zip(sources, tensors, strict=False))
        args, kwargs = map_arg((node.args, node.kwargs), inputs.__getitem__)
        results = node.target(*args, **kwargs)  # type: ignore[operator]
        outputs = [results] if isinstance(results, Tensor) else list(results)
        found = torch.autograd.grad(
            [outputs[place] for place in given],
            [inputs[source] for source in wanted],
            list(tensors[len(sources) :]),
            allow_unused=True,
            create_graph=True,
        )
        taken = [x for x in found if x is not None]
        numbers = iter(range(len(taken)))
        places[:] = [None if x is None else next(numbers) for x in found]
        return [*outputs, *taken]

    def fresh(source: fx.Node) -> Tensor:
        return value_of(source).detach().requires_grad_(source in wanted)

    with draft.mode, torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        tensors = [*map(fresh, sources), *(value_of(x).detach() for x in given.values())]
        traced = make_fx(backward, decomposition_table=IN_PARTS)(*tensors)
        if any(is_write(each.target) for each in traced.graph.nodes):
            traced = make_fx(torch.func.functionalize(traced))(*(x.detach() for x in tensors))
    return traced.graph, places


def _append_gradients(draft: TracedGraph, graph: fx.Graph, node: fx.Node, inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Append what a traced backward computes of the gradients, which it gives behind the outputs of the call."""
    module = node.meta["module"]
    results: Any = graph.output_node().args[0]
    made: dict[Any, Any] = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    value = node.meta["val"]
    num_outputs = 1 if isinstance(value, Tensor) else len(value)
    for place, result in enumerate(results[:num_outputs]):
        if isinstance(value, Tensor):
            made.setdefault(result, node)
        elif isinstance(value[place], Tensor):
            made.setdefault(result, draft.call(operator.getitem, node, place, module=module))
    needed = set(_needed(results[num_outputs:], made))
    for each in graph.nodes:
        if each not in needed:
            continue
        if each.op == "get_attr":
            raise CaptureError(f"the backward of {node.target} in {where(module)} reads a tensor of its own.")
        args, kwargs = map_arg((each.args, each.kwargs), made.__getitem__)
        if each.target is aten.detach.default:  # detach of a saved tensor is the tensor itself
            made[each] = args[0]
        else:
            made[each] = draft.call(each.target, *args, module=module, **kwargs)
    return [made[result] for result in results[num_outputs:]]


def _needed(results: Sequence[fx.Node], made: Mapping[fx.Node, Any]) -> Iterator[fx.Node]:
    left, seen = list(results), set()
    while left:
        node = left.pop()
        if node not in seen and node not in made:
            seen.add(node)
            yield node
            left += node.all_input_nodes
