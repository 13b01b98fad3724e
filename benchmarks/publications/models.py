"""The decoders of the tables on the meta device, with the kernels that their frameworks run.

llama   nanotron's: queries, keys and values in one product, gate and up in one, RMSNorm and rotary embedding fused
gpt     Megatron's: the same product, biases, learned positions; scores are written out unless it is `flash`
mpt     llm-foundry's: as gpt without biases, always flash

What products take together lies head by head, as Megatron has it, so that columns of it are whole heads.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.publications.kernels import causal_softmax, rms_norm, rotary
from benchmarks.publications.rows import Shape


class RMSNorm(nn.Module):
    """RMS normalization over the last dim, in one kernel."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x_BSF: Tensor) -> Tensor:
        return rms_norm(x_BSF, self.weight)


class Attention(nn.Module):
    """Causal attention, its projections included."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.size = shape, shape.hidden // shape.heads
        self.shared = shape.heads // shape.kv_heads
        biased = shape.kind == "gpt"
        self.qkv_proj = nn.Linear(shape.hidden, (self.shared + 2) * shape.kv_heads * self.size, bias=biased)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=biased)
        if shape.qk_norm:
            self.q_norm, self.k_norm = nn.LayerNorm(self.size), nn.LayerNorm(self.size)

    def forward(self, x_BSF: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, positions, _ = x_BSF.shape
        packed = self.qkv_proj(x_BSF).view(batch, positions, self.shape.kv_heads, (self.shared + 2) * self.size)
        q, k, v = packed.split((self.shared * self.size, self.size, self.size), dim=-1)
        q = q.reshape(batch, positions, self.shape.heads, self.size)
        if self.shape.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q_BHSD = q.transpose(1, 2)
        k_BHSD, v_BHSD = k.transpose(1, 2), v.transpose(1, 2)
        if angles is not None:
            k_BHSD, v_BHSD = k_BHSD.contiguous(), v_BHSD.contiguous()  # as nanotron's; the packed product is let go
            q_BHSD, k_BHSD = rotary(q_BHSD, *angles), rotary(k_BHSD, *angles)
        if self.shape.flash:
            shared = self.shared > 1
            out = F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, is_causal=True, enable_gqa=shared)
        else:
            weights = causal_softmax(q_BHSD @ k_BHSD.transpose(2, 3), self.size**-0.5)
            out = F.dropout(weights, self.shape.dropout, self.training) @ v_BHSD
        return self.o_proj(out.transpose(1, 2).reshape(batch, positions, self.shape.hidden))


class FeedForward(nn.Module):
    """The MLP of a layer, gated where the model is a Llama."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ffn, self.gated, biased = shape.ffn, shape.kind == "llama", shape.kind == "gpt"
        self.up_proj = nn.Linear(shape.hidden, (2 if self.gated else 1) * shape.ffn, bias=biased)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=biased)

    def forward(self, x_BSF: Tensor) -> Tensor:
        up = self.up_proj(x_BSF)
        if not self.gated:
            return self.down_proj(F.gelu(up))
        gate, up = up.unflatten(-1, (self.ffn, 2)).unbind(-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and with a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        norm = RMSNorm if shape.kind == "llama" else nn.LayerNorm
        self.input_norm, self.attention = norm(shape.hidden), Attention(shape)
        self.mlp_norm, self.mlp = norm(shape.hidden), FeedForward(shape)
        self.dropout = shape.dropout

    def forward(self, x_BSF: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        x_BSF = x_BSF + F.dropout(self.attention(self.input_norm(x_BSF), angles), self.dropout, self.training)
        return x_BSF + F.dropout(self.mlp(self.mlp_norm(x_BSF)), self.dropout, self.training)


class Decoder(nn.Module):
    """A decoder that returns its mean loss per token."""

    def __init__(self, shape: Shape, positions: int, compute: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        if shape.kind == "llama" or shape.rotary:
            angles = torch.zeros(positions, shape.hidden // shape.heads, dtype=compute)
            self.register_buffer("cos", angles, persistent=False)
            self.register_buffer("sin", angles.clone(), persistent=False)
        else:
            self.positions = nn.Parameter(torch.zeros(positions, shape.hidden))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = (RMSNorm if shape.kind == "llama" else nn.LayerNorm)(shape.hidden)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if shape.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids_BS: Tensor, labels_BS: Tensor) -> Tensor:
        x_BSF, angles = self.embed_tokens(ids_BS), None
        if hasattr(self, "cos"):
            angles = (self.cos, self.sin)
        if self.shape.kind != "llama":
            x_BSF = x_BSF if self.shape.rotary else x_BSF + self.positions
            x_BSF = F.dropout(x_BSF, self.shape.dropout, self.training)
        for layer in self.layers:
            x_BSF = layer(x_BSF, angles)
        logits_BSV = self.lm_head(self.norm(x_BSF)).float()
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())


@cache
def decoder(shape: Shape, positions: int, compute: torch.dtype) -> Decoder:
    """The model on the meta device."""
    with torch.device("meta"):
        return Decoder(shape, positions, compute)
