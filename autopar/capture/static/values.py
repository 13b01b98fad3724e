"""Static tensors while a model is traced: what is computed from them alone is computed, the rest reads constants.

Static tensors keep their values. A function of static tensors and constants runs at once, outside of the trace, and
what it returns is static, too, so that `tolist()`, sizes and branches see numbers. Where a static tensor meets a traced
one, the graph gets a copy of its values as a constant. A write of traced values into a static tensor makes it traced.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autopar.capture.python.user_code import where
from autopar.capture.python.writes import is_write
from autopar.capture.static.arguments import StaticTensor
from autopar.capture.static.static_nodes import MAX_ELEMENTS, known_value
from autopar.errors import CaptureError
from autopar.ir.program.precision import AS_IT_IS, Precision

OF_VALUES = """
    __bool__ __complex__ __contains__ __float__ __index__ __int__ allclose argwhere bincount combinations equal
    is_nonzero item masked_select nonzero numpy tensor tolist unique unique_consecutive
"""
"""Functions that return values of their arguments to Python, or a shape that depends on them."""
OF_COUNTS = "repeat_interleave split_with_sizes tensor_split"
"""Functions whose shapes depend on the values of all arguments but the first."""
OF_MASKS = "__getitem__ __setitem__ index_put index_put_"
"""Functions whose shapes depend on the values of masks and numbers among all arguments but the first."""
OF_SIZES = """
    arange broadcast_to chunk empty expand full narrow new_empty new_full new_ones new_zeros ones rand randn repeat
    reshape roll select split tile unflatten unfold view zeros
"""
"""Functions of which arguments but the first may be sizes, given as tensors of one element."""


class StaticValues(TorchFunctionMode):
    """The static tensors of one trace."""

    def __init__(self, leaves: Sequence[Any], precision: Precision = AS_IT_IS) -> None:
        """`leaves` are the arguments of the call; static floats are seen in the dtype of compute."""
        super().__init__()
        self._given: dict[str, Tensor] = {}
        """Text in the place of a static argument → the tensor that the forward gets."""
        self.leaves = [self._stand_in(leaf, precision) for leaf in leaves]
        """The arguments, with a text in the place of each StaticTensor."""
        self._static: dict[int, Tensor] = {}
        """Id → static tensor; all of them are kept, as an id is given again."""
        self._snapshots: dict[int, tuple[int, Tensor]] = {}
        """Id → the version of a static tensor, and its values then, as the graph has them."""
        self._traced: dict[int, Tensor] = {}
        """Storage → the traced tensor that took its place when traced values were written into it."""
        self._of_model: dict[int, Tensor] = {}
        """Storage → a constant that is not static, of which static tensors may be views."""
        self._values = self._counts = self._masks = self._sizes = frozenset[Any]()
        self._running = False

    def _stand_in(self, leaf: Any, precision: Precision) -> Any:
        if not isinstance(leaf, StaticTensor):
            return leaf
        name = f"autopar static {len(self._given)}"
        self._given[name] = leaf.values.to(precision.computes(leaf.values.dtype))
        return name

    @contextlib.contextmanager
    def given_to(self, traced: nn.Module) -> Iterator[None]:
        """Have a model, traced inside, get the values of its static arguments."""
        if not self._given:
            yield
            return
        before = traced.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
        after = traced.register_forward_hook(self._end)
        try:
            with self:
                yield
        finally:
            before.remove()
            after.remove()

    def is_static(self, tensor: object) -> bool:
        """Return whether a tensor is static: a static argument, or computed from some."""
        return id(tensor) in self._static

    def _begin(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Put the static arguments in the places of their texts."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            given = {name: tensor.clone() for name, tensor in self._given.items()}
        self._static.update((id(tensor), tensor) for tensor in given.values())
        # While a model is traced, some of these are others than PyTorch's own.
        self._values, self._counts, self._masks, self._sizes = map(
            _functions, (OF_VALUES, OF_COUNTS, OF_MASKS, OF_SIZES)
        )
        self._running = True
        return pytree.tree_map_only(str, lambda text: given.get(text, text), (args, kwargs))

    def _end(self, _: nn.Module, args: Any, outputs: Any) -> Any:
        """Return the outputs with traced tensors that took the place of static ones."""
        self._running = False
        return pytree.tree_map_only(Tensor, self._traced_value, outputs)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._running:
            return func(*args, **kwargs)
        if self._traced:
            args, kwargs = _map_tensors(self._traced_value, (args, kwargs))
        args, kwargs = self._with_known(func, args, kwargs)
        tensors = _tensors((args, kwargs))
        if not any(map(self.is_static, tensors)):
            return func(*args, **kwargs)
        written, are_real = _written(func, args, kwargs), all(map(_is_real, tensors))
        self._check_own(written)
        are_many = are_real and not _is_small(tensors)
        if are_real and not are_many and all(map(self.is_static, written)):
            self._of_model.update((_memory_key(each), each) for each in tensors if not self.is_static(each))
            found, is_random = self._computed(func, args, kwargs, written)
            if not is_random:
                return found
        for each in filter(self.is_static, written):
            self._trace(each)
        args, kwargs = _map_tensors(self._traced_value, (args, kwargs))
        if func in self._sizes:
            args, kwargs = (*args[:1], *_map_tensors(_number_in, args[1:])), _map_tensors(_number_in, kwargs)

        def constant(x: Tensor) -> Tensor:
            if not self.is_static(x):
                return x
            found = self._snapshot(x)
            return found.clone() if are_many else found  # a call of the graph: masks of constants are computed

        args, kwargs = _map_tensors(constant, (args, kwargs))
        return func(*args, **kwargs)

    def _with_known(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return arguments whose values a function needs as static tensors, if they follow from constants alone."""
        if func in self._values or (func is torch.where and len(args) + len(kwargs) == 1):
            return _map_tensors(self._known, (args, kwargs))
        if func in self._counts:
            return (*args[:1], *_map_tensors(self._known, args[1:])), _map_tensors(self._known, kwargs)
        if func in self._masks:
            return (*args[:1], *_map_tensors(self._known_mask, args[1:])), _map_tensors(self._known_mask, kwargs)
        return args, kwargs

    def _known(self, tensor: Tensor) -> Tensor:
        value = known_value(tensor) if isinstance(tensor, FakeTensor) else None
        if value is None:
            return tensor
        self._static[id(value)] = value
        return value

    def _known_mask(self, tensor: Tensor) -> Tensor:
        is_mask = not tensor.ndim or tensor.dtype in (torch.bool, torch.uint8)
        return self._known(tensor) if is_mask else tensor

    def _computed(self, func: Any, args: Any, kwargs: Any, written: Sequence[Tensor]) -> tuple[Any, bool]:
        """Return what a function gives for static tensors, and whether it drew random numbers, which undoes it."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            random, before = torch.get_rng_state(), [each.clone() for each in written]
            found = func(*args, **kwargs)
            if not torch.equal(random, torch.get_rng_state()):
                torch.set_rng_state(random)
                for tensor, values in zip(written, before, strict=True):
                    tensor.copy_(values)
                return None, True
        self._static.update((id(each), each) for each in pytree.tree_leaves(found) if _is_real(each))
        return found, False

    def _check_own(self, written: Sequence[Tensor]) -> None:
        """Raise CaptureError if a write would change a tensor that the model keeps."""
        if any(self.is_static(each) and _memory_key(each) in self._of_model for each in written):
            raise CaptureError(
                f"the forward writes into a view of a tensor that the model keeps ({where(sys._getframe(2))}), and a "
                "graph cannot hold the write. Write into a clone, or register the tensor as a buffer."
            )

    def _snapshot(self, tensor: Tensor) -> Tensor:
        """Return the values that a static tensor has now, which no later write changes, for the graph."""
        version, found = self._snapshots.get(id(tensor), (-1, tensor))
        if version != tensor._version:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                found = tensor.clone()
            self._snapshots[id(tensor)] = tensor._version, found
        return found

    def _trace(self, tensor: Tensor) -> None:
        """Let a traced tensor take the place of the memory of a static one, for all of its views."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            whole = _whole_memory(tensor).clone()
        with torch._C.DisableTorchFunction():
            self._traced[_memory_key(tensor)] = whole.clone()

    def _traced_value(self, tensor: Tensor) -> Tensor:
        """Return the traced tensor that took the place of a static one; any other tensor as it is."""
        if not self._traced or not self.is_static(tensor):
            return tensor
        whole = self._traced.get(_memory_key(tensor))
        if whole is None:
            return tensor
        if not tensor.is_contiguous():
            return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if tensor.numel() != whole.numel():
            whole = whole.narrow(0, tensor.storage_offset(), tensor.numel())
        return whole.view(tensor.shape)


def _functions(names: str) -> frozenset[Any]:
    """Return the functions and methods of these names, as they are while a model is traced."""
    found = [getattr(owner, name, None) for owner in (torch, Tensor) for name in names.split()]
    return frozenset(each for each in found if each is not None)


def _map_tensors(function: Any, values: Any) -> Any:
    """Return nested arguments with `function` of each tensor, those in slices included."""

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return slice(*(mapped(each) for each in (leaf.start, leaf.stop, leaf.step)))
        return function(leaf) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(mapped, values, is_leaf=lambda leaf: isinstance(leaf, slice))


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map_tensors(lambda tensor: found.append(tensor) or tensor, values)
    return found


def _is_real(value: object) -> bool:
    """Return whether a value is a tensor with values, outside of the trace and of function transforms."""
    return (
        type(value) is Tensor
        and not isinstance(value, FakeTensor)
        and not value.is_meta
        and not is_functorch_wrapped_tensor(value)
    )


def _is_small(tensors: Sequence[Tensor]) -> bool:
    """Return whether an elementwise function of tensors returns few enough elements to compute while tracing."""
    try:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    except RuntimeError:
        return True
    return math.prod(shape) <= MAX_ELEMENTS


def _written(func: Any, args: Sequence[Any], kwargs: Any) -> list[Tensor]:
    found = _tensors(kwargs.get("out"))
    if is_write(getattr(func, "__name__", "")) or kwargs.get("inplace") is True:
        found += _tensors(args[:1])
    return found


def _number_in(tensor: Tensor) -> Any:
    """Return the number in a real integer tensor of one element without dims; any other tensor as it is."""
    if not _is_real(tensor) or tensor.ndim or tensor.is_floating_point():
        return tensor
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return tensor.item()


def _memory_key(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor, which its views share."""
    return tensor.untyped_storage()._cdata


def _whole_memory(tensor: Tensor) -> Tensor:
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((size,), (1,), 0)
