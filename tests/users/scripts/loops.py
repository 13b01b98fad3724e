"""Scripts with loops of their own: evaluation, early stopping, averages, accumulation, resuming, closures."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from tests.users.scripts.setting import (
    Classifier,
    Found,
    Setting,
    Writer,
    batches,
    parameters_of,
    seeded,
    texts,
    whole,
)


def two_optimizers(setting: Setting) -> Found:
    """SGD for the embedding, AdamW for the rest, each with a scheduler."""
    data = texts(4)
    model = setting.parallel(seeded(Writer), data[0])
    embedding = torch.optim.SGD(model.embed.parameters(), lr=0.1, momentum=0.9)
    rest = torch.optim.AdamW([p for name, p in model.named_parameters() if not name.startswith("embed")], lr=1e-2)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (embedding, rest)]
    losses = []
    for ids in data:
        loss = F.cross_entropy(model(ids)[:, :-1].reshape(-1, 16), ids[:, 1:].reshape(-1))
        for each in (embedding, rest):
            each.zero_grad()
        loss.backward()
        for each in (embedding, rest, *schedulers):
            each.step()
        losses.append(loss.item())
    return {"losses": losses, **parameters_of(model)}


def average_of_weights(setting: Setting) -> Found:
    """Keep an exponential moving average and evaluate with it."""
    data = batches(4)
    model = setting.parallel(seeded(Classifier), data[0][0])
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
    average.eval()
    with torch.no_grad():
        return {"averaged": whole(average(data[0][0])), **parameters_of(average.module)}


def average_by_hand(setting: Setting) -> Found:
    """Keep an average as a dictionary of tensors, swap it in for evaluation, and swap it out again."""
    data = batches(3)
    model = setting.parallel(seeded(Classifier), data[0][0])
    shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            shadow[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.data.copy_(shadow[name])
    with torch.no_grad():
        averaged = whole(model(data[0][0]))
    for name, parameter in model.named_parameters():
        parameter.data.copy_(kept[name])
    with torch.no_grad():
        return {"averaged": averaged, "trained": whole(model(data[0][0])), **parameters_of(model)}


def curriculum_of_lengths(setting: Setting) -> Found:
    """Sequences grow from 4 to 8 to 12 tokens."""
    data = [ids for length in (4, 8, 12) for ids in texts(2, length=length, seed=length)]
    model = setting.parallel(seeded(Writer), data[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for ids in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **parameters_of(model)}


def early_stopping(setting: Setting) -> Found:
    """Evaluate after every epoch, keep the best state, stop without progress, and restore it."""
    train, held_out = batches(3), batches(2, size=4, seed=7)
    model = setting.parallel(seeded(Classifier), train[0][0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
    best, best_state, waited, history = float("inf"), None, 0, []
    for _ in range(6):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            score = sum(F.cross_entropy(model(x), y).item() for x, y in held_out) / len(held_out)
            right = sum(int((model(x).argmax(-1) == y).sum()) for x, y in held_out)
        history.append((score, right))
        if score < best:
            best, best_state, waited = score, copy.deepcopy(model.state_dict()), 0
        else:
            waited += 1
            if waited == 2:
                break
    assert best_state is not None
    model.load_state_dict(best_state)
    return {"scores": [score for score, _ in history], "right": [each for _, each in history], **parameters_of(model)}


def resume(setting: Setting) -> Found:
    """Save model, optimizer and scheduler with `torch.save`, make everything anew, load, and go on."""
    data = batches(4)

    def made() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        model = setting.parallel(seeded(Classifier), data[0][0])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)

    model, optimizer, scheduler = made()
    losses = []
    path = setting.folder / f"checkpoint{setting.rank}.pt"
    for step, (x, y) in enumerate(data):
        if step == 2:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr": scheduler.state_dict()}
            torch.save(state, path)
            model, optimizer, scheduler = made()
            state = torch.load(path, weights_only=False)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["lr"])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return {"losses": losses, **parameters_of(model)}


def accumulation_by_hand(setting: Setting) -> Found:
    """Accumulate four backward passes before a step, and log the norm of every gradient."""
    data = batches(8, size=4)
    model = setting.parallel(seeded(Classifier), data[0][0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: Found = {}
    for step, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / 4).backward()
        if step % 4 == 3:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                found[f"{name}.norm{step}"] = whole(parameter.grad.norm())
            optimizer.step()
            optimizer.zero_grad()
    return {**found, **parameters_of(model)}


def custom_sampler(setting: Setting) -> Found:
    """A DataLoader with a weighted sampler, whose last batch is smaller."""
    x, y = (torch.cat(each) for each in zip(*batches(3, size=6), strict=True))
    weights = torch.where(y == 0, 3.0, 1.0)
    sampler = WeightedRandomSampler(weights.tolist(), 18, generator=torch.Generator().manual_seed(3))
    loader = DataLoader(TensorDataset(x, y), batch_size=4, sampler=sampler)
    model = setting.parallel(seeded(Classifier), x[:4])
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    losses = []
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **parameters_of(model)}


def second_order_closure(setting: Setting) -> Found:
    """LBFGS with a closure."""
    (x, y), *_ = batches(1, size=16)
    model = setting.parallel(seeded(Classifier), x)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    losses: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        return loss

    optimizer.step(closure)
    return {"losses": losses, **parameters_of(model)}


def low_precision_by_autocast(setting: Setting) -> Found:
    """`torch.autocast` around model and loss."""
    data = batches(3)
    model = setting.parallel(seeded(Classifier), data[0][0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"rough losses": losses}
