"""One training step of a published table: model, strategy, and measurements in SI units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder; `kind` is "llama" (gated MLP, RMSNorm, rotary), "gpt" (Megatron's) or "mpt"."""

    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    tied: bool = False
    flash: bool = True
    """True if attention is one kernel that saves no scores."""
    dropout: float = 0.0
    rotary: bool = False
    """True if positions are rotary instead of learned; for "gpt" only."""
    qk_norm: bool = False
    """True if queries and keys have LayerNorms of their own; for "gpt" only."""

    def __post_init__(self) -> None:
        assert self.kind in ("llama", "gpt", "mpt"), self.kind
        assert self.hidden % self.heads == 0 and self.heads % self.kv_heads == 0, f"heads of {self}"

    @property
    def layer_parameters(self) -> int:
        """The elements of the matrices of one layer."""
        attention = 2 * self.hidden**2 * (self.heads + self.kv_heads) // self.heads
        return attention + (3 if self.kind == "llama" else 2) * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        """The elements of all matrices and tables."""
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.vocabulary * self.hidden


@dataclass(frozen=True, slots=True)
class Row:
    """One measured step. Degrees are those of the source; `micro_batch` is in sequences of one replica."""

    source: str
    """The family of a table, for statistics: "nanotron", "vtrain one node", "korthikanti" …"""
    label: str
    framework: str
    shape: Shape
    sequence: int
    micro_batch: int
    accumulation: int
    """Micro-batches of a step."""
    device: str
    """Name of the device as the source has it, in lower case."""
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    schedule: str = "1f1b"
    """Pipeline schedule by autopar's name; ignored without a pipeline."""
    chunks: int = 1
    """Stages of the pipeline on each rank."""
    zero: int = 0
    recompute: str = "none"
    sequence_parallel: bool = False
    precision: str = "bf16-mixed"
    seconds: float | None = None
    allocated_bytes: float | None = None
    """Bytes of a device between steps, as counted by the framework's allocator."""
    reserved_bytes: float | None = None
    """Largest number of bytes that the framework's allocator has reserved on a device."""
    peak_bytes: float | None = None
    """Peak bytes of tensors on a device, as counted by the framework's allocator."""
    device_bytes: float | None = None
    """Bytes of a device, as shown by nvidia-smi."""
    is_local: bool = False
    """True if Megatron's own modules run instead of Transformer Engine's."""
    conventions: str = "autopar"
    """Name of autopar's memory conventions, which define what counts as memory."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage; empty if the framework assigns them."""
    out_of_memory: bool = False
    bandwidths: Mapping[str, float] = field(default_factory=dict)
    """Collective → bytes/s that NCCL reached in the run's own allocation; "intra_…" within a node."""
    unexpressed: str | None = None
    """Why the row cannot be planned, where its source already says it."""

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def model(self) -> str:
        """Key of the model; cross-validation leaves out all rows with the same key together."""
        each = self.shape
        return f"{each.kind} {each.layers}x{each.hidden}x{each.ffn}"

    @property
    def nodes(self) -> int:
        """Nodes of eight devices."""
        return -(-self.devices // 8)

    @property
    def global_batch(self) -> int:
        return self.dp * self.micro_batch * self.accumulation
