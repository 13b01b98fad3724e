"""A preset that leaves the main computation whole says so, with its share; one that splits it says nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.costs.plans.plan import Plan
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import built_in
from autopar.planning import replicated_work
from tests.support.options import by_flag


@torch.library.custom_op("replicated_work::project", mutates_args=())
def project(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


project.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[-1]))
project.register_autograd(
    lambda context, grad: (grad @ context.saved_tensors[1].mT, context.saved_tensors[0].mT @ grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Unruled(nn.Module):
    """Three quarters of the products are in an operation without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.weight = nn.Linear(16, 16, bias=False), nn.Parameter(torch.ones(16, 48))

    def forward(self, x: Tensor) -> Tensor:
        return project(self.up(x), self.weight).square().mean()


class Partly(nn.Module):
    """An operation without a rule, used twice, next to matmuls that take most of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.weight = nn.Linear(64, 256), nn.Parameter(torch.ones(256, 256))
        self.wide = nn.Sequential(nn.Linear(256, 4096), nn.Linear(4096, 256))

    def forward(self, x: Tensor) -> Tensor:
        return project(project(self.wide(self.up(x)), self.weight), self.weight).square().mean()


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256, 256))

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight)


def _warned(*args: Any, word: str, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        autopar.plan(*args, **by_flag(**options))
    return [str(each.message) for each in found if word in str(each.message)]


def _specified(
    model: nn.Module, inputs: tuple[Tensor, ...], strategy: str, axes: dict[str, int], **options: Any
) -> list[str]:
    return _warned(model, Mesh(axes), inputs, strategy=strategy, word="replicated", **options)


ADVICE = 'Give it a rule by autopar.register_rule("replicated_work::project", …): docs/how-to/own-operations.md'
PARTLY = 2 * 256**2 / (64 * 256 + 2 * 256 * 4096 + 2 * 256**2)


def test_an_operation_without_a_rule_is_reported_with_its_share_of_the_step() -> None:
    plan = autopar.plan(Partly(), Mesh({"dp": 2}), (torch.ones(1024, 64),))
    (whole,) = plan.kept_whole
    assert (whole.operation, whole.calls, whole.reason) == ("replicated_work::project", 2, "no rule")
    assert whole.flops_share == pytest.approx(PARTLY)
    assert whole.num_bytes == 4 * 2 * (1024 * 256 + 256 * 256 + 1024 * 256)
    rows = [row for row in plan.rows if row.name in (plan.unruled or {})]
    assert whole.seconds == pytest.approx(sum(row.seconds for row in rows)) and len(rows) == 2
    assert whole.seconds_share == pytest.approx(whole.seconds / sum(row.seconds for row in plan.rows))
    assert Plan.from_json(plan.to_json()).kept_whole == plan.kept_whole
    assert plan.verify().ok and ADVICE in str(plan)


def test_a_warning_names_it_with_its_share_and_what_to_do() -> None:
    (text,) = _warned(Partly(), Mesh({"dp": 2}), (torch.ones(1024, 64),), word="project")
    assert text.startswith("replicated_work::project (2 calls) has no rule: each of 2 devices computes it whole")
    assert f"{PARTLY:.0%} of the FLOPs and" in text and text.endswith(f"of the step's seconds. {ADVICE}.")


def test_the_stages_of_a_pipeline_are_reported_as_one(recwarn: pytest.WarningsRecorder) -> None:
    stages = [nn.Sequential(nn.Linear(64, 256), Projected()) for _ in range(4)]
    plan: Any = autopar.plan(
        nn.Sequential(*(nn.Sequential(each, nn.Linear(256, 64)) for each in stages)),
        Mesh({"pp": 2, "dp": 2}),
        (torch.ones(1024, 64),),
        pipeline=autopar.Pipeline(schedule="gpipe"),
        microbatches=2,
    )
    (whole,) = plan.kept_whole
    parts = [each for stage in plan.stages for each in stage.plan.kept_whole]
    assert whole.calls == 4 and whole.seconds == pytest.approx(sum(each.seconds for each in parts))
    assert whole.seconds_share == pytest.approx(whole.seconds / sum(stage.plan.seconds for stage in plan.stages))
    assert ADVICE in str(plan)
    (text,) = [str(each.message) for each in recwarn if "project" in str(each.message)]
    assert (
        "project in 0.0.1 (4 calls) has no rule: each of 4 devices" in text and "an unknown share of the FLOPs" in text
    )


def test_on_one_device_nothing_is_replicated() -> None:
    assert not _warned(Partly(), Mesh({"dp": 1}), (torch.ones(1024, 64),), word="project")


def test_a_product_without_a_rule_is_named_with_its_share() -> None:
    (text,) = _specified(Unruled(), (torch.ones(4, 16),), "data_parallel", {"dp": 2})
    assert "strategy='data_parallel' leaves 75% of the FLOPs replicated over dp: project" in text
    assert "which has no rule. Each of its devices computes them whole" in text


def test_convolutions_that_megatron_leaves_whole_are_named() -> None:
    model, inputs = built_in("tiny-cnn", 8, 8)
    (text,) = _specified(model, inputs, "megatron", {"dp": 2, "tp": 2})
    assert "of the FLOPs replicated over tp: conv2d in blocks.0.conv" in text


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
@pytest.mark.parametrize("strategy", ["data_parallel", "zero3", "megatron", "fully_replicated"])
def test_nothing_is_stated_where_the_main_computation_is_split_or_meant_to_be_whole(name: str, strategy: str) -> None:
    model, inputs = built_in(name, 8, 16)
    assert not _specified(model, inputs, strategy, {"dp": 2, "tp": 2})


@pytest.mark.slow
def test_the_stages_of_a_pipeline_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = built_in("tiny-llama", 8, 16)
    assert not _specified(model, inputs, "data_parallel", {"pp": 2, "dp": 2}, schedule="gpipe", microbatches=2)
    monkeypatch.setattr(replicated_work, "MEANT", ())
    (text,) = _specified(model, inputs, "fully_replicated", {"pp": 2, "dp": 2}, schedule="gpipe", microbatches=2)
    assert "leaves 100% of the FLOPs replicated over dp" in text
