"""Choices that `ep="expert"` pins in every form of experts, by the names of modules and parameters."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.export import capture
from autopar.costs.hardware.load import load
from autopar.costs.space.build import build_space
from autopar.costs.space.space import Space
from autopar.errors import AnnotationError
from autopar.ir.program.program import Program
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.annotations.annotate import annotate, annotations_of, pins_of
from autopar.strategies.roles import RoledProgram
from tests.support.expert_models import DENSE, decoder, token_batches
from tests.support.simulation.training import Steps, train_alike

pytest.importorskip("transformers")
PRODUCT = {"einsum": "em", "bmm": "bk", "matmul": "ak"}
"""Form → the letters of its factors of experts and of what a product sums."""


@functools.cache
def captured(form: str) -> Program:
    return capture(decoder(form), (), token_batches(1)[0], training=True)


@functools.cache
def space(size: int = 2) -> Space:
    return build_space(captured("sorted"), Mesh({"dp": 2, "ep": size}), load("cpu"))


def pinned(pattern: str, specified: object, size: int = 2) -> dict[str, set[str]]:
    """Operation → what is left of its choices on the second axis, by an annotation of the sorted form."""
    model = annotate(decoder(), pattern, ep=specified)
    found: dict[str, set[str]] = {}
    for number, mask in pins_of(annotations_of(model), space(size), "semi_auto", {}).items():
        decision = space(size).decisions[number]
        name = decision.candidates.call.name if decision.candidates.call else decision.kind
        left = (decision.candidates.strategies[int(index)] for index in mask.nonzero()[0])
        # A parameter is stored in one layout over both axes: the second one's is the last word.
        found.setdefault(name, set()).update(each.choices[-1].split()[-1] for each in left)
    return found


@pytest.mark.parametrize("form", DENSE)
def test_a_product_by_a_matrix_per_expert_has_the_roles_of_its_factors(form: str) -> None:
    calls = [call for call in RoledProgram.of(captured(form)).calls.values() if "expert" in call.roles.values()]
    first, activation, second, *_, home = calls
    for product in (first, second):
        roles = {role: factor for factor, role in product.roles.items()}
        assert roles["expert"][0] + roles["row"][0] in (PRODUCT[form], "ef")
        assert roles["column"] in product.out_terms[0].factors
    assert dict(activation.roles)["a"] == "expert"
    assert home.call.name == "einsum"  # of its two inputs with experts, gates are columns of the router
    assert home.roles["e0"] == "expert"


def test_two_activations_and_a_matrix_that_every_token_meets_are_no_experts() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Linear(16, 16, bias=False)
            self.heads = nn.Parameter(torch.randn(4, 16, 8))

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.weight.weight[ids]
            x = x @ x.transpose(1, 2) @ x @ self.weight.weight
            return torch.einsum("bsd,hdk->bshk", x, self.heads).square().mean()

    program = capture(Scores(), (), token_batches(1)[0], training=True)
    assert not any("expert" in call.roles.values() for call in RoledProgram.of(program).calls.values())


ENDS = {"dispatch", "combine"}
TOGETHER = {"x", "a0+x", "b0+x"}


@pytest.mark.parametrize("pattern", ["layers.*.moe", "layers.0.moe", "moe"])
def test_experts_are_pinned_by_the_name_of_their_module(pattern: str) -> None:
    found = pinned(pattern, "expert")
    assert {name: found[name] for name in ENDS} == dict.fromkeys(ENDS, TOGETHER)
    assert found["grouped_mm"] == {"x"}


def test_experts_are_pinned_by_the_names_of_their_parameters() -> None:
    assert pinned("layers.*.moe.w*", "expert") == {"grouped_mm": {"x"}}
    assert pinned("moe.w2", 0) == {"parameter": {"S(0)"}}


def test_one_way_to_split_experts_is_pinned_by_its_factors() -> None:
    assert pinned("moe.dispatch", "factor:x") == {"dispatch": {"x"}}
    assert pinned("moe.dispatch", "factor:+x") == {"dispatch": TOGETHER - {"x"}}


def test_experts_that_do_not_divide_are_refused_with_their_number() -> None:
    with pytest.raises(AnnotationError, match='"expert" on axis ep splits 8 experts into 3 parts; 8 is divisible by'):
        pinned("moe", "expert", 3)
    for factor in ("x", "+x"):
        with pytest.raises(AnnotationError, match=r"on axis ep splits 8 into 3 parts; 8 is divisible by 2, 4, 8\. Use"):
            pinned("moe.dispatch", f"factor:{factor}", 3)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["einsum", "bmm", "sorted"])
def test_pinned_experts_train_as_on_one_process(form: str) -> None:
    steps = Steps(token_batches(2))
    train_alike(annotate(decoder(form), "moe", ep="expert"), steps, {"ep": 2}, {"mode": "semi_auto"})
