"""Stage annotations and named cuts leave each block a range of stages, or are refused with the reason."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.export import capture
from autopar.errors import AnnotationError, PipelineError
from autopar.ir.program.program import Program
from autopar.planning.annotations.annotate import annotate, annotations_of, pins_of
from autopar.planning.pipeline.stages.blocks import Block, blocks_of
from autopar.planning.pipeline.stages.pins import allowed
from tests.support.planned import X_BD, space_of


class Layer(nn.Module):
    """Two linear layers around a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Positions(nn.Module):
    """Constant that every layer adds; it depends on no parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1]) / 8


class Net(nn.Module):
    """A linear layer, six layers, another linear layer; then the first one again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.positions = Positions()
        self.layers = nn.ModuleList([Layer() for _ in range(6)])
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        positions = self.positions(x)
        for layer in self.layers:
            x = layer(x + positions)
        return self.embed(self.head(x))


BLOCKS = ["embed", *(f"layers.{number}" for number in range(6)), "head", "embed#2"]


@functools.cache
def _program() -> Program:
    return capture(Net(), (X_BD,), {})


def _allowed(
    num_stages: int, *specified: tuple[str, int], split_points: Sequence[str] | None = None
) -> tuple[tuple[Block, ...], tuple[range, ...]]:
    model = Net()
    for pattern, stage in specified:
        annotate(model, pattern, stage=stage)
    blocks = blocks_of(_program(), num_stages)
    return blocks, allowed(blocks, annotations_of(model), split_points, num_stages)


def _texts(ranges: Sequence[range]) -> list[str]:
    return ["".join(map(str, each)) for each in ranges]


# What is left.


def test_without_pins_the_ends_are_fixed_and_each_block_has_what_those_before_and_behind_leave_it() -> None:
    blocks, found = _allowed(3)
    assert [block.name for block in blocks] == BLOCKS
    assert _texts(found) == ["0", "01", *["012"] * 5, "12", "2"]


def test_named_cuts_leave_one_stage_each() -> None:
    assert _texts(_allowed(3, split_points=["layers.2", "head"])[1]) == ["0", "0", "0", "1", "1", "1", "1", "2", "2"]


def test_a_cut_may_be_named_by_the_first_module_in_a_block() -> None:
    assert _allowed(2, split_points=["layers.2.up"])[1] == _allowed(2, split_points=["layers.2"])[1]


def test_an_annotated_module_is_on_its_stage_and_the_others_around_it() -> None:
    assert _texts(_allowed(3, ("layers.3", 1))[1]) == ["0", "01", "01", "01", "1", "12", "12", "12", "2"]
    assert _texts(_allowed(2, ("layers.3", 1))[1]) == ["0", "01", "01", "01", "1", "1", "1", "1", "1"]


def test_a_part_of_a_block_takes_the_block_with_it() -> None:
    assert _allowed(3, ("layers.3.down", 1))[1] == _allowed(3, ("layers.3", 1))[1]


def test_one_call_may_be_named_by_its_node() -> None:
    name = next(node.name for node in _program().graph.nodes if node.meta.get("module") == "layers.3.down")
    assert _allowed(3, (f"%{name}", 1))[1] == _allowed(3, ("layers.3", 1))[1]


def test_an_annotation_on_an_inner_module_counts_from_there() -> None:
    model = Net()
    annotate(model.layers[3], "down", stage=1)
    blocks = blocks_of(_program(), 3)
    assert allowed(blocks, annotations_of(model), None, 3) == _allowed(3, ("layers.3", 1))[1]


def test_names_and_annotations_hold_together() -> None:
    both = _allowed(3, ("head", 2), split_points=["layers.2", "layers.4"])[1]
    assert both == _allowed(3, split_points=["layers.2", "layers.4"])[1]


def test_the_ranges_are_those_of_all_cuts_that_hold() -> None:
    draws = random.Random(20240613)
    for _ in range(60):
        num_stages = draws.randint(2, 5)
        specified = tuple(
            (f"layers.{draws.randrange(6)}", draws.randrange(num_stages)) for _ in range(draws.randint(0, 3))
        )
        holding: list[tuple[int, ...]] = []
        for cuts in itertools.combinations(range(1, len(BLOCKS)), num_stages - 1):
            stage_of = [sum(cut <= block for cut in cuts) for block in range(len(BLOCKS))]
            if all(stage_of[BLOCKS.index(name)] == stage for name, stage in specified):
                holding.append(tuple(stage_of))
        if not holding:
            with pytest.raises(PipelineError):
                _allowed(num_stages, *specified)
        else:
            each = [sorted(set(stages)) for stages in zip(*holding, strict=True)]
            assert [list(found) for found in _allowed(num_stages, *specified)[1]] == each


# What is refused.


@pytest.mark.parametrize(
    ("num_stages", "specified", "message"),
    [
        (
            3,
            [("layers.9", 1)],
            'annotate("layers.9", stage=1): no module that the model calls matches "layers.9" or "*.layers.9". '
            "Blocks are embed, layers.0-5, head, embed#2.",
        ),
        (3, [("head", 3)], "found stage 3, needed one from 0 to 2, as the pipeline has 3 stages. Name one of these"),
        (1, [("head", 1)], "found stage 1, needed one from 0 to 0, as the pipeline has 1 stage. Name one of these"),
        (3, [("positions", 1)], '"positions" depends on no parameter, so that every stage that needs it computes it'),
        (
            3,
            [("layers.4", 1), ("layers.2", 2)],
            'annotate("layers.4", stage=1) puts layers.4 on stage 1, and annotate("layers.2", stage=2) puts layers.2, '
            "which runs before it, on stage 2. Stages follow the order of the graph",
        ),
        (
            3,
            [("layers.4.up", 1), ("layers.4.down", 2)],
            'annotate("layers.4.down", stage=2) puts the block layers.4 on stage 2, and annotate("layers.4.up", '
            "stage=1) puts it on stage 1. A block runs on one stage: take one of the two back.",
        ),
        (
            3,
            [("embed", 1)],
            'annotate("embed", stage=1): its calls stand in 2 runs of the graph, at embed, embed#2. A stage is one '
            "run, so that stage 1 would hold everything between them, which the other stages leave no place for. Name "
            'one of the calls, as in annotate(model, "%linear_default", stage=1).',
        ),
        (
            4,
            [("layers.1", 0), ("layers.2", 3)],
            'annotate("layers.1", stage=0) and annotate("layers.2", stage=3): between layers.1 on stage 0 and layers.2 '
            "on stage 3 the pipeline needs 2 more stages (1, 2), and there are no blocks. Move a pin",
        ),
        (
            4,
            [("layers.0", 3)],
            "between the beginning of the model and layers.0 on stage 3 the pipeline needs 3 more stages (0, 1, 2), "
            "and there is 1 block.",
        ),
        (
            5,
            [("head", 1)],
            "between head on stage 1 and the end of the model the pipeline needs 3 more stages (2, 3, 4)",
        ),
    ],
)
def test_an_annotation_that_cannot_hold_is_refused(
    num_stages: int, specified: list[tuple[str, int]], message: str
) -> None:
    with pytest.raises(PipelineError, match=re.escape(message)):
        _allowed(num_stages, *specified)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (["head"], "found 1, needed a list of 2 names, of the modules with which stages 1 to 2 begin"),
        ("head", "found text, needed a list of 2 names"),
        (
            ["layers.9", "head"],
            "split_points=['layers.9', 'head']): no module that the model calls matches \"layers.9\"",
        ),
        (["layers.2", "positions"], '"positions" depends on no parameter'),
        (
            ["layers.2.down", "head"],
            '"layers.2.down" begins inside the block layers.2, and stages can only begin where a block does. '
            "Blocks are embed, layers.0-5, head, embed#2.",
        ),
        (["embed", "head"], '"embed" is the beginning of the model, which is that of stage 0'),
        (["layers.*", "head"], '"layers.*" matches layers.0, layers.1'),
        (
            ["head", "layers.2"],
            '"layers.2" begins with or before "head", the beginning of stage 1; name each module once',
        ),
        (["head", "head"], '"head" begins with or before "head", the beginning of stage 1; name each module once'),
    ],
)
def test_names_that_are_no_cuts_are_refused(stages: Sequence[str], message: str) -> None:
    with pytest.raises(PipelineError, match=re.escape(message)):
        _allowed(3, split_points=stages)


def test_a_name_against_an_annotation_is_refused_with_both() -> None:
    message = 'split_points=[\'layers.4\']): "layers.4" puts the block layers.3 on stage 0, and annotate("layers.3", '
    with pytest.raises(PipelineError, match=re.escape(message)):
        _allowed(2, ("layers.3", 1), split_points=["layers.4"])


# Together with annotations of layouts.


def test_a_stage_alone_is_no_pin_of_a_layout_and_next_to_one_it_changes_nothing() -> None:
    model = annotate(Net(), "layers.2", stage=1)
    space = space_of(model, (X_BD,))
    assert pins_of(annotations_of(annotate(model, "layers.9", stage=2)), space, "semi_auto", {}) == {}
    alone = pins_of(annotations_of(annotate(Net(), "layers.2.up", tp="column")), space, "semi_auto", {})
    other = pins_of(annotations_of(annotate(Net(), "layers.2.up", tp="column", stage=1)), space, "semi_auto", {})
    assert alone.keys() == other.keys() and all((alone[number] == other[number]).all() for number in alone)


def test_a_stage_prints_as_it_was_stated() -> None:
    (annotation,) = annotations_of(annotate(Net(), "head", tp="column", stage=2))
    assert str(annotation) == 'annotate("head", tp="column", stage=2)'


@pytest.mark.parametrize("stage", [-1, "1", 1.0, True])
def test_a_stage_is_a_number_from_0(stage: object) -> None:
    with pytest.raises(AnnotationError, match="needed a stage of the pipeline, counted from 0"):
        annotate(Net(), "head", stage=stage)  # type: ignore[arg-type]
