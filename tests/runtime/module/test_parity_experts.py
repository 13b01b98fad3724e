"""Hugging Face's Mixture-of-Experts on real ranks, with every split of experts, compared with one process.

One call of the ranks trains many cases: what it captures of a family serves all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import autopar
from autopar.planning import best_plan
from tests.support.capped_experts import capped_family
from tests.support.divided_experts import Form, batches, choices, forced, with_experts
from tests.support.expert_families import WITH_EXPERTS
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, Case, Training, build, compare, parallel, train, train_alone, whole
from tests.support.ranks import Ranks, mesh

Way = tuple[str, ...]
"""Choice that shards experts over each mesh axis, see `choices`; ("auto",) is the solver's choice on four ranks."""

WAYS: tuple[Way, ...] = (("t",), ("x",), ("t+x",), ("auto",), ("t", "t+x"))
QUICK = (("mixtral", ("t+x",)), ("qwen3_moe", ("x",)), ("gpt_oss", ("t", "t+x")))


def case_of(family: str, way: Way, steps: int, **options: Any) -> Case:
    """A family on four ranks."""
    return Case(family, (4,) if len(way) == 1 else (2, 2), options={"hardware": SLOW_DEVICES, **options}, steps=steps)


def divided(way: Way) -> Any:
    """Within this, plans divide experts so."""
    pins_of = best_plan.pins_of
    forcing = (lambda space, pins: pins) if way == ("auto",) else forced(choices(*way))
    return mock.patch.object(
        best_plan, "pins_of", lambda specified, space, *given: forcing(space, pins_of(specified, space, *given))
    )


def _trained(cases: Sequence[tuple[str, Way]], steps: int, options: dict[str, Any]) -> list[Training]:
    found = []
    for family, way in cases:
        with divided(way):
            found.append(parallel(case_of(family, way, steps, **options)))
    return found


def alone(family: str, way: Way, steps: int) -> Training:
    return train_alone(*case_of(family, way, steps).graph, steps, 1)


def hold(
    ranks: Ranks,
    cases: Sequence[tuple[str, Way]],
    steps: int,
    alone: Callable[[str, Way, int], Training] = alone,
    **options: Any,
) -> None:
    """Train the cases on real ranks and hold every one against one process, bytes in the mean of the ranks."""
    found = ranks.run(_trained, cases, steps, options, world_size=4, timeout=400)
    for (family, way), trainings in zip(cases, zip(*found, strict=True), strict=True):
        expected = alone(family, way, steps)
        counted: Counter[tuple[str, str]] = Counter()
        for training in trainings:
            counted.update(training.counted)
        mean: Any = {key: num_bytes / len(trainings) for key, num_bytes in counted.items()}
        for training in trainings:
            try:
                compare(replace(training, counted=mean), expected, rtol=1e-4, atol=1e-5, floor=0.05)
            except AssertionError as error:
                raise AssertionError(f"{family}, {'|'.join(way)}: {error}") from error


@pytest.mark.slow
def test_families_with_experts_train_on_ranks_as_on_one_process(ranks: Ranks) -> None:
    hold(ranks, QUICK, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_a_family_trains_with_its_experts_divided_in_every_way(ranks: Ranks, family: str) -> None:
    hold(ranks, [(family, way) for way in WAYS], steps=5)


def capped_alone(family: str, way: Way, steps: int) -> Training:
    """One process whose experts take 2 of the rows of each sample."""
    case = case_of(family, way, steps)
    (num_samples, _) = WITH_EXPERTS[family].inputs(0)[1]["input_ids"].shape
    return train(case, capped_family(build(case), num_samples, limit=2))


CAPPED = [("mixtral", way) for way in (("t",), ("x",), ("t+x",), ("x", "t+x"), ("t+x", "t+x"))]


@pytest.mark.parametrize("cases", [CAPPED[2:3], pytest.param(CAPPED, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_ranks_drop_the_rows_beyond_a_capacity_as_one_process_does(ranks: Ranks, cases: list[tuple[str, Way]]) -> None:
    # 16 positions with 2 of 8 experts each: 4 rows of a sample for each.
    hold(ranks, cases, 5, capped_alone, capacity_factor=0.5)


PADDED = [(name, way) for name in ("qwen3_moe", "gpt_oss") for way in (*WAYS, ("t+x", "o"))]


@pytest.mark.parametrize(
    ("cases", "options"),
    [
        ([("mixtral", ("t+x",))], {"padded_rows": 3.0}),
        pytest.param(PADDED, {"padded_rows": 4.0}, marks=pytest.mark.slow),
        pytest.param(CAPPED, {"padded_rows": 2.0, "capacity_factor": 0.5}, marks=pytest.mark.slow),
    ],
    ids=["quick", "all", "capped"],
)
def test_ranks_whose_rows_are_padded_train_as_one_process_does(
    ranks: Ranks, cases: list[tuple[str, Way]], options: dict[str, Any]
) -> None:
    hold(ranks, cases, 2, capped_alone if "capacity_factor" in options else alone, **options)


def _family(way: Way, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """Qwen3-MoE on all ranks, from weights of its own."""
    case = case_of("qwen3_moe", way, steps=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        source = WITH_EXPERTS["qwen3_moe"].build()
        for parameter in source.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    axes = dict(zip(case.axes, (dist.get_world_size(),) if len(way) == 1 else (2, 2), strict=True))
    with divided(way):
        model = autopar.compile(source, mesh(tuple(axes.values()), tuple(axes)), batch(0), hardware=SLOW_DEVICES)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def batch(step: int) -> dict[str, Any]:
    return WITH_EXPERTS["qwen3_moe"].inputs(step)[1]


def _steps(model: Any, optimizer: torch.optim.Optimizer, number: int) -> dict[str, torch.Tensor]:
    """The weights after some steps."""
    for step in range(number):
        optimizer.zero_grad()
        model(**batch(step)).loss.backward()
        optimizer.step()
    return {name: whole(p) for name, p in model.named_parameters()}  # type: ignore[misc]


def _save(folder: str, way: Way) -> dict[str, torch.Tensor]:
    model, optimizer = _family(way, seed=1)
    _steps(model, optimizer, 2)
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    return _steps(model, optimizer, 2)


def _load(folder: str, way: Way) -> dict[str, torch.Tensor]:
    model, optimizer = _family(way, seed=2)
    _steps(model, optimizer, 1)  # so that the optimizer has a state to load into
    weights, moments = get_state_dict(model, optimizer)
    load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return _steps(model, optimizer, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"), [((2, ("t+x",)), (4, ("t+x",))), ((4, ("x",)), (4, ("t", "t+x"))), ((4, ("t",)), (2, ("x",)))]
)
def test_a_checkpoint_goes_on_where_experts_are_divided_otherwise(
    ranks: Ranks, source: tuple[int, Way], target: tuple[int, Way], tmp_path: Any
) -> None:
    saved = ranks.run(_save, str(tmp_path), source[1], world_size=source[0], timeout=120)
    for found in ranks.run(_load, str(tmp_path), target[1], world_size=target[0], timeout=120):
        torch.testing.assert_close(found, saved[0], rtol=1e-4, atol=1e-5)


def _under_torch_compile(
    dtype: torch.dtype,
    backend: str,
    capacity_factor: float | None = None,
    shared: Literal["", "before"] = "",
    recompute: str = "none",
    padded: float | None = None,
) -> None:
    example = batches(1, dtype)[0]
    options: dict[str, Any] = {
        "hardware": SLOW_DEVICES,
        "capacity_factor": capacity_factor,
        "recompute": recompute,
        "padded_rows": padded,
    }
    with divided(("t+x",)):
        model = autopar.compile(
            with_experts(Form(shared=shared), dtype), mesh((2,), ("dp",)), example, **by_flag(**options)
        )
    found = []
    for step in (model, torch.compile(model, backend=backend)):
        model.zero_grad()
        loss = step(**example)
        loss.backward()
        found.append([loss.detach(), *(whole(parameter.grad) for parameter in model.parameters())])
    torch._dynamo.reset()
    tolerance = 0.0 if backend == "aot_eager" else 4 * torch.finfo(dtype).eps  # inductor fuses what rounds between
    for plain, on_top in zip(*found, strict=True):
        torch.testing.assert_close(on_top, plain, rtol=tolerance, atol=tolerance * plain.abs().max().item())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torch_compile_gives_the_same_step(ranks: Ranks, dtype: torch.dtype, backend: str) -> None:
    ranks.run(_under_torch_compile, dtype, backend, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile_gives_the_same_step_while_rows_travel(ranks: Ranks, backend: str) -> None:
    ranks.run(_under_torch_compile, torch.float32, backend, None, "before", timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile_drops_the_same_rows(ranks: Ranks, backend: str) -> None:
    ranks.run(_under_torch_compile, torch.float32, backend, 0.5, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["", "before"])
def test_torch_compile_pads_the_same_rows(ranks: Ranks, shared: str) -> None:
    ranks.run(_under_torch_compile, torch.float32, "aot_eager", None, shared, "none", 2.0, timeout=300)


@pytest.mark.slow
def test_torch_compile_computes_experts_again(ranks: Ranks) -> None:
    ranks.run(_under_torch_compile, torch.float32, "aot_eager", None, "", "full", timeout=300)
