"""`torch.func` in a forward: vmap, grad, vjp, jvp and what is made of them become the calls that they run.

The exporter records calls above autograd and `torch.func`, where a transform has not acted yet. A transform is
therefore traced by itself, below both, and the calls that it consists of are made again in the forward.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._functorch import apis, eager_transforms
from torch.fx.experimental import proxy_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from autopar.capture.derivatives.tape import aside, recording
from autopar.capture.inlining.gradients import IN_PARTS
from autopar.capture.passes.traced_graph import aten
from autopar.capture.python.user_code import is_users, where
from autopar.errors import CaptureError

DETACHED = "detached"
"""Key in a node's meta: the function itself calls detach() there, which other calls of autograd do, too."""


@contextlib.contextmanager
def transforms_taken_apart() -> Iterator[None]:
    """Let a forward that uses torch.func be recorded as the calls of which its transforms consist."""
    vmap: Any = apis.vmap_impl  # pyright: ignore[reportPrivateImportUsage]
    jvp = eager_transforms._jvp_with_argnums
    grad, grad_and_value = eager_transforms.grad_impl, eager_transforms.grad_and_value_impl
    vjp = eager_transforms._vjp_with_argnums

    def apart(transform: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return transform(*args, **kwargs) if recording() is None else _taken_apart(transform, args, kwargs)

        return run

    def of_rows(func: Any, in_dims: Any, out_dims: Any, randomness: Any, chunk_size: Any, *args: Any, **kw: Any) -> Any:
        def whole(args: Any, kw: Any) -> Any:
            return vmap(func, in_dims, out_dims, randomness, chunk_size, *args, **kw)

        return apart(whole)(args, kw)

    def pullback(func: Callable[..., Any], *primals: Any, argnums: Any = None, has_aux: bool = False) -> Any:
        if recording() is None:
            return vjp(func, *primals, argnums=argnums, has_aux=has_aux)
        outputs, *aux = func(*primals) if has_aux else (func(*primals),)

        def run(primals: Any, cotangents: Any) -> Any:
            return vjp(func, *primals, argnums=argnums, has_aux=has_aux)[1](cotangents)

        return outputs, lambda cotangents, *options, **kw: apart(run)(primals, cotangents), *aux

    def forward_mode(*args: Any, **kwargs: Any) -> Any:
        try:
            return jvp(*args, **kwargs)
        except CaptureError:
            raise
        except Exception as error:
            text = next(iter(str(error).strip().splitlines()), "")
            raise CaptureError(
                "torch.func.jvp, of which jacfwd and hessian are made, does not run here on tensors without values "
                f"({type(error).__name__}: {text}). Use jacrev for jacfwd, jacrev(jacrev(f)) for hessian(f), and "
                "torch.autograd.functional.jvp(..., create_graph=True) for jvp."
            ) from error

    with (
        mock.patch.object(apis, "vmap_impl", of_rows),
        mock.patch.object(eager_transforms, "_jvp_with_argnums", apart(forward_mode)),
        mock.patch.object(eager_transforms, "grad_impl", apart(grad)),
        mock.patch.object(eager_transforms, "grad_and_value_impl", apart(grad_and_value)),
        mock.patch.object(eager_transforms, "_vjp_with_argnums", pullback),
    ):
        yield


def _taken_apart(transform: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return what a transform gives, by the calls that it runs."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    returned: list[Any] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        args, kwargs = pytree.tree_unflatten(given, spec)
        returned[:] = pytree.tree_flatten(transform(*args, **kwargs))
        return [leaf for leaf in returned[0] if isinstance(leaf, Tensor)]

    tensors = [leaves[place] for place in places]
    with aside(), sdpa_kernel(SDPBackend.MATH), _gradients_as_above(), _marked_detaches():
        traced = proxy_tensor.make_fx(run, decomposition_table=IN_PARTS)(*tensors)
    results = iter(_Again(traced).run(*tensors))
    found = [next(results) if isinstance(leaf, Tensor) else leaf for leaf in returned[0]]
    return pytree.tree_unflatten(found, returned[1])


class _Again(fx.Interpreter):
    """Makes the calls of a transform in the forward."""

    def run_node(self, n: fx.Node) -> Any:
        if n.target is aten.detach.default and DETACHED not in n.meta:  # detach of a tensor that is saved for backward
            return self.fetch_args_kwargs_from_env(n)[0][0]
        return super().run_node(n)


@contextlib.contextmanager
def _marked_detaches() -> Iterator[None]:
    """Mark the nodes at which the function itself calls detach()."""
    detach = Tensor.detach

    def marked(tensor: Tensor) -> Tensor:
        mode = proxy_tensor.get_proxy_mode()
        if mode is None:
            return detach(tensor)
        root = mode.tracer.graph._root
        last = root.prev
        found = detach(tensor)
        node = root.prev
        while node is not last:
            node.meta[DETACHED] = True
            node = node.prev
        return found

    with mock.patch.object(Tensor, "detach", marked):
        yield


@contextlib.contextmanager
def _gradients_as_above() -> Iterator[None]:
    """Raise CaptureError if a transformed function turns gradients off, as its calls run again with gradients."""

    def refusing(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def refuse(block: Any) -> Any:
            frame = sys._getframe(1)
            if frame.f_globals.get("__name__") == "torch.utils._contextlib" and frame.f_back is not None:  # a decorator
                frame = frame.f_back
            if is_users(frame.f_globals.get("__name__")):
                raise CaptureError(
                    f"the forward turns gradients off ({where(frame)}) inside of a function that torch.func "
                    "transforms, of which only the calls are captured. Call detach() on what is computed there in "
                    "its place."
                )
            return enter(block)

        return refuse

    with (
        mock.patch.object(torch.no_grad, "__enter__", refusing(torch.no_grad.__enter__)),
        mock.patch.object(torch.inference_mode, "__enter__", refusing(torch.inference_mode.__enter__)),
    ):
        yield
