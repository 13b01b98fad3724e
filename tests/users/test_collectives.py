"""A forward written for DDP gathers over ranks itself: it is refused by its line, and works without the call."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed import all_reduce as reduced_by_name
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import CaptureError
from autopar.ir.sharding.mesh import Mesh
from tests.support.optimizing import losses_of
from tests.support.options import by_flag
from tests.support.parity import mesh
from tests.support.ranks import Ranks

X_BH = torch.arange(32.0).reshape(8, 4).sin()


class Contrastive(nn.Module):
    """CLIP's loss with negatives of all ranks, gathered in one of the ways that are in use."""

    def __init__(self, how: str, over: DeviceMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how
        self.over = over

    def gathered(self, x: Tensor) -> Tensor:
        if self.how == "nn.functional":
            return torch.cat(differentiable.all_gather(x))
        if self.how == "functional":
            return funcol.all_gather_tensor_autograd(x, 0, [0, 1])
        if self.how == "list":
            parts = [torch.empty_like(x) for _ in range(2)]
            dist.all_gather(parts, x)
            return torch.cat(parts)
        if self.how == "work":
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            work.wait()
        if self.how == "by name":
            reduced_by_name(torch.tensor(8.0))
        if self.how == "group":
            assert dist.group.WORLD is not None
            dist.group.WORLD.allreduce([x]).wait()
        if self.how == "rank":
            return x + dist.get_rank()
        if self.how == "size" and dist.is_initialized() and dist.get_world_size() > 1:
            return x
        if self.how == "mesh":
            assert self.over is not None
            return x + self.over.get_local_rank()
        return x

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gathered(self.image(x)) @ self.gathered(self.text(x)).mT
        return nn.functional.cross_entropy(logits, torch.arange(len(logits)))


NAMED = {
    "nn.functional": "torch.distributed.nn.functional.all_gather()",
    "functional": "torch.distributed._functional_collectives.all_gather_tensor_autograd()",
    "list": "torch.distributed.all_gather()",
    "work": "torch.distributed.all_reduce()",
    "by name": "torch.distributed.all_reduce()",
    "group": "ProcessGroup.allreduce()",
    "rank": "torch.distributed.get_rank()",
    "size": "torch.distributed.get_world_size()",
    "mesh": "DeviceMesh.get_local_rank()",
}


class Synchronized(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(4, 6), kind(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)).tanh().square().mean()


def _trained(model: nn.Module, x: Tensor) -> tuple[list[float], list[Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = losses_of(optimizer, [x] * 3, model)
    values = [*model.parameters(), *model.buffers()]
    return losses, [getattr(value, "full_tensor", lambda value=value: value)().detach() for value in values]


def _refused() -> dict[str, str]:
    specified = {}
    for how in NAMED:
        with pytest.raises(CaptureError) as found:
            autopar.compile(Contrastive(how, mesh((2,), ("dp",))), mesh((2,), ("dp",)), (X_BH,))
        specified[how] = str(found.value)
    wrapped = nn.Sequential(DistributedDataParallel(nn.Linear(4, 4)), nn.Linear(4, 4))
    with pytest.raises(CaptureError) as found:
        autopar.compile(wrapped, mesh((2,), ("dp",)), (X_BH,))
    return specified | {"wrapped": str(found.value)}


def _without() -> list[tuple[list[float], list[Tensor]]]:
    options = {"seed": 0, "hardware": "cpu"}
    contrastive = autopar.compile(
        Contrastive("none"), mesh((2,), ("dp",)), (X_BH,), strategy="zero3", **by_flag(**options)
    )
    norms = autopar.compile(
        Synchronized(nn.SyncBatchNorm), mesh((2,), ("dp",)), (X_BH[:4],), inputs="local", **by_flag(**options)
    )
    return [_trained(contrastive, X_BH), _trained(norms, X_BH.chunk(2)[dist.get_rank()])]


def test_collectives_and_ranks_in_forward_are_refused_by_name_and_never_wait(ranks: Ranks) -> None:
    for specified in ranks.run(_refused, world_size=2):
        for how, name in NAMED.items():
            assert f"the forward calls {name} (" in specified[how] and "test_collectives.py:" in specified[how]
            assert "sees the batch of all ranks" in specified[how]
        assert specified["wrapped"].startswith("0 is wrapped already (DistributedDataParallel)")
        assert "use its .module" in specified["wrapped"]


def test_without_the_call_the_loss_is_that_of_one_process_and_sync_batch_norm_needs_no_change(ranks: Ranks) -> None:
    expected = _trained(Contrastive("none"), X_BH), _trained(Synchronized(nn.BatchNorm1d), X_BH)
    for found in ranks.run(_without, world_size=2):
        for (losses, values), (of_one, values_of_one) in zip(found, expected, strict=True):
            assert losses == pytest.approx(of_one, rel=1e-5)
            torch.testing.assert_close(values, values_of_one, rtol=1e-4, atol=1e-5)


def test_a_library_that_asks_for_the_number_of_ranks_is_told_that_it_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import torch.distributed as dist\ndef several():\n    return dist.get_world_size() > 1\n"
    library: dict[str, object] = {"__name__": "a_library"}
    exec(compile(source, "/site-packages/a_library.py", "exec"), library)

    class Guarded(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            assert not library["several"]()  # type: ignore[operator]
            return super().forward(input).sum()

    autopar.plan(Guarded(4, 4), Mesh({"dp": 2}), (X_BH,))
