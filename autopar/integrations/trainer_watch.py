"""`Watch` as a callback of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from autopar.integrations.watch import Watch


class WatchCallback(transformers.TrainerCallback):
    """Callback that writes a record of every optimizer step; takes the arguments of `Watch` except the model.

    >>> trainer.add_callback(WatchCallback("run.jsonl"))  # doctest: +SKIP

    The Trainer tells callbacks no losses in a step; its own logs have them.
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

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Start to watch the model that is trained."""
        self._watch = Watch(given["model"], calls=args.gradient_accumulation_steps, **self._options)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Record the step."""
        assert self._watch is not None, "training begins before its first step"
        self._watch.step()
