"""A stage on torch.distributed.pipelining's schedules: what it takes and gives, stated before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.pipelining import PipelineStage

from autopar.program.program import TensorInfo
from autopar.runtime.module.executable import Executable
from autopar.runtime.module.stage import Stage
from autopar.runtime.pipeline.split_backward import backward_to_inputs, backward_to_weights
from autopar.sharding.layout import Layout


class ScheduledStage(PipelineStage):
    """A `PipelineStage` that tells its module which micro-batch it runs."""

    def __init__(
        self, stage: Stage, number: int, num_stages: int, loss_position: int | None, group: dist.ProcessGroup
    ) -> None:
        """`loss_position` is that of the loss among the user's outputs, on the last stage; None on the others."""
        executable = stage.executable
        super().__init__(
            _Handed(stage, loss_position),
            number,
            num_stages,
            torch.device(executable.mesh.device_type),
            input_args=received_tensors(executable),
            output_args=sent_tensors(executable) if loss_position is None else torch.empty((), device="meta"),
            group=group,
        )
        self.stage = stage

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As in the base class."""
        self.stage.microbatch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """As in the base class; what is sent back is contiguous."""
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        gradients = self.bwd_cache.get(bwd_chunk_id, ())
        self.bwd_cache[bwd_chunk_id] = tuple(None if each is None else each.contiguous() for each in gradients)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """As in the base class, whose own halves of a backward leave out weights that no input is upstream of."""
        if backward_type == "input":
            inputs, weights = bwd_kwargs["input_values"], list(self.submod.parameters())
            return backward_to_inputs(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], inputs, weights)
        if backward_type == "weight":
            backward_to_weights(bwd_kwargs["param_groups"])
            return (), None
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


class _Handed(nn.Module):
    """A stage that gives what goes to the next one, or the loss."""

    def __init__(self, stage: Stage, loss_position: int | None) -> None:
        super().__init__()
        self.stage = stage
        self._loss_position = loss_position

    def forward(self, *received: Tensor) -> Any:
        outputs = self.stage(*received)
        if self._loss_position is not None:
            return outputs[self._loss_position]
        # Schedules detach what was sent, which views do not allow; what is only passed on is a buffer to receive in.
        known = {id(tensor) for tensor in received}
        sent = outputs[: self.stage.executable.program.num_sent]
        copied = (x._is_view() or id(x) in known or not x.is_contiguous() for x in sent)
        pairs = zip(sent, copied, strict=True)
        return tuple(x.clone(memory_format=torch.contiguous_format) if copy else x for x, copy in pairs)


def received_tensors(executable: Executable) -> tuple[Tensor, ...]:
    """What a rank's part of a stage receives, as tensors without memory."""
    nodes, layouts = executable.program.placeholders(), executable.local.layouts
    infos = [nodes[name].meta["tensor"] for name in executable.program.received]
    return _described(executable, infos, [layouts[name] for name in executable.program.received])


def sent_tensors(executable: Executable) -> tuple[Tensor, ...]:
    """What a rank's part of a stage sends, as tensors without memory."""
    program = executable.program
    infos = [_info(value) for value in program.output[: program.num_sent]]
    layouts = executable.local.output_layouts[: program.num_sent]
    return _described(executable, infos, layouts)


def result_tensors(values: Sequence[object], layouts: Sequence[Layout | None], sizes: Sequence[int]) -> list[Any]:
    """The user's outputs on a rank, as tensors without memory; what is no tensor, as it is."""
    return [
        value if layout is None else _empty(_info(value), layout, sizes)
        for value, layout in zip(values, layouts, strict=True)
    ]


def _described(
    executable: Executable, infos: Sequence[TensorInfo], layouts: Sequence[Layout | None]
) -> tuple[Tensor, ...]:
    sizes = executable.mesh.shape
    pairs = zip(infos, layouts, strict=True)
    return tuple(_empty(info, layout, sizes) for info, layout in pairs if layout is not None)


def _empty(info: TensorInfo, layout: Layout, sizes: Sequence[int]) -> Tensor:
    shape = layout.local_shape(info.shape, sizes)
    return torch.empty(shape, dtype=info.dtype, device="meta", requires_grad=info.requires_grad)


def _info(value: object) -> TensorInfo:
    assert isinstance(value, fx.Node)
    return value.meta["tensor"]
