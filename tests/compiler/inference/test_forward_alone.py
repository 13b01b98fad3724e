"""`compile` and `plan` with training=False: a forward alone, equal to the model's, and nothing of training."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.compiler.inference.inference_module import InferenceModule
from autopar.costs.plans.plan import Plan
from autopar.errors import InputError, PipelineError
from autopar.ir.sharding.mesh import Mesh
from autopar.runtime.collectives.mesh_axes import record_traffic
from autopar.tools.benchmarking.meters import peak_bytes
from tests.support.language_models import language_model, texts
from tests.support.options import by_flag
from tests.support.ranks import Ranks, mesh

AXES = ("dp", "tp")
BATCH, LENGTH = 4, 64


def _ran(shape: tuple[int, ...], strategies: tuple[str | None, ...]) -> list[str]:
    """Return each strategy's differences from one process, from the plan's bytes, and from its peak (over 10%)."""
    wrong = []
    inputs = texts(BATCH, LENGTH)
    with torch.no_grad():
        expected = language_model().eval()(**inputs)
    for strategy in strategies:
        compiled = autopar.compile(
            language_model(),
            mesh(shape, AXES[: len(shape)]),
            inputs,
            strategy=strategy,
            hardware="h100",
            training=False,
        )
        assert isinstance(compiled, InferenceModule)
        with record_traffic() as traffic, torch.no_grad():
            found = compiled(**inputs)
        for name in expected:
            got = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
            if not torch.allclose(got, expected[name], atol=1e-5, rtol=1e-5):
                wrong.append(f"{strategy}: {name}")
        predicted = {key: size for key, size in compiled.plan.traffic.items() if size}
        if traffic.num_bytes != predicted:
            wrong.append(f"{strategy}: moved {dict(traffic.num_bytes)}, planned {predicted}")
        held = [*compiled.parameters(), *compiled.buffers(), *inputs.values()]
        with torch.no_grad():
            peak = peak_bytes(lambda each=compiled: each(**inputs), lambda: None, lambda each=held: each)
        if abs(peak / compiled.plan.peak_bytes - 1) > 0.1:
            wrong.append(f"{strategy}: a peak of {peak}, planned {compiled.plan.peak_bytes}: {compiled.plan.memory}")
    return wrong


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shape", "strategies"),
    [
        ((2,), (None, "megatron")),
        pytest.param((2,), ("data_parallel", "zero3"), marks=pytest.mark.slow),
        ((2, 2), ("zero3",)),
        pytest.param((2, 2), (None, "data_parallel", "megatron"), marks=pytest.mark.slow),
    ],
)
def test_outputs_bytes_and_peak_are_those_of_one_process_and_of_the_plan(
    ranks: Ranks, shape: tuple[int, ...], strategies: tuple[str | None, ...]
) -> None:
    world_size = math.prod(shape)
    assert ranks.run(_ran, shape, strategies, world_size=world_size) == [[]] * world_size


def _planned(**options: Any) -> Any:
    model = language_model()
    return autopar.plan(
        model,
        Mesh({"dp": 2}),
        texts(BATCH, LENGTH),
        hardware="h100",
        **by_flag(memory_conventions="tensors", **options),
    )


def test_a_plan_has_no_gradients_no_state_and_no_backward() -> None:
    plan, training = _planned(training=False), _planned()
    assert plan.memory is not None and training.memory is not None
    assert "optimizer" in training.memory.parts
    assert plan.memory.parts.keys() <= {"parameters", "buffers and inputs", "activations", "gathered weights"}
    assert not any(moved.backward for row in plan.rows for moved in row.transfers)
    assert all(row.backward_seconds == 0 and row.saved_bytes == 0 for row in plan.rows)
    assert plan.seconds < training.seconds and plan.peak_bytes < training.peak_bytes
    assert not any(instant.backward for instant in plan.memory.timeline)


def test_a_plan_is_verified_and_holds_to_a_limit() -> None:
    plan = _planned(training=False)
    assert plan.verify().ok
    limited = _planned(training=False, memory=plan.peak_bytes - 1)
    assert limited.peak_bytes < plan.peak_bytes and limited.verify().ok


NAMES = {"optimizer": "(optimizer|name)"}
"""Option by itself → the name that messages have."""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer", "sgd"),
        ("optimizer", autopar.Optimizer("muon")),
        ("master_copies", True),
        ("recompute", "full"),
        ("microbatches", 2),
        ("schedule", "1f1b"),
        ("loss_tiles", 2),
        ("mlp_tiles", "auto"),
        ("offload", "optimizer"),
    ],
)
def test_what_is_of_training_alone_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{NAMES.get(name, name)}=.* is given with training=False, .*Leave it out"):
        _planned(training=False, **{name: value})


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_presets_that_divide_gradients_and_state_are_refused(strategy: str) -> None:
    with pytest.raises(InputError, match=f'strategy="{strategy}" is given with training=False.*"zero3" stores'):
        _planned(training=False, strategy=strategy)


def test_a_pipeline_is_refused() -> None:
    with pytest.raises(
        PipelineError, match='the axis "pp", and training=False runs a forward without one; rename the axis'
    ):
        autopar.plan(language_model(), Mesh({"pp": 2, "dp": 2}), texts(4, 8), hardware="h100", training=False)


def test_parameters_that_no_call_reads_are_stored_and_counted() -> None:
    model = language_model()
    model.register_parameter("unread", nn.Parameter(torch.zeros(1000)))
    plan = autopar.plan(
        model, Mesh({"dp": 2}), texts(BATCH, LENGTH), strategy="zero3", precision="bf16-mixed", training=False
    )
    assert isinstance(plan, Plan) and plan.memory is not None
    assert plan.choices["p_unread"] == "S(0)" and plan.verify().ok
    assert plan.memory.parts["parameters"] == sum(each.nbytes for each in model.parameters()) // 2


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x))


def _misused() -> list[str]:
    """Return the error messages of a compiled module for each attempt to train it."""
    model, x = _Scaled(), torch.ones(4, 8)
    compiled = autopar.compile(copy.deepcopy(model), mesh((2,), ("dp",)), (x,), training=False, outputs="full")
    expected = model.eval()(x)
    if not torch.allclose(compiled(x), expected.detach(), atol=1e-6):
        return ["dropout was drawn"]
    parameter = next(iter(compiled.parameters()))

    def learn() -> None:
        parameter.requires_grad_(True)
        try:
            compiled(x)
        finally:
            parameter.requires_grad_(False)

    specified = []
    for misuse in (
        lambda: compiled(x).sum().backward(),
        lambda: compiled.train(),
        lambda: compiled.train_step(x),
        lambda: compiled(x.clone().requires_grad_()),
        lambda: compiled.generate(x.long()),
        learn,
    ):
        try:
            misuse()
            specified.append("nothing")
        except InputError as error:
            specified.append(str(error))
    return specified


def test_who_would_train_it_is_told_why_not(ranks: Ranks) -> None:
    for specified in ranks.run(_misused, world_size=2):
        assert [each.split(" which")[0].split(",")[0] for each in specified] == [
            "backward through a model that was compiled with training=False",
            "the model was compiled with training=False",
            "train_step of a model that was compiled with training=False. Compile the model with training=True to "
            "train it.",
            "x needs a gradient",
            "generate of a _Scaled",
            "linear.weight needs a gradient",
        ]
