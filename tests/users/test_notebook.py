"""Ranks that a notebook starts: functions of the notebook itself, forked after everything has been imported."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

NOTEBOOK = textwrap.dedent(
    """
    import torch
    from accelerate import debug_launcher
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    import autopar

    x = torch.randn(8, 4)
    alone = nn.Linear(4, 2)
    print(autopar.plan(alone, autopar.Mesh({"dp": 2}, hardware="cpu"), (x,)).mesh)  # a plan in the notebook, before


    def train():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = autopar.compile(alone, mesh, (x,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        if torch.distributed.get_rank() == 0:
            print("trained", loss.item())


    debug_launcher(train, num_processes=2)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = alone(x).square().mean()
        loss.backward()
        optimizer.step()
    print("alone", loss.item())
    """
)


@pytest.mark.slow
def test_a_notebook_plans_and_then_trains_on_ranks_that_it_forks() -> None:
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = dict(line.split() for line in done.stdout.splitlines() if line.startswith(("trained", "alone")))
    assert float(figures["trained"]) == pytest.approx(float(figures["alone"]), rel=1e-5)
