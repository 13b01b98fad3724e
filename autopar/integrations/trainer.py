"""The Trainer of transformers on a compiled module: no wrapper, the loss of the whole batch, checkpoints of all ranks.

Differences from a plain `Trainer` on many processes: the model's loss is that of the whole batch already, so it is not
scaled by their number; every rank takes part in saving and loading; outputs are this rank's part of them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME

from autopar.api.entry import compile
from autopar.compiler.arguments import Run
from autopar.errors import InputError
from autopar.integrations.varying_texts import LOOKED_AT, buckets_for
from autopar.runtime.module.compiled_module import ParallelModule

STATE = "parallel_state"
"""Folder of a checkpoint: the optimizer's state in shards, and the model's random numbers."""


class Trainer(transformers.Trainer):
    """`transformers.Trainer` that compiles its model on `mesh`, or takes one compiled with inputs="local".

    `bf16=True` is an autocast region around the forward, as ever; a model with a `precision=` needs none. Checkpoints
    have the model as safetensors, and `resume_from_checkpoint` takes them on another mesh.
    Raises InputError for what would be wrong in silence.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        mesh: DeviceMesh | None = None,
        options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """`mesh`: compile the model on it, for batches of the datasets, with these `options` of `autopar.compile`.

        If samples differ in length, and the collator pads each batch to its longest sample, `Run(buckets=…)` is by
        default "auto" with the padding of the tokenizer, so that ranks with batches of different lengths are called
        alike; "none" pads nothing.
        Other arguments are those of `transformers.Trainer`.
        """
        check_is_honoured(args)
        if mesh is None:
            check_gives_parts(model)
        elif isinstance(model, ParallelModule) or not isinstance(model, nn.Module):
            raise InputError(f"mesh= is to compile a model on; found a {type(model).__name__} for a model.")
        elif others.get("train_dataset") is None and others.get("eval_dataset") is None:
            raise InputError(
                "mesh= compiles the model for batches of train_dataset, or of eval_dataset, and there is neither; give "
                'one, or the model that autopar.compile(..., inputs="local") returns.'
            )
        super().__init__(model=model, args=args, **others)
        if mesh is not None:
            model = self._compiled(mesh, options or {})
            check_gives_parts(model)
            self.model = self.model_wrapped = self.callback_handler.model = model
        vars(model)["_is_accelerate_prepared"] = True  # accelerate leaves it as it is

    def _compiled(self, mesh: DeviceMesh, options: Mapping[str, Any]) -> Any:
        """Return the model, compiled for a step as the Trainer makes it."""
        plain: Any = self.model
        trains = self.train_dataset is not None
        loader: Any = self.get_train_dataloader() if trains else self.get_eval_dataloader()
        size = self._train_batch_size if trains else self.args.eval_batch_size
        with torch.random.fork_rng(devices=[]):  # collators may draw
            batch = loader.collate_fn(list(itertools.islice(_samples(loader.dataset), size)))
            run = Run.of(options.get("run"))
            if run.buckets is None:
                looked_at = itertools.islice(_samples(loader.dataset), LOOKED_AT)
                buckets = buckets_for(looked_at, loader.collate_fn, plain, self.processing_class)
                options = {**options, "run": replace(run, buckets=buckets)}
        if trains:
            _, num_items = self.get_batch_samples(iter([batch]), 1, self.args.device)
            batch = self._with_num_items(batch, num_items)
        if self._computes_loss:
            batch = {name: each for name, each in batch.items() if name != "labels"}
        with self.accelerator.autocast():
            given: dict[str, Any] = {"inputs": "local", **options}
            return compile(plain.train(trains), mesh, dict(batch), **given)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Do nothing before compilation: each rank moves only its parts."""
        if isinstance(model, ParallelModule):
            super()._move_model_to_device(model, device)

    def _with_num_items(self, inputs: Any, num_items_in_batch: Any) -> Any:
        counts = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return {**inputs, "num_items_in_batch": num_items_in_batch} if counts else inputs

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss, and this rank's part of the outputs.

        The model's loss is that of all ranks' batches; one that is computed here is this rank's.
        """
        labels = inputs.pop("labels", None) if self._computes_loss else None
        with self.accelerator.autocast():
            outputs = model(**self._with_num_items(inputs, num_items_in_batch))
        if self.compute_loss_func is not None or labels is not None:
            loss = self._own_loss(outputs, labels, num_items_in_batch)
        else:
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        return (loss, pytree.tree_map(own_part, outputs)) if return_outputs else loss

    @property
    def _computes_loss(self) -> bool:
        """True if the loss is computed from outputs of the model."""
        return self.label_smoother is not None or self.compute_loss_func is not None

    def _own_loss(self, outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
        """Return the loss of this rank's samples, as `transformers.Trainer.compute_loss` does."""
        counted = {"num_items_in_batch": num_items_in_batch}
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, **counted)
        else:
            assert self.label_smoother is not None
            shifts = type(self._model.tree.root).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            loss = self.label_smoother(outputs, labels, shift_labels=shifts, **counted)
        # Gradients are averaged over ranks; a sum over the items of all ranks is to be added up.
        accepts = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        adds_up = self.args.average_tokens_across_devices and accepts and num_items_in_batch is not None
        return loss * self._model.mesh.size() if adds_up else loss

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Run the Trainer's prediction step; return this rank's part of the outputs also if there are no labels."""
        found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return pytree.tree_map(own_part, found)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as safetensors; called by all ranks."""
        folder = output_dir or self.args.output_dir or "."
        self._model.save_pretrained(folder)
        if self.args.should_save:
            processing: Any = self.processing_class
            if processing is not None:
                processing.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    @property
    def _model(self) -> ParallelModule:
        assert isinstance(self.model, ParallelModule)
        return self.model

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(self._state(), checkpoint_id=os.path.join(output_dir, STATE))
        if self.args.should_save:
            torch.save(self._scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = self._state()
        load(state, checkpoint_id=os.path.join(checkpoint, STATE))
        set_optimizer_state_dict(self._model, self._optimizer, state["optimizer"])
        scheduler = torch.load(os.path.join(checkpoint, SCHEDULER_NAME), map_location="cpu", weights_only=True)
        self._scheduler.load_state_dict(scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._model.load_safetensors(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._model.load_safetensors(self.state.best_model_checkpoint)

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        found: Any = self.optimizer
        return getattr(found, "optimizer", found)  # accelerate's stands around the one that there was

    @property
    def _scheduler(self) -> Any:
        return self.lr_scheduler

    def _state(self) -> dict[str, Any]:
        moments = get_optimizer_state_dict(self._model, self._optimizer)
        return {"optimizer": moments, "random": self._model.random_state}


def check_gives_parts(model: Any) -> None:
    """Raise InputError for what is no compiled module that takes each rank's own samples."""
    if not isinstance(model, ParallelModule):
        raise InputError(
            f"model is a {type(model).__name__}; give it with mesh=, or give what autopar.compile returns, with "
            'inputs="local" and on a mesh without a pipeline, or use transformers.Trainer.'
        )
    if model.axes_of_parts != tuple(model.mesh.mesh_dim_names or ()):
        raise InputError(
            'the Trainer gives every rank its own samples; compile the model with inputs="local", found parts over '
            f"{', '.join(model.axes_of_parts) or 'no axis'}."
        )


def check_is_honoured(args: Any) -> None:
    """Raise InputError for arguments that would be wrong in silence."""
    if getattr(args, "fp16", None):
        raise InputError(
            f"fp16={args.fp16} needs a loss scale that ranks agree on; use bf16=True, or your own loop with "
            "ShardedGradScaler."
        )


def _samples(dataset: Any) -> Iterator[Any]:
    """Return the samples of a dataset in its own order, which loaders may shuffle."""
    if isinstance(dataset, IterableDataset):
        return iter(dataset)
    return (dataset[number] for number in range(len(dataset)))


def own_part(value: Any) -> Any:
    """Return this rank's samples of an output: along dim 0, the part that it gave of the inputs.

    Returns the whole tensor if dim 0 does not divide by the number of ranks, and values that are no DTensor as they
    are.
    """
    if not isinstance(value, DTensor):
        return value
    if value.ndim == 0 or value.shape[0] % value.device_mesh.size():
        return value.full_tensor()
    found: Tensor = value.redistribute(placements=[Shard(0)] * value.device_mesh.ndim).to_local()
    return found
