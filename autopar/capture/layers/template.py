"""Trace of one layer in a form that stands for equal layers: its calls, what they read, what it returns."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autopar.capture.inlining.layers import LAYER, Body, path_within
from autopar.capture.layers.equal import ties
from autopar.capture.passes.traced_graph import is_write, storages
from autopar.capture.python.cone import node_of
from autopar.ir.program.python_state import ATOMS


@dataclass(frozen=True, slots=True)
class Form:
    """The memory of a tensor that shares none."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def made(self, device: str = "cpu") -> Tensor:
        """Return a tensor of this form, which is no leaf of a gradient."""
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)
        return made.requires_grad_().clone() if self.requires_grad else made

    @property
    def is_kept(self) -> bool:
        """True if `made` reproduces the strides; a copy has no gaps between elements."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return self.made("meta").stride() == self.stride


@dataclass(frozen=True, slots=True)
class Output:
    """One leaf of what a layer returns: a value, a tensor that it was given, or one that it has made."""

    value: Any = None
    given: int | None = None
    made: int | None = None


@dataclass(frozen=True, slots=True)
class Template:
    """One layer as it was traced; its tensors and then its inputs are what it is given."""

    layer: nn.Module
    ties: tuple[int, ...]
    body: Body
    read: tuple[int, ...]
    """Indices of the given tensors that the body reads."""
    forms: tuple[Form, ...]
    """Forms of the tensors that the body returns."""
    outputs: tuple[Output, ...]
    spec: pytree.TreeSpec

    def returned(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> Any:
        """Return the layer's result, assembled from the tensors it was given and those that its LAYER call made."""
        leaves: list[Any] = []
        for each in self.outputs:
            if each.given is not None:
                leaves.append(given[each.given])
            else:
                leaves.append(each.value if each.made is None else made[each.made])
        return pytree.tree_unflatten(leaves, self.spec)


def template_of(
    layer: nn.Module,
    path: str,
    given: Sequence[Tensor],
    nodes: Sequence[fx.Node | None],
    returned: Any,
    region: Sequence[fx.Node],
) -> Template | None:
    """Build the template of the layer at `path`, which made the nodes `region`; None if one call cannot stand for it.

    One call cannot express a layer that reads other tensors than the given, writes into those, or returns views.
    `nodes` are those of the given before the layer was called: a cast that changes nothing gives a tensor another one.
    """
    own = set(region)
    places = {node: index for index, node in reversed(list(enumerate(nodes)))}
    read = list(dict.fromkeys(x for node in region for x in node.all_input_nodes if x not in own))
    if not all(node in places for node in read) or not all(_can_be_repeated(node, path) for node in region):
        return None
    memory = storages(given)
    if any(not memory.isdisjoint(_memory_written(node)) for node in region):
        return None
    leaves, spec = pytree.tree_flatten(returned)
    index_of = {id(tensor): index for index, tensor in reversed(list(enumerate(given)))}
    made = {id(x): x for x in leaves if isinstance(x, Tensor) and id(x) not in index_of}
    gives = [node_of(tensor) for tensor in made.values()]
    forms = tuple(Form(tuple(x.shape), x.stride(), x.dtype, x.requires_grad) for x in made.values())
    alone = storages(list(made.values())) - memory
    if (
        not all(node in own for node in gives)
        or len(alone) < len(made)
        or any(tensor.storage_offset() for tensor in made.values())
        or not all(form.is_kept for form in forms)
        or not all(isinstance(leaf, (*ATOMS, Tensor)) for leaf in leaves)
    ):
        return None
    outputs = tuple(_output(leaf, index_of, list(made)) for leaf in leaves)
    body = Body.of(region, read, [node for node in gives if node is not None], path)
    return Template(layer, ties(given), body, tuple(places[node] for node in read), forms, outputs, spec)


def _output(leaf: Any, given: Mapping[int, int], made: Sequence[int]) -> Output:
    if not isinstance(leaf, Tensor):
        return Output(leaf)
    return Output(given=given[id(leaf)]) if id(leaf) in given else Output(made=made.index(id(leaf)))


def _can_be_repeated(node: fx.Node, path: str) -> bool:
    """Return whether a call is an operator inside the layer whose outputs are tensors or None, not symbolic sizes."""
    plain = isinstance(node.target, torch._ops.OpOverload) or node.target in (operator.getitem, LAYER)
    sizes = (leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if not isinstance(leaf, Tensor))
    return plain and path_within(node, path) is not None and all(leaf is None for leaf in sizes)


def _memory_written(node: fx.Node) -> set[int]:
    return storages([source.meta.get("val") for source in node.all_input_nodes]) if is_write(node.target) else set()
