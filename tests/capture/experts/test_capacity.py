"""A requested capacity: models compute what a loop over samples computes, and models without a limit are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  which defines the grouped product for any dtype
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from autopar.capture.export import capture
from autopar.errors import CaptureError
from autopar.ir.program.operators.capacity import WITHIN_CAPACITY
from autopar.ir.program.operators.expert_operators import DISPATCH
from autopar.ir.program.program import Program
from tests.support import experts
from tests.support.capped_experts import capped
from tests.support.divided_experts import Form, WithExperts, batches, with_experts
from tests.support.eager import calls, run
from tests.support.experts import grouped

BATCH = batches(1, length=6)[0]


def trained(model: WithExperts, step: Callable[..., Tensor]) -> list[Tensor]:
    """The loss and the gradients of all parameters."""
    loss = step(**BATCH)
    return [loss.detach(), *torch.autograd.grad(loss, tuple(model.parameters()))]


def captured(form: Form, capacity_factor: float | None) -> list[Tensor]:
    model = with_experts(form)
    program = capture(model, (), BATCH, capacity_factor=capacity_factor)
    leaves = pytree.tree_leaves(((), BATCH))
    return trained(model, lambda **_: run(program, dict(model.named_parameters()), {}, leaves))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("form", "capacity_factor", "limit"),
    [
        (Form(), 0.3, 1),  # of 6 positions, 2 slots each, over 4 experts
        (Form(bias=True, end="sum"), 1, 3),
        (Form(early=True), 1.1, 4),
        (Form(early=True, bias=True, end="scatter_add"), 1.0, 3),
        (Form(top_k=1), 1.0, 2),
        (Form(top_k=1, early=True), 0.5, 1),
        (Form(top_k=1, favoured=(3,)), 1.0, 2),
        (Form(top_k=4), 0.5, 3),
        (Form(top_k=4, early=True, end="sum"), 1e-9, 1),
    ],
    ids=str,
)
def test_experts_take_so_many_rows_of_each_sample(form: Form, capacity_factor: float, limit: int) -> None:
    reference, dropless = capped(with_experts(form), limit), capped(with_experts(form), 6)
    found = captured(form, capacity_factor)
    torch.testing.assert_close(found, trained(reference, reference))
    assert abs(found[0] - dropless(**BATCH)) > 1e-4, "nothing is dropped"


@pytest.mark.parametrize("form", [Form(), Form(early=True, bias=True), Form(top_k=4)], ids=str)
def test_a_capacity_for_all_rows_changes_nothing(form: Form) -> None:
    torch.testing.assert_close(captured(form, form.num_experts / form.top_k), captured(form, None))


def limited(model: nn.Module, *inputs: Tensor, capacity_factor: float = 1.25) -> Program:
    return capture(model, inputs, {}, capacity_factor=capacity_factor)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize(("weighted", "ending"), [("before", experts.added), ("after", experts.inverted)])
def test_samples_are_known_however_experts_are_written(
    weighted: str, ending: Callable[..., Tensor], top_k: int
) -> None:
    model = experts.SortedExperts(ending=ending, weighted=weighted, top_k=top_k)
    slots = (top_k, 1) if weighted == "before" and top_k > 1 else (top_k,)
    assert limits(model, torch.zeros(2, 6, 8)) == [(2, 6, *slots)]


def test_samples_are_known_of_tokens_that_are_repeated() -> None:
    assert limits(experts.RepeatedTokens(), torch.zeros(2, 6, 8)) == [(2, 6, 2, 1)]


def limits(model: nn.Module, x: Tensor) -> list[tuple[int, ...]]:
    """The shape of every index that is limited."""
    return [node.meta["tensor"].shape for node in calls(limited(model, x), WITHIN_CAPACITY)]


def test_programs_differ_by_their_capacity() -> None:
    x = torch.zeros(2, 6, 8)
    one, other = (limited(experts.SortedExperts(), x, capacity_factor=factor) for factor in (1.25, 1.5))
    plain = capture(experts.SortedExperts(), (x,), {})
    assert len({one.fingerprint, other.fingerprint, plain.fingerprint}) == 3
    assert calls(plain, DISPATCH)[0].args[3:] == () and not calls(plain, WITHIN_CAPACITY)


class Unsorted(nn.Module):
    """Rows that lie in the order of experts from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8, 8))

    def forward(self, rows: Tensor) -> Tensor:
        return grouped(rows.flatten(0, 1), self.weight, torch.arange(1, 5, dtype=torch.int32) * 3)


class Listed(nn.Module):
    """Experts of tokens in one list."""

    def __init__(self, **block: Any) -> None:
        super().__init__()
        self.experts = experts.SortedExperts(**block)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.experts(x_TD)


class Slots(Listed):
    """Tokens once for each of their experts, as the module itself lays them out."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x_TD: Tensor) -> Tensor:
        x, mine, top_k = x_TD, self.experts, self.experts.top_k
        weight, expert = F.linear(x, mine.router).softmax(-1).topk(top_k)
        ids_R, perm_R = torch.sort(expert.reshape(-1), stable=True)
        ends_E = experts.histogram(ids_R, mine.num_experts).cumsum(0, dtype=torch.int32)
        sizes = [*x.shape[:-1], top_k, x.shape[-1]]
        slots = x.unsqueeze(-2)
        if self.how == "expand":
            slots = slots.expand(sizes)
        elif self.how == "repeat":
            slots = slots.repeat(*[1] * (x.ndim - 1), top_k, 1)
        else:
            slots = slots.repeat_interleave(top_k, -2)
        rows = slots.reshape(-1, x.shape[-1])[perm_R]
        gate, up = grouped(rows, mine.gate_up.transpose(1, 2), ends_E).chunk(2, -1)
        y = grouped(F.silu(gate) * up, mine.down, ends_E)[torch.argsort(perm_R)]
        return (y.view(sizes) * weight.unsqueeze(-1)).sum(-2)


@pytest.mark.parametrize("how", ["expand", "repeat", "repeat_interleave"])
def test_slots_that_a_module_lays_out_itself_are_no_samples(how: str) -> None:
    with pytest.raises(CaptureError, match="in the forward tokens lie in one list"):
        limited(Slots(how), torch.zeros(12, 8))
    assert limits(Slots(how), torch.zeros(2, 6, 8)) == [(2, 6, 2, 1)]


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (
            nn.Linear(8, 8),
            (2, 6, 8),
            r"^Experts\(capacity_factor=1.25\) limits the rows of sorted experts, and the model has none",
        ),
        (
            nn.Sequential(experts.SortedExperts(), Unsorted()),
            (2, 6, 8),
            "sorted experts, and those in 1 are written in a form that autopar does not know",
        ),
        (Listed(), (12, 8), r"in experts tokens lie in one list, of shape \[12, 8\], whose samples are not known"),
        (Listed(weighted="before"), (12, 8), r"in experts tokens lie in one list"),
        (Listed(weighted="before", top_k=1), (12, 8), r"in experts tokens lie in one list"),
    ],
)
def test_what_cannot_be_limited_is_refused(model: nn.Module, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        limited(model, torch.zeros(shape))
