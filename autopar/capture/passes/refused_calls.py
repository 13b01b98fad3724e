"""Calls that no plan can hold, refused by name, and calls that need another form to be kept.

A graph has one shape for all values, its gradients are dense, and each of its tensors lies in memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.errors import CaptureError
from autopar.ir.program.program import fault_of_form

aten = torch.ops.aten


class NeedsValuesError(CaptureError):
    """A model that needs the values of tensors to be traced."""


SPARSE: dict[Callable[..., Any], int] = {
    aten.embedding.default: 4,
    aten.embedding_bag.default: 5,
    aten._embedding_bag.default: 5,
}
"""Position of the argument that asks for sparse gradients."""

WITHOUT_DERIVATIVE = frozenset({"linspace", "logspace", "rand_like", "randint_like", "randn_like"})
"""Operations that in PyTorch's own calls read nothing but shapes and bounds, and so give no gradient."""


def check_call(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], module: str) -> None:
    """Raise CaptureError for a call that asks what no plan holds."""
    place = SPARSE.get(target)
    if place is not None and ((len(args) > place and args[place]) or kwargs.get("sparse")):
        raise CaptureError(
            f"{target} in {where(module)} asks for sparse gradients (sparse=True), which autopar does not move between "
            "devices; make the embedding without sparse=True."
        )


KERNELS = {
    "transformer_engine": (
        "whose kernels keep scales, and choose what to run, as they run. Build the model with torch.nn's modules; "
        'hardware="h100:te" plans what TransformerEngine\'s kernels reach'
    ),
    "torch.ao.nn.quantized": "whose packed weights no graph holds. Compile the model before it is quantized",
    "torch.ao.nn.intrinsic.quantized": "whose packed weights no graph holds. Compile the model before it is quantized",
}
"""Package → why its modules are refused, and what to do."""


def check_modules(model: nn.Module) -> None:
    """Raise CaptureError for modules of libraries whose kernels no graph holds."""
    for path, module in model.named_modules():
        kind = type(module)
        found = next((why for package, why in KERNELS.items() if f"{kind.__module__}.".startswith(f"{package}.")), None)
        if found is not None:
            raise CaptureError(f"{path or 'the model'} is a {kind.__module__}.{kind.__qualname__}, {found}.")


def has_derivative(target: Callable[..., Any]) -> bool:
    """Return whether gradients flow through a call as PyTorch runs it."""
    name = target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""
    return name not in WITHOUT_DERIVATIVE


def check_result(target: Callable[..., Any], value: Any, module: str) -> None:
    """Raise CaptureError where what a call gives is not dense, or in lists, or of a shape that depends on values."""
    if isinstance(value, list | tuple) and any(isinstance(each, list | tuple) for each in value):
        raise CaptureError(
            f"{target} in {where(module)} gives lists of tensors among other outputs, which a graph does not hold; "
            "let the operation give one list, or single tensors."
        )
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, Tensor):
            continue
        fault = fault_of_form(leaf)
        if fault:
            raise CaptureError(f"what {target} gives in {where(module)} {fault}.")
        if leaf._has_symbolic_sizes_strides:
            raise NeedsValuesError(f"{target} in {where(module)} {DEPENDS}")


def where(module: str) -> str:
    """Return a module as messages call it."""
    return module or "the forward"


def not_evaluated(target: Callable[..., Any], module: str, error: Exception) -> CaptureError:
    """Return the error for a call that cannot run on tensors without values."""
    text = str(error).strip().splitlines()
    return NeedsValuesError(
        f"{target} in {where(module)} cannot be traced without the values of its tensors "
        f"({type(error).__name__}: {text[0] if text else 'no message'}); compute it outside of the model and pass "
        "it as an input, or use operations whose shapes are known beforehand."
    )


DEPENDS = (
    "gives a tensor whose shape depends on the values of other tensors; a captured graph has one shape for all values. "
    "Keep the shape: torch.where or a product with the mask in place of indexing by it, output_size= for "
    "repeat_interleave. A mask that never changes may be a plain tensor attribute of the module (no buffer), or be "
    "given as the indices where it is true."
)
