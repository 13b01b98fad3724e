"""One rank of a Llama under tensor and data parallelism, written by hand in plain PyTorch in Megatron's form.

Queries, keys, values, gate and up are columns, o and down are rows, embedding and head hold part of the vocabulary;
every layer has two all-reduces forward and two backward (Shoeybi et al., 2019), in place. The loss is that of
megatron.core's `VocabParallelCrossEntropy`. Over the samples each gradient is all-reduced in place as soon as it is
there, without copies into buckets. Norms, rotary embedding and attention (F.scaled_dot_product_attention) compute as
transformers' model does, so that what differs from autopar is how it is divided and run, not what it computes.

Legend: B texts, S positions, H heads, D features of a head, M hidden size, V columns of the vocabulary of this rank.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

Group = dist.ProcessGroup


class _Enter(torch.autograd.Function):
    """Megatron's f: nothing forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    """Megatron's g: all-reduce forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _CrossEntropy(torch.autograd.Function):
    """The loss of every row of logits of which each rank has some columns."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, group: Group) -> Tensor:
        x_NV = logits_NV.float()
        top_N = x_NV.amax(-1)
        dist.all_reduce(top_N, dist.ReduceOp.MAX, group=group)
        x_NV = x_NV - top_N.unsqueeze(-1)
        columns = x_NV.shape[-1]
        column_N = target_N - dist.get_group_rank(group, dist.get_rank()) * columns
        mine_N = (column_N >= 0) & (column_N < columns)
        column_N = column_N.clamp(0, columns - 1)
        picked_N = x_NV.gather(-1, column_N.unsqueeze(-1)).squeeze(-1) * mine_N
        x_NV.exp_()
        sum_N = x_NV.sum(-1)
        both = torch.stack([sum_N, picked_N])
        dist.all_reduce(both, group=group)
        sum_N, picked_N = both.unbind()
        x_NV.div_(sum_N.unsqueeze(-1))
        ctx.save_for_backward(x_NV, column_N, mine_N)
        ctx.dtype = logits_NV.dtype
        return sum_N.log() - picked_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        softmax_NV, column_N, mine_N = ctx.saved_tensors
        grad_NV = softmax_NV.scatter_add(-1, column_N.unsqueeze(-1), -mine_N.to(softmax_NV.dtype).unsqueeze(-1))
        return grad_NV.mul_(grad_N.unsqueeze(-1)).to(ctx.dtype), None, None


class Norm(nn.Module):
    """Root mean square normalization, in float32."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(hidden)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)).to(x.dtype)


def _turned(x_BHSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    first, second = x_BHSD.chunk(2, -1)
    return x_BHSD * cos_SD + torch.cat([-second, first], -1) * sin_SD


class Layer(nn.Module):
    """The part of a layer that one of `tp.size()` ranks has."""

    def __init__(self, config: Any, tp: Group) -> None:
        super().__init__()
        self.tp, size, hidden = tp, tp.size(), config.hidden_size
        self.head_dim = config.head_dim or hidden // config.num_attention_heads
        queries, keys = (
            each * self.head_dim // size for each in (config.num_attention_heads, config.num_key_value_heads)
        )
        inner = config.intermediate_size // size
        self.input_layernorm = Norm(hidden, config.rms_norm_eps)
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(hidden, keys, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.post_attention_layernorm = Norm(hidden, config.rms_norm_eps)
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x_BSM: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        y_BSM = _Enter.apply(self.input_layernorm(x_BSM), self.tp)
        q, k, v = (
            each(y_BSM).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended_BHSD = F.scaled_dot_product_attention(
            _turned(q, cos_SD, sin_SD), _turned(k, cos_SD, sin_SD), v, is_causal=True, enable_gqa=True
        )
        x_BSM = x_BSM + _Leave.apply(self.o_proj(attended_BHSD.transpose(1, 2).flatten(2)), self.tp)
        y_BSM = _Enter.apply(self.post_attention_layernorm(x_BSM), self.tp)
        return x_BSM + _Leave.apply(self.down_proj(F.silu(self.gate_proj(y_BSM)) * self.up_proj(y_BSM)), self.tp)


class LlamaByHand(nn.Module):
    """One rank's shard of a Llama model of `config` (transformers' LlamaConfig), with uninitialized weights."""

    def __init__(self, config: Any, tp: Group, dp: Group | None = None) -> None:
        super().__init__()
        self.tp, self.dp = tp, dp
        self.rows = config.vocab_size // tp.size()
        self.embed_tokens = nn.Embedding(self.rows, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, tp) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, self.rows, bias=False)
        head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        self.theta, self.head_dim = config.rope_parameters["rope_theta"], head_dim

    def load_parts(self, weights: Mapping[str, Tensor]) -> None:
        """Take this rank's part of the weights of a whole model, by transformers' names."""
        number = dist.get_group_rank(self.tp, dist.get_rank())
        whole = {_short(name): weight for name, weight in weights.items()}
        with torch.no_grad():
            for name, mine in self.named_parameters():
                for dim, (size, part) in enumerate(zip(whole[name].shape, mine.shape, strict=True)):
                    if size != part:
                        whole[name] = whole[name].narrow(dim, number * part, part)
                mine.copy_(whole[name])

    def reduce_gradients(self) -> None:
        """Register hooks that all-reduce each gradient over the data-parallel ranks as soon as it is accumulated."""
        assert self.dp is not None, "no ranks have other samples"
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self._reduce)

    def _reduce(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=self.dp)

    def forward(self, ids_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """This rank's texts → the mean loss of all ranks' tokens."""
        local_BS = ids_BS - dist.get_group_rank(self.tp, dist.get_rank()) * self.rows
        mine_BS = (local_BS >= 0) & (local_BS < self.rows)
        found_BSM = self.embed_tokens(local_BS.clamp(0, self.rows - 1)) * mine_BS.unsqueeze(-1)
        x_BSM = _Leave.apply(found_BSM, self.tp)
        cos_SD, sin_SD = self._rotation(x_BSM)
        for layer in self.layers:
            x_BSM = layer(x_BSM, cos_SD, sin_SD)
        logits_BSV = self.lm_head(_Enter.apply(self.norm(x_BSM), self.tp))
        losses_N = _CrossEntropy.apply(logits_BSV.flatten(0, 1), labels_BS.flatten(), self.tp)
        sum_and_count = torch.stack([losses_N.sum(), torch.full_like(losses_N[0], losses_N.numel())])
        if self.dp is not None:
            sum_and_count = _Leave.apply(sum_and_count, self.dp)
        return sum_and_count[0] / sum_and_count[1]

    def _rotation(self, x_BSM: Tensor) -> tuple[Tensor, Tensor]:
        exponents_D = torch.arange(0, self.head_dim, 2, device=x_BSM.device, dtype=torch.float32) / self.head_dim
        positions_S = torch.arange(x_BSM.shape[1], device=x_BSM.device, dtype=torch.float32)
        angles_SD = torch.outer(positions_S, self.theta**-exponents_D).repeat(1, 2)
        return angles_SD.cos().to(x_BSM.dtype), angles_SD.sin().to(x_BSM.dtype)


def _short(name: str) -> str:
    """A parameter's name here, of that in transformers."""
    for part in ("decoder.", "model.", "self_attn.", "mlp."):
        name = name.replace(part, "")
    return name
