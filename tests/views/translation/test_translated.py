"""Degrees for torchtitan, axes of plans, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.costs.plans.plan import Plan
from autopar.errors import MeshError, PlanError
from tests.support.families import FAMILIES
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.planned import TwoLinears
from tests.support.ranks import Ranks, mesh

X_BD = torch.ones(4, 8)


def _plan(model: nn.Module, **options: object) -> Plan:
    family = FAMILIES["llama"]
    return autopar.plan(
        model, autopar.Mesh({"dp": 2, "tp": 2}), family.inputs(0)[1], hardware=SLOW_DEVICES, **by_flag(**options)
    )


def _degrees(plan: Plan) -> dict[str, str]:
    return dict(each.split("=") for each in (arg.rpartition(".")[2] for arg in plan.torchtitan_args().arguments))


@pytest.mark.parametrize(
    ("strategy", "degrees"),
    [("megatron", (2, 1, 2, "always")), ("zero3", (1, 4, 1, "always")), ("hsdp", (2, 2, 1, "always"))],
)
def test_presets_are_degrees_of_torchtitan(strategy: str, degrees: tuple[object, ...]) -> None:
    found = _degrees(_plan(FAMILIES["llama"].build(), strategy=strategy))
    names = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree")
    assert tuple(found[name] for name in (*names, "fsdp_reshard_after_forward")) == tuple(map(str, degrees))


def test_recomputation_and_the_loss_are_arguments_and_the_rest_is_named() -> None:
    model = autopar.annotate(FAMILIES["llama"].build(), "layers.0.mlp.*", tp="data")
    model = autopar.annotate(model, "cross_entropy_loss", tp="replicated")
    found = _plan(model, strategy="megatron", recompute="selective").torchtitan_args()
    assert {
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
        "--parallelism.disable_loss_parallel",
    } <= {*found.arguments}
    assert "tp: 3 matrices are divided by data, not by tensor" in found.lost
    assert any("torchtitan divides positions" in each for each in found.lost)


def test_a_plan_that_was_loaded_has_arguments_and_no_styles() -> None:
    plan = Plan.from_json(_plan(FAMILIES["llama"].build(), strategy="megatron").to_json())
    assert _degrees(plan)["tensor_parallel_degree"] == "2"
    for ask in (plan.tp_plan, plan.parallelize_plan):
        with pytest.raises(PlanError, match=r"needs the model that the plan is for.*attach"):
            ask()


def _on_both_axes() -> Plan:
    model = autopar.annotate(TwoLinears(), "up", dp="column", tp="column")
    model = autopar.annotate(model, "down", dp="row", tp="row")
    return autopar.plan(model, autopar.Mesh({"dp": 2, "tp": 2}), (X_BD,), hardware=SLOW_DEVICES)


def test_where_several_axes_split_matrices_one_is_requested() -> None:
    plan = _on_both_axes()
    with pytest.raises(PlanError, match=r"splits matrices on dp and tp; .*axis='dp'"):
        plan.tp_plan()
    assert dict(plan.tp_plan("dp").styles) == {"up": "colwise", "down": "rowwise"}
    assert "dp: divided by tensor; here its ranks take samples of their own" in plan.parallelize_plan("tp").lost
    with pytest.raises(PlanError, match="axis='pp'; the plan's mesh has dp, tp"):
        plan.parallelize_plan("pp")


def test_a_plan_without_split_matrices_says_so() -> None:
    found = _plan(FAMILIES["llama"].build(), strategy="zero3").tp_plan()
    assert (found.axis, found.styles, found.lost[0]) == (None, {}, "no axis splits matrices")


def _other_mesh() -> None:
    plan = _on_both_axes().parallelize_plan("tp")
    with pytest.raises(MeshError, match=r"the plan has the axes tp, dp, the mesh is .*tp=2"):
        plan.apply(TwoLinears(), mesh((2,), ("tp",)))


def test_a_mesh_that_lacks_an_axis_is_refused(ranks: Ranks) -> None:
    ranks.run(_other_mesh)
