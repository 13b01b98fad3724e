"""Settings and results of a measurement: model sizes, dtype, device, and the findings of a part."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.models.catalogue import BUILT_IN, BuiltIn
from autopar.tools.calibration.timing import CUDA, Effort

TINY_LLAMA = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 448,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 4,
}
"""Divides as Llama-3-8B does, over 8 ranks."""
TINY_EFFORT = Effort((1 << 10,), (32, 64), 3, 1 << 14, (8, 64), (1, 4, 16, 8))
SEED = 20240613


@dataclass(frozen=True, slots=True)
class Setting:
    """Device, sizes and hardware profile of a measurement.

    `small` selects tiny shapes in float32 for a CPU; its numbers are meaningless.
    """

    device: str = "cuda"
    small: bool = False
    profile: str = "h100"
    """Name or path of the hardware profile that predictions are made with."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.small else torch.bfloat16

    @property
    def sequence(self) -> int:
        """Tokens of a text; a rank computes one text."""
        return 32 if self.small else 8192

    @property
    def steps(self) -> int:
        """Number of measured steps per contestant."""
        return 3 if self.small else 20

    @property
    def effort(self) -> Effort:
        """Effort of the timings of single operations."""
        return TINY_EFFORT if self.small else CUDA

    def judged(self, reached: bool) -> bool | None:
        """Return whether a speed goal is reached; None for tiny shapes, whose speed is meaningless."""
        return None if self.small else reached

    def num_layers(self, compiled: bool) -> int:
        """Return the number of layers of the model; fewer when compiled, because compiling takes seconds per layer."""
        return 1 if self.small else 4 if compiled else 8

    def config(self, num_layers: int) -> Any:
        """Return the config of Llama-3-8B (transformers' LlamaConfig) with this number of layers; tiny sizes if
        `small`.
        """
        llama = BUILT_IN["llama-8b"]
        assert isinstance(llama, BuiltIn)
        config = llama.config(num_layers)
        for name, value in TINY_LLAMA.items() if self.small else ():
            setattr(config, name, value)
        return config

    def whole_model(self, num_layers: int, device: str | None = None) -> nn.Module:
        """The model before it is divided, its weights the same on every call."""
        llama = BUILT_IN["llama-8b"]
        assert isinstance(llama, BuiltIn)
        default = torch.get_default_dtype()
        torch.manual_seed(SEED)
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device(device or self.device):
                return llama.wrapper(self.config(num_layers))
        finally:
            torch.set_default_dtype(default)

    def batch(self, num_texts: int, device: str | None = None) -> tuple[Tensor, Tensor]:
        """Ids and labels of the global batch: int64[num_texts, sequence]."""
        shape, vocabulary = (num_texts, self.sequence + 1), self.config(1).vocab_size
        ids = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(SEED)).to(device or self.device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def synchronize(self) -> None:
        """Wait for what the device computes."""
        if self.device == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement: what was found, and the goal where there is one."""

    name: str
    found: str
    goal: str = ""
    reached: bool | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """Findings of a part; `data` goes into the JSON of the results."""

    rows: tuple[Row, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Finding:
        """Return the finding that JSON has."""
        return cls(tuple(Row(**row) for row in values["rows"]), values["data"])


@dataclass(frozen=True, slots=True)
class Draft:
    """The findings of a part so far, in a file that stays when the process of the part is ended."""

    path: Path

    def read(self) -> Finding:
        """Return what was found; nothing before the first `write`."""
        return Finding.of(json.loads(self.path.read_text())) if self.path.exists() else Finding()

    def write(self, finding: Finding) -> None:
        """Replace what was found, all at once."""
        begun = self.path.with_suffix(".begun")
        begun.write_text(json.dumps(asdict(finding)))
        begun.replace(self.path)

    def add(self, row: Row, **data: Any) -> None:
        """Add a finished case."""
        before = self.read()
        self.write(Finding((*before.rows, row), {**before.data, **data}))


@contextlib.contextmanager
def stubbed(device: str, axes: Mapping[str, int]) -> Iterator[DeviceMesh]:
    """Rank 0 of a mesh whose collectives do nothing (torch's fake process group)."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(axes.values()))
    try:
        yield init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()
