"""Manual mode follows annotations only: Megatron's layouts by hand move what Megatron moves; nothing is searched."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.costs.plans.plan import Plan
from autopar.ir.sharding.mesh import Mesh
from autopar.runtime.collectives.mesh_axes import record_traffic
from tests.support.ranks import Ranks

FEATURES, HIDDEN = 16, 64


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, FEATURES)

    def forward(self, x_BSF: torch.Tensor) -> torch.Tensor:
        return x_BSF + self.down(nn.functional.gelu(self.up(x_BSF)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, FEATURES)
        self.layers = nn.ModuleList(MLP() for _ in range(2))

    def forward(self, x_BSF: torch.Tensor) -> torch.Tensor:
        h_BSF = self.embed(x_BSF)
        for layer in self.layers:
            h_BSF = layer(h_BSF)
        return h_BSF.square().mean()


def by_hand() -> Blocks:
    torch.manual_seed(0)
    model = autopar.annotate(Blocks(), "layers.*.up", tp="column")
    return autopar.annotate(model, "layers.*.down", tp="row")


def batch() -> torch.Tensor:
    return torch.randn(8, 4, FEATURES, generator=torch.Generator().manual_seed(1))


def planned(model: nn.Module, **axes: int) -> Plan:
    return autopar.plan(model, Mesh(axes, "cpu"), (batch(),), mode="manual")


def test_operations_between_a_column_and_a_row_follow_their_input() -> None:
    plan = planned(by_hand(), tp=2)
    roles = {row.name: row.roles for row in plan.rows if row.kind == "call" and row.module.startswith("layers.0")}
    assert [role for name, (role,) in roles.items() if "gelu" in name] == ["column"]
    moved = {(each.collective, each.backward) for row in plan.rows for each in row.transfers}
    assert moved == {("all_reduce", False), ("all_reduce", True)}


def test_parameters_that_nothing_was_stated_about_are_whole() -> None:
    for axes in ({"tp": 2}, {"dp": 2, "tp": 2}, {"dp": 2}):
        plan = planned(nn.Sequential(Blocks()) if "tp" not in axes else by_hand(), **axes)
        split = {row.name for row in plan.rows if row.kind == "parameter" and "S" in row.layout}
        assert all("up" in name or "down_weight" in name for name in split)
        assert bool(split) == ("tp" in axes)


def test_the_head_of_a_manual_plan_claims_no_optimum() -> None:
    plan = planned(by_hand(), dp=2, tp=2)
    head = str(plan).split("\n\n")[0]
    assert "as annotated (manual)" in head and "optimal" not in head
    assert Plan.from_json(plan.to_json()).mode == "manual"
    assert "optimal" in str(autopar.plan(by_hand(), Mesh({"tp": 2}, "cpu"), (batch(),)))


def test_a_move_between_named_layouts_is_listed() -> None:
    model = autopar.annotate(Blocks(), "layers.*.up", tp="column")
    plan = planned(autopar.annotate(model, "layers.*.down", tp="column"), tp=2)
    notes = [note for note in plan.notes if note.startswith("moved between layouts")]
    assert notes[0] == "moved between layouts: all_gather over tp from gelu of layers.0 to linear of layers.0.down"
    assert not any(note.startswith("moved between layouts") for note in planned(by_hand(), tp=2).notes)


def _train(axes: tuple[int, ...]) -> tuple[list[float], dict[str, torch.Tensor], dict[tuple[str, str], int]]:
    model, traffic = by_hand(), {}
    if axes:
        mesh = init_device_mesh("cpu", axes, mesh_dim_names=("dp", "tp"))
        model = autopar.compile(model, mesh, (batch(),), mode="manual")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(3):
        optimizer.zero_grad()
        with record_traffic() as counted:
            loss = model(batch())
            loss.backward()
        traffic = dict(counted.calls)
        optimizer.step()
        losses.append(float(loss.detach()))
    full = {}
    for name, each in model.named_parameters():
        full[name] = each.full_tensor() if isinstance(each, DTensor) else each
    return losses, {name: each.detach() for name, each in full.items()}, traffic


@pytest.mark.parametrize("axes", [(1, 2)])
def test_layouts_by_hand_train_as_one_process_with_megatrons_collectives(ranks: Ranks, axes: tuple[int, ...]) -> None:
    losses, parameters, _ = _train(())
    for found, trained, traffic in ranks.run(_train, axes, world_size=2):
        torch.testing.assert_close(found, losses)
        torch.testing.assert_close(trained, parameters, rtol=1e-4, atol=1e-5)
        layers = 2
        assert {axis: count for (kind, axis), count in traffic.items() if count} == {"tp": 2 * layers}
        assert {kind for (kind, _), count in traffic.items() if count} == {"all_reduce"}
