"""The place of a loss in tiles among columns and rows: a head of its own, where its classes divide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopar
from autopar.capture.export import capture
from autopar.ir.program.operators.linear_cross_entropy import LINEAR_CROSS_ENTROPY, MEAN
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.operation import Call, OpRule
from autopar.planning.settings import context_of
from autopar.strategies import rule_of
from autopar.strategies.presets.regions import LOSS, regions_of
from autopar.strategies.roles import RoledProgram
from tests.support.loss_alone import LOSS_ALONE, Reader, reading

NAME = "linear_cross_entropy_default"
ROWS, FEATURES, CLASSES = 64, 8, 512
NOT_ELEMENTWISE = ("mm", "addmm", "addmm_", "zeros_like", "empty_like", "new_zeros", "gather", "scatter_add_")
"""Calls that multiply matrices, fill what they make, or touch a few elements."""


@pytest.mark.parametrize(("num_classes", "parts", "divides"), [(24, 4, True), (9, 4, True), (3, 4, False)])
def test_a_preset_of_columns_splits_its_classes_where_they_divide(num_classes: int, parts: int, divides: bool) -> None:
    program = capture(Reader(num_classes), (), reading(num_classes=num_classes), loss_tiles=2)
    regions = regions_of(RoledProgram.of(program), parts)
    assert regions.names(LOSS) == [NAME] * divides
    assert regions.factors.get(NAME) == ("o" if divides else None)
    assert (NAME in regions.heads) is divides


def test_its_dims_have_the_roles_that_annotations_name() -> None:
    program = capture(Reader(), (), reading(), loss_tiles=2)
    assert RoledProgram.of(program).calls[NAME].roles == {"a": "data", "b": "sequence", "o": "column"}


def test_positions_that_attention_shards_by_zigzag_stay_zigzag() -> None:
    family = LOSS_ALONE["llama_loss"]
    mesh = autopar.Mesh({"cp": 2})
    plan = autopar.plan(family.build(), mesh, family.inputs(0)[1], strategy="ring", memory=autopar.Memory(loss_tiles=2))
    space = context_of(plan).space
    decision = space.decisions[space.index[NAME]]
    strategy = next(each for each in decision.candidates.strategies if str(each) == plan.choices[NAME])
    assert [str(layout) for layout in strategy.inputs] == ["Z(1)", "R", "Z(1)"]


class _ElementwiseBytes(TorchDispatchMode):
    """Sums the bytes of matrices with a dim of classes that elementwise calls read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view and func._schema.name.removeprefix("aten::") not in NOT_ELEMENTWISE:
            tensors = [x for x in tree_leaves((args, found)) if isinstance(x, Tensor)]
            self.num_bytes += sum(x.nbytes for x in tensors if CLASSES in x.shape and x.ndim > 1)
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("learns", "biased"), [((True, True), False), ((False, True), True), ((False, False), False)])
@pytest.mark.parametrize("tiles", [1, 4])
def test_its_price_counts_what_elementwise_calls_move(
    dtype: torch.dtype, learns: tuple[bool, bool], biased: bool, tiles: int
) -> None:
    hidden = torch.randn(ROWS, FEATURES, dtype=dtype, requires_grad=learns[0])
    weight = torch.randn(CLASSES, FEATURES, dtype=dtype, requires_grad=learns[1])
    bias = torch.zeros(CLASSES, dtype=dtype, requires_grad=True) if biased else None
    given = hidden, weight, bias, torch.zeros(ROWS, dtype=torch.int64), MEAN, -100, dtype, tiles
    with _ElementwiseBytes() as counted:
        loss = LINEAR_CROSS_ENTROPY(*given)

    infos = [TensorInfo(tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else x for x in given]
    arguments = dict(zip((each.name for each in LINEAR_CROSS_ENTROPY._schema.arguments), infos, strict=True))
    inputs = tuple(each for each in infos if isinstance(each, TensorInfo))
    call = Call(LINEAR_CROSS_ENTROPY, inputs, (TensorInfo((), dtype, loss.requires_grad),), arguments)
    op = rule_of(call)
    assert isinstance(op, OpRule)
    priced = op.implementations[0].elementwise_bytes(op, call, {"a": ROWS, "o": CLASSES})
    assert priced == counted.num_bytes
