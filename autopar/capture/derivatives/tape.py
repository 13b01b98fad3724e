"""`torch.autograd.grad` in a forward: each use becomes one call of the traced graph, which passes take apart later.

The exporter records calls above autograd, so that what autograd itself runs is lost. The graph therefore says which
tensors are differentiated by which, and nothing is computed while it is traced.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.fx.experimental import proxy_tensor

from autopar.capture.inlining.gradients import GRADIENT, NEEDS_GRADIENT, GradientCall
from autopar.capture.python.user_code import where
from autopar.errors import CaptureError


@contextlib.contextmanager
def recorded_gradients(calls: list[GradientCall]) -> Iterator[None]:
    """Let each use of torch.autograd.grad be one call of the traced graph; `calls` gets them in order."""
    engine: Any = torch.autograd._engine_run_backward  # pyright: ignore[reportPrivateImportUsage]
    descriptor: Any = torch._C.TensorBase.requires_grad
    require_in_place = Tensor.requires_grad_

    def run(
        outputs: Sequence[Tensor],
        given: Sequence[Tensor | None],
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any],
        *options: Any,
        **accumulated: Any,
    ) -> Any:
        mode = recording()
        if mode is None:
            return engine(outputs, given, retain_graph, create_graph, inputs, *options, **accumulated)
        if accumulated.get("accumulate_grad"):
            raise CaptureError(
                f"the forward calls backward() ({where(sys._getframe(1))}), which adds to the .grad of tensors, and a "
                "captured graph has no .grad. Use torch.autograd.grad(..., create_graph=True), which gives gradients."
            )
        location = where(sys._getframe(1))
        if torch._C._are_functorch_transforms_active() or any(x is None for x in given):
            raise CaptureError(
                f"the forward calls torch.autograd.grad ({location}) with gradients of outputs in batches "
                "(is_grads_batched=True), which is not captured; use torch.func.vmap over torch.func.vjp."
            )
        call = GradientCall(len(outputs), create_graph, location)
        for tensor in inputs:
            _begin(mode, tensor)
        tensors = [*outputs, *given, *inputs]
        with aside():
            made = call(*tensors)  # type: ignore[arg-type]
        calls.append(call)
        _record(mode, GRADIENT, (len(calls) - 1, *tensors), made)
        return made

    def require(tensor: Tensor, required: bool, change: Callable[[Tensor, bool], object]) -> None:
        mode = recording()
        begins = required and not tensor.requires_grad
        change(tensor, required)
        if mode is not None and begins and proxy_tensor.get_proxy_slot(tensor, mode.tracer, None) is not None:
            _record(mode, NEEDS_GRADIENT, (tensor,), tensor)

    def requires_grad_(tensor: Tensor, requires_grad: bool = True) -> Tensor:
        require(tensor, requires_grad, require_in_place)
        return tensor

    def assign(tensor: Tensor, requires_grad: bool) -> None:
        require(tensor, requires_grad, descriptor.__set__)

    with (
        mock.patch.object(torch.autograd, "_engine_run_backward", run),
        mock.patch.object(Tensor, "requires_grad_", requires_grad_),
        mock.patch.object(Tensor, "requires_grad", property(descriptor.__get__, assign), create=True),
    ):
        yield


def recording() -> Any:
    """Return the mode that records a forward, as the exporter does: above autograd; None elsewhere."""
    mode = proxy_tensor.get_proxy_mode()
    return mode if mode is not None and mode.pre_dispatch else None


def _begin(mode: Any, tensor: Tensor) -> None:
    """Let a tensor that was made with `requires_grad=True` be read as after `requires_grad_()`."""
    slot: Any = proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
    if slot is None or not tensor.is_leaf or not isinstance(slot.proxy.node.target, torch._ops.OpOverload):
        return
    node = slot.proxy.node
    with node.graph.inserting_after(node):
        begun = node.graph.call_function(NEEDS_GRADIENT, (node,))
    begun.meta.update(node.meta)
    node.replace_all_uses_with(begun, lambda user: user is not begun)
    with aside():
        proxy_tensor.track_tensor_tree(tensor, fx.Proxy(begun, mode.tracer), constant=None, tracer=mode.tracer)


def _record(mode: Any, target: Callable[..., Any], args: tuple[Any, ...], results: Any) -> None:
    """Add a call to the graph being traced, and let tensors be what it gives."""
    slots = [proxy_tensor.fetch_object_proxy(mode.tracer, x) if isinstance(x, Tensor) else x for x in args]  # type: ignore[arg-type]
    proxy = mode.tracer.create_proxy("call_function", target, tuple(getattr(x, "proxy", x) for x in slots), {})
    with aside():
        proxy_tensor.track_tensor_tree(results, proxy, constant=None, tracer=mode.tracer)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Let what is computed inside be no part of the graph."""
    with proxy_tensor.disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        yield
