"""Mixture-of-Experts in the sorted forms that people write by hand, and plans that do one thing to them.

Legend: T tokens, D features, F features of an expert, K experts of a token, E experts, R = T · K rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.costs.space.space import Space
from autopar.ir.program.operators.expert_operators import DISPATCH, GROUPED_MM
from tests.support.experts import added, placed, scatter_added, sorted_rows

D, BATCH, LENGTH, CLASSES = 8, 8, 2, 3
End = Literal["index_add", "scatter_add", "sum"]
ENDS: Mapping[End, Callable[..., Tensor]] = {"index_add": added, "scatter_add": scatter_added, "sum": placed}
Pins = dict[int, np.ndarray]
Wanted = Mapping[Any, frozenset[tuple[str, ...]]]
"""Operator → the choices, one for each mesh axis, that a plan may make of it."""


@dataclass(frozen=True, slots=True)
class Form:
    """Form in which experts are written, and experts that tokens choose."""

    num_experts: int = 4
    top_k: int = 2
    hidden: int = 6
    end: End = "index_add"
    """Operation that turns rows into tokens again: two ways to add, and the sum that transformers use."""
    early: bool = False
    """True if rows are weighted before their experts, as torchtitan may do."""
    bias: bool = False
    favoured: tuple[int, ...] = ()
    """Experts that the router prefers so much that every token chooses them."""
    frozen: tuple[str, ...] = ()
    """Parts of the names of frozen parameters."""
    num_layers: int = 1
    shared: Literal["", "before", "after"] = ""
    """Place where a layer calls its shared expert, if it has one: before or after its other experts."""


class SortedExperts(nn.Module):
    """A router, and gated experts whose rows are sorted."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.router = nn.Linear(D, form.num_experts)
        self.w1 = nn.Parameter(torch.randn(form.num_experts, 2 * form.hidden, D) * 0.3)
        self.w2 = nn.Parameter(torch.randn(form.num_experts, D, form.hidden) * 0.3)
        self.b1 = nn.Parameter(torch.randn(form.num_experts, 2 * form.hidden)) if form.bias else None
        self.b2 = nn.Parameter(torch.randn(form.num_experts, D)) if form.bias else None
        with torch.no_grad():
            for expert in form.favoured:
                self.router.bias[expert] = 50.0

    def forward(self, h_BSD: Tensor) -> Tensor:
        form, x_TD = self.form, h_BSD.view(-1, D)
        weights_TK, index_TK = self.router(x_TD).softmax(-1).topk(form.top_k)
        # Else one weight of one expert were 1 whatever the router says.
        weights_TK = weights_TK + weights_TK / (1 + weights_TK.sum(-1, keepdim=True))
        forms: dict[str, Any] = {"ending": ENDS[form.end], "weighted": "before" if form.early else "after"}
        y_TD = sorted_rows(x_TD, weights_TK, index_TK, form.num_experts, self._through, **forms)
        return y_TD.view(h_BSD.shape)

    def _through(self, rows_RD: Tensor, product: Callable[..., Tensor], ids_R: Tensor) -> Tensor:
        """Rows through their experts."""
        up = product(rows_RD, self.w1.transpose(-2, -1))
        gate, up = (up if self.b1 is None else up + self.b1[ids_R]).chunk(2, -1)
        down = product(F.silu(gate) * up, self.w2.transpose(-2, -1))
        return down if self.b2 is None else down + self.b2[ids_R]


class Layer(nn.Module):
    """A linear layer and experts, each with a residual connection."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.linear, self.experts = nn.Linear(D, D), SortedExperts(form)
        self.called = form.shared
        self.shared = (
            nn.Sequential(nn.Linear(D, form.hidden), nn.SiLU(), nn.Linear(form.hidden, D)) if form.shared else None
        )

    def forward(self, h_BSD: Tensor) -> Tensor:
        h_BSD = h_BSD + torch.tanh(self.linear(h_BSD))
        if self.shared is None:
            return h_BSD + self.experts(h_BSD)
        if self.called == "before":
            shared_BSD = self.shared(h_BSD)
            return h_BSD + (self.experts(h_BSD) + shared_BSD)
        return h_BSD + (self.experts(h_BSD) + self.shared(h_BSD))


class WithExperts(nn.Module):
    """Layers with experts; gives its loss."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(form) for _ in range(form.num_layers))
        self.head = nn.Linear(D, CLASSES)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not any(part in name for part in form.frozen))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def with_experts(form: Form, dtype: torch.dtype = torch.float64) -> WithExperts:
    """The same weights on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return WithExperts(form).to(dtype)


def batches(number: int, dtype: torch.dtype = torch.float64, length: int = LENGTH) -> list[dict[str, Tensor]]:
    """Global batches for `WithExperts`."""
    drawn = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(BATCH, length, D, generator=drawn, dtype=dtype),
            "labels": torch.randint(CLASSES, (BATCH, length), generator=drawn),
        }
        for _ in range(number)
    ]


def choices(*names: str) -> Wanted:
    """Return the choices of experts that a plan may make, given one word for each mesh axis.

    "t" (of samples; "p" of positions), "x", "t+x" and "d" at the ends; "o", the features of an expert, by column and
    then by row.
    """
    of_ends = tuple("-" if name == "o" else name.replace("t", "a0").replace("p", "b0") for name in names)
    wanted = {DISPATCH: frozenset({of_ends})}
    if "o" in names:
        of_matrices = ("o", "k")
        wanted[GROUPED_MM] = frozenset(
            tuple(each if name == "o" else "r" if name in ("t", "p") else "x" for name in names) for each in of_matrices
        )
    return wanted


def forced(wanted: Wanted) -> Callable[[Space, Pins], Pins]:
    """Adds to the pins of a plan that it makes one of the wanted choices of every call of an operator."""

    def pinned(space: Space, pins: Pins) -> Pins:
        found, seen = dict(pins), set()
        for number, decision in enumerate(space.decisions):
            allowed = wanted.get(decision.node.target) if decision.kind == "call" else None
            if allowed is not None:
                seen.add(decision.node.target)
                mask = np.array([strategy.choices in allowed for strategy in decision.candidates.strategies])
                assert mask.any(), f"{decision.name}: none of {allowed}"
                found[number] = mask
        assert seen == set(wanted), f"the graph has no {set(wanted) - seen}"
        return found

    return pinned
