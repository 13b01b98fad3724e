"""CUDA without a GPU: what a CUDA build of PyTorch says of autopar's graphs on tensors that have no memory.

Nothing is computed, and no device is needed: tensors are fake ones on "cuda" (FakeTensorMode), collectives are those of
a fake process group, of which this process is rank 0. Checked are

- models: each family of `benchmarks.families` in bf16 on a mesh of (2, 2), divided by each strategy: its forward runs,
  and every output has the shape and dtype that the model itself gives there; the fused kernels of attention that
  autopar calls by name are listed;
- autocast: what the operations that autocast treats specially give under `autocast("cuda")`, captured by autopar
  (from inputs on the CPU, for a CUDA mesh) and run by PyTorch itself.

Not checked, as PyTorch asks the driver: backwards, and which kernel `scaled_dot_product_attention` chooses by itself.

    make cuda-check                                    its environment (5 GB) and all families
    python -m benchmarks.cuda_check llama mixtral      some
"""

from __future__ import annotations

import argparse
import sys
import time
import unittest.mock
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.capture.export import capture
from autopar.capture.passes.autocast import autocasting
from autopar.errors import AutoparError
from autopar.ir.program.program import info_of
from autopar.runtime.collectives import mesh_axes as axes
from benchmarks.families import FAMILIES, MESH, batch, build

STRATEGIES = ("zero3", "megatron")
READS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
CAPABILITY = (9, 0)
"""Compute capability of an H100; without it PyTorch would query the driver."""
OPERATIONS: Mapping[str, Callable[[Tensor], Any]] = {
    "linear": lambda x: F.linear(x, x),
    "matmul": lambda x: x @ x,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 2),
    "pow": lambda x: x.pow(2),
    "exp": torch.exp,
    "log": torch.log,
    "rsqrt": torch.rsqrt,
    "sum": torch.sum,
    "mean": torch.mean,
    "cumsum": lambda x: x.cumsum(-1),
    "norm": torch.norm,
    "softplus": F.softplus,
    "gelu": F.gelu,
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64, device=x.device)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "add of two dtypes": lambda x: x + x.to(torch.float32),
}


class _Kernels(TorchDispatchMode):
    """Counts the fused attention kernels that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        self.found[name] += "dot_product" in name and "attention" in name
        return func(*args, **(kwargs or {}))


class _Calls(nn.Module):
    """One operation as a model."""

    def __init__(self, operation: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, x: Tensor) -> Any:
        return self.operation(x)


def _forms(outputs: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of a model's output."""
    return [(tuple(x.shape), x.dtype) for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]


def of_family(family: str, strategies: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """Family, strategy, what came of it ("fine", or what is wrong), and the attention kernels that were called."""
    found = []
    mesh = init_device_mesh("cuda", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    for strategy in strategies:
        empty = build(family).to("meta", torch.bfloat16)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = empty.to_empty(device="cuda")
            inputs = pytree.tree_map_only(Tensor, _on_cuda, batch(family, 0))
            kernels = _Kernels()
            try:
                own = _forms_of_itself(model, inputs)
                compiled = autopar.compile(model, mesh, inputs, strategy=strategy, hardware="h100")
                with kernels:
                    outputs = compiled(**inputs)
            except AutoparError as error:
                found.append((family, strategy, f"refused: {str(error)[:90]}", ""))
                continue
            except READS_VALUES as error:
                found.append((family, strategy, f"cannot be checked: {error.func} reads a value", ""))
                continue
            except RuntimeError as error:
                found.append((family, strategy, f"cannot be checked: {str(error).splitlines()[0][:90]}", ""))
                continue
        there = pytree.tree_map_only(DTensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), outputs)
        alike = own is None or _forms(there) == own
        called = ", ".join(f"{count} {name}" for name, count in kernels.found.items() if count)
        found.append((family, strategy, "fine" if alike else f"WRONG: {_forms(there)}, not {own}", called))
    return found


def _forms_of_itself(model: nn.Module, inputs: Any) -> list[tuple[tuple[int, ...], torch.dtype]] | None:
    """Return the shapes and dtypes of the model's own outputs, without autopar.

    Returns None if the model reads values, as transformers models do to look for padding.
    """
    try:
        return _forms(model(**inputs))
    except READS_VALUES:
        return None


def _with_real_meshes(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for which numbers of ranks are real: a mesh makes a tensor of them at every access."""

    def called(*given: Any) -> Any:
        with unset_fake_temporarily():
            return function(*given)

    return called


def _on_cuda(value: Tensor) -> Tensor:
    dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
    return torch.empty(value.shape, dtype=dtype, device="cuda")


def of_autocast(dtype: torch.dtype) -> list[tuple[str, str, str, str]]:
    """Operation, dtype of its input, and what it gives under `autocast("cuda")`: by autopar, and by PyTorch."""
    found = []
    for name, operation in OPERATIONS.items():
        for given in (torch.float32, dtype):
            with autocasting("cuda", dtype, True):
                program = capture(_Calls(operation), (torch.ones(4, 4, dtype=given),), {}, device=torch.device("cuda"))
                with FakeTensorMode(), torch.no_grad():
                    own = operation(torch.empty(4, 4, dtype=given, device="cuda"))
            ours = ", ".join(str(info_of(node).dtype) for node in program.output if isinstance(node, torch.fx.Node))
            found.append((name, str(given), ours, str(own.dtype)))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables; exit status 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [family for families in FAMILIES.values() for family in families]
    parser.add_argument("families", nargs="*", help="by default all of them")
    parser.add_argument("--strategies", nargs="*", default=STRATEGIES)
    given = parser.parse_args(arguments)
    unknown = [family for family in given.families if family not in every]
    if unknown:
        raise SystemExit(f"{unknown[0]} is no family of benchmarks.families; there are {', '.join(every)}.")
    if torch.version.cuda is None:
        raise SystemExit(
            f"torch {torch.__version__} is no CUDA build; run make cuda-check, which makes an environment."
        )
    warnings.filterwarnings("ignore")
    start, wrong = time.monotonic(), 0
    rows = of_autocast(torch.bfloat16)
    wrong += sum(ours != own for _, _, ours, own in rows)
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, no device needed\n")
    print(tabulate(rows, ("operation", "given", "captured", "autocast itself")), "\n")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    with (
        unittest.mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY),
        unittest.mock.patch.object(torch.cuda, "default_generators", (torch.Generator(),)),
        unittest.mock.patch.object(axes, "_ranks_of", _with_real_meshes(axes._ranks_of)),
    ):
        for family in given.families or every:
            for row in of_family(family, given.strategies):
                wrong += row[2].startswith("WRONG")
                print("  ".join(row), flush=True)
    print(f"\n{wrong} wrong, {time.monotonic() - start:.0f} s")
    sys.exit(int(wrong > 0))


if __name__ == "__main__":
    main()
