"""Annotations of a model pin the strategies that remain, and give clear errors if they cannot be satisfied."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.costs.space.space import Space
from autopar.errors import AnnotationError
from autopar.ir.sharding.layout import I, Layout, S
from autopar.planning.annotations.annotate import annotate
from tests.support.gated_mlps import Gated, tokens
from tests.support.options import by_flag
from tests.support.pinned import IDS_BS, X_BD, Net, left, on_axis, pins, refused, space_of


@pytest.fixture(scope="module")
def space() -> Space:
    return space_of(Net())


# What a pattern matches.


def test_a_pattern_names_the_end_of_a_module_in_every_layer(space: Space) -> None:
    found = left(space, pins(space, annotate(Net(), "down", tp="row")))
    assert set(found) == {"layers.0.down:linear", "layers.1.down:linear"}
    assert all(on_axis(roles, 1) == {"row"} for roles in found.values())
    assert on_axis(found["layers.0.down:linear"], 0) >= {"data", "sequence", "column", "replicated"}


def test_a_whole_name_goes_before_the_end_of_a_name() -> None:
    model = nn.Sequential()
    model.add_module("head", nn.Linear(8, 8))
    model.add_module("inner", copy.deepcopy(model))
    space = space_of(model, (X_BD,))
    assert set(left(space, pins(space, annotate(copy.deepcopy(model), "head", tp="column")))) == {"head:linear"}
    both = {"head:linear", "inner.head:linear"}
    assert set(left(space, pins(space, annotate(model, "*head", tp="column")))) == both


@pytest.mark.parametrize("pattern", ["relu", "layers.*.relu"])
def test_an_operation_is_named_by_itself_or_below_its_module(space: Space, pattern: str) -> None:
    found = left(space, pins(space, annotate(Net(), pattern, dp="data")))
    assert set(found) == {"layers.0:relu", "layers.1:relu"}
    assert all(on_axis(roles, 0) == {"data"} for roles in found.values())


def test_what_is_stated_on_a_module_inside_holds_there_only(space: Space) -> None:
    model = Net()
    annotate(model.layers[1], "down", tp="row")
    assert set(left(space, pins(space, model))) == {"layers.1.down:linear"}


def test_a_role_of_a_parameter_is_that_of_the_calls_that_use_it(space: Space) -> None:
    found = left(space, pins(space, annotate(Net(), "layers.0.up.weight", tp="column")))
    assert {name: on_axis(roles, 1) for name, roles in found.items()} == {"layers.0.up:linear": {"column"}}


def test_a_role_of_a_parameter_reaches_the_call_behind_a_view_of_it() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 12))

        def forward(self, x_BD: Tensor) -> Tensor:
            return torch.nn.functional.linear(x_BD, self.weight.t())

    space = space_of(Transposed(), (X_BD,))
    found = left(space, pins(space, annotate(Transposed(), "weight", tp="column")))
    assert {name: on_axis(roles, 1) for name, roles in found.items()} == {":linear": {"column"}}


def test_columns_and_rows_of_a_module_are_those_of_its_weights(space: Space) -> None:
    found = left(space, pins(space, annotate(Net(), "layers.0", tp="column")))
    assert set(found) == {"layers.0.up:linear", "layers.0.down:linear"}


def test_data_of_a_module_pins_every_call_that_has_samples(space: Space) -> None:
    found = left(space, pins(space, annotate(Net(), "layers.0", dp="data")))
    assert {f"layers.0.{name}" for name in ("norm:layer_norm", "up:linear", "down:linear")} < set(found)
    assert {"layers.0:relu", "layers.0:add.Tensor"} < set(found)


# What is left.


def test_an_embedding_split_by_rows_splits_its_vocabulary(space: Space) -> None:
    (mask,) = pins(space, annotate(Net(), "embed", tp="row")).values()
    decision = next(d for d in space.decisions if "embedding" in d.name and d.kind == "call")
    assert {decision.candidates.strategies[i].inputs[0][1] for i in mask.nonzero()[0]} == {S(0)}


def test_a_dim_splits_the_values_that_leave_a_module(space: Space) -> None:
    found = pins(space, annotate(Net(), "layers.0", tp=-1))
    ((number, mask),) = found.items()
    assert space.decisions[number].node.target is torch.ops.aten.add.Tensor
    assert {space.decisions[number].candidates.strategies[i].outputs[0][1] for i in mask.nonzero()[0]} == {S(2)}


def test_a_value_that_the_model_returns_leaves_the_model() -> None:
    class Rectified(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return torch.relu(super().forward(input))

    space = space_of(Rectified(8, 12), (X_BD,))
    assert set(left(space, pins(space, annotate(Rectified(8, 12), "*", tp=0)))) == {":relu"}


def test_none_keeps_the_values_that_leave_a_module_whole(space: Space) -> None:
    ((number, mask),) = pins(space, annotate(Net(), "head", dp=None)).items()
    strategies = space.decisions[number].candidates.strategies
    assert {repr(strategies[i].outputs[0][0]) for i in mask.nonzero()[0]} == {"I"}


def test_a_dim_of_a_parameter_is_that_of_its_storage(space: Space) -> None:
    found = left(space, pins(space, annotate(Net(), "layers.0.up.weight", tp=0)))
    assert found == {"p_layers_0_up_weight": {"I S(0)", "S(0) S(0)", "S(1) S(0)"}}


def test_storage_splits_every_parameter_of_a_module_that_it_can(space: Space) -> None:
    found = left(space, pins(space, annotate(Net(), "*", storage="dp")))
    assert len(found) == len(list(Net().parameters())) - 1  # the scale has no dims
    assert all(layout.startswith("S") for layouts in found.values() for layout in layouts)


def test_storage_over_two_axes_splits_over_both(space: Space) -> None:
    found = left(space, pins(space, annotate(Net(), "layers.0.down", storage=("dp", "tp"))))
    assert found == {"p_layers_0_down_weight": {"S(0) S(0)", "S(0) S(1)", "S(1) S(0)", "S(1) S(1)"}}


def test_a_tied_parameter_answers_to_each_of_its_names(space: Space) -> None:
    by_head = pins(space, annotate(Net(), "head.weight", storage="dp"))
    assert by_head.keys() == pins(space, annotate(Net(), "embed.weight", storage="dp")).keys() != set()


def test_what_is_stored_already_stays_where_it_is(space: Space) -> None:
    model = annotate(Net(), "layers.0.down", storage="dp")
    found = left(space, pins(space, model, layers__0__down__weight=Layout((I, S(1)))))
    assert found == {"p_layers_0_down_weight": {"I S(1)"}}


def test_slices_fix_the_layout_of_every_input(space: Space) -> None:
    ((number, mask),) = pins(space, annotate(Net(), "head", slices=((2, 1, 1), (2, 1)))).items()
    strategies = space.decisions[number].candidates.strategies
    assert {tuple(map(str, strategies[i].inputs)) for i in mask.nonzero()[0]} == {
        ("S(0) R", "R S(0)"),
        ("R S(0)", "S(0) R"),
    }


def test_slices_of_one_ask_for_whole_inputs_not_for_partial_ones(space: Space) -> None:
    ((number, mask),) = pins(space, annotate(Net(), "head", slices=((1, 1, 1), (1, 1)))).items()
    strategies = space.decisions[number].candidates.strategies
    assert {repr(p) for i in mask.nonzero()[0] for layout in strategies[i].inputs for p in layout} == {"I"}


def test_slices_may_leave_out_the_bias(space: Space) -> None:
    whole = pins(space, annotate(Net(), "up", slices=((4, 1, 1), (1, 1), (1,))))
    short = pins(space, annotate(Net(), "up", slices=((4, 1, 1), (1, 1))))
    assert [mask.tolist() for mask in whole.values()] == [mask.tolist() for mask in short.values()] != []


def test_annotations_of_one_call_intersect(space: Space) -> None:
    model = annotate(annotate(Net(), "up", tp="column"), "layers.0", dp="data")
    assert left(space, pins(space, model))["layers.0.up:linear"] == {"data/column"}


def test_manual_mode_splits_nothing_but_samples_that_nothing_was_stated_about(space: Space) -> None:
    found = left(space, pins(space, annotate(Net(), "up", tp="column"), "manual"))
    assert found["layers.0.up:linear"] == {"data/column"}
    assert found["layers.0.down:linear"] == found["head:linear"] == {"data/replicated"}
    without = left(space, pins(space, Net(), "manual"))
    assert without["layers.0.down:linear"] == without["head:linear"] == {"data/data"}


def test_manual_mode_stores_parameters_as_their_calls_take_them(space: Space) -> None:
    found = pins(space, annotate(annotate(Net(), "up", tp="column"), "down", tp="row"), "manual")
    split = set()
    for number, mask in found.items():
        decision = space.decisions[number]
        if decision.kind == "parameter":
            layouts = {str(decision.candidates.strategies[each].outputs[0]) for each in mask.nonzero()[0]}
            assert len(layouts) == 1, "nothing is left to search"
            split |= {decision.name} if "S" in layouts.pop() else set()
    assert {name.rpartition("layers_")[2][2:] for name in split} == {"up_weight", "up_bias", "down_weight"}


def test_manual_mode_leaves_to_the_samples_what_they_divide_into() -> None:
    two = space_of(Net(), (IDS_BS[:2],))
    assert all("data" in each for each in left(two, pins(two, Net(), "manual"))["head:linear"])
    assert "data/data" not in left(two, pins(two, Net(), "manual"))["head:linear"]


# What cannot hold.


def test_a_pattern_that_matches_nothing_names_what_is_near(space: Space) -> None:
    text = refused(space, annotate(Net(), "layers.*.dwn", tp="row"))
    assert text.startswith('annotate("layers.*.dwn", tp="row"): no module, parameter or operation')
    assert "layers.*.down" in text


def test_a_pattern_that_matches_nothing_is_a_warning_in_auto_mode(space: Space) -> None:
    model = annotate(Net(), "layers.*.dwn", tp="row")
    with pytest.warns(UserWarning, match=re.escape(refused(space, model))):
        assert pins(space, model, "auto") == {}


def test_a_pattern_that_matches_is_no_warning(space: Space) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pins(space, annotate(Net(), "down", tp="row"), "auto")


@pytest.mark.parametrize("specified", [{"pp": "column"}, {"storage": "pp"}])
def test_an_axis_that_the_mesh_lacks_is_named_next_to_those_it_has(space: Space, specified: dict[str, Any]) -> None:
    assert 'the mesh has no axis "pp"; its axes are dp, tp.' in refused(
        space, annotate(Net(), "head", **specified), "auto"
    )


def test_a_role_that_does_not_divide_names_the_sizes() -> None:
    text = refused(space_of(Net(), dp=2, tp=5), annotate(Net(), "layers.1.down", tp="row"))
    assert text == (
        'annotate("layers.1.down", tp="row"): layers.1.down: "row" on axis tp splits 12 inputs into 5 parts; '
        '12 is divisible by 2, 3, 4, 6, 12. Use an axis of such a size, or one of "column", "replicated".'
    )


def test_a_role_that_nothing_has_names_the_roles_there_are(space: Space) -> None:
    text = refused(space, annotate(Net(), "relu", tp="row"))
    assert 'nothing it matches has a "row"; the operations found there (relu) offer "data"' in text


def test_a_dim_that_does_not_divide_names_the_sizes() -> None:
    text = refused(space_of(Net(), dp=2, tp=3), annotate(Net(), "layers.0", tp=0))
    assert "dim 0 on axis tp splits 4 into 3 parts; 4 is divisible by 2, 4. Use an axis of such a size" in text


def test_a_dim_that_is_not_there_names_the_shapes(space: Space) -> None:
    assert "there is no dim 3; found layers.0 [4, 4, 8]" in refused(space, annotate(Net(), "layers.0", tp=3))


def test_slices_of_another_operation_name_the_operations_there_are(space: Space) -> None:
    text = refused(space, annotate(Net(), "head", slices=((2, 1), (1, 1))))
    assert "it states slices of 2 tensors with 2, 2 dims; found linear(float32[4, 4, 8], float32[6, 8])" in text


def test_slices_that_the_mesh_cannot_make_name_those_it_can(space: Space) -> None:
    text = refused(space, annotate(Net(), "head", slices=((2, 1, 1), (3, 1))))
    assert "on the mesh dp=2 × tp=2 cannot be cut into ((2, 1, 1), (3, 1)). Use one of ((" in text


def test_storage_of_what_has_no_parameters_is_refused(space: Space) -> None:
    assert "it matches operations without parameters" in refused(space, annotate(Net(), "relu", storage="dp"))


def test_storage_of_a_parameter_that_cannot_be_split_names_its_shape(space: Space) -> None:
    text = refused(space, annotate(Net(), "scale", storage="dp"))
    assert "none can be stored in 2 parts over dp; found p_scale []." in text


def test_two_annotations_that_contradict_are_both_named(space: Space) -> None:
    text = refused(space, annotate(annotate(Net(), "layers.*.down", tp="row"), "layers.1.down", tp="column"))
    assert (
        'annotate("layers.1.down", tp="column") contradicts annotate("layers.*.down", tp="row"): layers.1.down' in text
    )


def test_an_annotation_that_contradicts_itself_is_named_once() -> None:
    text = refused(space_of(Net(), dp=2, tp=4), annotate(Net(), "layers.0.up", dp=2, slices=((1, 1, 1), (4, 1))))
    assert "says things of layers.0.up that exclude each other on the mesh dp=2 × tp=4" in text


# MLPs in tiles, which are one call.


@pytest.mark.parametrize(
    "specified",
    [
        {"layers.*.gate": "column", "layers.*.up": "column", "layers.*.down": "row"},
        {"layers.0.up": "column"},
        {"layers.0": "row"},
    ],
)
def test_columns_of_the_first_layers_of_an_mlp_in_tiles_are_its_hidden_features(specified: dict[str, str]) -> None:
    model = Gated()
    for pattern, role in specified.items():
        annotate(model, pattern, tp=role)
    plan = autopar.plan(
        model, autopar.Mesh({"tp": 2}), {"x": tokens()["x"].float()}, memory=autopar.Memory(mlp_tiles=2)
    )
    assert plan.choices["mlp_in_tiles_default"] == "k"


@pytest.mark.parametrize(
    ("pattern", "role", "text"),
    [
        (
            "layers.*.gate",
            "row",
            'layers.0.down: an MLP in tiles has the inputs of its first layers whole; give these "co',
        ),
        (
            "layers.*.down",
            "column",
            'nothing it matches has a "column"; the operations found there .mlp_in_tiles. offer',
        ),
    ],
)
def test_features_of_an_mlp_in_tiles_are_whole(pattern: str, role: str, text: str) -> None:
    model = annotate(Gated(), pattern, tp=role)
    with pytest.raises(AnnotationError, match=text):
        autopar.plan(model, autopar.Mesh({"tp": 2}), {"x": tokens()["x"].float()}, memory=autopar.Memory(mlp_tiles=2))


@pytest.mark.parametrize("shape", [{"dp": 2, "tp": 2}, {"dp": 8, "tp": 8}], ids=str)
def test_a_weight_that_is_stored_whole_on_an_axis_is_cast_whole_there(shape: dict[str, int]) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    options: dict[str, Any] = {"strategy": "fsdp_megatron", "precision": "bf16-mixed", "hardware": "h100"}
    plan = autopar.plan(model, autopar.Mesh(shape), (torch.zeros(64, 64),), **by_flag(**options))
    assert plan.choices["p_0_bias"] == "I S(0)"
    assert not {each for each in plan.traffic if each[0] == "reduce_scatter" and each[1] == "tp"}
