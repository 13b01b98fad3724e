"""A program of the fuzzer: blocks of Python lines, which is what a person reads, shrinks and pastes into a test.

A line assigns one value, as in `v3 = F.linear(v1, w2, w5)`. Names: `x0` floats and `i0` token ids that are given (dim 0
is the batch), `w0` parameters, `b0` buffers, `v0` what lines compute, `loss` what the last line computes. Blocks become
modules `layers.0`, `layers.1` …, each with the tensors that it is the first to use, and run one after the other on the
names of all before them.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DTYPE = torch.float64
"""Wide enough that what is apart by more than rounding is wrong."""
VOCABULARY = 8
GLOBALS: Mapping[str, Any] = {"torch": torch, "F": F, "math": math}

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Lines by block, and the shapes of what they take."""

    blocks: tuple[tuple[str, ...], ...]
    inputs: Mapping[str, Shape]
    parameters: Mapping[str, Shape] = field(default_factory=dict)
    buffers: Mapping[str, Shape] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    """Parameter → the one that it is, under a name of its own in its block."""
    outputs: tuple[str, ...] = ()
    """Values that are returned together with the loss."""
    frozen: tuple[str, ...] = ()
    """Parameters that require no gradient."""

    def __post_init__(self) -> None:
        """Drop the inputs, parameters, buffers and ties that no line uses; a tie needs both of its names."""
        lines = tuple(line for block in self.blocks for line in block)
        used = names_in(lines)
        for field_name in ("inputs", "parameters", "buffers"):
            table = getattr(self, field_name)
            object.__setattr__(self, field_name, {name: shape for name, shape in table.items() if name in used})
        kept = {name: first for name, first in self.tied.items() if name in used and first in used}
        object.__setattr__(self, "tied", kept)
        object.__setattr__(self, "frozen", tuple(name for name in self.frozen if name in self.parameters))

    @property
    def num_lines(self) -> int:
        return sum(map(len, self.blocks))

    def build(self) -> Made:
        """The program as a module in training mode, with the same values on every call."""
        return Made(self)

    def batch(self, step: int) -> dict[str, Tensor]:
        """The global batch of a step."""
        return {name: drawn(name, shape, step) for name, shape in self.inputs.items()}


class Made(nn.Module):
    """A program as a module: called with its inputs by name, it returns the loss, or (loss, outputs…)."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        owned: set[str] = set()
        made = {name: nn.Parameter(drawn(name, shape)) for name, shape in program.parameters.items()}
        made |= {name: made[first] for name, first in program.tied.items()}
        for name, parameter in made.items():
            parameter.requires_grad_(name not in program.frozen)
        self.layers = nn.ModuleList()
        self.outputs = program.outputs
        for lines in program.blocks:
            used = names_in(lines) - owned
            owned |= used
            parameters = {name: parameter for name, parameter in made.items() if name in used}
            buffers = {n: drawn(n, s) for n, s in program.buffers.items() if n in used}
            self.layers.append(Block(lines, parameters, buffers))

    def forward(self, **values: Tensor) -> Any:
        for block in self.layers:
            values = block(values)
        return (values["loss"], *(values[name] for name in self.outputs)) if self.outputs else values["loss"]


class Block(nn.Module):
    """Some lines of a program, with the parameters and buffers that they are the first to use."""

    def __init__(self, lines: tuple[str, ...], parameters: dict[str, nn.Parameter], buffers: dict[str, Tensor]) -> None:
        super().__init__()
        self.code = compiled("\n".join(lines))
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Any] = {**GLOBALS, **values, **self._parameters, **self._buffers}
        exec(self.code, found)
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def drawn(name: str, shape: Shape, step: int = 0) -> Tensor:
    """Return the values of an input, a parameter or a buffer, the same in every call."""
    generator = torch.Generator().manual_seed(1000 * step + 31 * sum(map(ord, name)) + len(name))
    if name.startswith("i"):
        return torch.randint(0, VOCABULARY, shape, generator=generator)
    scale = 1.0 if name.startswith("x") else 0.7
    return scale * torch.randn(shape, generator=generator, dtype=DTYPE)


@functools.lru_cache(maxsize=4096)
def names_in(lines: tuple[str, ...]) -> set[str]:
    """The names that lines use or assign."""
    return {node.id for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.Name)}


@functools.lru_cache(maxsize=4096)
def compiled(text: str) -> CodeType:
    """The lines as code."""
    return compile(text, "<a program of the fuzzer>", "exec")
