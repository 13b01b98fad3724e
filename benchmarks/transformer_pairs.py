"""One transformer, parallelized by autopar and by PyTorch's own tools, each as its users would do it at their best.

Every contestant takes the same global batch and trains the same weights. Vocabulary, attention heads and hidden layers
are split alike by both sides, and so is the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

import autopar
from autopar.benchmarking import baselines
from autopar.benchmarking.baselines import Baseline

SEED = 20240613


@dataclass(frozen=True, slots=True)
class Size:
    """Layers, hidden size, heads, tokens in the vocabulary, texts in the global batch, and tokens in a text."""

    num_layers: int
    hidden: int
    num_heads: int
    vocabulary: int = 1024
    batch: int = 8
    sequence: int = 64

    def __str__(self) -> str:
        return f"{self.num_layers} layers, d={self.hidden}"


class Attention(nn.Module):
    """Causal attention; how many heads it computes follows from its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(size.hidden, size.hidden) for _ in range(4))
        self.head_dim = size.hidden // size.num_heads

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] → the same."""
        q, k, v = (each(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Feedforward(nn.Module):
    """Two projections with a GELU between."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size.hidden, 4 * size.hidden), nn.Linear(4 * size.hidden, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] → the same."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A layer with the norms before."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(size.hidden), Attention(size)
        self.feedforward_norm, self.feedforward = nn.LayerNorm(size.hidden), Feedforward(size)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] → the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feedforward(self.feedforward_norm(x))


class Transformer(nn.Module):
    """A decoder that returns its loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Token ids and labels [batch, sequence] → mean cross-entropy."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def transformer(size: Size) -> Transformer:
    """The same weights on every call."""
    torch.manual_seed(SEED)
    return Transformer(size)


def batch(size: Size) -> tuple[Tensor, Tensor]:
    """Ids and labels of the global batch."""
    ids = torch.randint(size.vocabulary, (size.batch, size.sequence + 1), generator=torch.Generator().manual_seed(SEED))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def ddp(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """DistributedDataParallel as `autopar bench` runs it."""
    peer = baselines.ddp(transformer(size), mesh, batch(size))
    if compiled:
        peer.model.compile()
    return peer


def fsdp2(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """`fully_shard` as `autopar bench` runs it, its layers compiled one by one."""
    model = transformer(size)
    if compiled:
        for block in model.blocks:
            block.compile()
    return baselines.fsdp2(model, mesh, batch(size))


def _split_block(sequence: bool) -> Mapping[str, ParallelStyle]:
    """The styles of a layer, as in PyTorch's tensor parallelism tutorial."""
    row = RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate())
    columns = ("attention.q", "attention.k", "attention.v", "feedforward.up")
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    styles |= {"attention.o": row, "feedforward.down": row}
    if sequence:
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        styles |= {"attention": whole, "feedforward": whole}
        styles |= {"attention_norm": SequenceParallel(), "feedforward_norm": SequenceParallel()}
    return styles


def _dtensor(size: Size, mesh: DeviceMesh, compiled: bool, sequence: bool) -> Baseline:
    model = transformer(size)
    between = Shard(1) if sequence else Replicate()
    around: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        around["norm"] = SequenceParallel()
    blocks = {f"blocks.*.{name}": style for name, style in _split_block(sequence).items()}
    parallelize_module(model, mesh, {**around, **blocks})
    if compiled:
        model.compile()
    return Baseline(model, batch(size), loss_parallel)


def dtensor(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """`parallelize_module`: tensor parallelism with the loss split over the vocabulary."""
    return _dtensor(size, mesh, compiled, sequence=False)


def dtensor_sequence(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """The same with sequence parallelism between the split projections."""
    return _dtensor(size, mesh, compiled, sequence=True)


def _planned(size: Size, mesh: DeviceMesh, compiled: bool, strategy: str) -> Baseline:
    found = autopar.compile(transformer(size), mesh, batch(size), strategy=strategy, recompute="none")
    if compiled:
        found.compile()
    return Baseline(found, batch(size))


def data_parallel(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """The preset of that name; so are the next four."""
    return _planned(size, mesh, compiled, "data_parallel")


def zero3(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """Parameters in parts, gathered where they are used."""
    return _planned(size, mesh, compiled, "zero3")


def megatron(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """Projections and vocabulary split."""
    return _planned(size, mesh, compiled, "megatron")


def megatron_sequence(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """The same with norms on parts of the sequence."""
    return _planned(size, mesh, compiled, "megatron_sequence")


def async_tensor_parallel(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """`megatron_sequence` in chunks, beside whose collectives ranks compute."""
    return _planned(size, mesh, compiled, "async_tensor_parallel")


Build = Callable[[Size, DeviceMesh, bool], Baseline]


@dataclass(frozen=True, slots=True)
class Pair:
    """What autopar does and what it is held against; its goal in time, and in memory where it has one."""

    ours: Build
    theirs: Build
    goal: float
    memory_goal: float | None = None


PAIRS = (
    Pair(data_parallel, ddp, 1.0),
    Pair(zero3, fsdp2, 1.0, 1.0),
    Pair(megatron, dtensor, 0.75),
    Pair(megatron_sequence, dtensor_sequence, 0.8),
    Pair(async_tensor_parallel, megatron_sequence, 1.0),
)
