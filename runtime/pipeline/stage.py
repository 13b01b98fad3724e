"""A stage on torch.distributed.pipelining's schedules: what it takes and gives, stated before anything runs.

PyTorch allocates a buffer for every micro-batch of a step, for each tensor that a stage receives, and most of its
schedules hold what was sent up to the end of the step. Here a buffer is allocated when its receive is posted, and freed
with the micro-batch's backward, so that there are as many as `planning.pipeline.schedules.receive_buffers` counts along
the schedule's order. Outputs and gradients are freed when the next ones are sent, as Megatron-LM does with
`deallocate_pipeline_outputs`: a backward begins at an output, and needs its shape alone. The schedules stay PyTorch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _make_tensor_from_meta
from torch.distributed.pipelining.stage import _RecvInfo

from autopar.ir.program.operators.derivatives import once_differentiable
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.layout import Layout
from autopar.runtime.module.executable import Executable
from autopar.runtime.module.stage import Stage
from autopar.runtime.pipeline.split_backward import backward_to_inputs, backward_to_weights


class _Received(_RecvInfo):
    """A tensor from another stage for one micro-batch; its buffer is here from its receive until it is taken."""

    buffer: Tensor | None

    def taken(self) -> Tensor | None:
        buffer, self.buffer = self.buffer, None
        return buffer


class ScheduledStage(PipelineStage):
    """A `PipelineStage` that tells its module which micro-batch it runs, and holds buffers for those in flight only."""

    def __init__(
        self,
        stage: Stage,
        number: int,
        num_stages: int,
        loss_position: int | None,
        group: dist.ProcessGroup,
        fuses: bool,
    ) -> None:
        """`loss_position` is that of the loss among the user's outputs, on the last stage; None on the others.

        `fuses`: whether the schedule posts sends together with receives, and waits for both (1F1B).
        """
        executable = stage.executable
        self._inputs = received_tensors(executable)
        super().__init__(
            _Handed(stage, loss_position),
            number,
            num_stages,
            torch.device(executable.mesh.device_type),
            input_args=self._inputs,
            output_args=sent_tensors(executable) if loss_position is None else torch.empty((), device="meta"),
            group=group,
        )
        self.stage = stage
        self._fuses = fuses
        self._fused: list[dist.P2POp] = []
        self._outputs_sent: list[dist.Work] = []
        self._last_sent: int | None = None
        self._gradients_sent: list[dist.Work] = []

    # Receive buffers. PyTorch's methods of these names allocate them all, or expect that.

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        if self.is_first:
            super()._setup_forward_recv_info(num_microbatches, has_backward)
            return
        assert self._stage_meta.inputs is not None, "inputs are described before they are received"
        for number in range(num_microbatches):
            self.args_recv_info[number] = tuple(
                _Received(f"input {position}", self.stage_index - 1, None, meta)
                for position, meta in enumerate(self._stage_meta.inputs)
            )

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[_RecvInfo, ...]:
        if self.is_last:
            return ()
        assert self._stage_meta.output_grads is not None, "gradients are described before they are received"
        return tuple(
            _Received(f"gradient of output {position}", self.stage_index + 1, None, meta)
            for position, meta in enumerate(self._stage_meta.output_grads)
        )

    def _get_recv_ops(self, recv_infos: tuple[_RecvInfo, ...]) -> list[dist.P2POp]:
        found = []
        for info in recv_infos:
            if isinstance(info, _Received) and info.tensor_meta is not None:
                assert info.source is not None, "a stage receives from another one"
                info.buffer = buffer = _make_tensor_from_meta(info.tensor_meta, self.device)
                peer = self._resolve_peer_global_rank(info.source)
                found.append(dist.P2POp(dist.irecv, buffer, peer, self.group))
        return found

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for info, like in zip(self.args_recv_info[fwd_chunk_id], self._inputs, strict=True):
            assert isinstance(info, _Received), "the inputs of this stage"
            tensor = info.taken()
            assert tensor is not None, "it has been received"
            found.append(tensor.requires_grad_(like.requires_grad and torch.is_grad_enabled()))
        return tuple(found)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        infos: tuple[_Received, ...] = self.grad_recv_info[bwd_chunk_id]
        return tuple(info.taken() for info in infos)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients that the next stage, on this rank, has made; zeros where it has made none."""
        for info, gradient in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True):
            if gradient is None and info.tensor_meta is not None:
                gradient = _make_tensor_from_meta(info.tensor_meta, self.device).zero_()
            info.buffer = gradient

    # Sends. All schedules but 1F1B hold what was sent up to the end of the step, so it is sent here for them.

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of outputs that the schedule is to post; none if they are in transit already.

        The outputs before have arrived by then, and are freed: a schedule that posts them has waited for them.
        """
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        if not self._fuses:
            _wait(self._outputs_sent)
            self._outputs_sent = _posted(operations)
        self._free_last_sent()
        self._last_sent = None if self.is_last else fwd_chunk_id
        return self._left_to_schedule(operations)

    def _free_last_sent(self) -> None:
        sent: Sequence[Tensor] = () if self._last_sent is None else self.fwd_cache.get(self._last_sent, ((),))[0]
        for tensor in sent:
            tensor.data = tensor.new_empty(()).expand(tensor.shape)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of gradients that the schedule is to post; none if they are in transit already.

        Gradients are sent here after the previous ones have arrived.
        """
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        if not self._fuses:
            _wait(self._gradients_sent)
            self._gradients_sent = _posted(operations)
        return self._left_to_schedule(operations)

    def _left_to_schedule(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        self._fused += operations if self._fuses else ()
        return operations if self._fuses else []

    def _let_go_of_sent(self) -> None:
        """Drop what 1F1B has sent: it has posted it by now, and holds the operations until it sends again."""
        for operation in self._fused:
            del operation.tensor
        self._fused.clear()

    def finish_sends(self) -> None:
        """Wait until all is sent."""
        _wait(self._gradients_sent + self._outputs_sent)
        self._gradients_sent, self._outputs_sent, self._last_sent = [], [], None

    # Computations.

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a micro-batch as the base class does; tell the stage its number, and free sent tensors."""
        self._let_go_of_sent()
        self.stage.microbatch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run the backward of a micro-batch as the base class does; make the gradients that are sent back
        contiguous.
        """
        self._let_go_of_sent()
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        loss = kwargs.get("loss")
        if loss is not None and (not self.is_first or kwargs.get("full_backward", True)):
            loss.detach_()  # the schedule holds it up to the end, and its graph would hold what was received
        gradients = self.bwd_cache.get(bwd_chunk_id, ())
        self.bwd_cache[bwd_chunk_id] = tuple(None if each is None else each.contiguous() for each in gradients)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a backward, or a half of one, so that weights that no input is upstream of are not left out.

        The halves of the base class leave such weights out. The last backward of a stage reduces gradients as it makes
        them.
        """
        if last_backward:
            self.stage.begin_last_backward()
        if backward_type == "input":
            inputs, weights = bwd_kwargs["input_values"], list(self.submod.parameters())
            return backward_to_inputs(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], inputs, weights)
        if backward_type == "weight":
            backward_to_weights(bwd_kwargs["param_groups"])
            return (), None
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


def _posted(sends: Sequence[dist.P2POp]) -> list[dist.Work]:
    found = (dist.isend(each.tensor, group=each.group, group_dst=each.group_peer) for each in sends)
    return [work for work in found if work is not None]


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


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
        return tuple(x.clone(memory_format=torch.contiguous_format) if copy else _Sent.apply(x) for x, copy in pairs)


class _Sent(torch.autograd.Function):
    """A tensor that shares memory with an output, and may let go of it: a backward may have saved the output."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


def received_tensors(executable: Executable) -> tuple[Tensor, ...]:
    """Describe the tensors that a rank's part of a stage receives, as tensors without memory."""
    nodes, layouts = executable.program.placeholders(), executable.local.layouts
    infos = [nodes[name].meta["tensor"] for name in executable.program.received]
    return _described(executable, infos, [layouts[name] for name in executable.program.received])


def sent_tensors(executable: Executable) -> tuple[Tensor, ...]:
    """Describe the tensors that a rank's part of a stage sends, as tensors without memory."""
    program = executable.program
    infos = [_info(value) for value in program.output[: program.num_sent]]
    layouts = executable.local.output_layouts[: program.num_sent]
    return _described(executable, infos, layouts)


def result_tensors(values: Sequence[object], layouts: Sequence[Layout | None], sizes: Sequence[int]) -> list[Any]:
    """Return the user's outputs on a rank, as tensors without memory; what is no tensor, as it is."""
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
