"""Optimizers of matrices on compiled models: as on one process, with the state and the collectives that are planned."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.optim import GaLoreAdamW, Muon
from tests.support.families import FAMILIES
from tests.support.optimizing import planned_for
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh

STEPS, RANK = 4, 8
KINDS: dict[str, tuple[type[Muon] | type[GaLoreAdamW], dict[str, Any]]] = {
    "muon": (Muon, {"lr": 0.01, "adamw_lr": 1e-3, "adamw_eps": 1e-4}),
    "galore": (GaLoreAdamW, {"lr": 1e-3, "eps": 1e-4, "rank": RANK, "update_proj_gap": 2}),
}
COLLECTIVES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}


class _Counting(TorchDispatchMode):
    """Bytes of the collectives that DTensors run, in NCCL's convention."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and func._opname in COLLECTIVES:
            larger = max(args[0].numel(), result.numel()) * args[0].element_size()
            self.num_bytes[COLLECTIVES[func._opname]] += larger
        return result


@dataclass(slots=True)
class _Run:
    losses: list[float]
    parameters: dict[str, Tensor]
    state_bytes: int = 0
    planned_bytes: int = 0
    moved: dict[str, int] | None = None
    planned: dict[str, int] | None = None


def _train(model: nn.Module, kind: str, in_backward: bool = False) -> _Run:
    made_by, settings = KINDS[kind]
    optimizer = made_by(model.named_parameters(), **settings)
    if in_backward:
        optimizer.step_in_backward()
    losses, counting = [], _Counting()
    for step in range(STEPS):
        args, kwargs = FAMILIES["llama"].inputs(step)
        optimizer.zero_grad()
        loss = FAMILIES["llama"].loss(model(*args, **kwargs))
        loss.backward()
        assert not in_backward or all(each.grad is None for each in model.parameters())
        with counting if step % 2 else torch.no_grad():  # steps that renew no basis
            optimizer.step()
        losses.append(loss.item())
    state = [x for values in optimizer.state.values() for x in values.values() if x.ndim]
    held = sum(x.to_local().nbytes if isinstance(x, DTensor) else x.nbytes for x in state)
    parameters = {name: whole(each) for name, each in model.named_parameters()}
    moved = {name: each // (STEPS // 2) for name, each in counting.num_bytes.items()}
    return _Run(losses, parameters, held, moved=moved)  # pyright: ignore[reportArgumentType]


def _compiled(kind: str, shape: tuple[int, ...], strategy: str, in_backward: bool = False) -> _Run:
    args, kwargs = FAMILIES["llama"].inputs(0)
    model = autopar.compile(
        FAMILIES["llama"].build(),
        mesh(shape, ("dp", "tp")[: len(shape)]),
        kwargs or args,
        strategy=strategy,
        optimizer=planned_for(kind, RANK),
        hardware=SLOW_DEVICES,
    )
    found = _train(model, kind, in_backward)
    rows = [row for row in model.plan.rows if row.kind == "parameter"]
    planned: Counter[str] = Counter()
    for row in rows:
        for each in row.transfers:
            planned[each.collective] += each.num_bytes
    found.planned = dict(planned)
    assert model.plan.memory is not None
    found.planned_bytes = round(model.plan.memory.parts["optimizer"])
    return found


CASES = [
    ("muon", (2,), "zero3"),
    pytest.param("galore", (2,), "zero3", marks=pytest.mark.slow),
    pytest.param("galore", (2, 2), "fsdp_megatron", marks=pytest.mark.slow),
    pytest.param("muon", (2, 2), "fsdp_megatron", marks=pytest.mark.slow),
    pytest.param("galore", (4,), "megatron", marks=pytest.mark.slow),
    pytest.param("galore", (2,), "data_parallel", marks=pytest.mark.slow),
    pytest.param("muon", (2, 2), "zero3", marks=pytest.mark.slow),
    pytest.param("galore", (2, 2), "zero3", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape", "strategy"), CASES)
def test_compiled_models_are_trained_as_on_one_process(
    ranks: Ranks, kind: str, shape: tuple[int, ...], strategy: str
) -> None:
    wanted = _train(FAMILIES["llama"].build(), kind)
    start = {name: each.detach() for name, each in FAMILIES["llama"].build().named_parameters()}
    for found in ranks.run(_compiled, kind, shape, strategy, world_size=math.prod(shape), timeout=180):
        torch.testing.assert_close(found.losses, wanted.losses, rtol=2e-4, atol=0)
        for name, value in found.parameters.items():
            # Muon iterates in bfloat16, which takes gradients apart that differ by the rounding of float32.
            apart, changed = value - wanted.parameters[name], wanted.parameters[name] - start[name]
            assert apart.norm() <= (0.15 if kind == "muon" else 1e-3) * changed.norm(), name
        assert found.state_bytes == found.planned_bytes < wanted.state_bytes or strategy == "data_parallel"
        assert found.moved == found.planned


@pytest.mark.slow
def test_parameters_are_updated_in_the_backward_as_behind_it(ranks: Ranks) -> None:
    behind = ranks.run(_compiled, "galore", (2,), "zero3", world_size=2, timeout=180)
    for found, wanted in zip(ranks.run(_compiled, "galore", (2,), "zero3", True, world_size=2), behind, strict=True):
        assert found.losses == wanted.losses
        torch.testing.assert_close(found.parameters, wanted.parameters, rtol=0, atol=0)
