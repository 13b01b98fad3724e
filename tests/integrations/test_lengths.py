"""transformers' Trainer on texts of any length, and resumed on fewer ranks than it was saved on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.testing import assert_close

from tests.integrations.scripts import environment
from tests.test_house import ROOT

pytest.importorskip("accelerate")


def _trained(num_ranks: int, *arguments: object) -> Any:
    """Run the script on one process or under torchrun, and return the losses that it prints."""
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--standalone") if num_ranks else ()
    command = [sys.executable, *ranks, "-m", "tests.integrations.trained_texts", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.JSONDecoder().raw_decode(done.stdout, done.stdout.rindex('{"losses"'))[0]


@pytest.mark.slow  # seven processes of which each imports transformers and its Trainer
def test_the_trainer_takes_texts_of_any_length_and_goes_on_on_fewer_ranks(tmp_path: Path) -> None:
    expected = _trained(0, tmp_path / "alone")["losses"]
    found = _trained(4, tmp_path / "ranks", "zero3")
    assert_close(found["losses"], expected, rtol=1e-4, atol=1e-4)
    assert found["plans"] == 2  # of the example, and of batches, which also have a num_items_in_batch
    checkpoint = tmp_path / "ranks" / "checkpoint-2"
    again = _trained(2, tmp_path / "again", "zero3", checkpoint)
    assert_close(again["losses"], expected, rtol=1e-4, atol=1e-4)
    assert len(set(expected)) == len(expected) == 4
