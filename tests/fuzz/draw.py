"""Random programs from a seed: lines are drawn one by one, and each is tried on real numbers before it is kept."""

from __future__ import annotations

import contextlib
import random
import warnings

import torch
from torch import Tensor

from tests.fuzz import layers, tensors  # noqa: F401  which give the kinds their expressions
from tests.fuzz.kinds import EXPRESSIONS, WEIGHTS, UnfitError
from tests.fuzz.program import GLOBALS, Program, Shape, drawn, names_in

MAX_ELEMENTS, MAX_ENTRY, MAX_GRADIENT, TRIES = 512, 30.0, 1e4, 40
BATCH = 4
TERMS = (".square().mean()", ".sin().sum()", ".mean()", ".square().sum()*0.1", ".tanh().mean()")
"""Expressions that make a term of the loss from a value."""


class Drawing:
    """A program as far as it has been drawn, with the values of its first step."""

    def __init__(self, chance: random.Random) -> None:
        self.random = chance
        self.values: dict[str, Tensor] = {}
        self.inputs: dict[str, Shape] = {}
        self.parameters: dict[str, Shape] = {}
        self.buffers: dict[str, Shape] = {}
        self.tied: dict[str, str] = {}
        self.lines: list[tuple[str, str]] = []
        """(name, expression)."""
        for shape in self._input_shapes():
            self._add(self.inputs, "x", shape)

    def value(self, *ndims: int) -> str:
        fitting = [n for n, v in self.values.items() if n[0] in "xv" and (not ndims or v.ndim in ndims)]
        if not fitting:
            raise UnfitError
        return self.random.choice(fitting[-3:] if self.random.random() < 0.6 else fitting)

    def weight(self, *shape: int) -> str:
        same = [name for name, each in self.parameters.items() if each == shape]
        if same and self.random.random() < 0.3:
            if self.random.random() < 0.7:
                return self.random.choice(same)
            name = f"w{len(self.parameters) + len(self.tied)}"
            self.tied[name] = self.random.choice(same)
            self.values[name] = self.values[self.tied[name]]
            return name
        return self._add(self.parameters, "w", shape, len(self.tied))

    def buffer(self, *shape: int) -> str:
        return self._add(self.buffers, "b", shape)

    def ids(self, *shape: int) -> str:
        if shape[:1] != (BATCH,):
            raise UnfitError  # every input has the batch in dim 0
        same = [name for name, each in self.inputs.items() if each == shape and name[0] == "i"]
        return self.random.choice(same) if same and self.random.random() < 0.7 else self._add(self.inputs, "i", shape)

    def shape(self, name: str) -> Shape:
        return tuple(self.values[name].shape)

    def line(self, kind: str) -> None:
        """Add a line that works."""
        for _ in range(TRIES):
            tables = (self.values, self.inputs, self.parameters, self.buffers, self.tied)
            before = [dict(table) for table in tables]
            text, found = "", None
            with contextlib.suppress(UnfitError, RuntimeError, ValueError, IndexError, TypeError, AttributeError):
                text = self.random.choice(EXPRESSIONS[kind])(self)
                found = self._run(text)
            if found is not None:
                name = f"v{len(self.lines)}"
                self.values[name] = found
                self.lines.append((name, text))
                return
            for table, entries in zip(tables, before, strict=True):
                table.clear()
                table.update(entries)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def program(self) -> Program:
        """Build the drawn program, with a loss that depends on every value that nothing else uses."""
        used = names_in(tuple(text for _, text in self.lines))
        names = {name for name, _ in self.lines} - used
        terms = [self._term(name) for name in sorted(names, key=lambda n: int(n[1:]))]
        lines = [f"{name} = {text}" for name, text in self.lines]
        lines.append(f"loss = {' + '.join(terms)}")
        cuts = sorted(self.random.sample(range(1, len(lines)), min(self.random.randint(0, 2), len(lines) - 1)))
        blocks = tuple(tuple(lines[a:b]) for a, b in zip([0, *cuts], [*cuts, len(lines)], strict=True))
        outputs = [n for n, _ in self.lines if self.random.random() < 0.05][:2]
        frozen = tuple(n for n in self.parameters if self.random.random() < 0.05)
        # A tied name whose first one no line uses is a parameter of its own.
        shapes = {
            **self.parameters,
            **{n: self.parameters[first] for n, first in self.tied.items() if first not in used},
        }
        return Program(blocks, self.inputs, shapes, self.buffers, self.tied, tuple(outputs), frozen)

    def _term(self, name: str) -> str:
        if not self.values[name].ndim:
            return name
        return name + self.random.choice(TERMS)

    def _input_shapes(self) -> list[Shape]:
        wide, length = self.random.choice((4, 8, 8, 6)), self.random.choice((4, 4, 2, 3))
        shapes: list[Shape] = [(BATCH, wide), (BATCH, length, wide), (BATCH, 2, 4, 4), (BATCH, 4, 6), (BATCH,)]
        return self.random.sample(shapes, self.random.choice((1, 1, 2)))

    def _add(self, table: dict[str, Shape], letter: str, shape: Shape, offset: int = 0) -> str:
        name = f"{letter}{sum(each[0] == letter for each in table) + offset}"
        table[name] = shape
        self.values[name] = drawn(name, shape)
        return name

    def _run(self, text: str) -> Tensor | None:
        """The value of an expression; None where it is no good."""
        copies = {n: v.clone() if n[0] == "b" else v for n, v in self.values.items()}
        torch.manual_seed(0)
        found = eval(text, {**GLOBALS, **copies})
        if not isinstance(found, Tensor) or not found.is_floating_point() or not 0 < found.numel() <= MAX_ELEMENTS:
            return None
        return found if bool(found.isfinite().all()) and float(found.abs().max()) < MAX_ENTRY else None


def draw_program(chance: random.Random, max_lines: int = 10) -> Program:
    """A program of up to so many lines, and one more for the loss, that trains on one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while True:
            drawing = Drawing(chance)
            kinds, weights = zip(*WEIGHTS.items(), strict=True)
            for _ in range(chance.randint(2, max_lines)):
                drawing.line(chance.choices(kinds, weights)[0])
            while not drawing.parameters or not drawing.lines:
                drawing.line("matmul")
            program = drawing.program()
            if trains(program):
                return program


def trains(program: Program, num_microbatches: int = 1) -> bool:
    """Return whether forward and backward of the first batch give numbers that can be compared.

    The batch is split into `num_microbatches` micro-batches.
    """
    model = program.build()
    torch.manual_seed(0)
    try:
        for number in range(num_microbatches):
            outputs = model(**{name: x.chunk(num_microbatches)[number] for name, x in program.batch(0).items()})
            loss = outputs[0] if program.outputs else outputs
            if loss.ndim:
                return False
            loss.backward()
    except (RuntimeError, ValueError, IndexError, NameError):  # the last where a line has been left out
        return False
    learned = [p.grad for p in model.parameters() if p.grad is not None]
    return bool(learned) and all(float(grad.abs().max()) < MAX_GRADIENT for grad in learned)  # nan is not less
