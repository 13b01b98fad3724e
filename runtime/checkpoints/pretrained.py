"""`save_pretrained` of a module that is stored in parts: all tensors of a model, or the adapters of PEFT."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
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
        model: has the names, classes and configurations to write; a PeftModel writes its adapters alone, a model of
            transformers to which `add_adapter` gave some the active one.
        stand_ins: gives `model` parameters and buffers of the whole shapes, on the meta device.
        stored: first name → tensor as this rank stores it.
        mesh: all ranks that store parts of the model.
        folder: a path that all ranks see.
        max_bytes: size of a file, of a model's tensors; PEFT reads adapters from one file.

    Raises:
        InputError: one rank cannot write, or PEFT computes what it writes for this kind of adapter.
    """
    if not _has_adapters(model):
        write(stored, mesh, folder, max_bytes)
        write_configs(model, mesh, folder)
        return
    first_names = from_first_rank(lambda: _names_in_adapters(model, stand_ins), mesh)
    tensors = _on_first_rank(stored, set(first_names.values()), mesh)

    def save() -> None:
        whole = {name: tensors[first] for name, first in first_names.items()}
        adapted: Any = model
        try:
            if _is_injected(model):
                _save_active(adapted, Path(folder), whole)
            else:
                adapted.save_pretrained(str(folder), state_dict=whole)
        except Exception as error:
            raise InputError(f"the adapters cannot be written to {folder}: {error}.") from error

    from_first_rank(save, mesh)


def _has_adapters(model: nn.Module) -> bool:
    peft: Any = sys.modules.get("peft")  # adapters exist only where PEFT is imported
    return peft is not None and (isinstance(model, peft.PeftModel) or _is_injected(model))


def _is_injected(model: nn.Module) -> bool:
    """Return whether the model is one of transformers that got adapters from its own `add_adapter`."""
    return getattr(model, "_hf_peft_config_loaded", False) is True


def _written(model: Any) -> dict[str, Any]:
    """Return the configurations of the adapters to write: all of a PeftModel, else the active one."""
    if not _is_injected(model):
        return model.peft_config
    active = model.active_adapters()
    if len(active) > 1:
        raise InputError(
            f"the adapters {', '.join(active)} are active, and save_pretrained writes one, as it does in transformers. "
            "Call model.set_adapter(name), then save_pretrained, for one after the other."
        )
    return {adapter: model.peft_config[adapter] for adapter in active}


def _save_active(model: Any, folder: Path, whole: dict[str, Tensor]) -> None:
    """Write the active adapter as `save_pretrained` of transformers does, which only writes on global rank 0."""
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    for adapter, config in _written(model).items():
        found = get_peft_model_state_dict(model, whole, adapter)
        tensors = {f"base_model.model.{name}": each.contiguous() for name, each in found.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(folder))


def _names_in_adapters(model: Any, stand_ins: AbstractContextManager[nn.Module]) -> dict[str, str]:
    """Return the model's name of every tensor that PEFT writes → the first name of that tensor."""
    from peft import get_peft_model_state_dict

    with stand_ins, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT repeats its warnings when it writes
        state = model.state_dict(keep_vars=True)
        written: set[int] = set()
        for adapter, config in _written(model).items():
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
