"""No step reads on the host what a device computes: on a GPU it would wait there for all that it has launched.

On ranks of a CPU nothing waits, but what would is seen: calls that give the host a value of a tensor. Those that a step
makes are of tensors which the host has made itself, on the CPU.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from tests.support.divided_experts import Form, batches, with_experts
from tests.support.families import HIDDEN
from tests.support.options import by_flag
from tests.support.ranks import Ranks, mesh

READS = {
    *(Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.nonzero, Tensor.equal),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
    *(torch.equal, torch.nonzero, torch.is_nonzero),
}
FROM_HOST_TO_HOST = {
    "dropout.py": "the seed of a draw, which the host computes",
    "host_values.py": "whether a rank of the pipeline has frozen something",
    "shared_parameters.py": "which tied weights have a gradient",
}
"""Files of the runtime that may read CPU tensors in a step → the value that they read."""
RUNTIME = Path(autopar.__file__).parent / "runtime"


def _reader() -> str:
    """The file of the runtime that reads."""
    frame = sys._getframe(1)
    while frame is not None:
        if "/runtime/" in frame.f_code.co_filename and "/tests/" not in frame.f_code.co_filename:
            return Path(frame.f_code.co_filename).name
        frame = frame.f_back
    return "elsewhere"


class Reads(TorchFunctionMode):
    """Mode that counts the runtime's files that read values of tensors, in Python or inside an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._operations = _Operations(self.found)

    def __enter__(self) -> Any:
        self._operations.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._operations.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.found[_reader()] += 1
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            self._found[_reader()] += 1
        return func(*args, **(kwargs or {}))


class Tied(nn.Module):
    """A tower with dropout, whose first weight is used again at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BD = nn.functional.dropout(layer(x_BD).relu(), 0.1, self.training)
        return (self.norm(x_BD) @ self.layers[0].weight).square().mean()


def _reads(options: dict[str, Any], forwards: bool) -> dict[str, int]:
    torch.manual_seed(0)
    x_BD = torch.randn(8, HIDDEN)
    axis = "pp" if "schedule" in options else "dp"
    model = autopar.compile(Tied(), mesh((2,), (axis,)), (x_BD,), **by_flag(**options))
    step: Callable[[], Any] = (lambda: model(x_BD).backward()) if forwards else (lambda: model.train_step(x_BD))
    for _ in range(2):  # the first calls compare inputs between ranks
        step()
    with Reads() as reads:
        step()
    return dict(reads.found)


def _reads_of_experts(padded: float | None, choice: str) -> set[str]:
    form, (batch,) = Form(num_experts=4, hidden=8), batches(1, torch.float32)
    source = autopar.annotate(with_experts(form, torch.float32), "*experts.dispatch", ep=f"factor:{choice}")
    model: Any = autopar.compile(source, mesh((2,), ("ep",)), batch, **by_flag(padded_rows=padded))
    for _ in range(2):
        model.train_step(**batch)
    with Reads() as reads:
        model.train_step(**batch)
    return set(reads.found)


@pytest.mark.parametrize("choice", ["x", "a0+x"])
def test_rows_of_experts_are_counted_on_the_host_unless_they_are_padded(ranks: Ranks, choice: str) -> None:
    for padded, expected in ((None, {"experts.py"}), (2.0, set[str]())):
        assert ranks.run(_reads_of_experts, padded, choice) == [expected] * 2


def test_files_that_may_read_are_files_of_the_runtime() -> None:
    assert FROM_HOST_TO_HOST.keys() <= {path.name for path in RUNTIME.rglob("*.py")}


PIPELINE = {"schedule": "1f1b", "microbatches": 4, "split_points": ["layers.2"]}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("options", "forwards"),
    [
        ({"strategy": "zero3"}, True),
        ({"strategy": "zero2", "microbatches": 2}, False),
        ({"strategy": "megatron"}, True),
        ({"strategy": "zero3", "precision": "bf16-mixed"}, True),
        (PIPELINE, False),
    ],
    ids=lambda value: value.get("strategy", "pipeline") if isinstance(value, dict) else "",
)
def test_a_step_reads_nothing_that_a_device_computes(ranks: Ranks, options: dict[str, Any], forwards: bool) -> None:
    for found in ranks.run(_reads, options, forwards):
        assert found.keys() <= FROM_HOST_TO_HOST.keys()
        assert found["dropout.py"]  # the modes see what is read
        assert ("host_values.py" in found) == ("schedule" in options)
