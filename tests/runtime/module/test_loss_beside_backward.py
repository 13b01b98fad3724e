"""The sum of a loss over ranks overlaps with the backward, and is waited for when somebody reads it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.runtime.collectives.mesh_axes import record_traffic
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

SAMPLES, POSITIONS, TOKENS, FEATURES = 8, 6, 12, 8
IGNORED = -100


def _labels() -> Tensor:
    """Return labels of which the samples of some ranks have many more to ignore."""
    labels = torch.randint(0, TOKENS, (SAMPLES, POSITIONS), generator=torch.Generator().manual_seed(1))
    labels[:3, 1:] = IGNORED
    return labels


class Mean(nn.Module):
    """The mean over the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(TOKENS, FEATURES)
        self.head = nn.Linear(FEATURES, TOKENS)

    def logits(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(ids)))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(ids).flatten(0, 1), labels.flatten())


class Divided(Mean):
    """A sum that the model divides itself, and a further term."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(ids)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / (labels != IGNORED).sum() + 0.1 * logits.square().mean()


class Bent(Mean):
    """A loss that its gradient depends on."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(ids, labels).exp()


def _of_rank_zero(loss: Tensor) -> None:
    if dist.get_rank() == 0:
        assert loss.item() > 0
    loss.backward()


def _twice(loss: Tensor) -> None:
    loss.backward(torch.tensor(0.5), retain_graph=True)
    (loss / 2).backward()


def _read_behind(loss: Tensor) -> None:
    loss.backward()
    assert float(loss) > 0


def _hooked(loss: Tensor) -> None:
    found: list[Tensor] = []
    loss.register_hook(found.append)
    loss.backward()
    assert found == [torch.ones(())]


def _never_read(loss: Tensor) -> None:
    loss.backward()


LOOPS: dict[str, Callable[[Tensor], None]] = {
    "never read": _never_read,
    "read behind": _read_behind,
    "read by one rank": _of_rank_zero,
    "two halves": _twice,
    "hooked": _hooked,
}


def _compiled(model: nn.Module, axes: dict[str, int], **options: Any) -> Any:
    given = torch.zeros(SAMPLES, POSITIONS, dtype=torch.int64), _labels()
    on = mesh(tuple(axes.values()), tuple(axes))
    return autopar.compile(model, on, given, hardware=SLOW_DEVICES, **by_flag(**options))


def _trains(kind: type[Mean], axes: dict[str, int], loop: str, options: dict[str, Any]) -> None:
    eager = kind()
    model = _compiled(copy.deepcopy(eager), axes, **options)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (eager, model)]
    for step in range(3):
        ids = torch.randint(0, TOKENS, (SAMPLES, POSITIONS), generator=torch.Generator().manual_seed(step))
        expected, found = eager(ids, _labels()), model(ids, _labels())
        expected.backward()
        LOOPS[loop](found)
        torch.testing.assert_close(found.detach(), expected.detach())
        for each in optimizers:
            each.step()
            each.zero_grad()
    for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        whole = getattr(p, "full_tensor", lambda p=p: p)()
        torch.testing.assert_close(whole, q, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.sample(4)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", [Divided, Mean, Bent])
def test_a_loop_trains_as_one_process_however_it_reads_the_loss(ranks: Ranks, kind: type[Mean], loop: str) -> None:
    ranks.run(_trains, kind, {"dp": 2}, loop, {"strategy": "data_parallel"})


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"strategy": "zero3"}, {}], ids=str)
@pytest.mark.parametrize("kind", [Divided, Mean])
def test_a_loop_on_two_axes_trains_as_one_process(ranks: Ranks, kind: type[Mean], options: dict[str, Any]) -> None:
    ranks.run(_trains, kind, {"dp": 2, "tp": 2}, "read behind", options, world_size=4)


def _issued() -> list[bool]:
    """Return whether the sum of the loss has been waited for: before the backward, behind it, and when it is read."""
    model = _compiled(Divided(), {"dp": 2}, strategy="data_parallel")
    with record_traffic() as traffic:
        loss: Any = model(torch.zeros(SAMPLES, POSITIONS, dtype=torch.int64), _labels())
    assert traffic.num_bytes["all_reduce", "dp"] == torch.float32.itemsize
    found = [loss._plain is not None]
    loss.backward()
    found.append(loss._plain is not None)
    assert loss.item() > 0
    return [*found, loss._plain is not None]


def test_the_backward_does_not_wait_for_the_loss(ranks: Ranks) -> None:
    assert ranks.run(_issued) == [[False, False, True]] * 2


def _compiled_by_torch() -> None:
    eager = Divided()
    model = _compiled(copy.deepcopy(eager), {"dp": 2}, strategy="data_parallel")
    model.compile(backend="aot_eager")
    ids = torch.zeros(SAMPLES, POSITIONS, dtype=torch.int64)
    found, expected = model(ids, _labels()), eager(ids, _labels())
    found.backward()
    expected.backward()
    torch.testing.assert_close(found.detach(), expected.detach())
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.slow
def test_a_model_that_torch_compiles_trains_as_one_process(ranks: Ranks) -> None:
    ranks.run(_compiled_by_torch)
