"""`Watch` as a callback of Lightning's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from autopar.errors import InputError
from autopar.integrations.watch import Watch
from autopar.runtime.module.compiled_module import ParallelModule


class WatchCallback(pl.Callback):
    """Callback that writes a record of every optimizer step; takes the arguments of `Watch` except the model.

    >>> trainer = Trainer(callbacks=WatchCallback("run.jsonl"), ...)  # doctest: +SKIP

    A record has what the LightningModule logs of a step with `self.log(..., on_step=True)`.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        tensorboard: str | Path | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self._options: dict[str, Any] = {"path": path, "tensorboard": tensorboard, "peak_flops": peak_flops}
        self._watch: Watch | None = None
        self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise InputError unless the LightningModule has exactly one compiled module."""
        compiled = [each for each in pl_module.modules() if isinstance(each, ParallelModule)]
        if len(compiled) != 1:
            raise InputError(f"{type(pl_module).__name__} has {len(compiled)} compiled modules; one can be watched.")
        self._watch, self._steps = Watch(compiled[0], calls=trainer.accumulate_grad_batches, **self._options), 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the step, unless gradients are still accumulated."""
        assert self._watch is not None, "training starts before its first batch"
        if trainer.global_step != self._steps:  # else gradients are still accumulated
            self._steps = trainer.global_step
            self._watch.step(**trainer.callback_metrics)
