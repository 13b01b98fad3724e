"""A tiny decoder with experts, in every form in which they are written: sorted rows, and dense ones with a capacity.

transformers is imported when a sorted form is made: its grouped product is captured in any dtype. Imported in a trace,
it would not register its outputs with PyTorch, and no model of its own could be captured later.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, INTERMEDIATE, HEADS, EXPERTS, CHOSEN, VOCABULARY = 16, 24, 4, 8, 2, 32
DENSE = ("einsum", "bmm", "matmul")


class Sorted(nn.Module):
    """Dropless experts: rows sorted by expert, through grouped products, and added up at home."""

    def __init__(self) -> None:
        super().__init__()
        import tests.support.experts  # noqa: F401

        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.w1 = nn.Parameter(0.3 * torch.randn(EXPERTS, INTERMEDIATE, HIDDEN))
        self.w3 = nn.Parameter(0.3 * torch.randn(EXPERTS, INTERMEDIATE, HIDDEN))
        self.w2 = nn.Parameter(0.3 * torch.randn(EXPERTS, HIDDEN, INTERMEDIATE))

    def forward(self, h_BSD: Tensor) -> Tensor:
        from tests.support.experts import sorted_rows  # which needs transformers

        x_TD = h_BSD.view(-1, HIDDEN)
        weights_TK, index_TK = self.gate(x_TD).softmax(-1).topk(CHOSEN)
        return sorted_rows(x_TD, weights_TK, index_TK, EXPERTS, self._through).view(h_BSD.shape)

    def _through(self, rows_RD: Tensor, product: Callable[..., Tensor], ids_R: Tensor) -> Tensor:
        gate, up, down = (each.transpose(-2, -1) for each in (self.w1, self.w3, self.w2))
        return product(F.silu(product(rows_RD, gate)) * product(rows_RD, up), down)


class Dense(nn.Module):
    """GShard's experts, each with room for a whole sequence: S samples' positions, E experts, C places."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.w1 = nn.Parameter(0.3 * torch.randn(EXPERTS, HIDDEN, INTERMEDIATE))
        self.w2 = nn.Parameter(0.3 * torch.randn(EXPERTS, INTERMEDIATE, HIDDEN))

    def forward(self, h_GSM: Tensor) -> Tensor:
        samples, positions, _ = h_GSM.shape
        gates_GSE = self.gate(h_GSM).softmax(-1)
        chosen_GSE = F.one_hot(gates_GSE.topk(CHOSEN)[1], EXPERTS).sum(2)
        place_GSE = (chosen_GSE.cumsum(1) - 1) * chosen_GSE + (chosen_GSE - 1)
        combine_GSEC = (place_GSE.unsqueeze(-1) == torch.arange(positions)) * gates_GSE.unsqueeze(-1)
        x_EGCM = torch.einsum("gsec,gsm->egcm", (combine_GSEC > 0).to(h_GSM.dtype), h_GSM)
        return torch.einsum("gsec,egcm->gsm", combine_GSEC, self.experts(x_EGCM, samples, positions))

    def experts(self, x_EGCM: Tensor, samples: int, places: int) -> Tensor:
        if self.form == "einsum":
            hidden_EGCF = torch.einsum("egcm,emf->egcf", x_EGCM, self.w1).relu()
            return torch.einsum("egcf,efm->egcm", hidden_EGCF, self.w2)
        product = torch.bmm if self.form == "bmm" else torch.matmul
        rows_ERM = x_EGCM.reshape(EXPERTS, samples * places, HIDDEN)
        rows_ERM = product(product(rows_ERM, self.w1).relu(), self.w2)
        return rows_ERM.view(EXPERTS, samples, places, HIDDEN)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), self.weight)


class Block(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.before_attention, self.before_experts = Norm(), Norm()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.moe = Dense(form) if form in DENSE else Sorted()

    def forward(self, h_BSD: Tensor) -> Tensor:
        x_BSD = self.before_attention(h_BSD)
        heads = (*h_BSD.shape[:2], HEADS, HIDDEN // HEADS)
        q, k, v = (project(x_BSD).view(heads).transpose(1, 2) for project in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h_BSD = h_BSD + self.o(attended.transpose(1, 2).reshape(h_BSD.shape))
        return h_BSD + self.moe(self.before_experts(h_BSD))


class Decoder(nn.Module):
    """A table, blocks, a norm and a head, with a mean loss; `form` is "sorted" or one of DENSE."""

    def __init__(self, form: str = "sorted", num_layers: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block(form) for _ in range(num_layers))
        self.norm = Norm()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h_BSD = self.embed(ids)
        for layer in self.layers:
            h_BSD = layer(h_BSD)
        return F.cross_entropy(self.head(self.norm(h_BSD)).flatten(0, 1), labels.flatten())


def decoder(form: str = "sorted", num_layers: int = 1) -> Decoder:
    """The same weights on every build, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Decoder(form, num_layers).double()


def token_batches(num: int, batch: int = 4, positions: int = 4) -> list[dict[str, Tensor]]:
    """Ids and labels for the decoder, by keyword."""
    generator = torch.Generator().manual_seed(3)

    def ids() -> Tensor:
        return torch.randint(0, VOCABULARY, (batch, positions), generator=generator)

    return [{"ids": ids(), "labels": ids()} for _ in range(num)]
