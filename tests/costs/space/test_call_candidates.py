"""The candidates of a call: every strategy on a mesh, in the layouts that its rule requires."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.capture.export import capture
from autopar.costs.space.call_candidates import Candidates, layout_candidates, split_layouts
from autopar.ir.program.program import TensorInfo, tensor_inputs
from autopar.ir.sharding.layout import Layout, R
from autopar.ir.sharding.mesh import Mesh
from autopar.ir.sharding.rule import PASS_REPLICATED
from tests.support.eager import calls
from tests.support.parity import SLOW_DEVICES
from tests.support.planned import SLOW_LINKS, TwoLinears, call_candidates, space_of

aten = torch.ops.aten
ONE, TWO = Mesh({"tp": 2}), Mesh({"dp": 2, "tp": 2})
NOTHING: frozenset[int] = frozenset()


def candidates_of(
    model: nn.Module, inputs: tuple[Tensor, ...], target: object, mesh: Mesh = ONE, padded: bool = False
) -> Candidates:
    """Return the candidates of the first call of an operation; `padded` lets every dim of parameters be padded."""
    program = capture(model, inputs, {})
    node = calls(program, target)[0]
    parameters = set(program.parameters.values())
    paddable = [
        frozenset(range(len(each.meta["tensor"].shape))) if padded and each.name in parameters else NOTHING
        for each in tensor_inputs(node)
    ]
    return call_candidates(node, paddable, mesh, SLOW_DEVICES)


def described(candidates: Candidates) -> dict[str, str]:
    """Strategy → "input, input -> output" layouts."""
    return {
        str(s): f"{', '.join(map(str, s.inputs))} -> {', '.join(map(str, s.outputs))}" for s in candidates.strategies
    }


class Later(nn.Module):
    """A linear layer (6 → 10) whose input needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.linear = nn.Linear(6, 10, bias=False)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.linear(x_BD * self.scale)


def test_a_linear_layer_may_split_its_batch_its_columns_or_its_rows() -> None:
    assert described(candidates_of(Later(), (torch.ones(4, 6),), aten.linear.default)) == {
        "...0": "S(0), R -> S(0)",
        "k": "S(1), S(1) -> P",
        "o": "R, S(0) -> S(1)",
        "-": "I, I -> I",
        "P0": "P, R -> P",
        "P1": "R, P -> P",
    }


def test_an_input_without_a_gradient_is_whole_where_one_with_a_gradient_is_replicated() -> None:
    candidates = candidates_of(nn.Linear(6, 10, bias=False), (torch.ones(4, 6),), aten.linear.default)
    assert described(candidates)["o"] == "I, S(0) -> S(1)"


def test_every_axis_chooses_for_itself() -> None:
    found = described(candidates_of(Later(), (torch.ones(4, 6),), aten.linear.default, TWO))
    assert found["k o"] == "S(1) R, S(1) S(0) -> P S(1)"
    assert found["- -"] == "I I, I I -> I I"


def test_two_axes_split_one_factor_where_its_size_divides_by_both() -> None:
    found = described(candidates_of(Later(), (torch.ones(4, 6),), aten.linear.default, TWO))
    assert found["...0 ...0"] == "S(0) S(0), R R -> S(0) S(0)"  # the batch of 4
    assert "k k" not in found and "o o" not in found  # 6 and 10


@pytest.mark.parametrize(("padded", "offered"), [(False, False), (True, True)])
def test_a_factor_that_does_not_divide_is_split_where_it_may_be_padded(padded: bool, offered: bool) -> None:
    candidates = candidates_of(nn.Linear(6, 5, bias=False), (torch.ones(4, 6),), aten.linear.default, padded=padded)
    assert ("o" in described(candidates)) == offered


def test_a_padded_factor_is_split_by_one_axis_only() -> None:
    found = described(
        candidates_of(nn.Linear(6, 5, bias=False), (torch.ones(4, 6),), aten.linear.default, TWO, padded=True)
    )
    assert "o -" in found and "- o" in found and "o o" not in found


def test_a_factor_smaller_than_the_axis_is_not_split() -> None:
    candidates = candidates_of(
        nn.Linear(8, 3, bias=False), (torch.ones(4, 8),), aten.linear.default, Mesh({"tp": 4}), padded=True
    )
    assert "o" not in described(candidates) and "k" in described(candidates)


def test_no_two_strategies_have_the_same_layouts() -> None:
    for target in (aten.linear.default, aten.relu.default, aten.sum.default):
        candidates = candidates_of(TwoLinears(), (torch.ones(4, 8),), target, TWO)
        layouts = [(s.inputs, s.outputs, s.implemented) for s in candidates.strategies]
        assert len(layouts) == len(set(layouts))


def test_a_call_without_a_rule_runs_replicated_and_says_so() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x_BD: Tensor) -> Tensor:
            return nn.functional.pdist(x_BD * self.scale)

    candidates = candidates_of(Apart(), (torch.ones(4, 4),), aten.pdist.default)
    assert candidates.reason == "no rule"
    assert described(candidates) == {"-": "I -> I"}


def test_what_computes_on_weights_alone_passes_replicated_values_whatever_it_is() -> None:
    class Learned(nn.Module):
        """Token embeddings, and positions that are learned and put through a layer of their own."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions, self.layer = nn.Embedding(12, 8), nn.Embedding(6, 8), nn.Linear(8, 8)

        def forward(self, ids_BS: Tensor) -> Tensor:
            positions_SD = self.layer(self.positions(torch.arange(ids_BS.shape[1]))).tanh()
            return (self.tokens(ids_BS) + positions_SD).tanh()

    space = space_of(Learned(), (torch.zeros(4, 6, dtype=torch.long),))
    passing = {
        decision.name: strategy
        for decision in space.decisions
        for strategy in decision.candidates.strategies
        if decision.kind == "call" and strategy.choices == (PASS_REPLICATED,)
    }
    assert set(passing) == {"embedding_default", "linear_default", "tanh_default"}
    assert not any(strategy.implemented for strategy in passing.values())  # no row is masked in a whole table
    assert passing["linear_default"].inputs == (Layout((R,)),) * 3


def test_equal_calls_share_one_candidates() -> None:
    program = capture(nn.Sequential(Later(), nn.Linear(10, 6), Later()), (torch.ones(4, 6),), {})
    first, _, last = calls(program, aten.linear.default)
    candidate_lists = [call_candidates(node, [NOTHING] * 2, ONE, SLOW_DEVICES) for node in (first, last)]
    assert candidate_lists[0] is candidate_lists[1]


def test_splitting_in_half_halves_the_seconds_of_slow_devices() -> None:
    candidates = candidates_of(Later(), (torch.ones(4, 6),), aten.linear.default)
    times = dict(zip(map(str, candidates.strategies), candidates.seconds, strict=True))
    assert times["o"] < 0.8 * times["-"]


def test_an_implementation_pays_for_its_own_collectives() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 16)

        def forward(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.head(x_BD), labels_B)

    program = capture(Loss(), (torch.ones(4, 8), torch.zeros(4, dtype=torch.long)), {})
    (node,) = calls(program, aten.cross_entropy_loss.default)
    candidates = call_candidates(node, [NOTHING] * len(tensor_inputs(node)), ONE, SLOW_LINKS)
    paying = [i for i, s in enumerate(candidates.strategies) if s.transfers]
    free = [i for i, s in enumerate(candidates.strategies) if not s.transfers]
    assert paying and all(candidates.strategies[i].implemented for i in paying)
    assert np.min(candidates.seconds[paying]) > SLOW_LINKS.links[-1].latency_s > np.max(candidates.seconds[free])


@pytest.mark.parametrize(
    ("shape", "mesh", "padded", "expected"),
    [
        ((4,), ONE, False, {"I", "S(0)"}),
        ((5,), ONE, False, {"I"}),
        ((5,), ONE, True, {"I", "S(0)"}),
        ((1, 4), ONE, True, {"I", "S(1)"}),
        ((), ONE, True, {"I"}),
        ((2,), TWO, False, {"I I", "I S(0)", "S(0) I"}),
        ((5,), TWO, True, {"I I", "I S(0)", "S(0) I"}),
        ((4,), TWO, False, {"I I", "I S(0)", "S(0) I", "S(0) S(0)"}),
    ],
)
def test_stored_tensors_are_split_into_parts_that_fit(
    shape: tuple[int, ...], mesh: Mesh, padded: bool, expected: set[str]
) -> None:
    layouts = split_layouts(TensorInfo(shape, torch.float32, True), mesh, padded)
    assert set(map(str, layouts)) == expected


def test_only_the_named_dims_are_split() -> None:
    layouts = split_layouts(TensorInfo((4, 4), torch.float32), ONE, dims=frozenset((1,)))
    assert set(map(str, layouts)) == {"I", "S(1)"}


def test_a_candidates_without_a_call_passes_its_layouts_on() -> None:
    candidates = layout_candidates((Layout.parse("I"), Layout.parse("S(0)")))
    assert [(str(s.inputs[0]), str(s.outputs[0])) for s in candidates.strategies] == [("I", "I"), ("S(0)", "S(0)")]
    assert candidates.seconds.tolist() == [0.0, 0.0]


def test_a_strategy_names_the_axes_of_every_factor_outer_first() -> None:
    candidates = candidates_of(Later(), (torch.ones(4, 6),), aten.linear.default, TWO)
    by_name = {str(s): s for s in candidates.strategies}
    assert by_name["k o"].axes_by_factor(TWO) == {"k": ("dp",), "o": ("tp",)}
    assert by_name["- -"].axes_by_factor(TWO) == {}
    assert by_name["...0 ...0"].axes_by_factor(TWO) == {"...0": ("dp", "tp")}
