"""A user's `autograd.Function` while a model is traced: kept whole, so that its own backward is the one that runs.

Its forward runs once on tensors without values, aside, to learn the outputs' shapes and dtypes; the graph gets one
call. Calls that cannot be expressed so are refused: tensors that are no arguments, writes, random numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.inlining.function_stand_ins import KEPT, KeptUse
from autopar.errors import CaptureError
from autopar.ir.program.autograd_function import applied

OF_CUSTOM_OPERATORS = "torch._library.autograd"
"""Module of the autograd Functions that are the backward of a custom operator, which is kept whole by itself."""


@contextlib.contextmanager
def kept_functions(uses: list[KeptUse]) -> Iterator[None]:
    """Let each use of an autograd.Function be one call of the traced graph; `uses` gets them in order."""
    apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def keep(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        mode = proxy_tensor.get_proxy_mode()
        if mode is None or cls.__module__ == OF_CUSTOM_OPERATORS:
            return apply(cls, *args, **kwargs)
        if torch._C._are_functorch_transforms_active():
            raise _refused(cls, "is used inside a transform of torch.func", "Use it outside of vmap and grad")
        use = KeptUse.of(cls, args)
        if kwargs or any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in use.leaves):
            raise _refused(cls, "is given arguments by keyword, or numbers made of tensors", "Give tensors by position")
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        outputs = _outputs(cls, args, tensors, mode.tracer)
        uses.append(use)
        slots = [proxy_tensor.fetch_object_proxy(mode.tracer, tensor) for tensor in tensors]  # type: ignore[arg-type]
        given = [getattr(slot, "proxy", slot) for slot in slots]
        proxy = mode.tracer.create_proxy("call_function", KEPT, (len(uses) - 1, *given), {})
        return proxy_tensor.track_tensor_tree(outputs, proxy, constant=None, tracer=mode.tracer)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(keep)):
        yield


def _outputs(cls: type[torch.autograd.Function], args: Any, tensors: list[Tensor], tracer: Any) -> Any:
    """Return the outputs of a Function's own forward on tensors without values, kept out of the graph."""
    shapes = getattr(detect_fake_mode(tensors), "shape_env", None)
    aside = contextlib.ExitStack()
    with aside:
        aside.enter_context(proxy_tensor.disable_proxy_modes_tracing())
        aside.enter_context(torch._C.DisableTorchFunction())
        aside.enter_context(_Watch(cls, tensors, tracer))
        if shapes is not None:
            aside.enter_context(shapes.ignore_fresh_unbacked_symbols())
        try:
            outputs = applied(cls, args)  # nothing is traced here: as it is
        except CaptureError:
            raise
        except Exception as error:
            text = next(iter(str(error).strip().splitlines()), "")
            raise _refused(
                cls,
                f"does not run on tensors without values ({type(error).__name__}: {text})",
                _replacement_hint(cls)
                or "Write what it calls as a custom operator with torch.library.custom_op, register_fake and "
                "register_autograd",
            ) from error
    sizes = [size for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) for size in leaf.shape]
    if any(isinstance(size, torch.SymInt) for size in sizes):
        raise _refused(cls, "gives tensors whose shape depends on values", "Let the shape follow from the inputs'")
    return outputs


class _Watch(TorchDispatchMode):
    """Looks at every operation of a Function's forward, and refuses what one call in a graph could not repeat."""

    def __init__(self, cls: type[torch.autograd.Function], tensors: list[Tensor], tracer: Any) -> None:
        super().__init__()
        self.cls, self.tracer = cls, tracer
        self.entered = set(map(id, tensors))
        self.storages = {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in taken:
            of_the_model = proxy_tensor.get_proxy_slot(tensor, self.tracer, None) is not None
            if of_the_model and id(tensor) not in self.entered and not self._is_part(tensor):
                raise _refused(
                    self.cls,
                    f"reads a tensor {list(tensor.shape)} of the model that is none of its arguments",
                    "Give it to apply as an argument",
                )
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _refused(self.cls, f"draws random numbers ({func})", "Draw them outside and give them to apply")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and self._is_part(value):
                raise _refused(self.cls, f"writes into its arguments ({func})", "Let forward work on a clone")
        return func(*args, **(kwargs or {}))

    def _is_part(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self.storages


INSTEAD = {
    "liger_kernel.": (
        "Of Liger, RMSNorm, LayerNorm, SwiGLU, GEGLU and RoPE are known; for its losses let the model compute "
        "torch.nn.functional.cross_entropy of the linear layer, which autopar takes in tiles by Memory(loss_tiles=…), "
        "and wrap other kernels by torch.library.custom_op with register_fake and autopar.register_rule"
    ),
    "transformer_engine.": (
        "Build the model with torch.nn's modules in place of TransformerEngine's, whose kernels decide on values of "
        "scales as they run; what they reach is planned by hardware='h100:te'"
    ),
    "bitsandbytes.": (
        "Dequantize the weights before autopar sees the model (model.dequantize() of transformers), or train adapters "
        "with bitsandbytes on one device"
    ),
}
"""Module → what to do about a kernel of it that cannot be captured."""


def _replacement_hint(cls: type[torch.autograd.Function]) -> str | None:
    return next((advice for module, advice in INSTEAD.items() if cls.__module__.startswith(module)), None)


def _refused(cls: type[torch.autograd.Function], found: str, advice: str) -> CaptureError:
    return CaptureError(
        f"the autograd.Function {cls.__module__}.{cls.__qualname__} {found}; a captured graph keeps it as one call of "
        f"its arguments. {advice}, or write it as plain PyTorch operations."
    )
