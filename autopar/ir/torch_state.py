"""PyTorch's own state around foreign code: whatever a traced forward leaves behind is put back, also where it fails.

A forward may enter a mode and raise before it leaves it, and a trace runs only a part of what it records. Modes,
levels of `torch.func`, grad mode, autocast, defaults and random numbers are global, so they would reach every later
call of the process.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import _autograd as autograd
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._ops import _len_torch_dispatch_stack_pre_dispatch, _pop_mode_from_pre_dispatch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

AUTOCAST_DEVICES = ("cpu", "cuda")
FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")
Restore = Callable[[], object]


@contextlib.contextmanager
def torch_state_restored() -> Iterator[None]:
    """Put PyTorch's global state back to what it was when the block began, whether the block fails or not."""
    with torch._C._PreserveDispatchKeyGuard():  # pyright: ignore[reportAttributeAccessIssue]
        restores = [remember() for remember in REMEMBER]
        try:
            yield
        finally:
            for restore in reversed(restores):
                restore()


@contextlib.contextmanager
def saved_tensor_hooks_apart() -> Iterator[None]:
    """Disable saved-tensor hooks inside the block; `torch.func` refuses to run with any active."""
    hooks: list[tuple[Any, Any]] = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def fake_tensor_errors_unlogged() -> Iterator[None]:
    """Keep PyTorch from logging a traceback for each call of fake tensors that fails inside the block.

    Such a call raises all the same. The block is for calls that are tried, whose failure is an answer.
    """
    disabled = FAKE_TENSOR_LOG.disabled
    FAKE_TENSOR_LOG.disabled = True
    try:
        yield
    finally:
        FAKE_TENSOR_LOG.disabled = disabled


def _functorch_levels() -> Restore:
    depth, level = functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level

    def restore() -> None:
        if functorch.get_dynamic_layer_stack_depth() > depth:
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        while forward_ad._current_level > level:
            forward_ad.exit_dual_level()

    return restore


def _function_modes() -> Restore:
    before = _get_current_function_mode_stack()
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # set by torch.set_default_device

    def restore() -> None:
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        for mode in before:
            torch._C._push_on_torch_function_stack(mode)
        torch._GLOBAL_DEVICE_CONTEXT.device_context = context

    return restore


def _dispatch_modes() -> Restore:
    before, num_before_autograd = _get_current_dispatch_mode_stack(), _len_torch_dispatch_stack_pre_dispatch()
    lifted = torch._C._only_lift_cpu_tensors()  # by a FakeTensorMode

    def restore() -> None:
        while _len_torch_dispatch_stack_pre_dispatch() > num_before_autograd:
            _pop_mode_from_pre_dispatch()
        for mode in reversed(_get_current_dispatch_mode_stack()):
            if all(mode is not kept for kept in before):
                _pop_mode(getattr(mode, "_mode_key", None))
        torch._C._set_only_lift_cpu_tensors(lifted)

    return restore


def _autocast() -> Restore:
    enabled = {kind: torch.is_autocast_enabled(kind) for kind in AUTOCAST_DEVICES}
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in AUTOCAST_DEVICES}
    cached, depth = torch.is_autocast_cache_enabled(), _autocast_depth()

    def restore() -> None:
        for kind in AUTOCAST_DEVICES:
            torch.set_autocast_enabled(kind, enabled[kind])
            torch.set_autocast_dtype(kind, dtypes[kind])
        torch.set_autocast_cache_enabled(cached)
        for _ in range(_autocast_depth() - depth):
            torch.autocast_decrement_nesting()

    return restore


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _defaults() -> Restore:
    dtype, grad, rng = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_rng_state()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    compiling, exporting = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag

    def restore() -> None:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.set_rng_state(rng)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = compiling, exporting

    return restore


REMEMBER: tuple[Callable[[], Restore], ...] = (
    _defaults,
    _autocast,
    _dispatch_modes,
    _function_modes,
    _functorch_levels,
)
"""Each remembers one part of the state; the last one is put back first, as modes catch the calls of the others."""
