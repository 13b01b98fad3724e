"""The user's calls: what is remembered, what is refused at once, and `constrain` inside a forward."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard

from autopar.costs.space.space import Space
from autopar.errors import AnnotationError
from autopar.planning.annotations.annotate import annotate, annotations_of, constrain, pins_of
from tests.support.pinned import X_BD, Net, refused, space_of

# Annotations, and how they are stored.


def test_an_annotation_prints_as_the_call_that_made_it() -> None:
    model = annotate(Net(), "head", tp="column", dp=None, slices=[[2, 1, 1], [1, 1]], storage="dp")
    expected = 'annotate("head", tp="column", dp=None, slices=((2, 1, 1), (1, 1)), storage="dp")'
    assert list(map(str, annotations_of(model))) == [expected]


def test_annotations_survive_a_deep_copy_and_stay_apart_from_the_original() -> None:
    model = annotate(Net(), "head", tp="column")
    copied = annotate(copy.deepcopy(model), "embed", tp="row")
    assert [a.pattern for a in annotations_of(copied)] == ["head", "embed"]
    assert [a.pattern for a in annotations_of(model)] == ["head"]


def test_placements_of_torch_are_dims() -> None:
    (annotation,) = annotations_of(annotate(Net(), "head", tp=Shard(1), dp=Replicate()))
    assert annotation.axes == (("tp", 1), ("dp", None))


def test_an_axis_may_have_the_name_of_a_parameter_of_annotate() -> None:
    (annotation,) = annotations_of(annotate(Net(), "head", model="column", pattern="data"))
    assert annotation.axes == (("model", "column"), ("pattern", "data"))


@pytest.mark.parametrize(
    ("specified", "message"),
    [
        ({}, "the annotation is empty"),
        ({"tp": "colum"}, 'roles are data, column, row, sequence, expert, replicated. Did you mean "column"?'),
        ({"tp": 1.5}, "found 1.5 for axis tp, needed a role"),
        ({"tp": Partial()}, 'a sum over an axis comes from the role "row"'),
        ({"slices": (2, 1)}, "give a tuple per tensor input"),
        ({"slices": ((2, 0),)}, "found 0 slices of a dim, needed a whole number of at least 1"),
        ({"slices": ()}, "slices is empty"),
        ({"storage": ("dp", 1)}, "storage names mesh axes"),
    ],
)
def test_what_no_mesh_could_satisfy_is_refused_at_the_call(specified: dict[str, Any], message: str) -> None:
    with pytest.raises(AnnotationError, match=re.escape(message)):
        annotate(Net(), "head", **specified)


def test_an_empty_pattern_is_refused() -> None:
    with pytest.raises(AnnotationError, match="needed a pattern"):
        annotate(Net(), "", tp="row")


# Inside a forward.


class Constrained(nn.Module):
    """A linear layer whose output is constrained."""

    def __init__(self, **specified: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 12)
        self.specified = specified

    def forward(self, x_BD: Tensor) -> Tensor:
        return torch.relu(constrain(self.linear(x_BD), **self.specified)).mean()


def constraint(space: Space) -> set[str]:
    """The layouts left to the call of `constrain`."""
    ((number, mask),) = pins_of((), space, "auto", {}).items()
    decision = space.decisions[number]
    assert str(decision.node.target) == "autopar.constrain.default"
    return {str(decision.candidates.strategies[i].outputs[0]) for i in mask.nonzero()[0]}


def test_a_constraint_fixes_the_layout_of_its_output() -> None:
    assert constraint(space_of(Constrained(dp=0, tp=-1), (X_BD,))) == {"S(0) S(1)"}


def test_a_constraint_to_none_keeps_its_output_whole_on_that_axis_only() -> None:
    found = constraint(space_of(Constrained(tp=Replicate()), (X_BD,)))
    assert {layout.split()[1] for layout in found} == {"I", "R"}
    assert {layout.split()[0] for layout in found} == {"S(0)", "S(1)", "I", "R", "P"}


def test_a_constraint_that_does_not_divide_names_the_module_and_the_shape() -> None:
    with pytest.raises(AnnotationError) as caught:
        constraint(space_of(Constrained(dp=1, tp=1), (X_BD,), dp=2, tp=5))
    assert str(caught.value).startswith(
        "constrain(float32[4, 12], dp=1, tp=1) in the model: dim 1 of 12 does not divide into 10 parts over dp, tp; "
    )


def test_a_constraint_contradicts_an_annotation_of_the_same_call() -> None:
    model = annotate(Constrained(tp=1), "constrain", tp=0)
    text = refused(space_of(model, (X_BD,)), model)
    assert 'constrain(float32[4, 12], tp=1) in the model contradicts annotate("constrain", tp=0)' in text


@pytest.mark.parametrize(
    ("specified", "message"), [({}, "the annotation is empty"), ({"tp": 2}, "found 2"), ({"tp": "row"}, "found")]
)
def test_a_constraint_is_checked_where_it_is_stated(specified: dict[str, Any], message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        constrain(X_BD, **specified)


def test_a_constraint_changes_neither_value_nor_gradient_and_is_no_alias() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    y = constrain(x, tp=0)
    assert torch.equal(x, y) and y.data_ptr() != x.data_ptr()
    (gradient,) = torch.autograd.grad((y * torch.arange(6.0).view(3, 2)).sum(), x)
    assert torch.equal(gradient, torch.arange(6.0).view(3, 2))
    torch.library.opcheck(torch.ops.autopar.constrain.default, (x, ["tp"], [0]))


def test_a_constraint_runs_on_the_meta_device() -> None:
    assert constrain(torch.ones(3, 2, device="meta"), tp=0).shape == (3, 2)
