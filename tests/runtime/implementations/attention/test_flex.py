"""Models that attend by flex_attention train on ranks as on one process, whatever splits samples and heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import flex_models
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh

STEPS = 3
ATTENTION = ("attention_by_mask", "scaled_dot_product_attention", "_safe_softmax")


@dataclass(frozen=True, slots=True)
class Trained:
    """Results of training."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    parameters: dict[str, Tensor | None] = field(default_factory=dict)
    splits: set[tuple[str, str]] = field(default_factory=set)
    """(mesh axis, what it splits) of the calls of attention."""


def train(model: nn.Module, pipelined: bool = False) -> Trained:
    """Train a model, compiled or not."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), Trained()
    for step in range(STEPS):
        optimizer.zero_grad()
        if pipelined:
            loss = model.train_step(*flex_models.batch(step))  # type: ignore[operator]
        else:
            loss = model(*flex_models.batch(step))
            loss.backward()
        found.losses.append(float(whole(loss)))  # type: ignore[arg-type]
        if step == 0:
            found.gradients.update((name, whole(p.grad)) for name, p in model.named_parameters())
        optimizer.step()
    found.parameters.update((name, whole(p)) for name, p in model.named_parameters())
    return found


def parallel(kind: str, sizes: tuple[int, ...], axes: tuple[str, ...], options: dict[str, Any]) -> Trained:
    """Train on the ranks of this process group."""
    import autopar

    requested: dict[str, Any] = {"hardware": SLOW_DEVICES, **options}
    compiled = autopar.compile(flex_models.build(kind), mesh(sizes, axes), flex_models.batch(0), **by_flag(**requested))
    found = train(compiled, "pp" in axes)
    if "pp" not in axes:
        rows = [row for row in compiled.plan.rows if row.operation in ATTENTION]
        found.splits.update((axis, role) for row in rows for axis, role in zip(axes, row.splits, strict=True))
    return found


def check(ranks: Ranks, kind: str, sizes: tuple[int, ...], axes: tuple[str, ...], **options: Any) -> list[Trained]:
    """Hold the ranks against one process with all scores written out."""
    expected = train(flex_models.build(kind, dense=True))
    found = ranks.run(parallel, kind, sizes, axes, options, world_size=int(torch.tensor(sizes).prod()), timeout=180)
    for each in found:
        torch.testing.assert_close(each.losses, expected.losses, rtol=1e-4, atol=1e-5)
        for ours, theirs in ((each.gradients, expected.gradients), (each.parameters, expected.parameters)):
            for name in ours:
                value = theirs[name]
                if value is not None and ours[name] is not None:
                    torch.testing.assert_close(
                        ours[name], value, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
                    )
    assert {name for each in found for name in each.parameters} == expected.parameters.keys()
    return found


KINDS = ("causal", "documents", "by heads", "alibi", "softcap", "both", "learned", "score alone")


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_samples_and_heads_are_split(ranks: Ranks, kind: str) -> None:
    found = check(ranks, kind, (2, 2), ("dp", "tp"), strategy="megatron")
    assert found[0].splits == {("dp", "data"), ("tp", "column")}


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_layers_are_computed_again(ranks: Ranks, recompute: str) -> None:
    check(ranks, "both", (2,), ("dp",), strategy="zero3", recompute=recompute)


@pytest.mark.slow
def test_a_pipeline_has_the_documents_on_every_stage(ranks: Ranks) -> None:
    check(ranks, "both", (2,), ("pp",), schedule="1f1b", microbatches=2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["both", "by heads"])
def test_positions_are_split(ranks: Ranks, kind: str) -> None:
    found = check(ranks, kind, (2,), ("sp",), strategy="context_parallel")
    assert found[0].splits == {("sp", "sequence")}


def test_the_planner_may_choose(ranks: Ranks) -> None:
    check(ranks, "alibi", (2, 2), ("dp", "tp"))
