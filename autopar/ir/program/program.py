"""A captured model: one clean fx graph of ATen calls, with the shape, dtype, gradient flag and module of every tensor.

`capture` makes a Program, the planner reads it, the runtime rewrites it. The graph is a `torch.fx.Graph` whose
placeholders are, in this order, parameters, buffers, constants and user inputs, and whose output is one flat tuple:
the user's outputs (tensors, or plain constants) followed by the new values of mutated buffers.
Every node carries

    node.meta["tensor"]   TensorInfo, or a tuple of TensorInfo/None for an op with several outputs, or None
    node.meta["module"]   dotted path of the module that made the call, "" for the root
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autopar.ir.program.python_state import PythonState


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Description of a tensor before it exists: global shape, dtype, and whether a gradient flows into it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(slots=True)
class Program:
    """A captured model. `parameters`, `buffers` and `constants` map original names to placeholder names."""

    graph: fx.Graph
    parameters: dict[str, str]
    """Original name (the first one, for tied parameters) → placeholder, for parameters the graph uses."""
    tied: dict[str, str]
    """Every further name of a tied parameter or buffer → its first name."""
    buffers: dict[str, str]
    """Original buffer name → placeholder, for buffers the graph uses."""
    constants: dict[str, torch.Tensor]
    """Placeholder → tensor lifted out of the graph (real tensors, on CPU)."""
    inputs: tuple[str | None, ...]
    """Placeholder of each leaf of the flattened (args, kwargs); None where the leaf is no tensor or is unused."""
    input_values: tuple[object, ...]
    """The leaf itself where it is no tensor (it was specialised), else its TensorInfo."""
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    num_outputs: int
    """Number of entries of the graph's output that belong to the user; the rest are buffer mutations."""
    mutations: tuple[str, ...]
    """Names of the mutated buffers, in the order of the remaining outputs."""
    training: bool = True
    input_names: tuple[str, ...] = field(default=())
    """A readable name per leaf, for errors: `input_ids`, `labels`, `args[0]`."""
    received: tuple[str, ...] = ()
    """Placeholders of a pipeline stage for tensors from the stage before, in the order in which that sends them."""
    num_sent: int = 0
    """Number of entries of a pipeline stage's output, before the user's, that go to the next stage."""
    reduced: torch.dtype | None = None
    """Dtype in which gradients of parameters are summed over devices; None: that in which they are made."""
    accumulated: torch.dtype | None = None
    """Dtype in which micro-batches add up gradients before they are reduced; None: see `accumulates`."""
    assumed: tuple[str, ...] = ()
    """Branches on the values of tensors that were not followed but assumed, with their place and outcome."""
    tileable: bool = False
    """True if the program has a loss, of a linear layer, that could be taken in tiles."""
    mlp_tileable: bool = False
    """True if the program has an MLP that could be taken in tiles; looked for only if `mlp_tiles` is "auto"."""
    model: str = field(default="", compare=False)
    """The name of the model's class."""
    python: PythonState = field(default=PythonState(), compare=False)
    """Python state that the forward reads beyond its inputs, and that it leaves behind."""
    facts: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cached findings about the graph, by name of the question; the graph does not change after capture."""

    @property
    def num_results(self) -> int:
        """Number of entries of the graph's output that are sent or the user's; the rest are buffer mutations."""
        return self.num_sent + self.num_outputs

    @property
    def learns(self) -> bool:
        """True if some tensor of the program requires a gradient; otherwise the program is a forward alone."""
        if "learns" not in self.facts:
            found = (node.meta.get("tensor") for node in self.graph.nodes)
            infos = (info for each in found for info in (each if isinstance(each, tuple) else (each,)))
            self.facts["learns"] = any(isinstance(info, TensorInfo) and info.requires_grad for info in infos)
        return self.facts["learns"]

    @property
    def parameter_names(self) -> dict[str, str]:
        """Placeholder → original name, of the parameters."""
        if "parameter_names" not in self.facts:
            self.facts["parameter_names"] = {placeholder: name for name, placeholder in self.parameters.items()}
        return self.facts["parameter_names"]

    @property
    def summary(self) -> str:
        """Inputs and graph in words: what must be equal on all ranks."""
        inputs = zip(self.input_names, self.input_values, strict=True)
        return f"{', '.join(f'{name}: {value}' for name, value in inputs)} (graph {self.fingerprint})"

    def placeholders(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.graph.nodes if node.op == "placeholder"}

    @property
    def output(self) -> tuple[object, ...]:
        """The flat output: fx nodes or constants."""
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def lines(self) -> list[str]:
        """Return the nodes of the graph with their shapes and dtypes, a line each: equal for equal graphs, on any
        device.
        """
        index: dict[fx.Node, int] = {}
        found = []
        for node in self.graph.nodes:
            index[node] = len(index)
            args = map_aggregate((node.args, node.kwargs), lambda leaf: _named(leaf, index))
            found.append(f"{node.op} {node.target} {args!r} {node.meta.get('tensor')}")
        return found

    @property
    def fingerprint(self) -> str:
        """A hash of the graph with its shapes and dtypes: equal for equal models on equal inputs, on any device."""
        digest = hashlib.sha256()
        for line in self.lines():
            digest.update(f"{line}\n".encode())
        digest.update(repr(sorted(self.parameters.items())).encode())
        if self.reduced is not None:
            digest.update(str(self.reduced).encode())
        if self.accumulated != self.reduced:
            digest.update(f"accumulated in {self.accumulated}".encode())
        return digest.hexdigest()[:16]

    def accumulates(self, used: torch.dtype, is_reduced: bool = False) -> torch.dtype:
        """Return the dtype in which micro-batches add up gradients of weights that are used in this one.

        If each micro-batch reduces its own (`is_reduced`), the sums are small parts, and stay in float32, or wider.
        """
        return _wide(used) if is_reduced else self.accumulated or _wide(used)


@functools.cache
def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _named(leaf: Any, index: Mapping[fx.Node, int]) -> Any:
    """Return an argument as the fingerprint has it: nodes by their place, and every device as the CPU."""
    if isinstance(leaf, fx.Node):
        return f"%{index[leaf]}"
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the tensor arguments of a call, one entry per use, in the order of its args and then its kwargs."""
    found: list[fx.Node] = []
    _collect(node.args, found)
    _collect(tuple(node.kwargs.values()), found)
    return found


def _collect(arguments: Sequence[object], found: list[fx.Node]) -> None:
    for argument in arguments:
        if isinstance(argument, fx.Node):
            if argument.meta.get("tensor") is not None:
                found.append(argument)
        elif isinstance(argument, list | tuple):
            _collect(argument, found)
        elif isinstance(argument, dict):
            _collect(tuple(argument.values()), found)


def info_of(node: fx.Node) -> TensorInfo:
    """Return the TensorInfo of a node with a single tensor output."""
    found = node.meta["tensor"]
    assert isinstance(found, TensorInfo), f"{node} has no single tensor output: {found}"
    return found


INSTEAD = {
    "nested": "torch.nested.to_padded_tensor(x, 0.0) and a mask",
    "quantized": "x.dequantize()",
}


OF_LIBRARIES = {
    "bitsandbytes": "dequantize the model first (model.dequantize() of transformers), or train it on one device",
    "torchao": (
        "compile the model before its weights are quantized; torchao.float8.convert_to_float8_training keeps plain "
        "weights, and quantization for inference belongs behind training"
    ),
    "transformer_engine": "keep plain weights, without fp8_model_init or quantized_model_init",
}
"""Library → what to do where a tensor is of a class of its own."""


def fault_of_form(tensor: Tensor) -> str:
    """Return what a tensor is instead of dense and plain, and what to pass in its place; "" if it is both.

    >>> fault_of_form(torch.eye(2).to_sparse_csr())
    'is a sparse_csr tensor, and autopar splits dense ones only; give x.to_dense() in its place'
    """
    kind = type(tensor)
    library = kind.__module__.partition(".")[0]
    if library != "torch" and (library in OF_LIBRARIES or is_traceable_wrapper_subclass(tensor)):
        advice = OF_LIBRARIES.get(library, "give a plain tensor in its place")
        return f"is a {kind.__module__}.{kind.__qualname__}, and autopar splits plain tensors only; {advice}"
    if tensor.is_nested:
        form = "nested"
    elif tensor.is_quantized:
        form = "quantized"
    elif tensor.layout is not torch.strided:
        form = str(tensor.layout).removeprefix("torch.").removeprefix("_")
    else:
        return ""
    given = INSTEAD.get(form, "x.to_dense()")
    return f"is a {form} tensor, and autopar splits dense ones only; give {given} in its place"
