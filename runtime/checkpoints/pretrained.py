"""`save_pretrained` of a module that is stored in parts: all tensors of a model, or the adapters of a PeftModel."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import InputError
from autopar.runtime.checkpoints.write import files_of_writers, whole_tensors, write, write_configs
from autopar.runtime.ranks.agreement import from_first_rank, gathered, is_first_rank


def write_pretrained(
    model: nn.Module,
    stand_ins: AbstractContextManager[nn.Module],
    stored: Mapping[str, Tensor],
    mesh: DeviceMesh,
    folder: str | Path,
    max_bytes: int,
) -> None:
    """Write into `folder` what `from_pretrained` of the model's library reads; called by all ranks of the mesh.

    Args:
        model: has the names, classes and configurations to write; a PeftModel writes its adapters alone.
        stand_ins: gives `model` parameters and buffers of the whole shapes, on the meta device.
        stored: first name → tensor as this rank stores it.
        mesh: all ranks that store parts of the model.
        folder: a path that all ranks see.
        max_bytes: size of a file, of a model's tensors; PEFT reads adapters from one file.

    Raises:
        InputError: one rank cannot write, or PEFT computes what it writes for this kind of adapter.
    """
    if not _is_peft(model):
        write(stored, mesh, folder, max_bytes)
        write_configs(model, mesh, folder)
        return
    first_names = from_first_rank(lambda: _names_in_adapters(model, stand_ins), mesh)
    tensors = _on_first_rank(stored, set(first_names.values()), mesh)

    def save() -> None:
        whole = {name: tensors[first] for name, first in first_names.items()}
        peft_model: Any = model
        try:
            peft_model.save_pretrained(str(folder), state_dict=whole)
        except Exception as error:
            raise InputError(f"the adapters cannot be written to {folder}: {error}.") from error

    from_first_rank(save, mesh)


def _is_peft(model: nn.Module) -> bool:
    peft: Any = sys.modules.get("peft")  # a PeftModel exists only where PEFT is imported
    return peft is not None and isinstance(model, peft.PeftModel)


def _names_in_adapters(model: Any, stand_ins: AbstractContextManager[nn.Module]) -> dict[str, str]:
    """Return the model's name of every tensor that PEFT writes → the first name of that tensor."""
    from peft import get_peft_model_state_dict

    with stand_ins, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT repeats its warnings when it writes
        state = model.state_dict(keep_vars=True)
        written: set[int] = set()
        for adapter, config in model.peft_config.items():
            found = {} if config.is_prompt_learning else get_peft_model_state_dict(model, state, adapter)
            if config.is_prompt_learning or not {id(each) for each in found.values()} <= set(map(id, state.values())):
                raise InputError(
                    f"adapter {adapter} is of type {config.peft_type.value}, for which PEFT writes computed values. "
                    "Gather the model with get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),"
                    " load it into the PeftModel that you compiled, and save that one."
                )
            written |= {id(each) for each in found.values()}
        first: dict[int, str] = {}
        return {name: first.setdefault(id(each), name) for name, each in state.items() if id(each) in written}


def _on_first_rank(stored: Mapping[str, Tensor], names: Collection[str], mesh: DeviceMesh) -> dict[str, Tensor]:
    """Return whole tensors by name, on the first rank of the mesh; other ranks get nothing."""
    wanted = {name: tensor for name, tensor in stored.items() if name in names}
    result: dict[str, Tensor] = {}
    is_first = is_first_rank(mesh)
    first_rank = int(mesh.mesh.flatten()[0])
    for file in files_of_writers(wanted, mesh, sys.maxsize):
        tensors = whole_tensors(wanted, file)
        if file.writer == first_rank:
            result |= dict(tensors)
            continue
        mine = dict(tensors)
        for name in file.num_bytes:  # one at a time: every rank receives it, and the first alone keeps it
            [tensor] = [each for each in gathered(mine.get(name), mesh) if each is not None]
            result |= {name: tensor} if is_first else {}
    return result
