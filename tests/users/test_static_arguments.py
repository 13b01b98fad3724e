"""A model whose sizes follow from the values of an argument trains if that is named in `static_argnames=`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import CaptureError, InfeasibleError, InputError, PipelineError
from autopar.ir.sharding.mesh import Mesh
from tests.support.options import by_flag
from tests.support.parity import whole
from tests.support.ranks import Ranks, mesh

MESH = Mesh({"dp": 2})
STATIC: dict[str, Any] = {"static_argnames": ["ends"]}


class Packed(nn.Module):
    """Attention within texts of different lengths that lie one behind the other, and a mean over each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.qkv, self.leave = nn.Linear(8, 16), nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, x_NC: Tensor, ends: Tensor, labels: Tensor) -> Tensor:
        h_ND = self.enter(x_NC).relu()
        lengths = ends.diff(prepend=ends.new_zeros(1))
        parts = [each.split(lengths.tolist()) for each in self.qkv(h_ND).chunk(3, -1)]
        heads = ([each.unflatten(-1, (2, 8)).transpose(0, 1) for each in text] for text in zip(*parts, strict=True))
        mixed = [F.scaled_dot_product_attention(*each).transpose(0, 1).flatten(1) for each in heads]
        means = torch.stack([each.mean(0) for each in mixed])
        return F.cross_entropy(self.leave(h_ND + means.repeat_interleave(lengths, dim=0)), labels)


def _batch(*ends: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(sum(ends))
    x_NC = torch.randn(ends[-1], 8, generator=random)
    return {"x_NC": x_NC, "ends": torch.tensor(ends), "labels": torch.arange(ends[-1]) % 4}


BATCHES = (_batch(2, 8), _batch(5, 8), _batch(2, 8), _batch(1, 3, 8))


def _trained(model: Any) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses, gradients = [], {}
    for batch in BATCHES:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        gradients = gradients or {name: whole(each.grad) for name, each in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients, {name: whole(each) for name, each in model.named_parameters()}


def _on_ranks(strategy: str | None) -> tuple[Any, int, list[str]]:
    model = autopar.compile(Packed(), mesh((2,), ("tp",)), BATCHES[0], strategy=strategy, **by_flag(**STATIC))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trained = _trained(model)
    specified = [str(each.message) for each in found if "static argument" in str(each.message)]
    return trained, len(model._known), specified


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero3", "megatron"])
def test_it_trains_on_ranks_as_on_one_process_and_other_values_are_planned_anew(ranks: Ranks, strategy: str) -> None:
    expected = _trained(Packed())
    for found, num_plans, specified in ranks.run(_on_ranks, strategy):
        assert found[0] == pytest.approx(expected[0], rel=1e-4)
        torch.testing.assert_close(found[1:], expected[1:], rtol=1e-4, atol=1e-5)
        assert num_plans == 3
        assert len(specified) == 1
        assert "planned 3 times, as the values of the static argument ends changed" in specified[0]


def _with_other_values(inputs: str) -> str:
    ends = [batch["ends"] * (2 if inputs == "local" else 1) for batch in BATCHES]  # of the rows of all ranks
    batch = {**BATCHES[0], "ends": ends[0]}
    model = autopar.compile(Packed(), mesh((2,), ("dp",)), batch, inputs=inputs, **by_flag(**STATIC))
    model(**batch)
    with pytest.raises(InputError) as error:
        model(**{**batch, "ends": ends[dist.get_rank()]})
    return str(error.value)


@pytest.mark.parametrize("inputs", ["whole", "local"])
def test_values_that_differ_between_ranks_are_refused(ranks: Ranks, inputs: str) -> None:
    here, there = ([4, 16], [10, 16]) if inputs == "local" else ([2, 8], [5, 8])
    for found in ranks.run(_with_other_values, inputs):
        assert f"rank 0 with ends: static int64[2] = {here}; rank 1 with ends: static int64[2] = {there}" in found
        assert "Give the static argument ends the same values on every rank" in found


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = n + 1
        found = n.float()
        found[0] = x.sum()
        return self.layer(x)[: int(n[0])], n, found


def _returned() -> None:
    x, n = torch.ones(4, 8), torch.tensor([2, 3])
    model = autopar.compile(Returning(), mesh((1,), ("dp",)), capture=autopar.Capture(static_argnames=["n"]))
    for _ in range(2):
        part, found, written = model(x, n)
        assert part.shape == (3, 8)
        assert found.tolist() == [3, 4]
        assert written.tolist() == [32, 4]
        found.add_(1)


def test_outputs_that_are_static_belong_to_the_caller(ranks: Ranks) -> None:
    ranks.run(_returned, world_size=1)


def _with_buckets() -> None:
    with pytest.raises(
        InputError, match=r"buckets=…\) is given with Capture\(static_argnames=\['ends'\]\): .* without buckets"
    ):
        autopar.compile(Packed(), mesh((1,), ("dp",)), **by_flag(buckets="auto", **STATIC))


def test_buckets_are_refused_as_they_would_pad_next_to_the_values(ranks: Ranks) -> None:
    ranks.run(_with_buckets, world_size=1)


REFUSED: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    (
        {"static_argnames": ["end"]},
        InputError,
        "'end', which is no argument of Packed.forward; .* are x_NC, ends, labels",
    ),
    ({"static_argnames": "ends"}, InputError, "static_argnames='ends'.; give a list of names of arguments of forward"),
    (
        {**STATIC, "microbatches": 2},
        InputError,
        r"static_argnames=\['ends'\]\) is given with microbatches=2, .* Leave microbatches",
    ),
    (
        {**STATIC, "pipeline": "dp"},
        PipelineError,
        r"static_argnames=\['ends'\]\) is given on a mesh with a pipeline, .* without a",
    ),
)


@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_does_not_go_with_static_arguments_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        autopar.plan(Packed(), MESH, BATCHES[0], **by_flag(**options))


def test_a_plan_is_made_for_the_values_and_attached_with_them() -> None:
    plan = autopar.plan(Packed(), MESH, BATCHES[0], strategy="zero3", **by_flag(**STATIC))
    assert plan.verify().ok
    loaded = autopar.Plan.from_json(plan.to_json())
    assert loaded.attach(Packed(), BATCHES[0], strategy="zero3", **by_flag(**STATIC)).verify().ok
    with pytest.raises(autopar.PlanError):
        loaded.attach(Packed(), BATCHES[1], strategy="zero3", **by_flag(**STATIC))
    by_position = tuple(BATCHES[0].values())
    assert (
        autopar.plan(Packed(), MESH, by_position, strategy="zero3", **by_flag(**STATIC)).fingerprint == plan.fingerprint
    )


def test_the_refusal_names_the_argument_with_which_the_model_was_captured() -> None:
    with pytest.raises(CaptureError, match=r'static_argnames=\["ends"\]\), with which the model can be captured'):
        autopar.plan(Packed(), MESH, BATCHES[0])


@pytest.mark.slow
def test_meshes_are_compared_without_micro_batches_and_pipelines() -> None:
    options: dict[str, Any] = {"devices": 4, "hardware": "h100", "memory_conventions": "tensors", **STATIC}
    with pytest.raises(InfeasibleError, match="no mesh of 4 devices has a plan") as error:
        autopar.plan(Packed(), "auto", _batch(2000, 8000), **by_flag(memory=300_000, **options))
    assert "pp=" not in str(error.value)


class Clipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return self.layer(x)[: int(x.abs().sum())] * n


def test_the_refusal_names_no_argument_that_does_not_help() -> None:
    with pytest.raises(CaptureError) as error:
        autopar.plan(Clipped(), MESH, (torch.ones(4, 8), torch.tensor(2)))
    assert "static_argnames" not in str(error.value)
    with pytest.raises(CaptureError) as error:  # no values to try
        autopar.plan(Packed(), MESH, {name: each.to("meta") for name, each in BATCHES[0].items()})
    assert "static_argnames" not in str(error.value)
