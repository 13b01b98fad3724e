"""Scripts that begin with a trained model: fine-tuning, adapters, frozen parts, distillation of parts."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


class Tagger(nn.Module):
    """A token classifier that takes a dictionary's entries and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.mix(self.embed(input_ids)).tanh() * attention_mask.unsqueeze(-1)
        pooled = hidden.sum(1) / attention_mask.sum(1, keepdim=True)
        return {"logits": self.head(hidden + pooled.unsqueeze(1)), "pooled": pooled}


def dictionaries_of_tensors(setting: Setting) -> Found:
    """Fine-tune with batches that are dictionaries, a frozen embedding, and a loss of the returned dictionary."""
    ids = texts(4)
    data = [{"input_ids": each, "attention_mask": (each != 0).float()} for each in ids]
    labels = [each % 3 for each in ids]
    model = seeded(Tagger)
    model.embed.requires_grad_(False)
    model = setting.parallel(model, data[0])
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for batch, label in zip(data, labels, strict=True):
        out = model(**batch)
        loss = F.cross_entropy(out["logits"].flatten(0, 1), label.flatten()) + 0.1 * out["pooled"].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return {"losses": losses, **parameters_of(model)}


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter, which can be merged."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.3)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()

    def merged(self) -> nn.Linear:
        with torch.no_grad():
            self.base.weight += self.b @ self.a
        return self.base


def adapters_then_merge(setting: Setting) -> Found:
    """Train low-rank adapters, read them back with `state_dict`, merge them, and go on with the merged model."""
    model = seeded(Classifier)
    model.requires_grad_(False)
    model.hidden, model.head = Adapted(model.hidden), Adapted(model.head)
    merged = copy.deepcopy(model)
    data = batches(4)
    model = setting.parallel(model, data[0][0])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-2)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    merged.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    merged.hidden, merged.head = merged.hidden.merged(), merged.head.merged()
    merged = setting.parallel(merged, data[0][0])
    merged.eval()
    with torch.no_grad():
        return {"losses": losses, "merged": whole(merged(data[0][0])), **parameters_of(model)}


class Quantized(nn.Module):
    """A frozen linear layer whose weight is stored in int8 with a scale per row."""

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        scale = base.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (base.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        assert base.bias is not None
        self.register_buffer("bias", base.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def quantized_frozen_base(setting: Setting) -> Found:
    """Train adapters of a base whose weights are int8 buffers."""
    model = seeded(Classifier)
    base = Quantized(model.hidden)
    adapter = nn.Sequential(nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False))
    model.requires_grad_(False)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.adapter = base, adapter

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.adapter(x)

    model.hidden = Both()
    data = batches(3)
    model = setting.parallel(model, data[0][0])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **parameters_of(model)}


def gradual_unfreezing(setting: Setting) -> Found:
    """Train the head alone at first, then unfreeze the body with a new parameter group."""
    model = seeded(Classifier)
    model.body.requires_grad_(False)
    model.hidden.requires_grad_(False)
    data = batches(5)
    model = setting.parallel(model, data[0][0])
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
    losses = []
    for step, (x, y) in enumerate(data):
        if step == 2:
            model.hidden.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.hidden.parameters()), "lr": 1e-3})
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **parameters_of(model)}


def a_new_head_on_trained_weights(setting: Setting) -> Found:
    """Load a checkpoint without its head (strict=False), re-initialize the head during training."""
    trained = {name: value for name, value in seeded(Classifier, 5).state_dict().items() if not name.startswith("head")}
    model = seeded(lambda: Classifier(classes=6))
    missing = model.load_state_dict(trained, strict=False)
    data = batches(4, classes=6)
    model = setting.parallel(model, data[0][0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step, (x, y) in enumerate(data):
        if step == 2:
            torch.manual_seed(9)
            fresh = torch.randn(6, 16) * 0.02
            model.load_state_dict({"head.weight": fresh, "head.bias": torch.zeros(6)}, strict=False)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"missing": len(missing.missing_keys), "losses": losses, **parameters_of(model)}


def layerwise_learning_rates(setting: Setting) -> Found:
    """Decay by name, learning rates by depth, a warm-up scheduler, and clipping."""
    data = texts(4)
    model = setting.parallel(seeded(Writer), data[0])
    depth = {"embed": 0.1, "qkv": 0.3, "out": 0.3, "norm": 0.3, "up": 0.5, "down": 0.5, "head": 1.0}
    groups = [
        {
            "params": [parameter],
            "lr": 1e-2 * depth[name.split(".")[0]],
            "weight_decay": 0.0 if parameter.ndim < 2 else 0.1,
        }
        for name, parameter in model.named_parameters()
    ]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    found: Found = {}
    for step, ids in enumerate(data):
        logits = model(ids[:, :-1]) if ids.shape[1] > 8 else model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        found[f"norm{step}"] = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        scheduler.step()
        found[f"loss{step}"] = loss.item()
    return {**found, **parameters_of(model)}
