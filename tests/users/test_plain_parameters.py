"""The default plan keeps parameters plain tensors where splitting them gains less than DTensors cost an optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.compiler import tiles
from autopar.costs.hardware.load import load
from autopar.costs.plans.plan import Plan
from autopar.ir.sharding.mesh import Mesh
from autopar.planning import whole_parameters
from autopar.planning.simulated import SimulatedDraft
from tests.support.optimizing import losses_of
from tests.support.options import by_flag
from tests.support.ranks import Ranks

HOST = load("cpu")
FEATURES = 256


class Embedded(nn.Module):
    """Layers behind a projection, as of the patches of a small vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4 * FEATURES, FEATURES)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU()) for _ in range(6)))

    def forward(self, x_BPF: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embed(x_BPF)).square().mean()


class Reading(Embedded):
    """The same with a head and its loss, which may be taken in tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, x_BPF: torch.Tensor) -> torch.Tensor:
        labels_BP = x_BPF[..., 0].gt(0).long()
        logits_BPC = self.head(self.layers(self.embed(x_BPF)))
        return nn.functional.cross_entropy(logits_BPC.flatten(0, 1), labels_BP.flatten())


def batch() -> torch.Tensor:
    return torch.randn(8, 4, 4 * FEATURES, generator=torch.Generator().manual_seed(0))


def planned(dtensor_s: float, model: nn.Module | None = None, **options: object) -> Plan:
    hardware = replace(HOST, dtensor_s=dtensor_s, name="host")
    return autopar.plan(
        model or Embedded(), Mesh({"dp": 2}, "cpu"), (batch(),), hardware=hardware, **by_flag(**options)
    )  # type: ignore[arg-type]


def splits(plan: Plan) -> bool:
    return any(row.kind == "parameter" and "S" in row.layout for row in plan.rows)


def test_parameters_stay_plain_where_dtensors_cost_more_than_splitting_gains() -> None:
    free, priced = planned(0.0), planned(HOST.dtensor_s)
    assert splits(free) and not splits(priced)
    assert any(note.startswith("parameters stay plain tensors") for note in priced.notes)
    preset = planned(HOST.dtensor_s, strategy="data_parallel")
    assert priced.timeline().seconds <= 1.01 * preset.timeline().seconds
    assert priced.verify().ok and planned(HOST.dtensor_s).to_json() == priced.to_json()


def test_what_a_user_says_about_storage_is_kept() -> None:
    model = autopar.annotate(Embedded(), "embed", storage="dp")
    assert splits(planned(HOST.dtensor_s, model))
    assert splits(planned(HOST.dtensor_s).what_if("embed", storage="dp"))
    needed = planned(HOST.dtensor_s).peak_bytes
    least = planned(HOST.dtensor_s, strategy="zero3").peak_bytes
    assert splits(planned(HOST.dtensor_s, memory=(needed + least) // 2)), "no plan with whole parameters fits"


def test_a_plan_of_whole_parameters_is_compared_with_data_parallelism_if_it_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launches take most of its step, so that its sum says little, and two plans of whole parameters are compared."""
    compared = list[bool]()
    again = whole_parameters.planned_under

    def noted(*query: Any) -> SimulatedDraft | None:
        compared.append(True)
        return again(*query)

    monkeypatch.setattr(whole_parameters, "planned_under", noted)
    inputs = (torch.randn(128, 4, 4 * FEATURES),)
    plan = autopar.plan(Embedded(), Mesh({"dp": 2}), inputs, hardware="h100")
    preset = autopar.plan(Embedded(), Mesh({"dp": 2}), inputs, hardware="h100", strategy="data_parallel")
    assert plan.choices == preset.choices and plan.simulated > 2 * plan.device_seconds
    assert len(compared) == 1, "with whole parameters, which is data parallelism"


def test_a_limit_that_costs_nothing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is first looked for a plan that pays nothing for memory, and any other one is cut off."""
    monkeypatch.setattr(tiles, "WORTHWHILE", 0.0)
    free, within = (planned(HOST.dtensor_s, Reading(), memory=limit) for limit in (None, "1GB"))
    assert within.choices == free.choices and not splits(free) and splits(planned(0.0, Reading()))


def _train(plain: bool) -> tuple[list[float], bool]:
    torch.manual_seed(0)
    model = Embedded()
    if plain:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = autopar.compile(model, mesh, (batch(),))
    losses = losses_of(torch.optim.AdamW(model.parameters(), lr=1e-2), range(4), lambda _: model(batch()))
    return losses, any(isinstance(each, DTensor) for each in model.parameters())


def test_a_small_model_trains_with_plain_parameters_as_one_process_does(ranks: Ranks) -> None:
    expected, _ = _train(False)
    for losses, dtensors in ranks.run(_train, True, world_size=2):
        assert not dtensors
        # AdamW's first steps are as long for gradients that rounding alone makes: CPUs differ by up to 5e-6.
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0.0)
