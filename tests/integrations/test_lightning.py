"""Lightning's Trainer on a compiled module: training, checkpoints in parts and whole, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import autopar
from tests.integrations.scripts import EXAMPLES, alone, on_two_ranks
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

pytest.importorskip("lightning")
pytestmark = pytest.mark.slow  # each process imports Lightning, which takes as long as torch
EXAMPLE = "lightning_trainer.py"
FIRST = "epoch=0-step=2.ckpt"
IMPORT_SECONDS = 280.0  # of Lightning, on a busy machine


def _close(found: Any, expected: Any) -> None:
    assert_close(found["losses"], expected["losses"][-len(found["losses"]) :], rtol=1e-5, atol=1e-6)


def test_a_script_with_lightning_trains_and_resumes_as_on_one_process_with_two_new_lines(tmp_path: Path) -> None:
    expected, changed = alone(EXAMPLE, tmp_path, tmp_path / "alone")
    assert changed == 2
    assert len((EXAMPLES / EXAMPLE).read_text().splitlines()) <= 60
    _close(on_two_ranks(EXAMPLE, tmp_path / "ranks"), expected)
    resumed = on_two_ranks(EXAMPLE, tmp_path / "again", tmp_path / "ranks" / FIRST)
    _close(resumed, expected)
    assert (len(expected["losses"]), len(resumed["losses"])) == (8, 4)


def test_whole_checkpoints_are_those_of_lightning_on_one_process(tmp_path: Path) -> None:
    expected, _ = alone(EXAMPLE, tmp_path, tmp_path / "alone")
    text = (EXAMPLES / EXAMPLE).read_text()
    script = tmp_path / "whole.py"
    script.write_text(text.replace('strategy="zero3"', 'strategy="zero3", save_distributed_checkpoint=False'))
    _close(on_two_ranks(str(script), tmp_path / "ranks"), expected)
    assert (tmp_path / "ranks" / FIRST).is_file()
    resumed, _ = alone(EXAMPLE, tmp_path, tmp_path / "from ranks", tmp_path / "ranks" / FIRST)
    _close(resumed, expected)
    resumed = on_two_ranks(str(script), tmp_path / "from one", tmp_path / "alone" / FIRST)
    _close(resumed, expected)
    assert len(resumed["losses"]) == 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def _module(**parts: nn.Module) -> Any:
    import lightning.pytorch as pl

    module = pl.LightningModule()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def _compiled(inputs: Any = "local") -> Any:
    line = mesh((2,), ("dp",))
    return autopar.compile(Model(), line, (torch.zeros(4, 4),), inputs=inputs, hardware=SLOW_DEVICES)


def _refused() -> None:
    from autopar.integrations.lightning import Strategy
    from autopar.integrations.lightning_watch import WatchCallback

    with pytest.raises(autopar.InputError, match=r"module='model' and example_inputs go together"):
        Strategy({"dp": 2}, "model")
    for module, message in (
        (_module(model=Model()), "LightningModule has no compiled module; name it, as in Strategy"),
        (_module(model=_compiled("whole")), 'every rank has its own samples; compile model with inputs="local"'),
        (
            _module(model=_compiled(), head=Model()),
            "sums gradients over ranks, and there are head.layer.weight, head.layer.bias",
        ),
    ):
        strategy = Strategy({"dp": 2})
        strategy.connect(module)
        with pytest.raises(autopar.InputError, match=message):
            strategy._check()
    with pytest.raises(autopar.InputError, match=r"LightningModule has 0 compiled modules; one can be watched"):
        WatchCallback().on_train_start(SimpleNamespace(accumulate_grad_batches=1), _module())
    strategy = Strategy({"dp": 3})
    strategy._setup_distributed = lambda: None  # type: ignore[method-assign]
    strategy.cluster_environment = SimpleNamespace(world_size=lambda: 2)  # type: ignore[assignment]
    with pytest.raises(autopar.InputError, match=r"a mesh of {'dp': 3} on 2 ranks; give sizes whose product that is"):
        strategy.setup_environment()


def test_what_would_learn_apart_is_refused(ranks: Ranks) -> None:
    ranks.run(_refused, timeout=IMPORT_SECONDS)


def _watched(path: Path) -> Any:
    from autopar.integrations.lightning_watch import WatchCallback

    callback, module = WatchCallback(path, peak_flops=1e9), _module(model=_compiled())
    trainer = SimpleNamespace(accumulate_grad_batches=2, global_step=0, callback_metrics={"loss": torch.ones(())})
    callback.on_train_start(trainer, module)
    for batch in range(6):
        trainer.global_step = (batch + 1) // 2
        callback.on_train_batch_end(trainer, module, None, None, batch)
    dist.barrier()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lightning_is_watched_by_a_callback(ranks: Ranks, tmp_path: Path) -> None:
    records = ranks.run(_watched, tmp_path / "run.jsonl", timeout=IMPORT_SECONDS)[0]
    assert [each["step"] for each in records] == [2, 3]
    assert [each["flops"] for each in records] == [2 * (2 * 8 * 4 * 4 * 2)] * 2, "of two calls of eight samples"
    assert records[0]["values"] == {"loss": 1.0}
