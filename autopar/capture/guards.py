"""Guards around tracing, without which `torch.export` silently records another computation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.modules import module as modules
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes

from autopar.capture.composites import composites_taken_apart
from autopar.capture.constant_indices import ConstantIndices
from autopar.capture.flex import flex_attention_taken_apart
from autopar.capture.python.cone import comes_from_inputs
from autopar.errors import CaptureError

HOOKS_ON_ALL: tuple[dict[int, Any], ...] = (
    modules._global_forward_pre_hooks,
    modules._global_forward_hooks,
    modules._global_backward_pre_hooks,
    modules._global_backward_hooks,
)


@contextlib.contextmanager
def faithful_tracing(
    device: str | None = None, is_static: Callable[[object], bool] = lambda tensor: False
) -> Iterator[None]:
    """Apply all guards below, with gradients enabled, as in training."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(checkpoints_called_directly())
        stack.enter_context(hugging_face_masks(is_static))
        stack.enter_context(no_fused_encoder_layers())
        stack.enter_context(parameters_kept())
        stack.enter_context(batch_norms())
        stack.enter_context(ConstantIndices())
        stack.enter_context(composites_taken_apart(device))
        stack.enter_context(flex_attention_taken_apart())
        yield


def check_no_backward_hooks(model: nn.Module) -> None:
    """Raise CaptureError where a module has a backward hook: a captured graph computes no gradients of modules."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"{name or 'the model'} has a backward hook (register_full_backward_hook or register_full_backward_"
                "pre_hook), and a captured graph computes the gradients of tensors, not of modules; remove it, or "
                "register it on a parameter (parameter.register_hook) or on the compiled model itself."
            )


def hooks_on_all_modules() -> dict[int, Any]:
    """Return the number → hook of those that run for every module there is and are not torch's own, which only look."""
    tables = [table for table in HOOKS_ON_ALL if table]
    return {
        number: hook
        for table in tables
        for number, hook in table.items()
        if not getattr(hook, "__module__", "").startswith("torch.")
    }


def check_no_hooks_on_all_modules() -> None:
    """Raise CaptureError where a hook would run for modules that no call of a captured graph enters."""
    for hook in hooks_on_all_modules().values():
        raise CaptureError(
            f"{getattr(hook, '__qualname__', hook)} is a hook on all modules (register_module_forward_hook or the "
            "like), and a compiled model runs one graph, not its modules; register it on those that it is for "
            "(module.register_forward_hook), before or after autopar.compile."
        )


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Keep what is computed from modes and hooks around it that would count it, as of a step: FLOP counters.

    Tensors without memory stay that: `FakeTensorMode` goes on.
    """
    before = [dict(table) for table in HOOKS_ON_ALL]
    try:
        with _disable_current_modes() as modes, contextlib.ExitStack() as kept:
            for mode in modes:
                if isinstance(mode, FakeTensorMode):
                    kept.enter_context(mode)
            refused = hooks_on_all_modules()
            for table in HOOKS_ON_ALL:
                for number in table.keys() - refused.keys():
                    del table[number]
            yield
    finally:
        for table, hooks in zip(HOOKS_ON_ALL, before, strict=True):
            table.update(hooks)


@contextlib.contextmanager
def checkpoints_called_directly() -> Iterator[None]:
    """Let torch.utils.checkpoint call its function and nothing else; what is recomputed is decided by the plan."""

    class Direct:
        @staticmethod
        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            return function(*args)

    def no_recomputation(*args: Any, **kwargs: Any) -> Generator[None]:
        yield

    # The two names that `checkpoint` looks up at each call, so that references to `checkpoint` itself work too.
    module = torch.utils.checkpoint
    with (
        mock.patch.object(module, "CheckpointFunction", Direct),
        mock.patch.object(module, "_checkpoint_without_reentrant_generator", no_recomputation),
    ):
        yield


@contextlib.contextmanager
def hugging_face_masks(is_static: Callable[[object], bool]) -> Iterator[None]:
    """Let transformers choose masks as in eager mode, so that attention is recorded with is_causal and enable_gqa.

    While exporting, transformers builds explicit masks and repeats keys and values, because an exported graph may meet
    other lengths; ours is planned anew for every shape. Packed sequences are looked for only in position ids that
    come from the inputs: those that the model counts itself are never packed.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None:
        yield
        return
    find_packed = masks.find_packed_sequence_indices

    def find_packed_in_inputs(position_ids: Tensor) -> Tensor | None:
        given = is_static(position_ids) or comes_from_inputs(position_ids)
        return find_packed(position_ids) if given else None

    with contextlib.ExitStack() as stack:
        for name in ("transformers.masking_utils", "transformers.integrations.sdpa_attention"):
            module = sys.modules.get(name)
            if module is not None and hasattr(module, "is_torchdynamo_exporting"):
                stack.enter_context(mock.patch.object(module, "is_torchdynamo_exporting", lambda: False))
        stack.enter_context(mock.patch.object(masks, "find_packed_sequence_indices", find_packed_in_inputs))
        yield


@contextlib.contextmanager
def batch_norms() -> Iterator[None]:
    """Record statistics of the whole batch for SyncBatchNorm, and cumulative averages (momentum=None) in tensors.

    PyTorch reads the number of batches as a Python number for these averages, which `update_bn` asks for.
    """
    forward = _BatchNorm.forward

    def recorded(module: _BatchNorm, input: Tensor) -> Tensor:
        mean, var, count = module.running_mean, module.running_var, module.num_batches_tracked
        if module.momentum is not None or not module.training or mean is None or var is None or count is None:
            return forward(module, input)
        module._check_input_dim(input)
        count.add_(1)
        with torch.no_grad():
            samples, dims = input.to(mean.dtype), [dim for dim in range(input.ndim) if dim != 1]
            found = samples.mean(dims, keepdim=True)
            spread = (samples - found).square().sum(dims) / (samples.numel() // samples.shape[1] - 1)
            mean.add_((found.flatten() - mean) / count)
            var.add_((spread - var) / count)
        return functional.batch_norm(input, None, None, module.weight, module.bias, True, 0.0, module.eps)

    with (
        mock.patch.object(_BatchNorm, "forward", recorded),
        mock.patch.object(nn.SyncBatchNorm, "forward", recorded),
    ):
        yield


@contextlib.contextmanager
def no_fused_encoder_layers() -> Iterator[None]:
    """Keep nn.TransformerEncoder from its fused inference operator, which has no derivative and no layouts."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextlib.contextmanager
def parameters_kept() -> Iterator[None]:
    """Let a forward cast or move modules where that changes nothing; CaptureError where it does.

    `nn.Module.to` puts new data into every parameter, which tensors without data do not allow.
    """

    def apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for name, tensor in (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)):
            with _disable_current_modes():  # else the cast were recorded, and the parameter taken for its result
                like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                changed = change(like)
            if changed is not like:
                raise CaptureError(
                    f"the forward changes the parameters of a {type(module).__name__} as it runs: its {name} would "
                    f"become {changed.dtype} on {changed.device} instead of {tensor.dtype} on {tensor.device}. Cast or "
                    "move the module before it is compiled."
                )
        return module

    with mock.patch.object(nn.Module, "_apply", apply):
        yield
