"""The space of plans: what is decided, which layouts are offered, and that a shared tensor is moved once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.export import capture
from autopar.costs.pricing.reshard import Transfer
from autopar.costs.space.build import AUXILIARY_ELEMENTS, build_space
from autopar.costs.space.returned import WHOLE
from autopar.costs.space.space import Space
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.annotations.annotate import annotate
from tests.support.families import FAMILIES
from tests.support.planned import IDS_BS, SLOW_LINKS, X_BD, Attention, Planned, TwoLinears, planned, space_of

ACTIVATION_BYTES = 4 * 6 * 8 * 4  # [4, 6, 8] in float32


def kinds(space: Space) -> dict[str, str]:
    return {decision.name: decision.kind for decision in space.decisions}


def shared_reshards(space: Space) -> list[str]:
    return [name for name, kind in kinds(space).items() if kind == "shared_reshard"]


def layouts(space: Space, name: str) -> list[str]:
    return [str(strategy.outputs[0]) for strategy in space.decisions[space.index[name]].candidates.strategies]


def megatron_attention(post_norm: bool) -> Planned:
    """Attention with query, key and value split by columns, their product by rows, and all else whole."""
    model = Attention(post_norm)
    for name in ("query", "key", "value"):
        annotate(model, name, tp="column")
    annotate(model, "out", tp="row")
    for name in ("norm", "embed", "add", "mean"):
        annotate(model, name, tp="replicated")
    return planned(space_of(model, (IDS_BS,)), model)


@pytest.mark.parametrize("post_norm", [False, True])
def test_query_key_and_value_share_one_all_reduce(post_norm: bool) -> None:
    """Check that query, key and value share one all-reduce.

    In a post-norm block the residual connection consumes the same tensor, and takes no part in the all-reduce.
    """
    assert dict(megatron_attention(post_norm).counts()) == {
        ("all_reduce", True, ACTIVATION_BYTES): 1,
        ("all_reduce", False, ACTIVATION_BYTES): 1,
    }


def test_consumers_of_one_kind_share_a_second_shared_reshard_where_others_stand_next_to_them() -> None:
    assert shared_reshards(space_of(Attention(post_norm=True), (IDS_BS,))) == [
        "embedding_default/reshard",
        "embedding_default/reshard1",
    ]


def test_a_tensor_with_one_consumer_has_no_shared_reshard() -> None:
    space = space_of(TwoLinears(), (X_BD,))
    assert shared_reshards(space) == []
    assert kinds(space) == {
        "p_up_weight": "parameter",
        "p_down_weight": "parameter",
        "x_bd": "input",
        "linear_default": "call",
        "relu_default": "call",
        "linear_default_1": "call",
        "sum_default": "call",
        "output:0": "output",
    }


def test_what_is_whole_and_needs_no_gradient_needs_no_shared_reshard() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x_BD: Tensor) -> Tensor:
            return (self.one(x_BD) + self.other(x_BD)).sum()

    assert shared_reshards(space_of(Twice(), (X_BD,))) == []


class Tied(nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x_BD: Tensor) -> Tensor:
        return nn.functional.linear(torch.relu(nn.functional.linear(x_BD, self.weight)), self.weight).sum()


def test_the_gradients_of_a_tied_weight_are_reduced_together() -> None:
    model = Tied()
    annotate(model, "linear", tp="data")
    annotate(model, "weight", tp=None)
    found = planned(space_of(model, (X_BD,)), model)
    assert [t for _, _, t in found.transfers() if t.num_bytes == 8 * 8 * 4] == [
        Transfer("all_reduce", "tp", 8 * 8 * 4, backward=True)
    ]


def test_equal_edges_have_one_path_and_other_costs_another() -> None:
    space = space_of(Attention(post_norm=False), (IDS_BS,))
    choices = [0] * len(space.decisions)
    pairs = [pair for pair in itertools.combinations(space.edges, 2) if len(set(map(space.kind, pair))) == 1]
    assert pairs and all(space.path(one, choices) is space.path(other, choices) for one, other in pairs)
    first, waiting = space.edges[0], space.waiting_for({"all_gather tp forward": 1.0})
    assert waiting.kind(first) == space.kind(first) and waiting.path(first, choices) is not space.path(first, choices)


def test_a_parameter_is_stored_whole_or_split() -> None:
    space = space_of(TwoLinears(bias=True), (X_BD,))
    assert layouts(space, "p_up_weight") == ["I", "S(0)", "S(1)"]
    assert layouts(space, "p_up_bias") == ["I", "S(0)"]


def test_an_input_arrives_whole_unless_it_is_stated_to_be_split() -> None:
    program = capture(TwoLinears(), (X_BD,), {})
    mesh = Mesh({"tp": 2})
    assert layouts(build_space(program, mesh, SLOW_LINKS), "x_bd") == ["I"]
    split = build_space(program, mesh, SLOW_LINKS, input_layouts={"x_bd": Layout.parse("S(0)")})
    assert layouts(split, "x_bd") == ["S(0)"]


def test_outputs_come_back_split_only_where_they_need_not_be_whole() -> None:
    program = capture(nn.Sequential(nn.Linear(8, 8)), (X_BD,), {})
    mesh = Mesh({"tp": 2})
    assert layouts(build_space(program, mesh, SLOW_LINKS), "output:0") == ["I", "S(0)", "S(1)"]
    assert layouts(build_space(program, mesh, SLOW_LINKS, returned=WHOLE), "output:0") == ["I"]


@pytest.mark.parametrize(("dtype", "num_bytes"), [(torch.float32, 4), (torch.float64, 8), (torch.bfloat16, 8)])
def test_a_loss_may_stay_partial_and_every_other_scalar_comes_back_whole(dtype: torch.dtype, num_bytes: int) -> None:
    space = space_of(TwoLinears().to(dtype), (X_BD.to(dtype),))
    assert layouts(space, "output:0") == ["I", "P"]
    whole, partial = space.decisions[space.index["output:0"]].candidates.strategies
    assert not whole.transfers and [each.num_bytes for each in partial.transfers] == [num_bytes]
    without_gradient = TwoLinears().requires_grad_(False)
    assert layouts(space_of(without_gradient, (X_BD,)), "output:0") == ["I"]


def test_a_buffer_that_changes_stays_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).train()
    space = space_of(model, (X_BD,))
    mutated = [f"output:{1 + i}" for i in range(len(space.program.mutations))]
    assert mutated and all(layouts(space, name) == ["I"] for name in mutated)


class Masked(nn.Module):
    """A mask of `size`² made of positions alone, and a linear layer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 1)
        self.size = size

    def forward(self, x_BD: Tensor) -> Tensor:
        at = torch.arange(self.size)
        mask_DD = (at[:, None] <= at[None, :]).to(torch.float32)
        return (self.linear(mask_DD).sum() + self.linear(x_BD)).sum()


@pytest.mark.parametrize(("size", "decided"), [(8, False), (4098, True)])
def test_what_depends_on_no_parameter_is_whole_unless_it_is_large(size: int, decided: bool) -> None:
    assert (size**2 > AUXILIARY_ELEMENTS) == decided
    with torch.device("meta"):
        model, x_BD = Masked(size), torch.ones(4, size)
    space = space_of(model, (x_BD,))
    (mask,) = (d for d in space.decisions if d.name.startswith("le_"))
    assert (len(mask.candidates.strategies) > 1) == decided


def test_a_decision_speaks_in_roles() -> None:
    space = space_of(TwoLinears(), (X_BD,))
    linear = space.decisions[space.index["linear_default_1"]]
    roles = {str(s): linear.role(i, 0) for i, s in enumerate(linear.candidates.strategies)}
    assert roles == {"...0": "data", "k": "row", "o": "column", "-": "replicated", "P0": "partial", "P1": "partial"}


FAST = ("mlp", "llama")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in FAMILIES])
def test_every_operation_of_every_family_has_a_rule(name: str) -> None:
    args, kwargs = FAMILIES[name].inputs(0)
    inputs: Any = kwargs or args
    assert space_of(FAMILIES[name].build(), inputs).unruled() == {}


def test_an_operation_without_a_rule_is_listed_with_the_reason() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x_BD: Tensor) -> Tensor:
            return nn.functional.pdist(self.linear(x_BD)).sum()

    assert space_of(Apart(), (torch.ones(8, 8),)).unruled() == {"pdist_default": "no rule"}
