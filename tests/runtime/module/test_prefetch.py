"""Weights that are fetched ahead train as those that are not, bit by bit, and as on one process."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import autopar
from tests.runtime.rewrite.test_prefetch import Stack
from tests.support.parity import SLOW_DEVICES, Case, Training, parallel
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.training import Steps, fault_of, train_alone, train_on_ranks

DEPTHS = (0, 1, 2)


def _case(shape: tuple[int, ...], **options: object) -> Case:
    frozen = ("layers.0",) if options.pop("frozen", False) else ()
    return Case("llama", shape, (), {"hardware": SLOW_DEVICES, "strategy": "zero3", **options}, steps=3, frozen=frozen)


def _at_every_depth(case: Case) -> list[Training]:
    return [parallel(replace(case, options={**case.options, "prefetch": depth})) for depth in DEPTHS]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "case",
    [
        _case((2,)),
        pytest.param(_case((2,), recompute="full"), marks=pytest.mark.slow),
        _case((2,), precision="bf16-mixed"),
        _case((2,), frozen=True),
        _case((2, 2), strategy="fsdp_megatron", recompute="selective"),
    ],
    ids=["zero3", "recompute", "mixed", "frozen", "two axes"],
)
def test_ranks_train_alike_however_far_ahead_weights_are_fetched(ranks: Ranks, case: Case) -> None:
    for none, *others in ranks.run(_at_every_depth, case, world_size=torch.Size(case.mesh).numel(), timeout=180):
        assert any(collective == "all_gather" for collective, _ in none.counted)
        for found in others:
            assert found.counted == none.counted == {key: count for key, count in found.predicted.items() if count}
            assert found.losses == none.losses
            for kind in ("gradients", "parameters"):
                torch.testing.assert_close(getattr(found, kind), getattr(none, kind), rtol=0, atol=0)


def _printed() -> str:
    compiled = autopar.compile(
        Stack(), mesh((2,), ("dp",)), (torch.ones(8, 16),), strategy="zero3", memory=autopar.Memory(prefetch=1)
    )
    with contextlib.redirect_stdout(io.StringIO()) as text:
        compiled.print_code()
    return text.getvalue()


def test_what_is_printed_is_what_runs(ranks: Ranks) -> None:
    code = ranks.run(_printed)[0]
    issued, products, waited = (
        code.index(each) for each in (" start_gather = start_gather('dp'", "# layers.0.up", "in_flight=start_gather)")
    )
    assert issued < products < waited


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("axes", "depth", "options"),
    [
        ({"dp": 2}, 1, {"strategy": "zero3", "recompute": "full"}),
        ({"dp": 2, "tp": 2}, 2, {"strategy": "hsdp"}),
        pytest.param({"dp": 2}, 1, {"strategy": "zero3", "microbatches": 2}, marks=pytest.mark.slow),
    ],
    ids=["recompute", "hsdp", "micro-batches"],
)
def test_simulated_ranks_train_as_one_process(axes: dict[str, int], depth: int, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = Stack().double()
    values = torch.Generator().manual_seed(1)
    batches: list[dict[str, Tensor]] = [
        {"x": torch.randn(8, 16, generator=values, dtype=torch.float64)} for _ in range(2)
    ]
    steps = Steps(batches, "adamw", int(options.get("microbatches", 1)))  # type: ignore[call-overload]
    found = train_on_ranks(model, steps, axes, {**options, "prefetch": depth})
    torch.manual_seed(0)
    expected = train_alone(Stack().double(), steps)
    assert not fault_of(found, expected)
    assert found.plan is not None
    assert found.plan.prefetch == depth
