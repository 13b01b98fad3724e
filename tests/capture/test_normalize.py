"""Normalisation: however a forward writes in place and packs its products, the clean graph computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, given, reject, settings
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.export import capture
from autopar.capture.normalize import rehome
from autopar.capture.passes.views import _split_groups
from autopar.errors import CaptureError
from autopar.ir.program.effects import is_random
from autopar.ir.program.program import Program
from tests.support.eager import assert_as_eager, calls

aten = torch.ops.aten


class Function(nn.Module):
    """A forward with two weights and a buffer."""

    def __init__(self, forward: Callable[..., Any], *, weight: tuple[int, ...] = (4, 6)) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(weight, generator=generator))
        self.bias = nn.Parameter(torch.randn(weight[-1], generator=generator))
        self.register_buffer("state", torch.zeros(6))
        self.function = forward

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


# In-place operations

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "first half": lambda x: x[: max(x.shape[0] // 2, 1)],
    "every other": lambda x: x[..., ::2],
    "last row": lambda x: x[-1] if x.ndim > 1 else x,
    "transposed": lambda x: x.transpose(0, -1),
    "all reversed": lambda x: x.permute(*reversed(range(x.ndim))),
    "flat": lambda x: x.view(-1) if x.is_contiguous() else x,
    "one more dim": lambda x: x.unsqueeze(0),
    "squeezed": lambda x: x.unsqueeze(1).squeeze(1),
    "a chunk": lambda x: x.chunk(2, 0)[-1],
    "a split": lambda x: x.split(2, -1)[0],
    "unbound": lambda x: x.unbind(0)[0] if x.ndim > 1 else x,
    "narrowed": lambda x: x.narrow(0, 0, 1),
    "diagonal": lambda x: x.diagonal() if x.ndim == 2 else x,
    "itself": lambda x: x,
}
MANY = ("a chunk", "a split", "unbound")
"""Autograd refuses writes around these where a gradient flows."""
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda view, w: view.add_(w),
    "mul": lambda view, w: view.mul_(1.5),
    "relu": lambda view, w: view.relu_(),
    "fill": lambda view, w: view.fill_(0.25),
    "fill with a tensor": lambda view, w: view.fill_(w),
    "copy": lambda view, w: view.copy_(w.expand(view.shape)),
    "zero": lambda view, w: view.zero_(),
    "masked": lambda view, w: view.masked_fill_(view.detach() > 0.5, 0.5),
    "clamp": lambda view, w: view.clamp_(-1, 1),
    "assign": lambda view, w: view.__setitem__(..., w * 2),
}
steps = st.lists(
    st.tuples(
        st.integers(0, 5), st.sampled_from(sorted(set(VIEWS) - set(MANY))), st.sampled_from(["", *sorted(WRITES)])
    ),
    min_size=1,
    max_size=6,
)


def _chain(chosen: list[tuple[int, str, str]]) -> Callable[..., Tensor]:
    """A forward that takes views of views, writes through some, and reads all of them at the end."""

    def forward(self: Any, x: Tensor) -> Tensor:
        tensors = [x * self.weight]
        for base, view, write in chosen:
            taken = VIEWS[view](tensors[base % len(tensors)])
            if write:
                WRITES[write](taken, self.bias[0])
            tensors.append(taken)
        self.state.add_(tensors[0].detach().sum(0))
        return torch.stack([(tensor * tensor).sum() * (i + 1) for i, tensor in enumerate(tensors)])

    return forward


@settings(max_examples=10, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(steps)
def test_chains_of_writes_through_views_are_as_eager(chosen: list[tuple[int, str, str]]) -> None:
    try:
        Function(_chain(chosen))(_x(4, 6)).square().mean().backward()
    except RuntimeError:  # a value that autograd needs was overwritten: eager refuses what functional calls can do
        reject()
    program = assert_as_eager(Function(_chain(chosen)), (_x(4, 6),), tolerance=1e-5)
    operations = [node.target for node in calls(program) if isinstance(node.target, torch._ops.OpOverload)]
    assert not any(operation._schema.is_mutable for operation in operations)
    assert program.mutations == ("state",)


@pytest.mark.parametrize("view", MANY)
def test_a_write_into_one_of_many_views_is_as_eager(view: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * 2
        VIEWS[view](y).add_(1)
        return y * self.weight

    assert_as_eager(Function(forward), (_x(4, 6),))


def test_a_write_is_seen_by_views_made_before_it() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * self.weight
        row = y[1]
        y.view(-1)[3:9].add_(1)
        return row

    program = assert_as_eager(Function(forward), (_x(4, 6),))
    assert calls(program, aten.slice_scatter.default)


def test_a_write_keeps_the_dtype_of_what_is_written() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = (x * self.weight).bfloat16()
        y.mul_(self.weight)
        return y.float()

    assert_as_eager(Function(forward), (_x(4, 6),), tolerance=0.02)  # bf16 has 8 bits


def test_a_buffer_written_twice_is_one_mutation() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        before = self.state * 2
        self.state.mul_(0.9)
        self.state[:3] += x.sum(0)[:3]
        return x * self.weight + self.state + before

    program = assert_as_eager(Function(forward), (_x(4, 6),))
    assert program.mutations == ("state",) and len(program.output) == 2


@pytest.mark.parametrize("write", ["fill", "fill with a tensor", "copy", "zero"])
def test_what_is_overwritten_has_a_gradient_of_zeros_without_dims_too(write: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        total = (x * self.weight).sum()
        WRITES[write](total, self.bias[0])
        return total

    model = Function(forward)
    assert_as_eager(model, (_x(4, 6),))
    assert model.weight.grad is not None and not model.weight.grad.any()


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x.normal_(1, 2),
    "uniform": lambda x: x.uniform_(-1, 1),
    "bernoulli": lambda x: x.bernoulli_(0.3),
    "bernoulli of a tensor": lambda x: x.bernoulli_(torch.full_like(x, 0.3)),
    "exponential": lambda x: x.exponential_(2.0),
    "log-normal": lambda x: x.log_normal_(),
    "geometric": lambda x: x.geometric_(0.3),
    "cauchy": lambda x: x.cauchy_(),
    "whole numbers": lambda x: x.random_(3, 9),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_filled_at_random_is_as_eager(draw: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        written = x * self.weight
        DRAWS[draw](written[1:])
        return written * DRAWS[draw](torch.empty_like(x))

    def seeded(output: Tensor) -> Tensor:
        torch.manual_seed(5)  # for the run of the model itself, which follows
        return output.square().mean()

    torch.manual_seed(5)
    program = assert_as_eager(Function(forward), (_x(4, 6),), loss=seeded)
    assert sum(is_random(node) for node in calls(program)) == 2


def test_a_write_into_an_expanded_tensor_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x.sum(0, keepdim=True) * self.bias
        y.expand(4, 6)[0].add_(1)
        return y

    with pytest.raises(CaptureError, match=r"through the view aten.expand.*clone"):
        capture(Function(forward), (_x(4, 6),), {})


# The form of products


def test_a_flattened_product_keeps_batch_and_sequence_apart() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], 6)

    program = assert_as_eager(Function(forward), (_x(2, 3, 4),))
    assert [node.target for node in calls(program)] == [aten.matmul.default, aten.add.Tensor]


@pytest.mark.sample(13)
@pytest.mark.parametrize(
    "take",
    [
        lambda y: y.split(2, -1),
        lambda y: y.chunk(3, 2),
        lambda y: y.split([1, 2, 3], -1),
        lambda y: (y[..., :4], y[..., 4:]),
        lambda y: y.view(*y.shape[:-1], 3, 2).unbind(-2),
        lambda y: y.view(2, 3, 3, 2, 1).permute(2, 0, 3, 1, 4).unbind(0),
        lambda y: list(y.unflatten(-1, (3, 2)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()),
        lambda y: (lambda z: (z[0], z[1], z[2]))(y.unflatten(-1, (3, 2)).permute(2, 0, 1, 3)),
    ],
)
@pytest.mark.parametrize("product", ["linear", "matmul", "bare"])
def test_a_packed_projection_becomes_one_for_each_piece(take: Any, product: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if product == "linear":
            y = self.linear(x)
        else:
            y = x @ self.weight + self.bias if product == "matmul" else x @ self.weight
        return torch.cat([(piece.sin() * (i + 1)).flatten() for i, piece in enumerate(take(y))])

    model = Function(forward)
    model.linear = nn.Linear(4, 6)
    program = assert_as_eager(model, (_x(2, 3, 4),))
    products = calls(program, aten.linear.default, aten.matmul.default)
    assert sum(node.meta["tensor"].shape[-1] for node in products) == 6 and len(products) in (2, 3)
    assert all(weight in calls(program, aten.slice.Tensor) for weight in (node.args[1] for node in products))


@pytest.mark.parametrize(
    "take",
    [
        lambda y: (y[..., :4], y[..., 2:]),
        lambda y: (*y.chunk(3, -1), y.sum()),
        lambda y: y.chunk(3, 1),
        lambda y: y.view(2, 3, 3, 2).unbind(-1),
    ],
)
def test_what_is_not_packed_stays_one_product(take: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.cat([piece.flatten() for piece in take(x @ self.weight)])

    program = assert_as_eager(Function(forward), (_x(2, 3, 4),))
    assert len(calls(program, aten.matmul.default)) == 1


def test_attention_heads_are_split_before_they_are_moved() -> None:
    model = Function(lambda self, x: self.attention(x, x, x, need_weights=False)[0])
    model.attention = nn.MultiheadAttention(8, 2, batch_first=True)
    program = assert_as_eager(model, (_x(3, 5, 8),))
    assert all(shape[0] not in (6, 15) for shape in _shapes(program)), "batch is merged with heads or with sequence"


def _merged(x: Tensor, heads: int) -> Tensor:
    """Return [batch * heads, positions, features] of hidden states [batch, positions, heads * features]."""
    batch, positions, hidden = x.shape
    return x.view(batch, positions, heads, hidden // heads).transpose(1, 2).reshape(batch * heads, positions, -1)


def _by_baddbmm(self: Any, x: Tensor) -> Tensor:
    """Compute attention as BLOOM does."""
    q, k, v = (_merged(each, 2) for each in (x @ self.weight).chunk(3, -1))
    bias = torch.arange(10.0).view(2, 1, 5).repeat(3, 1, 1)
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=0.5, alpha=0.7).view(3, 2, 5, 5)
    weights = (scores + torch.ones(5, 5).triu()).softmax(-1).view(6, 5, 5)
    return torch.bmm(weights, v).view(3, 2, 5, 2).transpose(1, 2).reshape(3, 5, 4)


def _by_bmm(self: Any, x: Tensor) -> Tensor:
    """Compute attention as BART did before it used scaled_dot_product_attention."""
    q, k, v = (_merged(each, 2) for each in (x @ self.weight).chunk(3, -1))
    scores = torch.bmm(q * 0.7, k.transpose(1, 2)).view(3, 2, 5, 5) + torch.ones(5, 5).triu()
    weights = F.dropout(scores.view(6, 5, 5).softmax(-1), p=0.0, training=self.training)
    return torch.bmm(weights, v).view(3, 2, 5, 2).transpose(1, 2).reshape(3, 5, 4)


@pytest.mark.parametrize("forward", [_by_baddbmm, _by_bmm])
def test_batch_and_heads_are_apart_in_attention_by_bmm(forward: Any) -> None:
    program = assert_as_eager(Function(forward, weight=(4, 12)), (_x(3, 5, 4),))
    assert all(shape[:1] != (6,) for shape in _shapes(program)), "batch is merged with heads"
    assert len(calls(program, aten.matmul.default)) == 5


def test_scores_that_others_read_stay_merged() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        scores = torch.bmm(_merged(x, 2), _merged(x, 2).transpose(1, 2))
        return scores.view(3, 2, 5, 5).sum() + scores.cumsum(0).sum() + self.weight.sum()

    program = assert_as_eager(Function(forward), (_x(3, 5, 4),))
    assert len(calls(program, aten.bmm.default)) == 1


def _shapes(program: Program) -> list[tuple[int, ...]]:
    return [node.meta["tensor"].shape for node in calls(program)]


# The form of the other calls


def test_sizes_of_views_are_explicit() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = (x * self.weight).unflatten(-1, (-1, 3)).flatten(0, 1)
        return y.reshape(-1, 2, 3).transpose(0, 1).reshape(-1) + self.bias[:1].expand_as(y.view(-1))

    program = assert_as_eager(Function(forward), (_x(4, 6),))
    views = calls(program, aten.view.default, aten.reshape.default, aten.expand.default)
    assert [node.args[1] for node in views] == [list(node.meta["tensor"].shape) for node in views]
    assert {node.target for node in calls(program)}.isdisjoint({aten.flatten.using_ints, aten.unflatten.int})
    assert len(calls(program, aten.reshape.default)) == 1, "only the transposed tensor moves memory"


def test_a_view_behind_a_kernel_with_strides_of_its_own_is_a_reshape() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        q = (x * self.bias[0]).view(2, 3, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).contiguous().view(2, 3, 8)

    program = assert_as_eager(Function(forward), (_x(2, 3, 8),))
    assert calls(program)[-1].target is aten.reshape.default


def test_calls_that_change_nothing_are_dropped() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = F.dropout(x.to(torch.float32).contiguous().view(4, 6), 0.0).expand(4, 6)[:] + 0
        y = F.dropout(y * 1, 0.5, training=False).type_as(x).detach().squeeze(0).clone()
        return (y / 1 - 0) * self.weight

    program = assert_as_eager(Function(forward), (_x(4, 6),))
    assert [node.target for node in calls(program)] == [aten.mul.Tensor]


def test_calls_that_change_something_are_kept() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = (x * self.weight).t().contiguous().double() + 1
        return F.dropout(y.detach() * y, 0.5)[:, :2]

    targets = [node.target for node in calls(capture(Function(forward), (_x(4, 6),), {}))]
    kept = [aten.contiguous.default, aten.to.dtype, aten.add.Tensor, aten.detach.default, aten.dropout.default]
    assert [target for target in targets if target in kept] == kept and targets[-1] is aten.slice.Tensor


def test_broadcast_tensors_are_expansions() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        a, b = torch.broadcast_tensors(x, self.bias)
        return a * b

    program = assert_as_eager(Function(forward), (_x(4, 6),))
    assert [node.target for node in calls(program)] == [aten.expand.default, aten.mul.Tensor]


@torch.library.custom_op("autopar::_kept_by_tests", mutates_args=())
def kept(x: Tensor) -> Tensor:
    """An identity that means something."""
    return x.clone()


kept.register_fake(torch.empty_like)
kept.register_autograd(lambda ctx, gradient: gradient)


def test_operators_of_autopar_itself_are_kept() -> None:
    program = assert_as_eager(Function(lambda self, x: kept(x * self.weight)), (_x(4, 6),))
    assert calls(program)[-1].target is torch.ops.autopar._kept_by_tests.default


def test_made_tensors_name_a_device_that_the_runtime_replaces() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        ones = torch.ones(6) + x.new_zeros(6) + torch.zeros_like(x) + torch.tensor(2.0)
        return x * self.weight + ones + torch.arange(6, device=x.device)

    program = assert_as_eager(Function(forward), (_x(4, 6),))
    makers = calls(program, aten.ones.default, aten.arange.default)
    assert [node.kwargs["device"] for node in makers] == [torch.device("cpu")] * 2
    rehome(program.graph, torch.device("meta"))
    assert [node.kwargs["device"] for node in makers] == [torch.device("meta")] * 2


@pytest.mark.parametrize(
    ("before", "after", "groups"),
    [
        ((6, 4), (2, 3, 4), [(2, 3), (4,)]),
        ((6, 4), (6, 4), None),
        ((6, 4), (24,), None),
        ((6, 4), (3, 8), None),
        ((6, 1), (2, 3, 1), [(2, 3), (1,)]),
        ((4,), (2, 2), [(2, 2)]),
    ],
)
def test_a_view_that_only_splits_is_told_apart(before: Any, after: Any, groups: Any) -> None:
    assert _split_groups(before, after) == groups


def test_the_sgn_of_real_numbers_is_sign_and_of_complex_ones_stays() -> None:
    program = assert_as_eager(Function(lambda self, x: (x * self.weight).sgn() * self.bias), (_x(4, 6),))
    assert calls(program, aten.sign.default) and not calls(program, aten.sgn.default)
    program = capture(Function(lambda self, x: torch.complex(x, self.weight).sgn().abs()), (_x(4, 6),), {})
    assert calls(program, aten.sgn.default)


# Gradients


def test_what_no_gradient_comes_back_to_is_detached() -> None:
    def forward(module: Function, x: Tensor) -> Tensor:
        scores = x @ module.weight
        order = (scores * 2 + module.bias).topk(2).indices  # of which only the order is read
        return scores.gather(1, order)

    program = assert_as_eager(Function(forward), (_x(3, 4),))
    scored = {str(node.target): node.meta["tensor"].requires_grad for node in program.graph.nodes if calls_one(node)}
    assert scored["aten.matmul.default"] and scored["aten.gather.default"]
    assert not scored["aten.mul.Tensor"] and not scored["aten.add.Tensor"]


def test_one_of_several_outputs_may_be_a_dead_end() -> None:
    def forward(module: Function, x: Tensor) -> Tensor:
        values, _ = (x @ module.weight).sort(1)
        return values[:, :2] * 3 + (values * 2).argsort(1)[:, :2]

    assert_as_eager(Function(forward), (_x(3, 4),))


def calls_one(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and not isinstance(node.meta["tensor"], tuple)
