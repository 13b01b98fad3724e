"""Weights that are used through views: pieces of packed ones, transposed ones. Mixtral's experts have both."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.capture.export import capture, skeleton
from autopar.ir.sharding.annotation import Annotation
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.best_plan import best_plan
from autopar.planning.record import choices_of
from autopar.planning.request import PlanRequest
from autopar.runtime.collectives.gradient_buckets import gather_parameters
from autopar.runtime.collectives.mesh_axes import record_traffic
from autopar.runtime.rewrite.per_rank_graph import rewrite
from tests.strategies.test_presets_volume import BYTES_ALONE
from tests.support.expert_families import WITH_EXPERTS
from tests.support.options import by_flag
from tests.support.simulation.simulate import from_ranks, simulate
from tests.support.simulation.training import (
    SLOW_DEVICES,
    Steps,
    planning_alone,
    train_alike,
    unshare,
)

pytest.importorskip("transformers")

MIXTRAL = WITH_EXPERTS["mixtral"]
STORED = Annotation("*", storage=("dp",), regather=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("microbatches", [None, 4])
def test_weights_of_which_views_are_taken_are_gathered_again_in_the_backward(microbatches: int | None) -> None:
    program = capture(skeleton(MIXTRAL.build()), (), MIXTRAL.inputs(0)[1], training=True)
    request = PlanRequest((STORED,), strategy="expert_data", hardware=BYTES_ALONE, microbatches=microbatches)
    space = request.space(program, Mesh({"dp": 2, "ep": 2}, "cpu"))
    graph = rewrite(space, choices_of(best_plan(request, space), space)).module.graph
    assert _gathered_again(graph) == {"gate_up_proj", "down_proj"}


def _gathered_again(graph: fx.Graph) -> set[str]:
    """The matrices of experts that are; none of them, and no view of one, may move over dp otherwise."""
    found, moved = set(), set()
    weights = {node for node in graph.nodes if node.op == "placeholder" and ".experts." in node.name.replace("_", ".")}
    for node in graph.nodes:
        if node.op == "call_function" and set(node.all_input_nodes) & weights:
            if node.target is gather_parameters:
                numbers = [number for number, each in enumerate(node.args[3:]) if each in weights]
                assert set(numbers) <= set(node.kwargs.get("regather", ()))
                found |= {node.args[3 + number].name.rpartition("experts_")[2] for number in numbers}
            elif "dp" in node.args:
                moved.add(node)
            elif len(node.all_input_nodes) == 1:
                weights.add(node)
    assert not moved
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mesh", "specified"),
    [
        ("data_parallel", {"dp": 2}, STORED),
        pytest.param("expert_model", {"ep": 2, "tp": 2}, None, marks=pytest.mark.slow),
    ],
    ids=["gathered again", "exchanged"],
)
def test_micro_batches_train_as_one_process(strategy: str, mesh: dict[str, int], specified: Annotation | None) -> None:
    steps = Steps([MIXTRAL.inputs(step)[1] for step in range(2)], num_microbatches=2)
    model: Any = MIXTRAL.build()
    model.config.output_router_logits = False  # whose loss is not that of the batch's parts
    if specified is not None:
        autopar.annotate(model, "*", storage="dp", regather=True)
    train_alike(model, steps, mesh, {"strategy": strategy, "microbatches": 2})


@pytest.mark.slow
def test_pieces_of_a_packed_weight_are_exchanged_once_for_all_micro_batches() -> None:
    batch = MIXTRAL.inputs(0)[1]
    with simulate(4) as mode, planning_alone(mode, lambda space, pins: pins):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
        options: dict[str, Any] = {"hardware": SLOW_DEVICES, "strategy": "expert_model", "microbatches": 2}
        compiled = autopar.compile(MIXTRAL.build(), mesh, batch, **by_flag(**options))
        unshare(compiled, mode)
        given = {name: from_ranks([value] * 4) for name, value in batch.items()}
        with record_traffic() as traffic:
            compiled.train_step(**given)
    assert traffic.calls["all_to_all", "tp"] == 4  # gate and up, forward and backward
