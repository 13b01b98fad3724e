"""A strategy of Lightning that compiles a module of the LightningModule, and writes checkpoints of all ranks.

Differences from Lightning's own `ModelParallelStrategy`: the mesh is the user's; every rank has its own samples, on
all axes; the loss that the module returns is that of the batch of all ranks; parameters may be plain tensors, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies.fsdp import _is_sharded_checkpoint
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

from autopar.api.entry import ExampleInputs, compile
from autopar.errors import InputError
from autopar.runtime.module.compiled_module import ParallelModule

RANDOM = "autopar_random_states"
"""Key in a checkpoint: name of a compiled module → seed and step of its random numbers."""


class Strategy(ModelParallelStrategy):
    """Trains a LightningModule of which one module is compiled, and has all parameters.

    >>> strategy = Strategy({"dp": 2}, "model", (torch.empty(4, 16),), strategy="zero3")
    """

    def __init__(
        self,
        mesh: Mapping[str, int],
        module: str | None = None,
        example_inputs: ExampleInputs | None = None,
        *,
        save_distributed_checkpoint: bool = True,
        **options: Any,
    ) -> None:
        """`mesh` has the size of each axis.

        The submodule `module` is compiled for `example_inputs`, as one rank's part of a batch, with these `options` of
        `autopar.compile`; without it `configure_model` is to compile one with inputs="local", on `self.device_mesh`.

        With `save_distributed_checkpoint` a checkpoint is a folder to which each rank writes its parts, else one file,
        which Lightning reads on one process, too.
        """
        super().__init__(save_distributed_checkpoint=save_distributed_checkpoint)
        if (module is None) != (example_inputs is None):
            raise InputError(
                f"module={module!r} and example_inputs go together: which module to compile, and what it takes."
            )
        self._sizes, self._module, self._example_inputs = dict(mesh), module, example_inputs
        self._options = {"inputs": "local", **options}

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank reads its own samples."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        """Start the process group, and make the mesh."""
        self._setup_distributed()
        if math.prod(self._sizes.values()) != self.world_size:
            raise InputError(f"a mesh of {self._sizes} on {self.world_size} ranks; give sizes whose product that is.")
        sizes, names = tuple(self._sizes.values()), tuple(self._sizes)
        self._device_mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=names)
        self._lightning._device_mesh = self._device_mesh

    def setup(self, trainer: pl.Trainer) -> None:
        """Compile the module, and make the optimizers of what it stores."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self._lightning)
        self._compile()
        self._check()
        self.model_to_device()
        self.barrier()
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _compile(self) -> None:
        if self._module is None or isinstance(plain := self._lightning.get_submodule(self._module), ParallelModule):
            return
        with self.precision_plugin.forward_context():
            compiled = compile(plain.train(), self.device_mesh, self._example_inputs, **self._options)
        owner, _, name = self._module.rpartition(".")
        setattr(self._lightning.get_submodule(owner), name, compiled)

    def _check(self) -> None:
        """Raise InputError where ranks would learn apart from each other."""
        compiled = self._compiled_modules()
        if not compiled:
            raise InputError(
                f"{type(self._lightning).__name__} has no compiled module; name it, as in Strategy(mesh, 'model', "
                'example_inputs), or compile one in configure_model with inputs="local", on a mesh without a pipeline.'
            )
        for name, module in compiled.items():
            if module.axes_of_parts != tuple(module.mesh.mesh_dim_names or ()):
                raise InputError(f'every rank has its own samples; compile {name} with inputs="local".')
        outside = [
            name
            for name, parameter in self._lightning.named_parameters()
            if parameter.requires_grad and not any(name.startswith(f"{module}.") for module in compiled)
        ]
        if outside:
            raise InputError(
                f"outside of the compiled module nobody sums gradients over ranks, and there {_listed(outside)}; "
                "compile a module that has all parameters, or freeze these."
            )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state, in parts or whole on the first rank, as checkpoints are to have it."""
        return get_model_state_dict(self._lightning, options=self._kept())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state, in parts, or whole on the first rank as Lightning numbers it on one process."""
        plain = getattr(optimizer, "_optimizer", optimizer)
        found = get_optimizer_state_dict(self._lightning, plain, options=self._kept())
        if self._save_distributed_checkpoint or self.global_rank:
            return found
        return FullyShardedDataParallel.rekey_optim_state_dict(found, OptimStateKeyType.PARAM_ID, self._lightning)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save `checkpoint`, as collected by Lightning; called on all ranks."""
        states = {name: module.random_state.state_dict() for name, module in self._compiled_modules().items()}
        super().save_checkpoint({**checkpoint, RANDOM: states}, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load model and optimizers, in parts or whole, from this mesh or another; what else there is is returned."""
        path = Path(self.broadcast(checkpoint_path))
        read = self._load_parts if _is_sharded_checkpoint(path) else self._load_whole
        found = read(path, weights_only)
        for name, state in found.pop(RANDOM, {}).items():
            module = self._compiled_modules().get(name)
            if module is not None:
                module.random_state.load_state_dict(state)
        return found

    def _load_parts(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        model = get_model_state_dict(self._lightning)
        moments = {
            f"optimizer_{number}": get_optimizer_state_dict(self._lightning, optimizer)
            for number, optimizer in enumerate(self.optimizers)
        }
        load({"state_dict": model, **moments}, checkpoint_id=path)
        set_model_state_dict(self._lightning, model)
        for optimizer, state in zip(self.optimizers, moments.values(), strict=True):
            set_optimizer_state_dict(self._lightning, optimizer, state)
        return torch.load(path / _METADATA_FILENAME, weights_only=weights_only)

    def _load_whole(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        found = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        whole = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self._lightning, found.pop("state_dict"), options=whole)
        for optimizer, state in zip(self.optimizers, found.get("optimizer_states", ()), strict=False):
            named = FullyShardedDataParallel.rekey_optim_state_dict(
                state, OptimStateKeyType.PARAM_NAME, self._lightning
            )
            set_optimizer_state_dict(self._lightning, optimizer, named, options=whole)
        return found

    def _kept(self) -> StateDictOptions:
        return StateDictOptions(full_state_dict=not self._save_distributed_checkpoint, cpu_offload=True)

    @property
    def _lightning(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _compiled_modules(self) -> dict[str, ParallelModule]:
        modules = self._lightning.named_modules()
        return {name: module for name, module in modules if isinstance(module, ParallelModule)}


def _listed(names: list[str], most: int = 4) -> str:
    shown = f"{', '.join(names[:most])}{' …' if len(names) > most else ''}"
    return f"{'is' if len(names) == 1 else 'are'} {shown}"
