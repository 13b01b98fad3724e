"""Buffers that a forward assigns (`self.steps = self.steps + 1`): the graph writes into the buffer, as it ends.

`torch.export` knows those of the outermost module only, and drops the others without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from autopar.errors import CaptureError


@contextlib.contextmanager
def assigned_buffers(traced: nn.Module) -> Iterator[None]:
    """Let a traced forward end with writes into the buffers of inner modules that it has assigned.

    Raises CaptureError where what is assigned has another shape or dtype, or is no tensor.
    """
    before: list[tuple[str, nn.Module, str, Tensor]] = []

    def begin(*_: object) -> None:
        before[:] = [
            (f"{path}.{name}", module, name, buffer)
            for path, module in traced.named_modules()
            if path
            for name, buffer in vars(module)["_buffers"].items()
            if buffer is not None
        ]

    def end(*_: object) -> None:
        memory = {buffer.untyped_storage()._cdata for *_, buffer in before}
        writes: list[tuple[Tensor, Tensor]] = []
        for path, module, name, buffer in before:
            now = vars(module)["_buffers"].get(name)
            if now is buffer:
                continue
            if now is None or now.shape != buffer.shape or now.dtype != buffer.dtype:
                found = "None" if now is None else f"{now.dtype} of shape {list(now.shape)}"
                raise CaptureError(
                    f"the forward assigns {found} to the buffer {path}, which is {buffer.dtype} of shape "
                    f"{list(buffer.shape)}; a captured graph writes into the memory of a buffer. Assign a tensor of "
                    "the same shape and dtype, or keep what changes in a plain attribute."
                )
            value = now.detach()
            # Read the other buffer's old value before it is written.
            writes.append((buffer, value.clone() if now.untyped_storage()._cdata in memory else value))
        for buffer, value in writes:
            buffer.copy_(value)

    handles = traced.register_forward_pre_hook(begin), traced.register_forward_hook(end)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
