"""Random numbers of a compiled model: equal on differently seeded ranks, and the same if a call is repeated."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.errors import InputError
from tests.support.optimizing import losses_of
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh

HIDDEN = 8
OPTIONS: dict[str, Any] = {"hardware": SLOW_DEVICES}


class VAE(nn.Module):
    """The mean and the logarithm of the variance of a normal distribution, and a decoder of what is drawn from it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder, self.decoder = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x_BD: Tensor) -> Tensor:
        mean_BD, log_BD = self.encoder(x_BD).chunk(2, -1)
        drawn_BD = mean_BD + torch.randn_like(mean_BD) * (log_BD / 2).exp()
        return F.mse_loss(self.decoder(drawn_BD), x_BD) + (mean_BD.square() + log_BD.exp() - log_BD).mean()


class Noisy(nn.Module):
    """One layer after another that draws: in place, from a distribution, by rows, from nothing, inside an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.rrelu, self.alpha, self.feature = nn.RReLU(), nn.AlphaDropout(0.2), nn.Dropout1d(0.2)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, 2, dropout=0.3)

    def forward(self, x_BD: Tensor) -> Tensor:
        x_BD = self.rrelu(self.first(x_BD)) * torch.empty_like(x_BD).bernoulli_(0.7)
        x_BD = self.alpha(x_BD) + torch.distributions.Normal(0.0, 1.0).sample(x_BD.shape)
        x_BD = self.feature(x_BD[:, None])[:, 0] * F.gumbel_softmax(x_BD)
        rows_B1 = torch.multinomial(x_BD.softmax(-1), 1)
        x_BD = x_BD.scatter(1, rows_B1, 0.0)[:, torch.randperm(HIDDEN)] + torch.rand(HIDDEN)
        return F.dropout(self.last(self.lstm(x_BD)[0]), 0.1).square().mean()


class Dropping(nn.Module):
    """Two layers with a dropout between them."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.dropout, self.down = nn.Linear(HIDDEN, 16), nn.Dropout(p), nn.Linear(16, HIDDEN)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.down(self.dropout(self.up(x_BD).relu()))


def batch(step: int = 0) -> Tensor:
    """Eight vectors, equal on every rank."""
    return torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(step))


def trained(model: nn.Module, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of some steps, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = losses_of(optimizer, range(steps), lambda step: model(batch(step)).square().mean())
    return losses, {name: whole(p) for name, p in model.named_parameters()}  # type: ignore[misc]


def _seeded_by_rank(kind: type[nn.Module], options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    model = kind()
    torch.manual_seed(1 + torch.distributed.get_rank())
    shape = (2,) if torch.distributed.get_world_size() == 2 else (2, 2)
    compiled = autopar.compile(
        model, mesh(shape, ("dp", "tp")[: len(shape)]), (batch(),), **by_flag(**{**OPTIONS, **options})
    )
    return trained(compiled)


# On the CPU's profile small models are best computed whole, so that every rank draws everything.
@pytest.mark.sample(3)
@pytest.mark.parametrize("options", [{"hardware": "cpu"}, {}, {"strategy": "zero3"}], ids=["whole", "split", "zero3"])
@pytest.mark.parametrize("kind", [VAE, Noisy])
def test_ranks_that_are_seeded_differently_train_one_model(ranks: Ranks, kind: Any, options: dict[str, Any]) -> None:
    (losses, weights), *others = ranks.run(_seeded_by_rank, kind, options)
    for other, further in others:
        assert other == losses
        assert_close(further, weights, rtol=0, atol=0)
    assert len(set(losses)) == len(losses)


@pytest.mark.parametrize("kind", [VAE, Noisy])
def test_a_deterministic_model_draws_what_one_process_draws(ranks: Ranks, kind: Any) -> None:
    eager = kind()
    torch.manual_seed(1)
    losses, weights = trained(eager)
    for found, further in ranks.run(_seeded_by_rank, kind, {"deterministic": True, "strategy": "data_parallel"}):
        assert_close(found, losses)
        assert_close(further, weights)


def _with_checkpoint(deterministic: bool) -> list[list[Tensor | None]]:
    """Gradients where the model is called three times in a step, twice on one input: without checkpoints, with them."""
    torch.manual_seed(1 + torch.distributed.get_rank())
    compiled = autopar.compile(
        Dropping(), mesh((2,), ("dp",)), (batch(),), **by_flag(**OPTIONS, deterministic=deterministic)
    )
    found = []
    for reentrant in (None, False, True):
        torch.manual_seed(7)
        compiled.random_state.load_state_dict({"seed": 5, "step": 0})
        found.append([])
        for step in range(2):
            x = batch(step).requires_grad_()
            compiled.zero_grad()
            hidden = _called(compiled, x, reentrant) + 2 * _called(compiled, x, reentrant)
            _called(compiled, whole_of(hidden), reentrant).square().mean().backward()
            found[-1] += [x.grad, *(whole(p.grad) for p in compiled.parameters())]
        assert compiled.random_state.step == 6
    return found


def _called(model: nn.Module, x: Tensor, reentrant: bool | None) -> Any:
    return model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)


def whole_of(x: Any) -> Tensor:
    """A tensor of which each rank holds a part, as every rank takes it."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_checkpoint_around_the_model_draws_the_same_again(ranks: Ranks, deterministic: bool) -> None:
    for expected, *others in ranks.run(_with_checkpoint, deterministic):
        assert all(x is not None and x.abs().sum() > 0 for x in expected)
        for found in others:
            assert_close(found, expected)


def _planned_in_checkpoint() -> None:
    """The first call of a kind, here with an input that needs a gradient, captures and plans inside the checkpoint."""
    compiled = autopar.compile(Dropping(0.0), mesh((1,), ("dp",)), (batch(),), **by_flag(**OPTIONS))
    expected, found = batch().requires_grad_(), batch().requires_grad_()
    checkpoint(compiled, found, use_reentrant=False).square().sum().backward()
    compiled(expected).square().sum().backward()
    assert_close(found.grad, expected.grad)


def test_the_first_call_may_stand_in_a_checkpoint(ranks: Ranks) -> None:
    ranks.run(_planned_in_checkpoint, world_size=1)


def _unknown(between: str) -> str:
    compiled = autopar.compile(Dropping(), mesh((1,), ("dp",)), (batch(),), **by_flag(**OPTIONS))
    x = batch().requires_grad_()
    with pytest.raises(InputError) as error:
        if between == "state":
            checkpoint(compiled, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
        else:
            torch.manual_seed(0)
            first = checkpoint(compiled, x, use_reentrant=False)
            torch.manual_seed(0)
            (first + checkpoint(compiled, x, use_reentrant=False)).sum().backward()
    return str(error.value)


def test_a_repeated_call_that_is_not_known_is_refused(ranks: Ranks) -> None:
    [unknown] = ranks.run(_unknown, "state", world_size=1)
    assert unknown == (
        "the model draws random numbers (dropout and the like) and is called inside a backward, where the CPU's "
        "generator is in a state in which no call began, so that the numbers of the first call cannot be drawn again. "
        "Use torch.utils.checkpoint with preserve_rng_state=True, or Memory(recompute=…) in its place."
    )
    [ambiguous] = ranks.run(_unknown, "seed", world_size=1)
    assert ambiguous == (
        "the model is called inside a backward, and several calls began with the CPU's generator in this state, so "
        "that the numbers of the first call cannot be drawn again. Do not seed the generator with the same number "
        "between calls whose backward is still to come."
    )


def _compiled(kind: Any = Dropping, **options: Any) -> Any:
    return autopar.compile(kind(), mesh((2,), ("dp",)), (batch(),), **by_flag(**OPTIONS, **options))


def _resumed() -> None:
    torch.manual_seed(1)
    first = _compiled()
    trained(first, 2)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    expected = [whole_of(first(batch(step))) for step in range(2)]
    torch.manual_seed(2)
    kept, own = _compiled(), _compiled(seed=9)
    for model, again in ((kept, True), (own, False)):
        file.seek(0)
        model.load_state_dict(torch.load(file, weights_only=True))
        assert model.random_state.step == 2
        found = [whole_of(model(batch(step))) for step in range(2)]
        assert all(torch.equal(x, y) is again for x, y in zip(found, expected, strict=True)), "seed=9 has other masks"


def test_a_state_dict_goes_on_with_the_numbers(ranks: Ranks) -> None:
    ranks.run(_resumed)


def _exchanged(folder: str) -> None:
    eager, compiled = Dropping(), _compiled(seed=1)
    compiled(batch())
    assert compiled.state_dict().keys() == eager.state_dict().keys()
    compiled.load_state_dict(eager.state_dict(), strict=True)
    assert compiled.random_state.state_dict() == {"seed": 1, "step": 1}
    eager.load_state_dict({name: whole(x) for name, x in compiled.state_dict().items()}, strict=True)
    around = nn.Sequential(compiled)
    around.load_state_dict(around.state_dict())
    # What consists of names and tensors leaves it out, as it leaves out PyTorch's generators; it is Stateful itself.
    state = {"model": get_model_state_dict(compiled), "random": compiled.random_state}
    save(state, checkpoint_id=folder)
    expected = whole_of(compiled(batch()))
    for name in ("random", ""):
        other = _compiled(seed=2)
        found = {"model": get_model_state_dict(other)}
        load({**found, **({name: other.random_state} if name else {})}, checkpoint_id=folder)
        set_model_state_dict(other, found["model"])
        assert torch.equal(whole_of(other(batch())), expected) is bool(name)


def test_keys_are_those_of_the_model_and_distributed_checkpoints_take_the_random_state(
    ranks: Ranks, tmp_path: Any
) -> None:
    ranks.run(_exchanged, str(tmp_path))
