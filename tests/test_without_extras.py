"""`pip install autopar` alone is enough to plan, train and read: extras are for those who use them."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterable
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
STEP = """
    import sys

    for extra in {extras!r}:
        sys.modules[extra] = None  # importing it fails, as where it is not installed
    import autopar
    import torch
    from torch import nn

    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    print(autopar.plan(model, autopar.Mesh({{"dp": 2, "tp": 2}}), (torch.ones(4, 8),)))
    mesh = torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    parallel = autopar.compile(model, mesh)
    parallel(torch.ones(4, 8)).sum().backward()
    torch.optim.SGD(parallel.parameters(), lr=0.1).step()
    parallel.plan.save(sys.argv[1])
"""


def _names(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[^\w-]", each)[0] for each in requirements}


def test_a_model_is_planned_and_trained_without_any_extra(tmp_path: Path) -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    optional = itertools.chain.from_iterable(project["optional-dependencies"].values())
    extras = _names(optional) - _names(project["dependencies"]) - {project["name"]}
    assert {"transformers", "matplotlib"} <= extras
    code = textwrap.dedent(STEP).format(extras=sorted(extras))
    saved = tmp_path / "plan.json"
    ran = subprocess.run([sys.executable, "-c", code, saved], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "plan for the mesh dp=2 × tp=2" in ran.stdout and saved.exists()
