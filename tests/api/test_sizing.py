"""Sizes that a deadline and a memory limit leave, with plans whose steps and memory are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autopar
from autopar.api import sizing
from autopar.errors import InfeasibleError, InputError, TimeLimitError
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import built_in
from tests.support.options import by_flag

DAY = 86400.0


class Plans:
    """Stands for `plan`: a step of so many seconds times devices, and so many bytes for each element of the inputs."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, work: float = 0.0, most: float = 1e9, least: float = 0.0
    ) -> None:
        self.requested: list[tuple[int, tuple[int, ...]]] = []
        self.work, self.most, self.least = work, most, least
        monkeypatch.setattr(sizing, "plan", self)

    def __call__(self, model: Any, mesh: str, inputs: Any, *, devices: int, **options: Any) -> Any:
        assert mesh == "auto"
        self.requested.append((devices, tuple(inputs[0].shape)))
        if inputs[0].numel() > self.most:
            raise InfeasibleError("no mesh has a plan:\nWhat came nearest is dp=1")
        seconds = max(self.work / devices, self.least)
        return SimpleNamespace(
            mesh=Mesh({"dp": devices}), peak_bytes=7, workload=SimpleNamespace(seconds=seconds), seconds=0.0
        )


MODEL, INPUTS = built_in("tiny-llama", 12, 16, 1)
TOKENS = 12 * 16 * 1e6
"""Tokens of a million steps."""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("work", "devices"), [(7.5 * DAY / 1e6, 8), (20 * DAY / 1e6, 24), (40 * DAY / 1e6, 48), (50 * DAY / 1e6, 64)]
)
def test_the_least_devices_are_whole_nodes_whose_odd_factors_divide_the_batch(
    monkeypatch: pytest.MonkeyPatch, work: float, devices: int
) -> None:
    plans = Plans(monkeypatch, work)
    found = sizing.least_devices(MODEL, INPUTS, tokens=TOKENS, days=1, hardware="h100")
    assert found.size == devices and found.plan.mesh.num_devices == devices
    assert all(size % 8 == 0 and size in (8, 16, 24, 32, 48, 64) for size, _ in plans.requested), (
        "40 and 56 do not suit 12"
    )
    assert f"{devices} devices: 192.00 M tokens in 1 days, 1,000,000 steps of at most 86.40 ms" in str(found)
    assert str(found).count(" yes ") == sum(each.is_enough for each in found.attempts)


def test_where_more_devices_do_not_help_the_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = Plans(monkeypatch, 50.0, least=2.0)
    with pytest.raises(InfeasibleError, match=r"a step takes 2.00 s on 64 devices, 2.00 s on half of them, and has to"):
        sizing.least_devices(MODEL, INPUTS, tokens=TOKENS * 1e3, days=1, hardware="h100")
    assert [size for size, _ in plans.requested] == [16, 32, 64]


def test_nothing_is_planned_that_computation_alone_makes_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = Plans(monkeypatch, 1e-9)
    slow = built_in("llama-1b", 64, 512, 1)
    sizing.least_devices(*slow, tokens="300B", days=1, hardware="h100")
    assert plans.requested[0][0] > 8


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ({"tokens": 0, "days": 1}, "0 is no number of tokens"),
        ({"tokens": "1X", "days": 1}, "'1X' is no number of tokens"),
        ({"tokens": 1e9, "days": -1}, "days=-1; give the days"),
        ({"tokens": 1e9, "days": 1, "device": 3}, "device is no option here"),
    ],
)
def test_what_is_no_question_is_refused(given: dict[str, Any], needed: str) -> None:
    with pytest.raises(InputError, match=needed):
        sizing.least_devices(MODEL, INPUTS, **by_flag(**given))


def test_inputs_without_tokens_have_no_deadline_and_no_sequence() -> None:
    model, inputs = built_in("tiny-mlp", 8, 8)
    floats = tuple(each for each in inputs if each.is_floating_point())
    with pytest.raises(InputError, match="so that tokens cannot be counted"):
        sizing.least_devices(model, inputs, tokens=1e9, days=1)
    with pytest.raises(InputError, match="no sequence"):
        sizing.largest_sequence(model, floats, devices=1, memory="1GB")


def test_the_largest_batch_and_sequence_are_those_that_fit_to_an_eighth(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = Plans(monkeypatch, most=100 * 16)
    batch = sizing.largest_batch(MODEL, INPUTS, devices=2, memory="1GB")
    assert batch.size == 96 and plans.requested[0] == (2, (12, 16)) and (2, (96, 16)) in plans.requested
    assert "96 samples: the most that fits on 2 devices within 1GB" in str(batch) and "What came nearest" in str(batch)
    plans.most = 12 * 100
    sequence = sizing.largest_sequence(MODEL, INPUTS, devices=2, memory="1GB")
    assert sequence.size == 96 and plans.requested[-1][1][0] == 12
    plans.most = 3
    with pytest.raises(InfeasibleError, match=r"no number of samples is known: .*; tried 12, 6, 3, 1"):
        sizing.largest_batch(MODEL, INPUTS, devices=2, memory="1GB")


def test_without_a_limit_any_batch_fits() -> None:
    with pytest.raises(InputError, match="memory is not given"):
        autopar.largest_batch(MODEL, INPUTS, devices=2)


def test_a_size_without_a_plan_in_time_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(model: Any, mesh: str, inputs: Any, **options: Any) -> Any:
        if inputs[0].shape[0] > 12:
            raise TimeLimitError("too short")
        return SimpleNamespace(mesh=Mesh({"dp": 2}), peak_bytes=7, workload=SimpleNamespace(seconds=1.0))

    monkeypatch.setattr(sizing, "plan", late)
    assert "no plan was found within the time limit" in str(sizing.largest_batch(MODEL, INPUTS, devices=2, memory=9))


@pytest.mark.slow
def test_a_batch_that_is_found_fits_and_the_next_does_not() -> None:
    model, inputs = built_in("tiny-mlp", 64, 8)
    options: dict[str, Any] = {"devices": 2, "hardware": "h100", "memory": 990_000_000, "max_axes": 1}
    found = autopar.largest_batch(model, inputs, **by_flag(**options))
    assert found.plan.reserved_bytes <= 990_000_000
    above = min(each.size for each in found.attempts if not each.is_enough)
    assert found.size < above <= found.size * (1 + 1 / 8) + 1
    with pytest.raises(InfeasibleError):
        larger = tuple(torch.zeros((above, *each.shape[1:]), dtype=each.dtype) for each in inputs)
        autopar.plan(model, "auto", larger, microbatches=1, **by_flag(**options))
