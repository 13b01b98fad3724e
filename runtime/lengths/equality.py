"""Test that padding does not change a model: a program and its padded twin, run side by side.

Both are captured from one model, for inputs of a small size and for the same inputs padded. They run node by node on
one CPU in float64, with made-up weights, and each value is freed after its last use. Each value of the smaller program
is compared with the leading part, of the same shape, of the larger program's value. Outputs must be equal. A loss is an
analytic function of weights, so two losses that are equal at random weights are one function and have equal gradients.
Only gradients that are not numbers (0 · inf at padded positions) could still differ, so the derivatives of each call
are checked, too.

Random numbers are left out: nothing is dropped, and every draw gives 0.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autopar.errors import InputError
from autopar.ir.program.calls import module_of
from autopar.ir.program.effects import MODES, RATES, is_random
from autopar.ir.program.program import Program, TensorInfo, info_of
from autopar.runtime.lengths.inputs import Arguments

TOLERANCE = 1e-5  # relative to the largest element: parts of a float64 model, such as norms, round in float32
DRAWN = ("rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "normal", "bernoulli")
VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "expand", "contiguous", "clone")


@dataclass(frozen=True, slots=True)
class Unequal:
    """Output that padding changes, and the call of the model where the difference begins, if that is known."""

    output: int
    cause: str


def first_unequal(
    one: Program, other: Program, inputs: Arguments, padded: Arguments, buffers: Mapping[str, Tensor]
) -> Unequal | None:
    """Return the first output in which two programs of one model differ beyond padded places; None where there is none.

    Raises InputError where that cannot be found out.
    """
    return _Comparison(one, other, buffers).run(inputs, padded)


class _Comparison:
    """Two programs run side by side."""

    def __init__(self, one: Program, other: Program, buffers: Mapping[str, Tensor]) -> None:
        self.programs, self.buffers = (one, other), buffers
        self.values: dict[fx.Node, tuple[Any, Any]] = {}
        """Node of the first program → its values in both, as long as they are used."""
        self.unequal: set[fx.Node] = set()
        self.undefined: str | None = None

    def run(self, inputs: Arguments, padded: Arguments) -> Unequal | None:
        one, other = self.programs
        pairs = list(zip(one.graph.nodes, other.graph.nodes, strict=False))
        if len(one.graph.nodes) != len(other.graph.nodes) or any(a.target != b.target for a, b in pairs if _calls(a)):
            raise InputError(
                "the model computes other things for other sizes, so whether padding changes its outputs is not known. "
                "If you know that it does not, say Buckets(check=False)."
            )
        flat = pytree.tree_leaves(inputs), pytree.tree_leaves(padded)
        twin = dict(pairs)
        uses = Counter(use for node, _ in pairs for use in node.all_input_nodes)
        for node, its_twin in pairs:
            if node.op == "output":
                return self._outputs(node, its_twin, twin)
            if node.op == "placeholder":
                values = self._given(node, its_twin, flat)
            else:
                values = self._called(node, its_twin, twin)
            self.values[node] = values
            if not _agree(*values):
                self.unequal.add(node)
            for use in set(node.all_input_nodes):
                uses[use] -= node.all_input_nodes.count(use)
                if not uses[use]:
                    del self.values[use]
        raise AssertionError("a graph has an output")

    def _given(self, node: fx.Node, its_twin: fx.Node, flat: tuple[list[Any], list[Any]]) -> tuple[Any, Any]:
        one, other = self.programs
        if node.name in one.inputs:
            return flat[0][one.inputs.index(node.name)], flat[1][other.inputs.index(its_twin.name)]
        if node.name in one.constants:
            return one.constants[node.name], other.constants[its_twin.name]
        names = {placeholder: name for name, placeholder in one.buffers.items()}
        if node.name in names:
            known = self.buffers.get(names[node.name])
            value = (
                _made_up(names[node.name], info_of(node))
                if known is None
                else known.detach().cpu().to(info_of(node).dtype)
            )
            return value.clone(), value.clone()
        value = _made_up(one.parameter_names[node.name], info_of(node))
        return value, value

    def _called(self, node: fx.Node, its_twin: fx.Node, twin: Mapping[fx.Node, fx.Node]) -> tuple[Any, Any]:
        back = {its: mine for mine, its in ((use, twin[use]) for use in node.all_input_nodes)}
        mine, broken = _run(node, lambda use: self.values[use][0])
        padded, breaks = _run(its_twin, lambda use: self.values[back.get(use, use)][1])
        if breaks and not broken and self.undefined is None:
            self.undefined = f"{_call_text(node)} has {breaks} at padded places"
        return mine, padded

    def _outputs(self, node: fx.Node, its_twin: fx.Node, twin: Mapping[fx.Node, fx.Node]) -> Unequal | None:
        mine: Sequence[Any] = node.args[0]  # type: ignore[assignment]
        padded: Sequence[Any] = its_twin.args[0]  # type: ignore[assignment]
        for number, (one, other) in enumerate(zip(mine, padded, strict=True)):
            equal = twin[one] is other and one not in self.unequal if isinstance(one, fx.Node) else one == other
            if isinstance(one, fx.Node) and _is_undefined(self.values[one][0]):
                raise InputError(
                    f"output {number} is no number with made-up inputs and weights, so whether padding changes it is "
                    "not known. If you know that it does not, say Buckets(check=False)."
                )
            if not equal:
                return Unequal(number, self._cause(one))
        return None if self.undefined is None else Unequal(0, self.undefined)

    def _cause(self, output: Any) -> str:
        """Return the first call from which an output differs, though its inputs are equal."""
        if not isinstance(output, fx.Node):
            return ""
        left, above = [output], set[fx.Node]()
        while left:
            node = left.pop()
            if node not in above:
                above.add(node)
                left.extend(node.all_input_nodes)
        begins = (each for each in self.programs[0].graph.nodes if each in above and each in self.unequal)
        first = next((each for each in begins if self.unequal.isdisjoint(each.all_input_nodes)), None)
        if first is None or (str(first.target).split(".")[1:2] and str(first.target).split(".")[1] in VIEWS):
            return ""
        return f"{_call_text(first)} mixes padded places with others"


def _calls(node: fx.Node) -> bool:
    return node.op == "call_function"


def _call_text(node: fx.Node) -> str:
    return f"{node.target} of {module_of(node) or 'the model'}"


def _run(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> tuple[Any, str]:
    """Run a call; return its result and the fault of the result or its derivatives, "" if there is none."""
    if is_random(node) and isinstance(node.target, torch._ops.OpOverload) and _name(node) in DRAWN:
        return pytree.tree_map_only(TensorInfo, _zeros, node.meta["tensor"]), ""
    args, kwargs = _nothing_dropped(node)
    given = map_arg((args, kwargs), value_of)
    leaves, spec = pytree.tree_flatten(given)
    differentiated = {id(value_of(use)) for use in node.all_input_nodes if _needs_gradient(use)}
    learning = [leaf.detach().requires_grad_() if id(leaf) in differentiated else leaf for leaf in leaves]
    assert callable(node.target)
    args, kwargs = pytree.tree_unflatten([leaf.clone() if _learns(leaf) else leaf for leaf in learning], spec)
    with torch.enable_grad():
        found = node.target(*args, **kwargs)
    return pytree.tree_map_only(Tensor, torch.Tensor.detach, found), _wrong(found, learning)


def _needs_gradient(node: fx.Node) -> bool:
    info = node.meta.get("tensor")
    return isinstance(info, TensorInfo) and info.requires_grad


def _wrong(found: Any, learning: Sequence[Any]) -> str:
    """Describe the fault of a call's outputs, or of their derivatives by its inputs; "" if there is none."""
    outputs = [each for each in pytree.tree_leaves(found) if isinstance(each, Tensor)]
    if any(map(_is_undefined, outputs)):
        return "values that are no numbers"
    roots = [each for each in outputs if each.requires_grad]
    leaves = [leaf for leaf in learning if _learns(leaf)]
    if roots and leaves:
        ones = [torch.ones_like(root) for root in roots]
        gradients = torch.autograd.grad(roots, leaves, ones, allow_unused=True)
        if any(each is not None and not each.isfinite().all() for each in gradients):
            return "derivatives that are no finite numbers"
    return ""


def _learns(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _name(node: fx.Node) -> str:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target._schema.name.partition("::")[2]


def _nothing_dropped(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, without dropping; InputError where it draws otherwise."""
    if not is_random(node):
        return node.args, dict(node.kwargs)
    assert isinstance(node.target, torch._ops.OpOverload)
    named = {argument.name: number for number, argument in enumerate(node.target._schema.arguments)}
    in_dropout = "dropout" in _name(node)
    nothing = {**dict.fromkeys(RATES, 0.0), **({"p": 0.0, **dict.fromkeys(MODES, False)} if in_dropout else {})}
    args, kwargs = list(node.args), dict(node.kwargs)
    for name in nothing.keys() & named.keys():
        if named[name] < len(args):
            args[named[name]] = nothing[name]
        else:
            kwargs[name] = nothing[name]
    if not nothing.keys() & named.keys():
        raise InputError(
            f"{_call_text(node)} draws random numbers, so whether padding changes outputs is not known. If you know "
            "that "
            "it does not, say Buckets(check=False)."
        )
    return tuple(args), kwargs


def _zeros(info: TensorInfo) -> Tensor:
    return torch.zeros(info.shape, dtype=info.dtype)


def _made_up(name: str, info: TensorInfo) -> Tensor:
    """Return the values of a parameter or buffer that keep activations in bounds, told by its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if not info.dtype.is_floating_point:
        return torch.full(info.shape, info.dtype == torch.bool, dtype=info.dtype)
    values = torch.randn(info.shape, generator=generator, dtype=torch.float64)
    if len(info.shape) < 2:  # weight of a norm, or a bias
        return (1 + 0.1 * values).to(info.dtype)
    return (values * info.shape[-1] ** -0.5).to(info.dtype)


def _agree(one: Any, other: Any) -> bool:
    """Return whether all values of `one` equal the leading parts of those of `other`."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(_equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def _equal(one: Tensor, other: Tensor) -> bool:
    if any(a > b for a, b in zip(one.shape, other.shape, strict=True)):
        return False
    other = other[tuple(slice(size) for size in one.shape)]
    if not one.is_floating_point():
        return torch.equal(one, other)
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()) or not torch.equal(one[~finite], other[~finite]):
        return False
    if not finite.any():
        return True
    a, b = one[finite].double(), other[finite].double()
    return bool((a - b).abs().max() <= TOLERANCE * a.abs().max())


def _is_undefined(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any())
