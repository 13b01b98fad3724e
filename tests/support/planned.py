"""Plans of small models, with what each plan moves: for tests of the space, of the planner and of its predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autopar.capture.export import capture
from autopar.costs.hardware.collectives import Transfer
from autopar.costs.hardware.profile import Hardware, Link
from autopar.costs.plans.plan import Plan
from autopar.costs.space.build import build_space
from autopar.costs.space.call_candidates import Candidates, candidates_of
from autopar.costs.space.space import Space
from autopar.ir.sharding.mesh import Mesh
from autopar.ir.sharding.operation import Call
from autopar.planning.annotations.annotate import annotations_of, pins_of
from autopar.planning.options.groups import Memory, Search, Solver
from autopar.planning.planner import make_plan
from autopar.planning.settings import Settings
from autopar.strategies.ruled import ruled

SLOW_LINKS = Hardware(
    "fast devices, slow links", {"float32": 1e12}, 1e12, 10**12, 0.0, (Link("wire", None, 1e-3, 1e6),)
)
"""Nothing but communication costs time, so that a plan has as little of it as its pins allow."""


class TwoLinears(nn.Module):
    """The smallest model with a choice to make: 8 → 16 → 8."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=bias)
        self.down = nn.Linear(16, 8, bias=bias)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x_BD))).sum()


class TwoLinearsSquared(TwoLinears):
    """The same with a loss that is no sum of what ranks have parts of: to divide it costs collectives."""

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x_BD))).square().sum()


class Attention(nn.Module):
    """Embedded tokens through one attention block whose norm stands before, after, or on the residual connection."""

    def __init__(self, post_norm: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.post_norm = post_norm

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSD = self.embed(ids_BS)
        normed_BSD = x_BSD if self.post_norm else self.norm(x_BSD)
        q_BHSE, k_BHSE, v_BHSE = (
            layer(normed_BSD).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed_BSD = F.scaled_dot_product_attention(q_BHSE, k_BHSE, v_BHSE).transpose(1, 2).flatten(2)
        summed_BSD = x_BSD + self.out(mixed_BSD)
        return (self.norm(summed_BSD) if self.post_norm else summed_BSD).square().mean()


X_BD = torch.ones(4, 8)
IDS_BS = torch.zeros(4, 6, dtype=torch.long)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with the space it was made in and its choice per decision."""

    space: Space
    plan: Plan
    choices: tuple[int, ...]

    def transfers(self) -> list[tuple[str, str, Transfer]]:
        """(source, target, collective) of everything that the plan moves between its decisions."""
        names = [decision.name for decision in self.space.decisions]
        return [
            (names[edge.source], names[edge.target], transfer)
            for edge in self.space.edges
            for transfer in self.space.path(edge, self.choices).transfers
        ]

    def counts(self) -> Counter[tuple[str, bool, int]]:
        """(collective, whether in the backward, bytes) → how often it runs between decisions."""
        return Counter((t.collective, t.backward, t.num_bytes) for _, _, t in self.transfers())

    def strategy(self, name: str) -> str:
        number = self.space.index[name]
        return str(self.space.decisions[number].candidates.strategies[self.choices[number]])


def space_of(
    model: nn.Module, inputs: tuple[Any, ...] | dict[str, Any], hardware: Hardware = SLOW_LINKS, **axes: int
) -> Space:
    """The space of a model on a mesh of these axes, by default tp=2."""
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    return build_space(capture(model, args, kwargs), Mesh(axes or {"tp": 2}), hardware)


def planned(space: Space, model: nn.Module, memory: int | None = None, solver: Solver = "auto") -> Planned:
    """The best plan under what the model's annotations say."""
    pins = pins_of(annotations_of(model), space, "semi_auto", {})
    return Planned(space, *make_plan(space, pins, Settings(Memory(memory), Search(solver=solver))))


def call_candidates(
    node: fx.Node, padded: Sequence[frozenset[int]], mesh: Mesh, hardware: Hardware, weight_only: bool = False
) -> Candidates:
    """Return the candidates of a call_function node.

    `padded` says for each tensor input which dims may be padded, `weight_only` that all are made of parameters alone.
    """
    return candidates_of(ruled(Call.of(node)), tuple(padded), mesh, hardware, weight_only)
