"""A module that is stored in parts as Hugging Face's safetensors: tensors are gathered one by one.

The first rank that has a tensor writes it: on a pipeline each stage's first rank writes files of its own,
else the first rank of the mesh writes all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.files.replace import replace_text
from autopar.runtime.checkpoints.files import INDEX, SINGLE, index_of
from autopar.runtime.ranks.agreement import gathered, is_first_rank, on_all_ranks


@dataclass(frozen=True, slots=True)
class File:
    """File of a checkpoint: the rank that writes it, and the bytes of its tensors by name."""

    writer: int
    num_bytes: dict[str, int]


def write(stored: Mapping[str, Tensor], mesh: DeviceMesh, folder: str | Path, max_bytes: int) -> None:
    """Write tensors by name into `folder`, in files of at most `max_bytes` (of at least one tensor each).

    Called by all ranks of the mesh; `stored` is what this rank has of them. Existing files of these names are replaced
    one by one; files of an older checkpoint that are not part of this one are removed. Where one rank cannot write, all
    raise.
    """
    folder = Path(folder)
    files = list(files_of_writers(stored, mesh, max_bytes))
    several = len(files) > 1
    names = [f"model-{n:05}-of-{len(files):05}.safetensors" if several else SINGLE for n in range(1, len(files) + 1)]
    error: InputError | None = None
    for file, name in zip(files, names, strict=True):
        tensors = dict(whole_tensors(stored, file))
        if tensors and error is None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                draft = folder / f".{name}.part"
                save_file(tensors, draft, metadata={"format": "pt"})
                os.replace(draft, folder / name)
            except Exception as found:  # the other ranks wait; all hear of it below
                error = InputError(f"the checkpoint cannot be written to {folder}: {found}.")

    def finish() -> None:
        if error is not None:
            raise error

    _on_every_rank(finish, mesh)

    def last() -> None:
        if not is_first_rank(mesh):
            return
        for old in folder.glob("model*.safetensors"):
            if old.name not in names and (old.name == SINGLE or "-of-" in old.name):
                old.unlink()
        (folder / INDEX).unlink(missing_ok=True)
        if several:
            where = {name: file_name for file, file_name in zip(files, names, strict=True) for name in file.num_bytes}
            replace_text(folder / INDEX, index_of(where, sum(sum(file.num_bytes.values()) for file in files)))

    _on_every_rank(last, mesh)


def write_configs(model: nn.Module, mesh: DeviceMesh, folder: str | Path) -> None:
    """Write what a model of transformers needs to be made again; of another model nothing."""

    def configs() -> None:
        for name in ("config", "generation_config") if is_first_rank(mesh) else ():
            config = getattr(model, name, None)
            if config is not None and hasattr(config, "save_pretrained"):
                if name == "config":
                    config.architectures = [type(model).__name__]
                config.save_pretrained(folder)

    _on_every_rank(configs, mesh)


def _on_every_rank(work: Callable[[], None], mesh: DeviceMesh) -> None:
    """Do work on every rank; where it fails on one, all raise, and none goes on before all are done."""
    on_all_ranks(work, lambda _: "", mesh, lambda _: [])


def files_of_writers(stored: Mapping[str, Tensor], mesh: DeviceMesh, max_bytes: int) -> Iterator[File]:
    """Yield the files of a checkpoint, the same on every rank."""
    here = {name: tensor.numel() * tensor.element_size() for name, tensor in stored.items()}
    writers: dict[int, dict[str, int]] = {}
    seen: set[str] = set()
    for rank, held in gathered((dist.get_rank(), here), mesh):
        writers[rank] = {name: num_bytes for name, num_bytes in held.items() if name not in seen}
        seen |= held.keys()
    for rank, held in writers.items():
        part: dict[str, int] = {}
        for name, num_bytes in held.items():
            if part and sum(part.values()) + num_bytes > max_bytes:
                yield File(rank, part)
                part = {}
            part[name] = num_bytes
        if part:
            yield File(rank, part)


def whole_tensors(stored: Mapping[str, Tensor], file: File) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file, on its writer; all ranks that store one of them with the writer gather it."""
    writes = dist.get_rank() == file.writer
    for name in file.num_bytes:
        tensor = stored.get(name)
        if isinstance(tensor, DTensor) and file.writer in tensor.device_mesh.mesh:
            tensor = cast(DTensor, tensor.detach()).full_tensor()
        if writes:
            assert tensor is not None
            yield name, tensor.detach().to("cpu", memory_format=torch.contiguous_format)
