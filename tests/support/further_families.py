"""Models whose main computation is none of a transformer's: recurrent nets, bags, spectra, weight norms, one key head.

As `families`, whose sizes they share.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.support.families import (
    BATCH,
    HEADS,
    HIDDEN,
    LAYERS,
    VOCABULARY,
    Family,
    Inputs,
    _causal_inputs,
    _generator,
    _labelled_ids,
    _of_output,
    _seeded,
)


class LSTMLanguageModel(nn.Module):
    """Token embeddings, an LSTM of two layers and a head over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, LAYERS, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids_BS: Tensor, labels_BS: Tensor) -> Tensor:
        hidden_BSD, _ = self.lstm(self.embedding(ids_BS))
        return F.cross_entropy(self.head(hidden_BSD).flatten(0, 1), labels_BS.flatten())


class GRUTranslator(nn.Module):
    """A GRU in both directions reads, positions first; a cell that starts from its last states writes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.reader = nn.GRU(HIDDEN, HIDDEN // 2, bidirectional=True)
        self.writer = nn.GRUCell(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids_BS: Tensor, labels_BS: Tensor) -> Tensor:
        embedded_SBD = self.embedding(ids_BS).transpose(0, 1)
        first = embedded_SBD.new_zeros(2, ids_BS.shape[0], HIDDEN // 2)
        read_SBD, last = self.reader(embedded_SBD, first)
        state_BD, written = last.transpose(0, 1).flatten(1), []
        for each_BD in read_SBD.unbind(0)[:3]:
            state_BD = self.writer(each_BD, state_BD)
            written.append(self.head(state_BD))
        return F.cross_entropy(torch.stack(written, 1).flatten(0, 1), labels_BS[:, :3].flatten())


class WeightNormNet(nn.Module):
    """Convolutions of normed weights with slopes, batch statistics and a loss over probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Conv1d(4, 16, 3, padding=1))
        self.norm = nn.BatchNorm1d(16)
        self.slope = nn.PReLU(16)
        self.second = parametrizations.weight_norm(nn.ConvTranspose1d(16, 8, 2, stride=2), dim=1)
        self.head = parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x_BCT: Tensor, likely_BK: Tensor) -> Tensor:
        hidden_BCT = self.slope(self.norm(self.first(x_BCT)))
        return F.cross_entropy(self.head(self.second(hidden_BCT).mean(-1)), likely_BK)


class Recommender(nn.Module):
    """Two tables of bags, one summed with weights and one averaged, and an MLP that scores."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(VOCABULARY, HIDDEN, mode="sum")
        self.words = nn.EmbeddingBag(VOCABULARY, HIDDEN, mode="mean", padding_idx=3)
        self.up, self.down = nn.Linear(3 * HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)

    def forward(self, items_BL: Tensor, shares_BL: Tensor, words_BL: Tensor, bought_B: Tensor) -> Tensor:
        items_BD, words_BD = self.items(items_BL, per_sample_weights=shares_BL), self.words(words_BL)
        features = torch.hstack([items_BD, words_BD, torch.multiply(items_BD, words_BD)])
        scores_B = self.down(F.relu(self.up(features))).squeeze(-1)
        return F.soft_margin_loss(scores_B, bought_B) + F.cosine_embedding_loss(items_BD, words_BD, bought_B)


class Spectra(nn.Module):
    """An embedding of the spectrum of each signal, whose distances to those of two others are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def embedded(self, x_BT: Tensor) -> Tensor:
        mixed = torch.fft.fft2(self.mix(x_BT).unflatten(1, (4, -1)), dim=(1, 2)).real.flatten(1)
        bands = torch.fft.rfft(mixed).abs()[:, 1:].log1p()
        return F.normalize(self.out(torch.tile(bands, (1, 2))), dim=-1)

    def forward(self, signals_NBT: Tensor) -> Tensor:
        anchor, near, far = (self.embedded(x_BT) for x_BT in signals_NBT.unbind(1))
        spread = torch.linalg.norm(anchor.unsqueeze(-1) * near.unsqueeze(-2), dim=(-2, -1))
        return F.triplet_margin_loss(anchor, near, far) + torch.var(torch.cdist(anchor, near)) + spread.mean()


def _falcon() -> nn.Module:
    from transformers import FalconConfig, FalconForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
    return FalconForCausalLM(
        FalconConfig(
            **sizes,  # pyright: ignore[reportArgumentType]
            num_attention_heads=HEADS,
            multi_query=True,
            new_decoder_architecture=False,
            alibi=False,
            bias=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
    )


def _signals_and_probabilities(batch_seed: int) -> Inputs:
    generator = _generator(batch_seed)
    likely = torch.rand(BATCH, 8, generator=generator)
    return (torch.randn(BATCH, 4, 6, generator=generator), likely / likely.sum(1, keepdim=True)), {}


def _bags(batch_seed: int) -> Inputs:
    generator = _generator(batch_seed)
    items, words = (torch.randint(VOCABULARY, (BATCH, 6), generator=generator) for _ in range(2))
    words[:, 0], words[0, 3:] = 5, 3
    bought = torch.randint(2, (BATCH,), generator=generator) * 2.0 - 1
    return (items, torch.rand(BATCH, 6, generator=generator), words, bought), {}


def _signals(batch_seed: int) -> Inputs:
    return (torch.randn(BATCH, 3, HIDDEN, generator=_generator(batch_seed)),), {}


FURTHER: dict[str, Family] = {
    family.name: family
    for family in (
        Family("lstm", _seeded(LSTMLanguageModel), _labelled_ids, lambda loss: loss),
        Family("gru", _seeded(GRUTranslator), _labelled_ids, lambda loss: loss),
        Family("weight_norm", _seeded(WeightNormNet), _signals_and_probabilities, lambda loss: loss),
        Family("recommender", _seeded(Recommender), _bags, lambda loss: loss),
        Family("spectra", _seeded(Spectra), _signals, lambda loss: loss),
        Family("falcon", _seeded(_falcon), _causal_inputs, _of_output),
    )
}
