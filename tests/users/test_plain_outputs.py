"""Outputs as a script finds them: plain tensors of the samples that it gave, gathered when they are first used."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import autopar
from autopar.errors import InputError
from autopar.runtime.collectives.mesh_axes import record_traffic
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import RankError, Ranks, mesh

SAMPLES, POSITIONS, TOKENS, FEATURES = 4, 6, 12, 8
IDS = torch.randint(0, TOKENS, (SAMPLES, POSITIONS), generator=torch.Generator().manual_seed(0))


class WithLoss(nn.Module):
    """Returns a loss and logits, as the models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(TOKENS, FEATURES)
        self.head = nn.Linear(FEATURES, TOKENS)

    def forward(self, ids: Tensor) -> Any:
        logits = self.head(torch.tanh(self.embedding(ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten()), "logits": logits}


class Logits(WithLoss):
    def forward(self, ids: Tensor) -> Any:
        return self.head(torch.tanh(self.embedding(ids)))


def _split_head(model: nn.Module, **options: Any) -> Any:
    """The model with logits that are split by tokens over two ranks; to gather them costs no copy worth avoiding."""
    autopar.annotate(model, "head", tp="column")
    hardware = replace(SLOW_DEVICES, memory_bytes_per_s=1e15)
    return autopar.compile(model, mesh((2,), ("tp",)), (IDS,), hardware=hardware, **by_flag(**options))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    whole = lambda x: getattr(x, "full_tensor", lambda: x)()  # noqa: E731
    return {name: whole(p.grad).clone() for name, p in model.named_parameters()}


def _reads_nothing_then_logits() -> None:
    eager, model = WithLoss(), _split_head(WithLoss())
    with record_traffic() as unread:
        output = model(IDS)
        logits = output["logits"]
        assert isinstance(logits, Tensor) and not isinstance(logits, DTensor)
        assert logits.shape == (SAMPLES, POSITIONS, TOKENS) and logits.size(-1) == TOKENS and len(logits) == SAMPLES
        assert (logits.dtype, logits.device.type, logits.ndim, logits.dim()) == (torch.float32, "cpu", 3, 3)
        assert logits.requires_grad and not logits.is_leaf and logits.is_floating_point()
        output["loss"].backward()
    assert dict(unread.num_bytes) == {key: count for key, count in model.plan.traffic.items() if count}
    eager(IDS)["loss"].backward()
    torch.testing.assert_close(_gradients(model), _gradients(eager))

    for each in (eager, model):
        each.zero_grad()
    output, theirs = model(IDS), eager(IDS)
    with record_traffic() as read:
        with torch.no_grad():  # the first reader wants no gradient, the second does
            assert torch.equal(output["logits"].argmax(-1), theirs["logits"].argmax(-1))
        assert type(output["logits"] * 1.0) is Tensor
    assert dict(read.num_bytes) == {("all_gather", "tp"): SAMPLES * POSITIONS * TOKENS * 4}
    for each in (output, theirs):
        (each["loss"] + each["logits"][:, -1].square().mean()).backward()
    torch.testing.assert_close(_gradients(model), _gradients(eager))


def test_logits_that_nobody_reads_next_to_a_loss_are_not_gathered(ranks: Ranks) -> None:
    ranks.run(_reads_nothing_then_logits)


def _uses_of_logits() -> None:
    eager, model = WithLoss(), _split_head(WithLoss())
    expected = eager(IDS)["logits"]
    fresh = lambda: model(IDS)["logits"]  # noqa: E731
    torch.testing.assert_close(fresh().detach().numpy(), expected.detach().numpy())
    torch.testing.assert_close(torch.stack([fresh(), fresh()])[1], expected)
    torch.testing.assert_close(copy.deepcopy(fresh().detach()), expected.detach())
    torch.testing.assert_close(pickle.loads(pickle.dumps(fresh().detach())), expected.detach())
    torch.testing.assert_close(torch.compile(lambda x: x.softmax(-1), backend="eager")(fresh()), expected.softmax(-1))
    with torch.inference_mode():
        torch.testing.assert_close(fresh().exp(), expected.exp())
    everyone = [torch.empty_like(expected) for _ in range(2)]
    with torch.no_grad():
        dist.all_gather(everyone, model(IDS)["logits"])
    torch.testing.assert_close(everyone[1], expected.detach())
    logits = fresh()
    logits.div_(2)
    torch.testing.assert_close(logits + 0, expected / 2)
    assert "tensor(" in repr(logits) and logits.tolist()
    for each, outside in ((model, fresh()), (eager, eager(IDS)["logits"])):
        each.zero_grad()
        torch.autograd.backward(outside, torch.ones_like(outside))
    torch.testing.assert_close(_gradients(model), _gradients(eager))


@pytest.mark.slow
def test_logits_next_to_a_loss_do_what_plain_tensors_do(ranks: Ranks) -> None:
    ranks.run(_uses_of_logits)


def _reads_on_first_rank() -> None:
    output = _split_head(WithLoss())(IDS)
    if dist.get_rank() == 0:
        output["logits"].argmax(-1)
    output["loss"].backward()


def test_logits_that_one_rank_alone_reads_are_named(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"begins to gather the output logits.*use them on every rank, for example"):
        ranks.run(_reads_on_first_rank)


def _learns_from_own_samples(**options: Any) -> None:
    model = autopar.compile(Logits(), mesh((2,), ("dp",)), (IDS,), strategy="zero3", **by_flag(**options))
    own = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    F.cross_entropy(model(IDS)[own].flatten(0, 1), IDS[own].flatten()).backward()


def _learns_unchecked() -> None:
    _learns_from_own_samples(check_inputs=False)


@pytest.mark.slow
def test_whole_outputs_of_which_ranks_compute_different_losses_are_refused(ranks: Ranks) -> None:
    specified = (
        r"rank \d with other values of the gradient of the output than rank \d\. .*compile with inputs=\"local\""
    )
    with pytest.raises(RankError, match=specified):
        ranks.run(_learns_from_own_samples)
    ranks.run(_learns_unchecked)


def _vocabulary_parallel() -> None:
    eager, model = Logits(), _split_head(Logits(), outputs="dtensor")
    logits = model(IDS)
    assert isinstance(logits, DTensor) and logits.placements == (Shard(2),)
    with loss_parallel():
        labels = DTensor.from_local(IDS.flatten(), model.mesh, [Replicate()])
        loss = F.cross_entropy(logits.flatten(0, 1), labels)
        loss.backward()
    expected = F.cross_entropy(eager(IDS).flatten(0, 1), IDS.flatten())
    expected.backward()
    assert isinstance(loss, DTensor)
    torch.testing.assert_close(loss.full_tensor(), expected)
    torch.testing.assert_close(_gradients(model), _gradients(eager))


def _loss_with_dtensors() -> None:
    eager = WithLoss()
    expected = eager(IDS)["loss"]
    expected.backward()
    for strategy in ("data_parallel", "fully_replicated"):  # whose loss is a part on each rank, and whole
        options: dict[str, Any] = {"strategy": strategy, "outputs": "dtensor"}
        model = autopar.compile(WithLoss(), mesh((2,), ("dp",)), (IDS,), **by_flag(**options))
        found = model(IDS)
        assert isinstance(found["logits"], DTensor) and not isinstance(found["loss"], DTensor)
        found["loss"].backward()
        torch.testing.assert_close(found["loss"].detach(), expected.detach())
        torch.testing.assert_close(_gradients(model), _gradients(eager))


def test_a_loss_with_dtensors_is_plain(ranks: Ranks) -> None:
    ranks.run(_loss_with_dtensors)


def test_losses_of_split_logits_stay_split_for_dtensors(ranks: Ranks) -> None:
    ranks.run(_vocabulary_parallel)


class Statistics(Logits):
    """Logits of each sample, and a mean over all samples."""

    def forward(self, ids: Tensor) -> Any:
        h = torch.tanh(self.embedding(ids)).mean(1)
        return self.head(h), h.mean(0), h @ h.T


def _own_samples(inputs: Any, part: int, num_parts: int) -> None:
    ids = IDS.chunk(num_parts)[part]
    model = autopar.compile(Statistics(), mesh((2, 2), ("dp", "tp")), (ids,), inputs=inputs, hardware=SLOW_DEVICES)
    eager = Statistics()
    logits, mean, similarity = model(ids)
    whole_logits, whole_mean, whole_similarity = eager(IDS)
    torch.testing.assert_close(logits, whole_logits.chunk(num_parts)[part])
    torch.testing.assert_close(mean, whole_mean)
    torch.testing.assert_close(similarity, whole_similarity.chunk(num_parts)[part])
    weights = torch.arange(1.0, num_parts + 1)  # ranks use the statistics differently, as a learned scale
    (logits.square().mean() + weights[part] * mean.square().sum()).backward()
    losses = [part.square().mean() for part in whole_logits.chunk(num_parts)]
    (torch.stack(losses).mean() + weights.mean() * whole_mean.square().sum()).backward()
    torch.testing.assert_close(_gradients(model), _gradients(eager))


def _own_samples_on_one_axis() -> None:
    _own_samples(("dp",), dist.get_rank() // 2, 2)


def _own_samples_everywhere() -> None:
    _own_samples("local", dist.get_rank(), 4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("run", [_own_samples_on_one_axis, _own_samples_everywhere])
def test_with_own_samples_other_outputs_are_whole_and_their_gradients_averaged(ranks: Ranks, run: Any) -> None:
    ranks.run(run, world_size=4)


def test_unknown_kinds_of_outputs_are_refused() -> None:
    with pytest.raises(InputError, match=r'outputs=\'whole\'; outputs are "plain", "dtensor" or "full"\.'):
        autopar.plan(Logits(), autopar.Mesh({"dp": 2}), (IDS,), outputs="whole")  # type: ignore[arg-type]
