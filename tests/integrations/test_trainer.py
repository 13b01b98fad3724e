"""The Trainer of transformers on a compiled module."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import autopar
from tests.integrations.scripts import alone, on_two_ranks
from tests.support.ranks import Ranks, mesh

pytest.importorskip("accelerate")


@pytest.mark.slow  # three processes of which each imports transformers and its Trainer
def test_the_trainer_trains_evaluates_predicts_and_resumes_as_on_one_process(tmp_path: Path) -> None:
    expected, changed = alone("trainer.py", tmp_path, tmp_path / "alone")
    found = on_two_ranks("trainer.py", tmp_path / "ranks")
    resumed = on_two_ranks("trainer.py", tmp_path / "again", tmp_path / "ranks" / "checkpoint-2")
    assert changed == 3
    for each in (found, resumed):
        assert_close(each["losses"], expected["losses"], rtol=1e-5, atol=1e-6)
        assert_close(each["evaluated"], expected["evaluated"], rtol=1e-4, atol=1e-5)
        assert each["predicted"] == expected["predicted"]
    assert expected["losses"][-1] != expected["losses"][0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def _refused() -> None:
    from autopar.integrations.trainer import Trainer

    def compiled(inputs: Any) -> Any:
        return autopar.compile(Model(), mesh((2,), ("dp",)), (torch.zeros(4, 4),), inputs=inputs)

    with pytest.raises(autopar.InputError, match=r"model is a Model; give it with mesh=, or give what autopar.comp"):
        Trainer(Model())
    with pytest.raises(autopar.InputError, match=r"mesh= compiles the model for batches of train_dataset, or of eval"):
        Trainer(Model(), mesh=mesh((2,), ("dp",)))
    with pytest.raises(autopar.InputError, match="mesh= is to compile a model on; found a ParallelModel for a model"):
        Trainer(compiled("local"), mesh=mesh((2,), ("dp",)))
    with pytest.raises(autopar.InputError, match='compile the model with inputs="local", found parts over no axis'):
        Trainer(compiled("whole"))
    local = compiled("local")
    with pytest.raises(autopar.InputError, match=r"^fp16=1 needs a loss scale .* ShardedGradScaler\.$"):
        Trainer(local, SimpleNamespace(fp16=1))


def test_what_would_be_wrong_in_silence_is_refused(ranks: Ranks) -> None:
    ranks.run(_refused)


def test_the_best_model_is_read_by_every_rank_from_its_checkpoint() -> None:
    from autopar.integrations.trainer import Trainer

    read: list[str] = []
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(best_model_checkpoint="output/checkpoint-2"),
        _model=SimpleNamespace(load_safetensors=read.append),
    )
    Trainer._load_best_model(trainer)
    assert read == ["output/checkpoint-2"]
