"""User constraints on the stages of a pipeline: the stages that each block may run on.

    annotate(model, "layers.8", stage=1)    every call of the module runs on stage 1, and with it the rest of its blocks
    split_points=["layers.8", "lm_head"]    stage 1 begins with layers.8, stage 2 with lm_head

Stages are runs of blocks in the order of the graph, none of them empty: from one block to the next the stage stays or
grows by one. So two pins leave each block between them a range of stages, and the ranges are all that a search needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.errors import PipelineError
from autopar.ir.program.calls import module_of
from autopar.ir.program.folding import folded
from autopar.ir.program.paths import ancestors, matches
from autopar.ir.sharding.annotation import NODE, Annotation
from autopar.planning.pipeline.stages.blocks import Block


@dataclass(frozen=True, slots=True)
class _Pin:
    """A block that runs on a user-specified stage."""

    block: int
    stage: int
    specified: str
    whole: tuple[int, ...]
    """All blocks with the same annotation."""

    @property
    def scattered(self) -> bool:
        """True if other blocks lie between the blocks that the same constraint names."""
        return bool(self.whole) and self.whole[-1] - self.whole[0] >= len(self.whole)


def allowed(
    blocks: Sequence[Block], annotations: Sequence[Annotation], stages: Sequence[str] | None, num_stages: int
) -> tuple[range, ...]:
    """Return the stages that each block may run on, under annotations and the names with which stages 1, 2, … begin.

    Raises PipelineError for what matches nothing, cannot hold alone, or contradicts something else.
    """
    assert len(blocks) >= num_stages, f"{len(blocks)} blocks for {num_stages} stages"
    pins: dict[int, _Pin] = {}
    for annotation in annotations:
        for pin in _annotated(blocks, annotation, num_stages):
            _add(pins, pin, blocks)
    if stages is not None:
        for pin in _begun(blocks, stages, num_stages):
            _add(pins, pin, blocks)
    _check_order(blocks, pins, num_stages)
    return _ranges(len(blocks), {block: pin.stage for block, pin in pins.items()}, num_stages)


def _annotated(blocks: Sequence[Block], annotation: Annotation, num_stages: int) -> list[_Pin]:
    if annotation.stage is None:
        return []
    if annotation.stage >= num_stages:
        raise PipelineError(
            f"{annotation}: found stage {annotation.stage}, needed one from 0 to {num_stages - 1}, as the pipeline has "
            f"{num_stages} {'stages' if num_stages > 1 else 'stage'}. Name one of these, or make the pipeline axis "
            "larger."
        )
    nodes = set(_named(blocks, annotation.pattern, annotation.within, str(annotation))[1])
    found = tuple(number for number, block in enumerate(blocks) if not nodes.isdisjoint(block.nodes))
    return [_Pin(number, annotation.stage, str(annotation), found) for number in found]


def _begun(blocks: Sequence[Block], stages: Sequence[str], num_stages: int) -> list[_Pin]:
    """Return pins for both sides of every cut that is named."""
    specified = f"Pipeline(split_points={list(stages)})"
    if isinstance(stages, str) or len(stages) != num_stages - 1:
        raise PipelineError(
            f"Pipeline(split_points={stages!r}): found {'text' if isinstance(stages, str) else len(stages)}, needed a "
            f"list of {num_stages - 1} names, of the modules with which stages 1 to {num_stages - 1} begin (stage 0 "
            f"begins with the model). Blocks are {_listed(blocks)}."
        )
    pins: list[_Pin] = []
    begun = 0
    for stage, name in enumerate(stages, 1):
        modules, nodes = _named(blocks, name, "", specified)
        tops = [path for path in modules if modules.isdisjoint(list(ancestors(path))[1:])]
        if len(tops) > 1:
            raise PipelineError(
                f'{specified}: "{name}" matches {", ".join(sorted(tops))}; a stage begins with one of them.'
            )
        number, block = next(each for each in enumerate(blocks) if not set(nodes).isdisjoint(each[1].nodes))
        if block.nodes[0] not in nodes:
            raise PipelineError(
                f'{specified}: "{name}" begins inside the block {block.name}, and stages can only begin where a '
                f"block does. Blocks are {_listed(blocks)}."
            )
        if number == 0:
            raise PipelineError(
                f'{specified}: "{name}" is the beginning of the model, which is that of stage 0; name the modules with '
                f"which stages 1 to {num_stages - 1} begin. Blocks are {_listed(blocks)}."
            )
        if number <= begun:
            raise PipelineError(
                f'{specified}: "{name}" begins with or before "{stages[stage - 2]}", the beginning of stage '
                f"{stage - 1}; name each module once, in the order in which the model runs them. "
                f"Blocks are {_listed(blocks)}."
            )
        begun = number
        text = f'{specified}: "{name}"'
        pins += [_Pin(number - 1, stage - 1, text, (number - 1,)), _Pin(number, stage, text, (number,))]
    return pins


def _named(blocks: Sequence[Block], pattern: str, within: str, specified: str) -> tuple[set[str], list[fx.Node]]:
    """Return the modules that a pattern names, and their calls that stand in blocks; for "%node" that one call."""
    inside = [node for block in blocks for node in block.nodes]
    calls = [node for node in inside[0].graph.nodes if node.op == "call_function"]
    modules: set[str] = set()
    if pattern.startswith(NODE):
        found = [node for node in calls if node.name == pattern.removeprefix(NODE)]
    else:
        paths = {path for node in calls for path in ancestors(module_of(node))}
        for each in (pattern, f"*.{pattern}"):
            modules = modules or {path for path in paths if matches(path, each, within)}
        found = [node for node in calls if not modules.isdisjoint(ancestors(module_of(node)))]
    if not found:
        raise PipelineError(
            f'{specified}: no module that the model calls matches "{pattern}" or "*.{pattern}". '
            f"Blocks are {_listed(blocks)}."
        )
    bound = set(inside)
    left = [node for node in found if node in bound]
    if not left:
        raise PipelineError(
            f'{specified}: "{pattern}" depends on no parameter, so that every stage that needs it computes it for '
            f"itself. Name a module with parameters. Blocks are {_listed(blocks)}."
        )
    return modules, left


def _add(pins: dict[int, _Pin], pin: _Pin, blocks: Sequence[Block]) -> None:
    before = pins.setdefault(pin.block, pin)
    if before.stage != pin.stage:
        raise PipelineError(
            f"{pin.specified} puts the block {blocks[pin.block].name} on stage {pin.stage}, and {before.specified} "
            "puts it on "
            f"stage {before.stage}. A block runs on one stage: take one of the two back."
        )


def _check_order(blocks: Sequence[Block], pins: dict[int, _Pin], num_stages: int) -> None:
    """Raise PipelineError if, from one pin to the next, the stage falls or grows faster than the blocks."""
    begin, end = _Pin(-1, -1, "", ()), _Pin(len(blocks), num_stages, "", ())
    ordered = [begin, *(pins[block] for block in sorted(pins)), end]
    for before, after in itertools.pairwise(ordered):
        if 0 <= after.stage - before.stage <= after.block - before.block:
            continue
        for pin in (before, after):
            if pin.scattered:
                raise PipelineError(_scattered(blocks, pin))
        if after.stage < before.stage:
            raise PipelineError(
                f"{after.specified} puts {blocks[after.block].name} on stage {after.stage}, and {before.specified} "
                "puts "
                f"{blocks[before.block].name}, which runs before it, on stage {before.stage}. Stages follow the order "
                "of the graph: let their numbers grow with it."
            )
        raise PipelineError(_crowded(blocks, before, after))


def _scattered(blocks: Sequence[Block], pin: _Pin) -> str:
    """Return the refusal if a module's calls are apart and a pin fixes something between them."""
    runs = [blocks[number] for number in pin.whole if number - 1 not in pin.whole]
    return (
        f"{pin.specified}: its calls stand in {len(runs)} runs of the graph, at {', '.join(run.name for run in runs)}. "
        f"A stage is one run, so that stage {pin.stage} would hold everything between them, which the other stages "
        f'leave no place for. Name one of the calls, as in annotate(model, "{NODE}{runs[0].nodes[0].name}", '
        f"stage={pin.stage})."
    )


def _crowded(blocks: Sequence[Block], before: _Pin, after: _Pin) -> str:
    """Return the refusal if there are fewer blocks between two pins than stages."""
    first = f"{blocks[before.block].name} on stage {before.stage}" if before.specified else "the beginning of the model"
    last = f"{blocks[after.block].name} on stage {after.stage}" if after.specified else "the end of the model"
    specified = " and ".join(dict.fromkeys(pin.specified for pin in (before, after) if pin.specified))
    stages = range(before.stage + 1, after.stage)
    return (
        f"{specified}: between {first} and {last} the pipeline needs {len(stages)} more stages "
        f"({', '.join(map(str, stages))}), and there {_blocks_text(after.block - before.block - 1)}. Move a pin, or "
        "use fewer "
        f"stages. Blocks are {_listed(blocks)}."
    )


def _blocks_text(number: int) -> str:
    return f"are {number or 'no'} blocks" if number != 1 else "is 1 block"


def _ranges(num_blocks: int, pins: dict[int, int], num_stages: int) -> tuple[range, ...]:
    """Return the stages that each block can have: neighbours differ by 0 or 1, the ends are the first stage and the
    last.
    """
    pins = {-1: -1, **pins, num_blocks: num_stages}
    lowest, highest = [0] * num_blocks, [0] * num_blocks
    low = high = -1
    for block in range(num_blocks):
        low, high = (pins[block],) * 2 if block in pins else (low, high + 1)
        lowest[block], highest[block] = max(low, 0), high
    low = high = num_stages
    for block in reversed(range(num_blocks)):
        low, high = (pins[block],) * 2 if block in pins else (low - 1, min(high, num_stages - 1))
        lowest[block], highest[block] = max(low, lowest[block]), min(high, highest[block])
    return tuple(range(low, high + 1) for low, high in zip(lowest, highest, strict=True))


def _listed(blocks: Sequence[Block]) -> str:
    return ", ".join(".".join(fold.path) for fold in folded((block.name, None, block) for block in blocks))
