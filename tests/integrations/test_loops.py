"""Custom loops, and loops with accelerate, on two ranks compared with one process without autopar."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.testing import assert_close

from tests.integrations.scripts import EXAMPLES, alone, environment, on_two_ranks, values_in
from tests.test_house import ROOT


@pytest.mark.slow  # three processes of which each imports torch
def test_a_plain_loop_trains_as_on_one_process_with_three_new_lines(tmp_path: Path) -> None:
    expected, changed = alone("plain.py", tmp_path)
    assert changed == 3
    assert_close(on_two_ranks("plain.py")["losses"], expected["losses"], rtol=1e-5, atol=1e-6)
    assert expected["losses"][-1] < expected["losses"][0]


@pytest.mark.slow  # five processes of which each imports torch and accelerate
def test_a_loop_with_accelerate_trains_as_on_one_process_by_both_launchers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    expected, changed = alone("accelerate_loop.py", tmp_path)
    assert changed == 4
    # "--cpu" starts one process; "--multi_gpu" starts ranks by torchrun, and asks for no GPU where the script does not.
    launch = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
    command = [sys.executable, *launch, "--mixed_precision", "no", "--dynamo_backend", "no"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "accelerate_loop.py")],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for found in (on_two_ranks("accelerate_loop.py"), values_in(done.stdout)):
        assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=1e-6)
    assert len({round(loss, 6) for loss in expected["losses"]}) == 8
