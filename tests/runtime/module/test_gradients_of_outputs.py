"""Values that only feed outputs besides the loss have no gradient, and a plan holds no bytes of one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.collectives.mesh_axes import record_traffic
from tests.support.simulation.simulate import from_ranks, simulate
from tests.support.simulation.training import SLOW_DEVICES, planning_alone, unshare

FEATURES = 8


class WithScores(nn.Module):
    """A loss, and scores made by products that the loss leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.router = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.scores = nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        routed = self.router(h)
        return (h * routed.softmax(-1)).square().mean(), self.scores(routed.sigmoid())


def test_bytes_are_those_of_the_gradients_that_the_loss_sends_back() -> None:
    with simulate(4) as mode, planning_alone(mode, lambda space, pins: pins):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = torch.randn(8, FEATURES)
        model = WithScores()
        autopar.annotate(model, "scores", tp="row")
        compiled = autopar.compile(model, mesh, (x,), hardware=SLOW_DEVICES)
        unshare(compiled, mode)
        plan = compiled.plan
        with record_traffic() as traffic:
            compiled(from_ranks([x] * 4))[0].backward()
    predicted = {key: count for key, count in plan.traffic.items() if count}
    assert plan.choices["linear_default_2"].endswith("k")
    assert predicted == {key: int(count) for key, count in traffic.num_bytes.items() if count}
    assert plan.reprice().traffic == predicted
