"""The usual loop over models of every kind, each with its own loss outside of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.users.scripts.setting import Found, Setting, parameters_of, seeded, whole


def _trained(
    setting: Setting,
    build: Callable[[], nn.Module],
    data: Sequence[tuple[Tensor, ...]],
    loss_of: Callable[..., Tensor],
    num_inputs: int = 1,
) -> Found:
    """Train on batches whose first tensors are inputs of the model, and whose others the loss takes."""
    model = setting.parallel(seeded(build), *data[0][:num_inputs])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_of(model(*batch[:num_inputs]), *batch[num_inputs:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    buffers = {name: whole(value) for name, value in model.named_buffers()}
    return {"losses": losses, **parameters_of(model), **buffers}


def _drawn(num: int, *makers: Callable[[], Tensor]) -> list[tuple[Tensor, ...]]:
    torch.manual_seed(6)
    return [tuple(make() for make in makers) for _ in range(num)]


class Pictures(nn.Module):
    """Convolutions with BatchNorm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.second_norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)).relu()
        h = h + self.second_norm(self.second(h)).relu()
        return self.head(F.adaptive_avg_pool2d(h, 1).flatten(1))


def residual_network(setting: Setting) -> Found:
    """Pictures, BatchNorm, mixup outside of the model."""
    data = _drawn(3, lambda: torch.randn(8, 3, 6, 6), lambda: torch.randint(4, (8,)))

    def mixed(logits: Tensor, labels: Tensor) -> Tensor:
        return 0.7 * F.cross_entropy(logits, labels) + 0.3 * F.cross_entropy(logits, labels.roll(1))

    return _trained(setting, Pictures, data, mixed)


class UNet(nn.Module):
    """Down, up and a skip connection, with the time as a second input."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.up, self.leave = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 1, 3, padding=1)
        self.time = nn.Linear(1, 8)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        entered = self.enter(x).relu()
        h = F.silu(self.down(entered) + self.time(time[:, None])[:, :, None, None])
        return self.leave(torch.cat([entered, self.up(h)], 1))


def diffusion(setting: Setting) -> Found:
    """Predict the noise that the loop has drawn."""
    data = _drawn(3, lambda: torch.randn(4, 1, 8, 8), lambda: torch.rand(4), lambda: torch.randn(4, 1, 8, 8))
    return _trained(setting, UNet, data, F.mse_loss, 2)


class Autoencoder(nn.Module):
    """A variational autoencoder that returns what its loss needs; its noise is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.log_variance = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.decode = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encode(x).relu()
        mean, log_variance = self.mean(h), self.log_variance(h)
        return self.decode(mean + noise * (0.5 * log_variance).exp()), mean, log_variance


def variational_autoencoder(setting: Setting) -> Found:
    """A loss of three outputs of the model."""
    torch.manual_seed(6)
    data = [(x, torch.randn(8, 4), x) for x in torch.randn(3, 8, 8)]

    def loss_of(outputs: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
        found, mean, log_variance = outputs
        return F.mse_loss(found, x) - 0.1 * (1 + log_variance - mean.square() - log_variance.exp()).mean()

    return _trained(setting, Autoencoder, data, loss_of, 2)


class Graph(nn.Module):
    """Messages along edges, summed at their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.head = nn.Linear(8, 8), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for _ in range(2):
            sent = self.message(nodes).relu()[edges[0]]
            summed = torch.zeros_like(nodes).index_add(0, edges[1], sent)
            nodes = self.update(torch.cat([nodes, summed], -1)).tanh()
        return self.head(nodes)


def graph_network(setting: Setting) -> Found:
    """Nodes and edges are the inputs, and the loss is of some nodes alone."""
    data = _drawn(3, lambda: torch.randn(12, 8), lambda: torch.randint(12, (2, 30)), lambda: torch.randint(3, (12,)))
    return _trained(setting, Graph, data, lambda out, labels: F.cross_entropy(out[::2], labels[::2]), 2)


class Tied(nn.Module):
    """A recurrent language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(16, 8), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.cell(self.embed(ids))[0])


def recurrent_language_model(setting: Setting) -> Found:
    """An LSTM with tied weights, and labels with an ignored index."""
    torch.manual_seed(6)
    ids = torch.randint(16, (3, 4, 9))
    data = [(each[:, :-1], each[:, 1:].masked_fill(each[:, 1:] < 3, -100)) for each in ids]
    return _trained(setting, Tied, data, lambda out, labels: F.cross_entropy(out.flatten(0, 1), labels.flatten()))


class Encoder(nn.Module):
    """PyTorch's own encoder with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])


def encoder_with_padding(setting: Setting) -> Found:
    """A mask of padding as a second input, and a binary loss."""
    padding = torch.arange(6)[None] >= torch.tensor([6, 4, 3, 5])[:, None]
    data = [(x, padding, y) for x, y in _drawn(3, lambda: torch.randn(4, 6, 8), lambda: torch.rand(4, 2).round())]

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, labels, pos_weight=torch.tensor([1.0, 2.0]))

    return _trained(setting, Encoder, data, loss_of, 2)


class Clicks(nn.Module):
    """Embedding bags and dense features, whose products are features, too."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, 8, mode="sum") for _ in range(3))
        self.dense, self.over = nn.Linear(4, 8), nn.Linear(8 + 6, 1)

    def forward(self, dense: Tensor, *sparse: Tensor) -> Tensor:
        bottom = self.dense(dense).relu()
        features = torch.stack([bottom, *(bag(ids) for bag, ids in zip(self.bags, sparse, strict=True))], 1)
        products = features @ features.transpose(1, 2)
        rows, columns = torch.tril_indices(4, 4, -1)
        return self.over(torch.cat([bottom, products[:, rows, columns]], -1)).squeeze(-1)


def recommendation(setting: Setting) -> Found:
    """Variable positional inputs, embedding bags, and products of pairs."""
    bag = lambda: torch.randint(20, (8, 3))  # noqa: E731
    data = _drawn(3, lambda: torch.randn(8, 4), bag, bag, bag, lambda: torch.rand(8).round())
    return _trained(setting, Clicks, data, F.binary_cross_entropy_with_logits, 4)


class Speech(nn.Module):
    """Frames to log-probabilities of letters."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.letters = nn.Conv1d(4, 8, 3, padding=1), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.letters(self.frames(x).relu().transpose(1, 2)).log_softmax(-1)


def speech(setting: Setting) -> Found:
    """CTC of log-probabilities, whose lengths are known outside of the model."""
    data = _drawn(3, lambda: torch.randn(4, 4, 12), lambda: torch.randint(1, 6, (4, 5)))

    def loss_of(out: Tensor, labels: Tensor) -> Tensor:
        return F.ctc_loss(out.transpose(0, 1), labels, torch.full((4,), 12), torch.full((4,), 5))

    return _trained(setting, Speech, data, loss_of)


class Translator(nn.Module):
    """PyTorch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.both = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 12)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5), persistent=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.both(self.embed(source), self.embed(target), tgt_mask=self.mask, tgt_is_causal=True))


def translation(setting: Setting) -> Found:
    """An encoder and a decoder with cross-attention, and smoothed labels."""
    source, target = lambda: torch.randint(12, (4, 7)), lambda: torch.randint(12, (4, 5))
    data = _drawn(3, source, target, target)

    def loss_of(out: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), labels.flatten(), label_smoothing=0.1)

    return _trained(setting, Translator, data, loss_of, 2)
