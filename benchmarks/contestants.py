"""One transformer, parallelized by autopar and by PyTorch's own tools, each as its users would do it at their best.

Every contestant takes the same global batch and trains the same weights. Vocabulary, attention heads and hidden layers
are split alike by both sides, and so is the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
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
from torch.nn.parallel import DistributedDataParallel

import autopar

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


@dataclass(slots=True)
class Contestant:
    """A model with what it takes on this rank."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """What forward and backward run in."""


def _part(size: Size, mesh: DeviceMesh) -> tuple[Tensor, ...]:
    """This rank's rows of the global batch."""
    return tuple(x.chunk(mesh.size())[mesh.get_local_rank()].contiguous() for x in batch(size))


def ddp(size: Size, mesh: DeviceMesh, compiled: bool) -> Contestant:
    """DistributedDataParallel with gradients as views of its buckets."""
    model: nn.Module = DistributedDataParallel(
        transformer(size), process_group=mesh.get_group(), gradient_as_bucket_view=True
    )
    return Contestant(_compiled(model) if compiled else model, _part(size, mesh))


def fsdp2(size: Size, mesh: DeviceMesh, compiled: bool) -> Contestant:
    """`fully_shard` of every layer and of the root."""
    model = transformer(size)
    for block in model.blocks:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Contestant(model, _part(size, mesh))


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


def _dtensor(size: Size, mesh: DeviceMesh, compiled: bool, sequence: bool) -> Contestant:
    model: nn.Module = transformer(size)
    between = Shard(1) if sequence else Replicate()
    around: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        around["norm"] = SequenceParallel()
    blocks = {f"blocks.*.{name}": style for name, style in _split_block(sequence).items()}
    parallelize_module(model, mesh, {**around, **blocks})
    return Contestant(_compiled(model) if compiled else model, batch(size), context=loss_parallel)


def dtensor(size: Size, mesh: DeviceMesh, compiled: bool) -> Contestant:
    """`parallelize_module`: tensor parallelism with the loss split over the vocabulary."""
    return _dtensor(size, mesh, compiled, sequence=False)


def dtensor_sequence(size: Size, mesh: DeviceMesh, compiled: bool) -> Contestant:
    """The same with sequence parallelism between the split projections."""
    return _dtensor(size, mesh, compiled, sequence=True)


def _planned(size: Size, mesh: DeviceMesh, compiled: bool, said: Mapping[str, Mapping[str, Any]]) -> Contestant:
    model = transformer(size)
    for pattern, keywords in said.items():
        autopar.annotate(model, pattern, **keywords)
    found: nn.Module = autopar.compile(model, mesh, batch(size), mode="semi_auto", recompute="none")
    return Contestant(_compiled(found) if compiled else found, batch(size))


def data_parallel(size: Size, mesh: DeviceMesh, compiled: bool) -> Contestant:
    """autopar, told to split the batch, and to store parameters whole."""
    whole = {"*.weight": {"ranks": None}, "*.bias": {"ranks": None}}
    return _planned(size, mesh, compiled, {"*": {"ranks": "data"}, **whole})


def zero3(size: Size, mesh: DeviceMesh, compiled: bool) -> Contestant:
    """autopar, told to split the batch and the storage of all parameters, and to gather them where they are used."""
    return _planned(size, mesh, compiled, {"*": {"ranks": "data", "storage": "ranks", "regather": True}})


COLUMNS = ("*.q", "*.k", "*.v", "*.up", "head", "cross_entropy_loss")
ROWS = ("*.o", "*.down", "embedding")
NORMS = ("*norm",)


def megatron(size: Size, mesh: DeviceMesh, compiled: bool) -> Contestant:
    """autopar, told to split projections and vocabulary as Megatron-LM does."""
    said = {name: {"ranks": "column"} for name in COLUMNS} | {name: {"ranks": "row"} for name in ROWS}
    return _planned(size, mesh, compiled, said)


def megatron_sequence(size: Size, mesh: DeviceMesh, compiled: bool) -> Contestant:
    """The same with norms on parts of the sequence."""
    said = {name: {"ranks": "column"} for name in COLUMNS} | {name: {"ranks": "row"} for name in ROWS}
    return _planned(size, mesh, compiled, said | {name: {"ranks": "sequence"} for name in NORMS})


def _compiled(model: nn.Module) -> nn.Module:
    model.compile()
    return model


Build = Callable[[Size, DeviceMesh, bool], Contestant]


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
)
