"""Plans made for Hugging Face's and torch's tensor parallelism, in autopar's words."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from autopar.capture.export import capture
from autopar.costs.hardware.load import load
from autopar.costs.space.build import build_space
from autopar.errors import AnnotationError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.annotations.annotate import annotate_plan, annotations_of, pins_of
from autopar.planning.annotations.tp_plans import ForeignPlan, translate
from tests.support.families import FAMILIES


def specified(plan: ForeignPlan, model: nn.Module | None = None) -> dict[str, object]:
    return dict(translate(model or nn.Module(), plan))


def test_the_names_of_hugging_face_are_roles() -> None:
    plan = {"a": "colwise", "b": "rowwise", "c": "colwise_rep", "d": "embedding_rowwise", "e": "sequence_parallel"}
    assert specified(plan) == {"a": "column", "b": "row", "c": "column", "d": "row", "e": "sequence"}


def test_every_name_that_transformers_knows_is_known() -> None:
    parallel = pytest.importorskip("transformers.distributed.tensor_parallel")
    pytest.importorskip("transformers.distributed.expert_parallel")
    names = list(parallel.ALL_PARALLEL_STYLES.keys())
    assert "colwise" in names
    for name in names:
        specified({"layers.*": name})


def test_a_style_that_only_places_a_collective_says_nothing() -> None:
    assert (
        specified({"norm": "replicated_with_grad_allreduce", "mlp": PrepareModuleInput(use_local_output=False)}) == {}
    )


def test_the_styles_of_torch_are_roles_and_dims() -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "norm": SequenceParallel(sequence_dim=0)}
    assert specified(plan) == {"up": "column", "down": "row", "norm": 0}


def test_an_unknown_style_lists_the_known_ones() -> None:
    with pytest.raises(
        AnnotationError, match=r'"up" has the style \'colwize\'; known are .*colwise, .*ColwiseParallel'
    ):
        specified({"up": "colwize"})


def test_a_plan_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(AnnotationError, match="needed a mapping from patterns to styles"):
        specified("colwise")  # type: ignore[arg-type]


def test_a_model_without_a_plan_is_told_what_to_give() -> None:
    with pytest.raises(AnnotationError, match="Linear brings no tp_plan along; give a mapping"):
        annotate_plan(nn.Linear(2, 2), "auto")
    with pytest.raises(AnnotationError, match=r'Linear brings no ep_plan along; .*ep_dispatch_experts.* ep="expert"'):
        annotate_plan(nn.Linear(2, 2), "ep")


def test_modules_that_this_configuration_lacks_are_left_out_of_its_own_plan() -> None:
    class Planned(nn.Module):
        tp_plan = {"up": "colwise", "experts": "rowwise"}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(2, 2)

    assert specified("auto", Planned()) == {"up": "column"}


class Experts(nn.Module):
    """Matrices [experts, in, out], as Llama 4 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(4, 8, 12))
        self.down = nn.Parameter(torch.empty(4, 6, 8))


def test_where_gate_and_up_are_packed_by_rows_the_matrices_are_transposed() -> None:
    model = nn.ModuleDict({"experts": Experts(), "proj": nn.Linear(2, 2)})
    plan = {"experts.gate_up": "packed_rowwise", "experts.down": "colwise", "proj": "colwise"}
    assert specified(plan, model) == {"experts.gate_up": "column", "experts.down": "row", "proj": "column"}
    straight = {"experts.gate_up": "packed_colwise", "experts.down": "rowwise"}
    assert specified(straight, model) == {"experts.gate_up": "column", "experts.down": "row"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "lora"])
def test_the_plan_of_a_hugging_face_model_pins_its_projections(family: str) -> None:
    pytest.importorskip("transformers")
    if family == "lora":
        pytest.importorskip("peft")
    model = annotate_plan(FAMILIES[family].build(), "auto")
    program = capture(model, *FAMILIES[family].inputs(0))
    space = build_space(program, Mesh({"dp": 2, "tp": 2}), load("cpu"))
    found: dict[str, set[str]] = {}
    for number, mask in pins_of(annotations_of(model), space, "semi_auto", {}).items():
        decision = space.decisions[number]
        for part in str(decision.node.meta["module"]).split("."):
            if part.endswith("proj"):
                found.setdefault(part, set()).update(decision.role(int(i), 1) for i in mask.nonzero()[0])
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    assert found == {name: {"column"} for name in columns} | {name: {"row"} for name in rows}
