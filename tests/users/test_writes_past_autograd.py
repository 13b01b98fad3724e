"""Forwards that write past autograd (`.data`, `.detach()`, `torch.no_grad()`, `out=`), compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, given, settings
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import autopar
from autopar.capture.export import capture
from autopar.errors import CaptureError
from tests.support.eager import assert_as_eager
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh

HIDDEN = 4
Forward = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    """A layer, a vector, a running average, and a forward that writes."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.vector = nn.Parameter(torch.randn(HIDDEN))
        self.register_buffer("average", torch.ones(HIDDEN))
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def batch(seed: int = 1) -> Tensor:
    return torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(seed))


def through_a_detached_alias(self: Any, x: Tensor) -> Tensor:
    h = self.layer(x) * 1.0
    h.detach().add_(1.0)
    return h.square().sum() + self.vector.square().sum()


def without_gradients(self: Any, x: Tensor) -> Tensor:
    h = self.layer(x) * self.vector
    with torch.no_grad():
        same = h.clamp_(max=0.1)
        h[0] = 2.0
    return h.square() + same


def through_data(self: Any, x: Tensor) -> Tensor:
    h = self.layer(x)
    h.data.mul_(2.0)
    h.data[0] = 3.0
    return h.square() * self.vector


def straight_through(self: Any, x: Tensor) -> Tensor:
    q = self.layer(x).tanh()
    q.data = q.sign()
    return q * self.vector


def through_views_of_aliases(self: Any, x: Tensor) -> Tensor:
    h = self.layer(x) * 1.0
    row, alias, flat = h[0], h.detach(), h.view(-1)
    alias[1:].t().mul_(3.0)
    alias.detach()[0].add_(1.0)
    return h.square() + row + flat.view(-1, HIDDEN) * alias * self.vector


def an_alias_that_learns(self: Any, x: Tensor) -> Tensor:
    h = self.layer(x) * 1.0
    alias = h.detach()
    alias.add_(self.vector)
    twice = alias * 2
    h.data.mul_(3.0)
    return h + twice + alias


def memory_that_is_shared(self: Any, x: Tensor) -> Tensor:
    h, doubled = self.layer(x) * 1.0, x * 2
    h.data = doubled
    doubled.add_(1.0)
    h.data.mul_(2.0)
    return h * self.vector * doubled


def not_finite(self: Any, x: Tensor) -> Tensor:
    h = self.layer(x) * 1.0
    h.data[0] = float("inf")
    h.data[h.isinf()] = 0.0
    return h * self.vector


def a_running_average(self: Any, x: Tensor) -> Tensor:
    self.average.data = self.average.data * 0.5 + x.mean(0)
    self.average.data.mul_(0.9)
    return self.layer(x) * self.average * self.vector


def results_in_given_tensors(self: Any, x: Tensor) -> Tensor:
    most, where = torch.empty(HIDDEN), torch.empty(HIDDEN, dtype=torch.long)
    with torch.no_grad():
        F.normalize(self.average, dim=0, out=self.average)
        torch.max(x, 0, out=(most, where))
    return self.layer(x) * self.average * most * self.vector + where


HONOURED = (
    through_a_detached_alias,
    without_gradients,
    through_data,
    straight_through,
    through_views_of_aliases,
    an_alias_that_learns,
    memory_that_is_shared,
    not_finite,
    a_running_average,
    results_in_given_tensors,
)


@pytest.mark.parametrize("forward", HONOURED)
def test_a_write_past_autograd_changes_the_value_and_keeps_the_gradient(forward: Forward) -> None:
    assert_as_eager(Model(forward), (batch(),))


def _trained(model: Any, pipelined: bool = False) -> list[Tensor | None]:
    """Losses of three steps, then gradients, parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model.train_step(batch(step)) if pipelined else model(batch(step))
        if not pipelined:
            loss.backward()
        optimizer.step()
        losses.append(whole(loss))
    parameters = list(model.parameters())
    return [*losses, *map(whole, [p.grad for p in parameters]), *map(whole, parameters), *map(whole, model.buffers())]


def _all_at_once(self: Any, x: Tensor) -> Tensor:
    parts = (through_data, straight_through, a_running_average)
    return torch.stack([part(self, x).square().mean() for part in parts]).sum()


def _as_one_process() -> None:
    expected = _trained(Model(_all_at_once))
    model = Model(_all_at_once)
    compiled = autopar.compile(model, mesh((2,), ("dp",)), (batch(),), hardware=SLOW_DEVICES, strategy="zero3")
    assert_close(_trained(compiled), expected)


@pytest.mark.slow
def test_writes_past_autograd_train_on_ranks_as_in_one_process(ranks: Ranks) -> None:
    ranks.run(_as_one_process, world_size=2)


class Staged(nn.Module):
    """Two stages, each with a write past autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Model(straight_through), Model(through_data)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def _in_a_pipeline() -> None:
    options: dict[str, Any] = {"schedule": "gpipe", "split_points": ["second"], "microbatches": 1}
    compiled = autopar.compile(Staged(), mesh((2,), ("pp",)), (batch(),), hardware=SLOW_DEVICES, **by_flag(**options))
    model = Staged()
    expected = _trained(model)[:3]
    assert_close(_trained(compiled, pipelined=True)[:3], expected)


def test_writes_past_autograd_train_in_a_pipeline_as_in_one_process(ranks: Ranks) -> None:
    ranks.run(_in_a_pipeline, world_size=2)


# What is refused


def _halved(self: Any, x: Tensor) -> Tensor:
    self.vector.data = self.vector.data * 0.5
    return self.layer(x) * self.vector


def _normalized(self: Any, x: Tensor) -> Tensor:
    self.layer.weight.data = F.normalize(self.layer.weight.data)
    return self.layer(x) * self.vector


def _clipped(self: Any, x: Tensor) -> Tensor:
    self.layer.weight.data.clamp_(-1, 1)
    return self.layer(x) * self.vector


def _one_set(self: Any, x: Tensor) -> Tensor:
    self.vector.data[0] += 1
    return self.layer(x) * self.vector


def _momentum(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.vector.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return self.layer(x) * self.vector


def _filled(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        nn.init.normal_(self.vector)
    return self.layer(x) * self.vector


def _into_out(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch.mul(self.vector, 0.5, out=self.vector)
    return self.layer(x) * self.vector


@pytest.mark.parametrize("forward", [_halved, _normalized, _clipped, _one_set, _momentum, _filled, _into_out])
def test_a_write_into_a_parameter_is_refused_with_its_name_and_line(forward: Forward) -> None:
    name = r"layer\.weight" if forward in (_normalized, _clipped) else "vector"
    message = (
        rf"writes into the parameter {name} \(.*test_writes_past_autograd\.py:\d+\).*buffer, or compute with a copy"
    )
    with pytest.raises(CaptureError, match=message):
        capture(Model(forward), (batch(),), {})


def _after_relu(clone: bool) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.layer(x).relu()
        h = h.clone() if clone else h
        h.data.add_(1.0)
        return h * self.vector

    return forward


def test_a_write_into_what_a_backward_keeps_is_refused_and_a_clone_helps() -> None:
    with pytest.raises(CaptureError, match=r"aten\.relu\.default in the forward keeps for its backward.*clone"):
        capture(Model(_after_relu(clone=False)), (batch(),), {})
    assert_as_eager(Model(_after_relu(clone=True)), (batch(),))


def _other_shape(self: Any, x: Tensor) -> Tensor:
    h = self.layer(x) * self.vector
    h.data = h.data[:1]
    return h


def _no_tensor(self: Any, x: Tensor) -> Tensor:
    self.plain.data = x.mean(0)
    return self.layer(x) * self.vector


def _an_input(self: Any, x: Tensor) -> Tensor:
    x.data = x * 2
    return self.layer(x) * self.vector


def _moved(self: Any, x: Tensor) -> Tensor:
    h = self.layer(x) * self.vector
    h.detach().set_(x)
    return h


def _initialized(self: Any, x: Tensor) -> Tensor:
    h = self.layer(x) * self.vector
    nn.init.constant_(h, 1.0)
    return h


def _a_view(self: Any, x: Tensor) -> Tensor:
    h = self.layer(x) * self.vector
    row = h[0]
    row.data = x[0] * 2
    return h + row


def _lasting_alias(self: Any, x: Tensor) -> Tensor:
    self.average.data = self.vector.data
    return self.layer(x) * self.vector * self.average


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (_other_shape, r"shape \[1, 4\] to the \.data of a tensor that is .* \[6, 4\] \(.*\.py:\d+\)"),
        (_no_tensor, r"\.data of a tensor \(.*\.py:\d+\) that is neither.*register_buffer"),
        (_an_input, r"writes into its input x; clone"),
        (_moved, r"calls set_ on a tensor \(.*\.py:\d+\).*x\.data = y"),
        (_initialized, r"nn\.init\.constant_ \(.*\.py:\d+\).*torch\.no_grad\(\)"),
        (_a_view, r"assigns the \.data of a view \(aten\.select\.int\).*clone"),
        (_lasting_alias, r"lets average lie in the memory of another parameter.*clone"),
    ],
)
def test_a_write_that_a_graph_cannot_hold_is_refused(forward: Forward, message: str) -> None:
    model = Model(forward)
    model.plain = torch.ones(HIDDEN)
    with pytest.raises(CaptureError, match=message):
        capture(model, (batch(),), {})
    assert_close(model.plain, torch.ones(HIDDEN))


# Spectral norm


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
@pytest.mark.parametrize("convolution", [False, True])
def test_spectral_norm_is_as_in_one_process(norm: Callable[..., nn.Module], convolution: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Conv2d(3, 4, 3) if convolution else nn.Linear(3, 4)))
    shape = (2, 3, 5, 5) if convolution else (2, 3)
    program = assert_as_eager(model, (torch.randn(shape),), tolerance=1e-5)
    assert len(program.mutations) == 2


# Random programs

STEPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda t, w: t.add_(1.0),
    "scale": lambda t, w: t.mul_(0.5),
    "add a weight": lambda t, w: t.add_(w),
    "scale by a weight": lambda t, w: t.mul_(w),
    "fill": lambda t, w: t.fill_(0.25),
    "data scaled": lambda t, w: t.data.mul_(2.0),
    "data set": lambda t, w: setattr(t, "data", t.data.sign()),
    "data of another": lambda t, w: setattr(t, "data", (w * 3).expand(t.shape).clone()),
    "row of data": lambda t, w: t.data[0].add_(2.0),
    "without gradients": lambda t, w: torch.no_grad()(lambda: t.mul_(3.0))(),
    "squared before": lambda t, w: t * t,
}
ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda t: t,
    "detached": lambda t: t.detach(),
    "data": lambda t: t.data,
    "transposed": lambda t: t.transpose(0, -1),
    "first": lambda t: t[:1],
    "a copy": lambda t: t.clone(),
}
programs = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(sorted(ALIASES)), st.sampled_from(["", *sorted(STEPS)])),
    min_size=1,
    max_size=5,
)


def _program(chosen: list[tuple[int, str, str]]) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        tensors = [self.layer(x) * 1.0]
        kept: list[Tensor] = []
        for base, alias, step in chosen:
            taken = ALIASES[alias](tensors[base % len(tensors)])
            result = STEPS[step](taken, self.vector[0]) if step else None
            if step == "squared before" and result is not None:
                kept.append(result)
            tensors.append(taken)
        return torch.stack([(each * each).sum() * (i + 1) for i, each in enumerate([*tensors, *kept])])

    return forward


@settings(max_examples=6, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(programs)
def test_programs_of_writes_are_as_eager_or_refused(chosen: list[tuple[int, str, str]]) -> None:
    try:
        Model(_program(chosen))(batch()).sum().backward()
    except RuntimeError:  # eager refuses the program
        return
    try:
        assert_as_eager(Model(_program(chosen)), (batch(),), loss=lambda found: found.sum(), tolerance=1e-4)
    except CaptureError as refusal:
        assert "keeps for its backward" in str(refusal) or ".data of a view" in str(refusal)
