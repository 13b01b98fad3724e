"""Split of a program at cut points into one program per pipeline stage, which pass tensors on to each other.

A stage computes its own blocks, and whatever it needs of calls that depend on no parameter. Its graph

    takes      parameters, buffers, constants, received tensors, user inputs
    returns    sent tensors, user outputs, mutations

A tensor that a later stage than the next one needs is received and sent again. The users' outputs leave from the last
stage. A parameter, or a value computed from parameters alone (a cast of a tied weight), is never sent: each stage that
uses it has the parameter. A changed buffer belongs to the one stage whose calls read it and change it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.errors import PipelineError
from autopar.ir.program.effects import changed_buffers, of_weights_alone, writes
from autopar.ir.program.program import Program
from autopar.planning.pipeline.stages.blocks import Block


@dataclass(frozen=True, slots=True)
class Splitter:
    """Cuts one program between its blocks; what follows from no cut is found once."""

    program: Program
    blocks: Sequence[Block]
    weights: frozenset[fx.Node]
    """Calls that depend on parameters alone."""
    readers: Mapping[str, tuple[fx.Node, ...]]
    """Placeholder of each changed buffer → the nodes that read it."""
    writers: tuple[fx.Node, ...]
    """Calls that change buffers in place."""

    @classmethod
    def of(cls, program: Program, blocks: Sequence[Block]) -> Splitter:
        """Return the splitter of a program into stages that begin with some of its blocks."""
        placeholders = program.placeholders()
        readers = {name: tuple(placeholders[name].users) for name in changed_buffers(program)}
        writers = tuple(filter(writes, program.graph.nodes))
        return cls(program, blocks, of_weights_alone(program), readers, writers)

    def between(self, first: int, end: int) -> Program:
        """Return the program of a stage with the blocks from `first` to before `end`, as `split` makes it."""
        starts = sorted({0, first, end} - {len(self.blocks)})
        placed, wanted = _placed(self, starts), starts.index(first)
        return next(_program(self.program, parts) for parts in _parts(placed) if parts.stage == wanted)


@dataclass(frozen=True, slots=True)
class _Placed:
    """Assignment of a program's calls and mutations to stages."""

    whole: Splitter
    stage: dict[fx.Node, int]
    """The one stage of every call of a block; calls that are absent stand wherever they are needed."""
    mutations: tuple[int, ...]
    """The stage of each mutation."""
    last: int


def split(program: Program, blocks: Sequence[Block], starts: Sequence[int]) -> tuple[Program, ...]:
    """Return one program per stage; stage i begins with block `starts[i]`.

    Raises PipelineError where a buffer that the forward changes is read on one stage and changed on another.
    """
    stages = [_program(program, parts) for parts in _parts(_placed(Splitter.of(program, blocks), starts))]
    assert not stages[-1].received, f"the first stage receives {stages[-1].received}"
    return tuple(reversed(stages))


def _placed(whole: Splitter, starts: Sequence[int]) -> _Placed:
    program, blocks = whole.program, whole.blocks
    assert starts[0] == 0 and list(starts) == sorted(set(starts)) and starts[-1] < len(blocks), f"no cuts: {starts}"
    ends = (*starts[1:], len(blocks))
    stage = {
        node: number
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
        for block in blocks[start:end]
        for node in block.nodes
    }
    mutations: list[int] = []
    for name, value in zip(program.mutations, _new_values(program), strict=True):
        readers = whole.readers.get(program.buffers.get(name, ""), ())
        found = {stage[reader] for reader in readers if reader in stage}
        if isinstance(value, fx.Node) and value in stage:
            found.add(stage[value])
        if len(found) > 1:
            raise PipelineError(
                f"the forward changes the buffer {name}, which stages {', '.join(map(str, sorted(found)))} read or "
                "write; only one stage can hold it. Put the modules that use it on one stage."
            )
        mutations.append(next(iter(found), 0))
    free = {node: number for node, number in stage.items() if node not in whole.weights}
    return _Placed(whole, free, tuple(mutations), len(starts) - 1)


def _new_values(program: Program) -> tuple[object, ...]:
    return program.output[program.num_outputs :]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Content of a stage's program, in the order of the whole program."""

    stage: int
    computed: list[fx.Node]
    received: tuple[fx.Node, ...]
    sent: tuple[fx.Node, ...]
    outputs: tuple[object, ...]
    mutations: list[int]
    """The numbers of those that stand here."""


def _parts(placed: _Placed) -> Iterator[_Parts]:
    """Yield the parts of every stage, the last one first: a stage sends what those behind it receive."""
    sent: tuple[fx.Node, ...] = ()
    for stage in reversed(range(placed.last + 1)):
        program = placed.whole.program
        outputs = program.output[: program.num_outputs] if stage == placed.last else ()
        parts = _stage(placed, stage, sent, outputs)
        yield parts
        sent = parts.received


def _stage(placed: _Placed, stage: int, sent: tuple[fx.Node, ...], outputs: tuple[object, ...]) -> _Parts:
    program = placed.whole.program
    numbers = [number for number, each in enumerate(placed.mutations) if each == stage]
    mutations = [_new_values(program)[number] for number in numbers]
    changed = [program.buffers[name] for name in (program.mutations[n] for n in numbers) if name in program.buffers]
    roots = [value for value in (*sent, *outputs, *mutations) if isinstance(value, fx.Node)]
    roots += [placeholder for placeholder in program.graph.find_nodes(op="placeholder") if placeholder.name in changed]
    roots += [node for node in placed.whole.writers if placed.stage.get(node) == stage]
    needed = _needed(placed, stage, roots)
    received = tuple(node for node in program.graph.nodes if node in needed and _is_received(placed, stage, node))
    computed = [node for node in program.graph.nodes if node in needed and node not in received]
    return _Parts(stage, computed, received, sent, outputs, numbers)


def _program(program: Program, parts: _Parts) -> Program:
    computed, received = parts.computed, parts.received
    mutations = [_new_values(program)[number] for number in parts.mutations]
    graph = _graph(computed, received, set(program.inputs), (*parts.sent, *parts.outputs, *mutations))
    taken = {node.name for node in computed if node.op == "placeholder"}
    return Program(
        graph=graph,
        parameters=_kept(program.parameters, taken),
        tied={name: first for name, first in program.tied.items() if _placeholder(program, first) in taken},
        buffers=_kept(program.buffers, taken),
        constants={name: value for name, value in program.constants.items() if name in taken},
        inputs=tuple(name if name in taken else None for name in program.inputs),
        input_values=program.input_values,
        in_spec=program.in_spec,
        out_spec=program.out_spec,
        num_outputs=len(parts.outputs),
        mutations=tuple(program.mutations[number] for number in parts.mutations),
        training=program.training,
        input_names=program.input_names,
        received=tuple(node.name for node in received),
        num_sent=len(parts.sent),
        reduced=program.reduced,
        accumulated=program.accumulated,
        assumed=program.assumed,
        model=program.model,
        python=program.python,
    )


def _graph(
    nodes: Sequence[fx.Node], received: Sequence[fx.Node], inputs: set[str | None], flat: Sequence[object]
) -> fx.Graph:
    """Return a graph of copies of `nodes`, with placeholders for what is received before those of the user's inputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    placeholders = [node for node in nodes if node.op == "placeholder"]
    calls = [node for node in nodes if node.op == "call_function"]
    of_user = [node for node in placeholders if node.name in inputs]
    of_model = [node for node in placeholders if node.name not in inputs]
    for node in (*of_model, *received, *of_user, *calls):
        if node in received:
            copies[node] = graph.create_node("placeholder", node.name, name=node.name)
            copies[node].meta = {"tensor": node.meta["tensor"], "module": ""}
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = dict(node.meta)
        assert copies[node].name == node.name, f"{node.name} became {copies[node].name}"
    graph.output(tuple(copies[value] if isinstance(value, fx.Node) else value for value in flat))  # type: ignore[arg-type]
    graph.lint()
    return graph


def _needed(placed: _Placed, stage: int, roots: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the roots and everything that the stage computes them from, down to placeholders and received tensors."""
    needed: set[fx.Node] = set()
    left = list(roots)
    while left:
        node = left.pop()
        if node in needed:
            continue
        needed.add(node)
        assert placed.stage.get(node, 0) <= stage, f"{node} is needed on stage {stage}, before it is computed"
        if not _is_received(placed, stage, node):
            left.extend(node.all_input_nodes)
    return needed


def _is_received(placed: _Placed, stage: int, node: fx.Node) -> bool:
    return placed.stage.get(node, stage) < stage


def _kept(names: dict[str, str], placeholders: set[str]) -> dict[str, str]:
    return {name: placeholder for name, placeholder in names.items() if placeholder in placeholders}


def _placeholder(program: Program, name: str) -> str | None:
    return program.parameters.get(name, program.buffers.get(name))
