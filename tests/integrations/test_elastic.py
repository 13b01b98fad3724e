"""Ranks that are lost in training: torchrun starts anew on those that are left, and the losses go on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.testing import assert_close

from tests.integrations.scripts import EXAMPLES, environment
from tests.test_house import ROOT

STEPS = 80
PATIENCE = 90.0  # seconds until ranks have started, of which each imports torch on a busy machine


class Node:
    """A torchrun agent with two ranks, which stands for a machine."""

    def __init__(self, folder: Path, port: int, number: int) -> None:
        self.log = folder / f"node{number}.txt"
        rendezvous = (f"--rdzv-endpoint=localhost:{port}", "--rdzv-backend=c10d", "--rdzv-id=elastic")
        quick = "--rdzv-conf=last_call_timeout=2,read_timeout=60"
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2")
        script = (str(EXAMPLES / "elastic.py"), str(folder / "checkpoints"), str(STEPS))
        with self.log.open("w") as log:
            self.agent = subprocess.Popen(
                [*torchrun, "--max-restarts=2", *rendezvous, quick, *script],
                cwd=ROOT,
                env={**environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        children = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children")
        return [int(pid) for pid in children.read_text().split()] if children.exists() else []

    def end(self) -> None:
        """Kill every process of the node at once, as when a machine is lost."""
        for pid in (self.agent.pid, *self.ranks()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agent.wait()


def _lines(*nodes: Node) -> list[dict[str, Any]]:
    """Return the lines with a loss that the nodes' first ranks have printed, in the order of steps."""
    found = []
    for node in nodes:
        for line in node.log.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line[line.index("{") :] if "{" in line else ""))
    return sorted((each for each in found if "loss" in each), key=lambda each: each["step"])


def _until(condition: Callable[[], bool], nodes: list[Node]) -> float:
    """Seconds until a condition holds."""
    start = time.monotonic()
    while not condition():
        logs = "\n".join(node.log.read_text()[-3000:] for node in nodes)
        assert time.monotonic() - start < PATIENCE, logs
        time.sleep(0.02)
    return time.monotonic() - start


@contextlib.contextmanager
def _two_nodes(folder: Path) -> Iterator[list[Node]]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    nodes = [Node(folder, port, number) for number in range(2)]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.end()


@pytest.mark.slow  # three starts of four processes, each of which imports torch
def test_a_run_that_loses_a_rank_and_a_node_has_the_losses_of_one_that_does_not(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    alone = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(EXAMPLES / "elastic.py")]
    arguments = [str(tmp_path / "alone"), str(STEPS)]
    done = subprocess.run(
        [*alone, *arguments], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    expected = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [each["step"] for each in expected] == list(range(STEPS))

    with _two_nodes(tmp_path) as nodes:
        host, lost = nodes
        _until(lambda: len(_lines(*nodes)) > 4, nodes)
        before = len(_lines(*nodes))
        os.kill(lost.ranks()[0], signal.SIGKILL)
        rank_seconds = _until(lambda: len(_lines(*nodes)) > before + 4, nodes)
        before = len(_lines(*nodes))
        lost.end()
        node_seconds = _until(lambda: len(_lines(*nodes)) > before, nodes)
        _until(lambda: _lines(*nodes)[-1]["step"] == STEPS - 1, nodes)
        assert host.agent.wait(timeout=60) == 0, host.log.read_text()
        found = _lines(*nodes)
    record_property("seconds from a killed rank to the next steps", round(rank_seconds, 1))
    record_property("seconds from a killed node to the next step", round(node_seconds, 1))
    print(f"\nseconds to the next steps: {rank_seconds:.1f} after a rank, {node_seconds:.1f} after a node")
    assert {each["step"] for each in found} == set(range(STEPS))
    assert [found[0]["ranks"], found[-1]["ranks"]] == [4, 2]
    for each in found:
        assert_close(each["loss"], expected[each["step"]]["loss"], rtol=1e-4, atol=1e-6)


def test_the_examples_are_short_and_the_script_for_slurm_is_bash() -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / "slurm.sh")], check=True)
    assert all(len(example.read_text().splitlines()) <= 60 for example in EXAMPLES.iterdir())
