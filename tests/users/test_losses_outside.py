"""Scripts that compute their loss outside the module, as most do: each compared with one process.

`whole`: every rank has the whole batch. `local`: every rank has its own samples, as under DDP, and the loss of the step
is the mean of the ranks' losses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

SAMPLES, POSITIONS, TOKENS, FEATURES, STEPS = 4, 6, 11, 8, 3
Batch = Mapping[str, Tensor]
Modules = Mapping[str, nn.Module]
Losses = Iterator[tuple[Tensor, str]]
"""A loss, and the module that learns from it."""


class Language(nn.Module):
    """Logits, values and a scale: what heads return; `head` says which."""

    def __init__(self, head: str = "logits") -> None:
        super().__init__()
        self.head = head
        self.embedding = nn.Embedding(TOKENS, FEATURES)
        self.hidden = nn.Linear(FEATURES, 2 * FEATURES)
        self.logits = nn.Linear(2 * FEATURES, TOKENS)
        self.value = nn.Linear(2 * FEATURES, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, ids: Tensor) -> Any:
        h = torch.tanh(self.hidden(self.embedding(ids)))
        match self.head:
            case "logits":
                return self.logits(h)
            case "score":
                return self.value(h[:, -1]).squeeze(-1)
            case "actor and critic":
                return self.logits(h), self.value(h).squeeze(-1)
            case "balanced":
                return {"balance": h.square().mean(), "logits": self.logits(h)}
        return F.normalize(h.mean(1), dim=-1), self.scale.exp()


def _of_tokens(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of each sequence."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


def classification(modules: Modules, batch: Batch) -> Losses:
    logits = modules["model"](batch["ids"])
    yield F.cross_entropy(logits[:, -1], batch["label"]), "model"


def temperature(modules: Modules, batch: Batch) -> Losses:
    logits = modules["model"](batch["ids"])
    logits /= 0.7
    logits[:, :, 0] = -5.0
    yield F.cross_entropy(logits.flatten(0, 1), batch["ids"].flatten()), "model"


def dpo(modules: Modules, batch: Batch) -> Losses:
    margins = []
    for ids in (batch["ids"], batch["rejected"]):
        with torch.no_grad():
            reference = _of_tokens(modules["reference"](ids), ids)
        margins.append(_of_tokens(modules["model"](ids), ids) - reference)
    yield -F.logsigmoid(0.5 * (margins[0] - margins[1])).mean(), "model"


def reward(modules: Modules, batch: Batch) -> Losses:
    yield -F.logsigmoid(modules["model"](batch["ids"]) - modules["model"](batch["rejected"])).mean(), "model"


def ppo(modules: Modules, batch: Batch) -> Losses:
    logits_BSV, values_BS = modules["model"](batch["ids"])
    chosen_BS = logits_BSV.log_softmax(-1).gather(-1, batch["ids"][..., None]).squeeze(-1)
    ratio_BS = (chosen_BS - batch["old"]).exp()
    advantage_BS = (batch["returns"] - values_BS).detach()
    clipped_BS = ratio_BS.clamp(0.8, 1.2)
    policy = -torch.min(ratio_BS * advantage_BS, clipped_BS * advantage_BS).mean()
    entropy = -(logits_BSV.softmax(-1) * logits_BSV.log_softmax(-1)).sum(-1).mean()
    yield policy + 0.5 * F.mse_loss(values_BS, batch["returns"]) - 0.01 * entropy, "model"


def distillation(modules: Modules, batch: Batch) -> Losses:
    with torch.no_grad():
        teacher = modules["teacher"](batch["ids"])
    student = modules["model"](batch["ids"])
    softened = F.kl_div((student / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="none").sum(-1).mean()
    yield softened + F.cross_entropy(student[:, -1], batch["label"]), "model"


def gan(modules: Modules, batch: Batch) -> Losses:
    fake = modules["generator"](batch["noise"])
    yield modules["critic"](fake.detach()).mean() - modules["critic"](batch["real"]).mean(), "critic"
    yield -modules["critic"](modules["generator"](batch["noise"])).mean(), "generator"


def contrastive(modules: Modules, batch: Batch) -> Losses:
    image_BF, scale = modules["model"](batch["ids"])
    text_BF, _ = modules["text"](batch["rejected"])
    similarity_BB = scale * image_BF @ text_BF.T
    each = torch.arange(len(similarity_BB))
    loss = (F.cross_entropy(similarity_BB, each) + F.cross_entropy(similarity_BB.T, each)) / 2
    yield loss, "model"


def balanced(modules: Modules, batch: Batch) -> Losses:
    output = modules["model"](batch["ids"])
    outside = F.cross_entropy(output["logits"][:, -1], batch["label"])
    yield outside + 0.1 * output["balance"], "model"


@dataclass(frozen=True, slots=True)
class Script:
    losses: Callable[[Modules, Batch], Losses]
    modules: Mapping[str, Callable[[], nn.Module]]
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Module → the input in the batch that it is called with first, if that is not "ids"."""
    plain: tuple[str, ...] = ()
    """Modules that are not compiled."""


def _critic(sizes: tuple[int, int]) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, sizes[1]))


SCRIPTS = {
    "classification": Script(classification, {"model": Language}),
    "temperature": Script(temperature, {"model": Language}),
    "dpo": Script(dpo, {"model": Language, "reference": Language}),
    "reward": Script(reward, {"model": lambda: Language("score")}),
    "ppo": Script(ppo, {"model": lambda: Language("actor and critic")}),
    "distillation": Script(distillation, {"model": Language, "teacher": Language}),
    "distillation from a plain teacher": Script(
        distillation, {"model": Language, "teacher": Language}, plain=("teacher",)
    ),
    "gan": Script(
        gan,
        {"generator": lambda: _critic((FEATURES, FEATURES)), "critic": lambda: _critic((FEATURES, 1))},
        {"generator": "noise", "critic": "real"},
    ),
    "contrastive": Script(contrastive, {"model": lambda: Language("both"), "text": lambda: Language("both")}),
    "balanced": Script(balanced, {"model": lambda: Language("balanced")}),
}


def _modules(script: Script) -> dict[str, nn.Module]:
    made = {}
    for seed, (name, build) in enumerate(script.modules.items()):
        torch.manual_seed(seed)
        made[name] = build()
    return made


def _batch(step: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(step)
    tokens = lambda *shape: torch.randint(0, TOKENS, shape, generator=random)  # noqa: E731
    return {
        "ids": tokens(SAMPLES, POSITIONS),
        "rejected": tokens(SAMPLES, POSITIONS),
        "label": tokens(SAMPLES),
        "old": -2 - torch.rand(SAMPLES, POSITIONS, generator=random),
        "returns": torch.randn(SAMPLES, POSITIONS, generator=random),
        "noise": torch.randn(SAMPLES, FEATURES, generator=random),
        "real": torch.randn(SAMPLES, FEATURES, generator=random),
    }


def _part(batch: Batch, number: int, parts: int) -> Batch:
    return {name: each.chunk(parts)[number] for name, each in batch.items()}


@dataclass(slots=True)
class Trained:
    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def _whole(x: Tensor) -> Tensor:
    return getattr(x, "full_tensor", lambda: x)().detach().clone()


def _train(script: Script, modules: Modules, parts: list[Callable[[Batch], Batch]]) -> Trained:
    """Train with the mean of the losses of some parts of each batch."""
    optimizers = {name: torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for name, each in modules.items()}
    found = Trained()
    for step in range(STEPS):
        running = [script.losses(modules, part(_batch(step))) for part in parts]
        for together in zip(*running, strict=True):
            (name,) = {name for _, name in together}
            loss = torch.stack([loss for loss, _ in together]).mean()
            for each in modules.values():
                each.zero_grad()
            loss.backward()
            found.losses.append(loss.detach().clone())
            if not step:
                named = modules[name].named_parameters()
                found.gradients |= {f"{name}.{key}": _whole(p.grad) for key, p in named if p.grad is not None}
            optimizers[name].step()
    found.parameters = {f"{name}.{k}": _whole(p) for name, each in modules.items() for k, p in each.named_parameters()}
    return found


def _on_ranks(name: str, inputs: str, options: dict[str, Any]) -> Trained:
    script, size, rank = SCRIPTS[name], dist.get_world_size(), dist.get_rank()
    on, part = mesh((size,), ("dp",)), lambda batch: batch
    if inputs == "local":
        part = lambda batch: _part(batch, rank, size)  # noqa: E731
    modules = {
        key: each
        if key in script.plain
        else autopar.compile(
            each, on, (part(_batch(0))[script.inputs.get(key, "ids")],), inputs=inputs, **by_flag(**options)
        )
        for key, each in _modules(script).items()
    }
    found = _train(script, modules, [part])
    if inputs == "local":
        for loss in found.losses:
            dist.all_reduce(loss.div_(size))
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_loss_outside_the_module_trains_as_on_one_process(ranks: Ranks, name: str) -> None:
    script = SCRIPTS[name]
    for inputs, options in (("whole", {"hardware": SLOW_DEVICES}), ("local", {"strategy": "zero3"})):
        parts = 2 if inputs == "local" else 1
        alone = [partial(_part, number=number, parts=parts) for number in range(parts)]
        expected = _train(script, copy.deepcopy(_modules(script)), alone)
        for found in ranks.run(_on_ranks, name, inputs, options):
            torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=1e-6)
            for kind in ("gradients", "parameters"):
                torch.testing.assert_close(getattr(found, kind), getattr(expected, kind), rtol=1e-4, atol=1e-5)
