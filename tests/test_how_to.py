"""The guides of docs/how-to: their Python code runs on ranks, and their commands are ones that `autopar` parses."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import autopar
from autopar.api import option_types
from autopar.cli.parser import parser
from tests.docs.prose import blocks
from tests.support.ranks import Ranks

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "docs" / "how-to"

COMMON = """
import autopar, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM
from autopar.models.catalogue import language_model
torch.manual_seed(0)
model = language_model("tiny-llama")
ids = torch.randint(512, (8, 32)); labels = ids.clone()
mesh = init_device_mesh("cpu", (min(2, dist.get_world_size()),), mesh_dim_names=("dp",))
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
def causal_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))
"""
ANEW = 'model = language_model("tiny-llama")\n'
SMALL = "ids = torch.randint(64, (8, 32)); labels = ids.clone()\n"
ON_CUDA = "a block that needs CUDA devices"
SETUP: dict[str, dict[int, str]] = {
    "annotations.md": {
        0: "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))",
        1: "llama = causal_model(); other = causal_model()",
    },
    "benchmark.md": {},
    "capture.md": {
        0: "x = torch.randn(8, 16)",
        2: """
class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
    def forward(self, x, grid):
        return torch.stack([p.mean() for p in self.layer(x).split(grid.tolist())]).square().mean()
patches, batch = Patches(), {"x": torch.randn(8, 16), "grid": torch.tensor([3, 5])}
""",
    },
    "checkpoints.md": {
        0: SMALL + "folder, checkpoint = 'hub', 'dcp'\n"
        "if dist.get_rank() == 0: causal_model().save_pretrained(folder)\ndist.barrier()",
        3: """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model(input_ids=ids, labels=ids).loss.backward()
optimizer.step()
""",
    },
    "clusters.md": {},
    "ddp-and-fsdp.md": {},
    "experts.md": {
        0: "model, other, third, fourth = (language_model('tiny-moe') for _ in range(4))\n"
        "mesh = init_device_mesh('cpu', (2,), mesh_dim_names=('ep',))"
    },
    "hardware.md": {},
    "inference.md": {0: SMALL + "causal = causal_model(); ids = ids[:, :8]; labels = ids"},
    "long-sequences.md": {0: "mesh = init_device_mesh('cpu', (2,), mesh_dim_names=('cp',))\nn = 2"},
    "lora.md": {0: SMALL + "causal = causal_model(); folder = 'adapters'", 1: "base = causal_model()"},
    "masks.md": {
        0: "x = torch.randn(4, 64, 64)",
        1: SMALL + "position_ids = (torch.arange(32) % 20).expand(8, 32)\n"
        "packed = autopar.compile(causal_model(), mesh, dict(input_ids=ids, position_ids=position_ids, labels=ids))",
    },
    "memory.md": {2: ANEW + "alone = language_model('tiny-llama')"},
    "mesh-search.md": {
        0: "model = autopar.models.built_in('tiny-mlp', 8, 1)[0]; ids, labels = torch.zeros(8, 1024), ids[:, 0]"
    },
    "modules.md": {0: "log_shape = lambda module, args, output: None"},
    "offload.md": {1: ANEW},
    "optimizers.md": {1: ANEW, 2: ANEW},
    "other-systems.md": {
        0: "llama = causal_model()\nfound = autopar.plan(llama, autopar.Mesh({'dp': 2, 'tp': 2}), "
        "dict(input_ids=ids % 64, labels=ids % 64), strategy='megatron').parallelize_plan()"
    },
    "own-operations.md": {},
    "planning.md": {1: "plan = autopar.plan(model, machine, (ids, labels))"},
    "precision.md": {
        1: ANEW,
        2: "autocast = autopar.compile(language_model('tiny-llama'), mesh)",
        3: "model = autopar.compile(language_model('tiny-llama'), mesh, (ids, labels))\n"
        "optimizer = torch.optim.AdamW(model.parameters())",
    },
    "scripts.md": {
        0: SMALL
        + """
from transformers import TrainingArguments
from torch.utils.data import DataLoader, TensorDataset
dataset = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (8, 16))]
arguments = TrainingArguments(output_dir="out", use_cpu=True, report_to="none", max_steps=1,
    per_device_train_batch_size=2)
llama, model = model, causal_model()
""",
        1: "model = llama; loader = DataLoader(TensorDataset(ids, labels), batch_size=2)",
        3: "batches = [(ids, labels)] * 2\n"
        "def train(*batch):\n    loss = model(*batch)\n    loss.backward()\n    return loss.item()",
    },
    "strategies.md": {0: "mesh = init_device_mesh('cpu', (1, 2), mesh_dim_names=('dp', 'tp'))"},
    "training.md": {
        0: "batches = [(ids, labels)] * 2",
        1: """
class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 1)
    def forward(self, x, y):
        return (self.layer(x).squeeze(1) - y).square().mean()
regression = Regression()
samples = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randn(64))
""",
        2: "torch.manual_seed(1); x = torch.randn(8, 16); model = autopar.compile(nn.Linear(16, 4), mesh, (x,))\n"
        "y = torch.zeros(8, dtype=torch.int64); criterion = nn.CrossEntropyLoss()",
        3: ANEW,
        4: "pass",
        5: ON_CUDA,
    },
    "varying-lengths.md": {
        0: SMALL + "pad_token_id, model = 0, causal_model()\n"
        "example = dict(input_ids=ids, labels=ids); shorter = dict(input_ids=ids[:, :23], labels=ids[:, :23])"
    },
}
NUM_RANKS = {
    "annotations.md": 4,
    "training.md": 4,
    "clusters.md": 4,
    "other-systems.md": 4,
    "mesh-search.md": 1,
    "hardware.md": 1,
}


OPTIONS = {name for kind in vars(option_types).values() for name in getattr(kind, "__annotations__", ())}


def _blocks(name: str, language: str) -> list[str]:
    found = blocks((GUIDES / name).read_text(encoding="utf-8"))
    return [each.text for each in found if each.language == language and ">>> " not in each.text]


def _commands() -> list[str]:
    lines = [
        re.sub(r"\s+#.*", "", line)
        for page in sorted(GUIDES.glob("*.md"))
        for block in _blocks(page.name, "sh")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return sorted({line[line.index("autopar ") :] for line in lines if re.match(r"(torchrun .*)?autopar ", line)})


WITH_CODE = [name for name in SETUP if _blocks(name, "python")]


def _run(name: str, folder: str) -> None:
    names: dict[str, Any] = {}
    with contextlib.chdir(folder):
        exec(COMMON, names)
        for index, code in enumerate(_blocks(name, "python")):
            if (setup := SETUP[name].get(index, "")) == ON_CUDA:
                continue
            exec(setup, names)
            # A file, as capture reads the source of a forward; one of each rank, as none reads what another writes.
            file = Path(f"{name}-{index}-{dist.get_rank()}") / "train.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(textwrap.dedent(code).replace('"cuda"', '"cpu"'), encoding="utf-8")
            exec(compile(file.read_text(encoding="utf-8"), str(file.resolve()), "exec"), names)


def test_every_guide_is_run_or_has_no_code() -> None:
    assert {page.name for page in GUIDES.glob("*.md")} - {"index.md"} <= SETUP.keys() | {"pipelines.md"}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CODE)
def test_the_code_of_a_guide_runs(ranks: Ranks, tmp_path: Path, name: str) -> None:
    ranks.run(_run, name, str(tmp_path), world_size=NUM_RANKS.get(name, 2), timeout=600.0)


@pytest.mark.parametrize("command", _commands())
def test_commands_are_parsed(command: str) -> None:
    parser().parse_args(shlex.split(command)[1:])


def _calls(name: str) -> list[ast.Call]:
    """Return the calls of functions and classes of autopar itself in the code of a guide."""
    nodes = [node for code in _blocks(name, "python") for node in ast.walk(ast.parse(code))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [
        call for call in calls if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "autopar"
    ]


@pytest.mark.parametrize("name", WITH_CODE)
def test_calls_have_options_that_there_are(name: str) -> None:
    for call in _calls(name):
        assert isinstance(call.func, ast.Attribute)
        taken = set(inspect.signature(getattr(autopar, call.func.attr)).parameters)
        known = taken | (OPTIONS if "options" in taken else set())
        given = {keyword.arg for keyword in call.keywords}
        assert given <= known or "axes" in taken, f"{name}: {ast.unparse(call)}; there is {sorted(known)}"
