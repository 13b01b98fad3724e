"""A model with fewer of its equal layers: a program that is planned in a fraction of the time, and stands for all.

The blocks of a model (`planning.pipeline.stages.blocks`) are numbered by their kinds; equal kinds differ in the names
of nodes alone. Three copies of a repeated pattern remain: the first two, and the last. The one in the middle has an
equal neighbour on both sides and stands for all that were taken out:

    kinds      0 1 1 1 1 1 1 2          or      0 1 2 1 2 1 2 1 2 3
    remain     0 1 1         1 2                0 1 2 1 2     1 2 3
    origin     0 1 2 2 2 2 3 4                  0 1 2 3 4 3 4 5 6 7

The last one takes from the second what it took from the one before it. Patterns whose values are read elsewhere, too
(states of every layer that a model returns), remain as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx
from torch.fx.node import map_arg

from autopar.ir.program.program import Program
from autopar.planning.pipeline.stages.blocks import Block

LONGEST_PATTERN = 8
"""Blocks of a repeated pattern, at most: a layer, or a few unlike ones in turn."""
REMAINING = 3
"""Repetitions that remain."""


@dataclass(frozen=True, slots=True)
class Shortened:
    """A shorter program of the same kinds of blocks."""

    program: Program
    blocks: tuple[Block, ...]
    """Blocks of the shorter program."""
    origin: tuple[int, ...]
    """Block of the whole program → the block of the shorter one that stands for it."""

    def names(self, whole: Sequence[Block]) -> dict[str, str]:
        """Return the node of the shorter program that stands for a node in the blocks of the whole one."""
        found: dict[str, str] = {}
        for block, number in zip(whole, self.origin, strict=True):
            own = self.blocks[number]
            for nodes in ((block.nodes, own.nodes), (_taken(block), _taken(own))):
                for there, here in zip(*nodes, strict=True):
                    found.setdefault(there.name, here.name)
        return found


def shortened(program: Program, blocks: Sequence[Block], specified: Mapping[str, object]) -> Shortened:
    """Take out all but three repetitions of every repeated pattern of blocks.

    Args:
        program: The whole program.
        blocks: Its blocks.
        said: The user's annotations of nodes, by name; blocks with different annotations are of unlike kinds.
    """
    outside = [_taken(block) for block in blocks]
    kinds = _numbered(_described(program, blocks, specified))
    origin, removed, place = list[int](), set[int](), 0
    moved: dict[fx.Node, fx.Node] = {}
    kept = 0
    while place < len(blocks):
        length, times = _pattern(kinds, place)
        middle = range(place + (REMAINING - 1) * length, place + (times - 1) * length)
        instead = _stand_ins(program, blocks, outside, middle, length) if times > REMAINING else None
        if instead is None:
            origin.append(kept)
            place, kept = place + 1, kept + 1
            continue
        moved |= instead
        removed |= set(middle)
        first_two = range(kept, kept + (REMAINING - 1) * length)
        origin += [*first_two, *list(first_two[length:]) * (times - REMAINING)]
        origin += range(first_two.stop, first_two.stop + length)
        place, kept = place + times * length, kept + REMAINING * length
    left = [block for number, block in enumerate(blocks) if number not in removed]
    if not removed:
        return Shortened(program, tuple(blocks), tuple(origin))
    gone = {node for number in removed for node in blocks[number].nodes}
    shorter, copies = _without_nodes(program, gone, moved)
    own = tuple(Block(each.name, tuple(copies[node] for node in each.nodes)) for each in left)
    return Shortened(shorter, own, tuple(origin))


def is_alike(short: Shortened, program: Program, blocks: Sequence[Block], same_sizes: bool) -> bool:
    """Check that a program captured of a model with fewer layers has the blocks of a shorter form.

    With `same_sizes` they must be equal, else equal to one another where those of the shorter form are.
    """
    if [block.name for block in blocks] != [block.name for block in short.blocks]:
        return False
    if same_sizes and len(program.graph.nodes) != len(short.program.graph.nodes):
        return False
    here, there = _described(program, blocks, {}), _described(short.program, short.blocks, {})
    return here == there if same_sizes else _numbered(here) == _numbered(there)


def _taken(block: Block) -> list[fx.Node]:
    """Return what a block takes from outside, in the order of its use."""
    own = set(block.nodes)
    return list(dict.fromkeys(each for node in block.nodes for each in node.all_input_nodes if each not in own))


def _described(program: Program, blocks: Sequence[Block], specified: Mapping[str, object]) -> list[object]:
    """Return every block in a form in which two are equal that differ in the names of nodes alone."""
    parameters, inputs = program.parameter_names, {name for name in program.inputs if name is not None}
    found: list[object] = []
    for block in blocks:
        taken = _taken(block)
        place = {node: number for number, node in enumerate((*taken, *block.nodes))}
        described = []
        for node, number in place.items():
            made: object = node.name if node.name in inputs else None
            if number >= len(taken):
                args = str(map_arg((node.args, dict(node.kwargs)), lambda n, place=place: f"%{place[n]}"))
                made = node.op, str(node.target), args
            described.append((made, repr(node.meta.get("tensor")), node.name in parameters, specified.get(node.name)))
        found.append(tuple(described))
    return found


def _numbered(described: Sequence[object]) -> list[int]:
    """Return the kind of every block, by number in the order of their first blocks."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(each, len(numbers)) for each in described]


def _pattern(kinds: Sequence[int], place: int) -> tuple[int, int]:
    """Return the blocks of the pattern that begins at a place, and its repetitions, of those that cover the most."""
    best = 1, 1
    for length in range(1, LONGEST_PATTERN + 1):
        pattern, times = kinds[place : place + length], 1
        while kinds[place + times * length : place + (times + 1) * length] == pattern:
            times += 1
        if times > REMAINING and times * length > best[0] * best[1]:
            best = length, times
    return best


def _stand_ins(
    program: Program, blocks: Sequence[Block], outside: Sequence[Sequence[fx.Node]], middle: range, length: int
) -> dict[fx.Node, fx.Node] | None:
    """Return the values that stand for those of the middle behind it; None if others of them are read there."""
    gone = {node for number in middle for node in blocks[number].nodes}
    found: dict[fx.Node, fx.Node] = {}
    for ahead in range(length):
        before, behind = outside[middle.start + ahead], outside[middle.stop + ahead]
        for there, here in zip(behind, before, strict=False):
            if there in gone and here not in gone and found.setdefault(there, here) is not here:
                return None
    if not gone.isdisjoint(program.graph.output_node().all_input_nodes):
        return None
    readers = (node for node in program.graph.nodes if node not in gone)
    read = {each for node in readers for each in node.all_input_nodes if each in gone}
    return found if read <= found.keys() else None


def _without_nodes(
    program: Program, gone: set[fx.Node], moved: Mapping[fx.Node, fx.Node]
) -> tuple[Program, dict[fx.Node, fx.Node]]:
    """Return the program without some nodes and what only they need, and the copies of its nodes."""
    needed, left = set[fx.Node](), [program.graph.output_node()]
    while left:
        node = left.pop()
        if node not in needed:
            needed.add(node)
            left.extend(moved.get(each, each) for each in node.all_input_nodes)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        if node in needed or (node.name in program.inputs and node.op == "placeholder"):
            copies[node] = graph.node_copy(node, lambda each: copies[moved.get(each, each)])
            copies[node].meta = dict(node.meta)
    there = {node.name for node in copies}
    shorter = replace(
        program,
        graph=graph,
        parameters={name: each for name, each in program.parameters.items() if each in there},
        buffers={name: each for name, each in program.buffers.items() if each in there},
        constants={name: each for name, each in program.constants.items() if name in there},
    )
    return shorter, copies
