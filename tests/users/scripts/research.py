"""Scripts of research code: noise, penalties, sharpness, several forwards, state of one's own, reinforcement."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.users.scripts.setting import (
    Classifier,
    Found,
    Setting,
    batches,
    parameters_of,
    seeded,
    whole,
)


def gradient_noise(setting: Setting) -> Found:
    """Scale and add to gradients between backward and step."""
    data = batches(3)
    model = setting.parallel(seeded(Classifier), data[0][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step, (x, y) in enumerate(data):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(parameter.detach().sign() * 0.01 / (1 + step)).clamp_(-0.05, 0.05)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **parameters_of(model)}


def sharpness_aware(setting: Setting) -> Found:
    """SAM: climb along the gradient, take the gradient there, return, and step."""
    data = batches(3)
    model = setting.parallel(seeded(Classifier), data[0][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        climbed = []
        with torch.no_grad():
            norm = torch.stack([whole(p.grad.norm()) for p in model.parameters() if p.grad is not None]).norm()
            for parameter in model.parameters():
                step = parameter.grad * (0.05 / float(norm))
                parameter.add_(step)
                climbed.append(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter, step in zip(model.parameters(), climbed, strict=True):
                parameter.sub_(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, **parameters_of(model)}


def steps_by_hand(setting: Setting) -> Found:
    """No optimizer: `p.data.add_(p.grad)` as in a first tutorial, with gradients set to None."""
    data = batches(3)
    model = setting.parallel(seeded(Classifier), data[0][0])
    losses = []
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None
        losses.append(loss.item())
    return {"losses": losses, **parameters_of(model)}


def siamese(setting: Setting) -> Found:
    """Three forwards of one model before one backward: a triplet loss."""
    data = batches(3, size=12)
    model = setting.parallel(seeded(lambda: Classifier(classes=8)), data[0][0][:4])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # the head's bias has no gradient but rounding
    losses = []
    for x, _ in data:
        anchor, positive, negative = (model(each) for each in x.chunk(3))
        loss = F.triplet_margin_loss(anchor, positive, negative)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **parameters_of(model)}


class Recurrent(nn.Module):
    """A recurrent network that returns its state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out, state = self.cell(x, state)
        return self.head(out), state


def truncated_backpropagation(setting: Setting) -> Found:
    """The state of one call, detached, is an input of the next."""
    torch.manual_seed(4)
    x, y = torch.randn(4, 24, 8), torch.randint(4, (4, 24))
    state = torch.zeros(1, 4, 16)
    model = setting.parallel(seeded(Recurrent), x[:, :6], state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for begin in range(0, 24, 6):
        logits, state = model(x[:, begin : begin + 6], state)
        loss = F.cross_entropy(logits.flatten(0, 1), y[:, begin : begin + 6].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = state.detach()
        losses.append(loss.item())
    return {"losses": losses, "state": whole(state), **parameters_of(model)}


class Weighted(nn.Module):
    """A criterion with parameters of its own: losses weighted by learned uncertainty."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, losses: Tensor) -> Tensor:
        return (losses * (-self.log_variance).exp() + self.log_variance).sum()


class TwoTasks(nn.Module):
    """A body with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.value = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.classes(h), self.value(h).squeeze(-1)


def learned_weights_of_tasks(setting: Setting) -> Found:
    """Two losses, weighted by a criterion that is trained with the model by one optimizer."""
    data = batches(3)
    model, criterion = setting.parallel(seeded(TwoTasks), data[0][0]), Weighted()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    losses = []
    for x, y in data:
        classes, value = model(x)
        loss = criterion(torch.stack([F.cross_entropy(classes, y), F.mse_loss(value, x.sum(-1))]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": whole(criterion.log_variance), **parameters_of(model)}


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is turned around."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return -0.5 * gradients[0]


class Adversarial(nn.Module):
    """A classifier and a domain classifier behind a reversed gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.domain = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).relu()
        return self.classes(h), self.domain(Reverse.apply(h))


def reversed_gradients(setting: Setting) -> Found:
    """Domain adaptation with an autograd.Function of one's own."""
    data = batches(3)
    model = setting.parallel(seeded(Adversarial), data[0][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in data:
        classes, domain = model(x)
        loss = F.cross_entropy(classes, y) + F.cross_entropy(domain, y % 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **parameters_of(model)}


class Normalized(nn.Module):
    """A policy and a value, of observations that are normalized by running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.tensor(1.0))
        self.policy, self.value = nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            with torch.no_grad():
                self.count += x.shape[0]
                self.mean += (x - self.mean).sum(0) / self.count
        x = x - self.mean
        return self.policy(x), self.value(x).squeeze(-1)


def policy_gradient(setting: Setting) -> Found:
    """Act with the policy in eval mode, then train on log-probabilities, advantages and an entropy bonus."""
    data = batches(3)
    model = setting.parallel(seeded(Normalized), data[0][0])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for x, _ in data:
        model.eval()
        with torch.no_grad():
            logits, value = model(x)
            actions, reward = logits.argmax(-1), x[:, 0] - value
        model.train()
        logits, value = model(x)
        policy = torch.distributions.Categorical(logits=logits)
        loss = (
            -(policy.log_prob(actions) * reward).mean()
            + 0.5 * (value - x[:, 0]).square().mean()
            - 0.01 * policy.entropy().mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "mean": whole(model.mean), "count": whole(model.count), **parameters_of(model)}


def adversarial_inputs(setting: Setting) -> Found:
    """FGSM: the gradient of the inputs makes the batch that is trained on."""
    data = batches(3)
    model = setting.parallel(seeded(Classifier), data[0][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in data:
        x = x.clone().requires_grad_()
        F.cross_entropy(model(x), y).backward()
        assert x.grad is not None
        attacked = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(attacked), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **parameters_of(model)}


def penalties_on_parameters(setting: Setting) -> Found:
    """Add an L2 penalty and a distance to former weights (EWC) to the loss, each summed to a plain number first."""
    data = batches(3)
    model = setting.parallel(seeded(Classifier), data[0][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    former = [each.detach().clone() for each in model.parameters()]
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        for now, before in zip(model.parameters(), former, strict=True):
            penalty = 0.01 * now.square().sum() + 0.1 * (now - before).square().sum()
            loss = loss + (penalty.full_tensor() if isinstance(penalty, DTensor) else penalty)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **parameters_of(model)}


def hooks_that_log(setting: Setting) -> Found:
    """Forward hooks gather statistics of activations; a hook of a parameter scales its gradient."""
    model = seeded(Classifier)
    data = batches(3)
    model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    model = setting.parallel(model, data[0][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **parameters_of(model)}
