"""A failing case made smaller: whatever can be left out while the failure stays is left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.case import Case
from tests.fuzz.program import Program

LINE = re.compile(r"(\w+) = (.*)", re.DOTALL)


def shrink(case: Case, still_fails: Callable[[Case], bool], tries: int = 80) -> Case:
    """The smallest case found in so many tries of which `still_fails` is true, as it is of the one given."""
    smaller = _candidates(case)
    for _ in range(tries):
        candidate = next(smaller, None)
        if candidate is None:
            break
        if still_fails(candidate):
            case, smaller = candidate, _candidates(candidate)
    return case


def _candidates(case: Case) -> Iterator[Case]:
    """Cases that are a little smaller, those first that leave out most."""
    for program in _programs(case.program):
        yield replace(case, program=program)
    for number in range(len(case.annotations)):
        yield replace(case, annotations=(*case.annotations[:number], *case.annotations[number + 1 :]))
    for name in case.options:
        yield replace(case, options={key: value for key, value in case.options.items() if key != name})
    if case.forced:
        yield replace(case, forced=0.0)
    if case.evaluated:
        yield replace(case, evaluated=False)
    if case.optimizer != "sgd":
        yield replace(case, optimizer="sgd")
    for mesh in ((2,), (2, 2)):
        if len(mesh) <= len(case.mesh) and mesh != case.mesh and not case.annotations:
            yield replace(case, mesh=mesh)


def _programs(program: Program) -> Iterator[Program]:
    blocks = program.blocks
    lines = [line for block in blocks for line in block]
    last = lines[-1].removeprefix("loss = ").split(" + ")
    for number in range(len(last) if len(last) > 1 else 0):
        yield _of(program, [*lines[:-1], "loss = " + " + ".join(last[:number] + last[number + 1 :])])
    for number in reversed(range(len(lines) - 1)):
        rest = lines[:number] + lines[number + 1 :]
        yield _of(program, rest)
        match = LINE.match(lines[number])
        assert match is not None
        name, text = match.groups()
        for other in dict.fromkeys(re.findall(r"\b[xvw]\d+\b", text)):
            yield _of(program, [re.sub(rf"\b{name}\b", other, line) for line in rest])
    if program.outputs:
        yield replace(program, outputs=())
    if program.frozen:
        yield replace(program, frozen=())
    if len(blocks) > 1:
        yield _of(program, lines)


def _of(program: Program, lines: list[str]) -> Program:
    """The program with these lines, in as many blocks as before where none is lost."""
    blocks = tuple(tuple(line for line in block if line in lines) for block in program.blocks)
    kept = tuple(block for block in blocks if block)
    same = [line for block in kept for line in block] == lines and lines != [x for b in program.blocks for x in b]
    assigned = {line.split(" = ")[0] for line in lines}
    outputs = tuple(name for name in program.outputs if name in assigned)
    return replace(program, blocks=kept if same else (tuple(lines),), outputs=outputs)
