"""Static arguments: values that follow from them alone are computed while a model is traced; the rest is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.capture.export import capture
from autopar.capture.static.arguments import StaticTensor, with_static
from autopar.errors import CaptureError, InputError
from tests.support.eager import assert_as_eager, calls

Forward = Callable[[Any, Tensor, Tensor], Any]
X_BD, COUNTS = torch.linspace(-1, 1, 32).reshape(4, 8), torch.tensor([1, 2, 0, 1])


class Model(nn.Module):
    """A weight, a plain tensor, and what a test does with them, an input and the static argument `n`."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 9.0))
        self.plain = torch.tensor([3, 1, 1, 1])
        self.function = function

    def forward(self, x_BD: Tensor, n: Tensor) -> Any:
        return self.function(self, x_BD * self.weight, n)


def _loop(m: Any, x: Tensor, n: Tensor) -> Tensor:
    return torch.stack([x[: int(count)].sum() * index for index, count in enumerate(n)])


def _groups(m: Any, x: Tensor, n: Tensor) -> Tensor:
    """Windows of one length, padded and taken out again, as Qwen2.5-VL has them."""
    padded = F.pad(torch.arange(int(n.sum())), (0, 2), value=-100).reshape(2, 3)
    lengths = (padded != -100).sum(1)
    kept = padded.reshape(-1)
    order, ends = kept[kept != -100].flip(0), F.pad(lengths.cumsum(0), (1, 0)).tolist()
    bounds = torch.unique_consecutive(torch.tensor(ends, dtype=torch.int32))
    return torch.cat([part.mean(0) for part in x[order].split((bounds[1:] - bounds[:-1]).tolist())])


def _branch(m: Any, x: Tensor, n: Tensor) -> Tensor:
    return x.sum() if n.max() > 1 else x.mean()


def _written(m: Any, x: Tensor, n: Tensor) -> Tensor:
    n = n.clone()
    before = x + n[:, None]
    n[0] = 2
    n += 1
    return before + x * n[:, None] * len(x.split([int(n[0]), 1]))


def _written_by_traced(m: Any, x: Tensor, n: Tensor) -> Tensor:
    y = torch.zeros_like(n, dtype=torch.float32)
    y[n[1]] = x[0].sum()
    return (x * y[:, None]).sum() + y[2]


def _written_through_a_view(m: Any, x: Tensor, n: Tensor) -> Tensor:
    y = n.float()
    row = y[1:3]
    row.add_(x[0, :2])
    return x * y[:, None] + row.sum()


def _read_by_columns(m: Any, x: Tensor, n: Tensor) -> Tensor:
    y = n.float().reshape(2, 2)
    columns = y.t()
    y[0] = x[0, :2]
    return x * columns.reshape(4, 1)


def _marked(m: Any, x: Tensor, n: Tensor) -> Tensor:
    chosen = torch.zeros(4, dtype=torch.long)
    first = chosen[:2]
    first.add_(1)
    chosen[n[1] + 1 :] = 1
    return x[chosen.bool()]


WORKS: dict[str, Forward] = {
    "sizes": lambda m, x, n: torch.cat([part.sum(0) for part in x.split(n.tolist())]),
    "a loop": _loop,
    "a slice": lambda m, x, n: x[: n[1]],
    "an index": lambda m, x, n: x[n[1]],
    "indices": lambda m, x, n: x[n],
    "a range": lambda m, x, n: sum(x[i] for i in range(n.sum())),
    "a branch": _branch,
    "a mask": lambda m, x, n: x[n > 0],
    "a mask of two dims": lambda m, x, n: x[n[:, None] > torch.arange(8)],
    "a mask of positions": lambda m, x, n: x[torch.arange(4) < n.max()],
    "places": lambda m, x, n: x[n.nonzero()[:, 0]],
    "with a constant": lambda m, x, n: x[n == m.plain],
    "repeats": lambda m, x, n: x.repeat_interleave(n, dim=0),
    "of no dims": lambda m, x, n: x.narrow(0, n[0], n[1]).reshape(n[1], -1),  # type: ignore[call-overload]
    "factors": lambda m, x, n: x * n[:, None],
    "a sum of squares": lambda m, x, n: x * (n.float() @ n.float()),
    "windows": _groups,
    "written": _written,
    "written by traced values": _written_by_traced,
    "written through a view": _written_through_a_view,
    "read by columns": _read_by_columns,
    "marked": _marked,
    "returned": lambda m, x, n: (x.sum(), n, n + 1),
}


def _first(output: Any) -> Tensor:
    return (output[0] if isinstance(output, tuple) else output).square().mean()


@pytest.mark.parametrize("name", WORKS)
def test_a_model_whose_sizes_follow_from_a_static_argument_is_captured_as_it_runs(name: str) -> None:
    program = assert_as_eager(Model(WORKS[name]), (X_BD, COUNTS), loss=_first, static=["n"])
    assert program.inputs[1] is None
    assert isinstance(program.input_values[1], StaticTensor)


def test_a_write_into_a_static_argument_leaves_the_callers_tensor() -> None:
    counts, model = COUNTS.clone(), Model(lambda m, x, n: x * n.add_(1)[:, None])
    args, kwargs = with_static(((X_BD, counts), {}), ["n"], model.forward)
    program = capture(model, args, kwargs)
    assert torch.equal(counts, COUNTS)
    assert torch.equal(args[1].values, COUNTS)
    assert [each.flatten().tolist() for each in program.constants.values()] == [[2, 3, 1, 2]]


def test_what_is_static_is_no_call_of_the_graph() -> None:
    model = Model(lambda m, x, n: x * (n.cumsum(0) * 2 + 1)[:, None])
    program = capture(model, *with_static(((X_BD, COUNTS), {}), ["n"], model.forward))
    assert not calls(program, torch.ops.aten.cumsum.default)
    assert [each.tolist() for each in program.constants.values()] == [[[3], [7], [7], [9]]]


def test_many_elements_are_no_constant() -> None:
    many, model = torch.arange(5000), Model(lambda m, x, n: x * (n[:, None] == n).sum())
    program = capture(model, *with_static(((X_BD, many), {}), ["n"], model.forward))
    assert calls(program, torch.ops.aten.eq.Tensor)
    assert max(each.numel() for each in program.constants.values()) == 5000


def test_static_positions_that_begin_anew_keep_packed_texts_apart() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, use_cache=False))
    ids = torch.arange(8)[None] * 5 % 16
    inputs = {"input_ids": ids, "labels": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}
    assert_as_eager(model, kwargs=inputs, loss=lambda output: output.loss, tolerance=1e-5, static=["position_ids"])


def test_random_numbers_like_a_static_tensor_are_drawn_in_every_call() -> None:
    model = Model(lambda m, x, n: x * torch.rand_like(n.float())[:, None] + n.float().bernoulli_(0.5)[:, None])
    state = torch.get_rng_state()
    program = capture(model, *with_static(((X_BD, COUNTS), {}), ["n"], model.forward))
    assert torch.equal(state, torch.get_rng_state())
    assert len([node for node in calls(program) if "rand" in node.name or "bernoulli" in node.name]) == 2


UNKNOWN: dict[str, Forward] = {
    "values of an input": lambda m, x, n: x[x[:, 0] > n],
    "a mask with traced writes": lambda m, x, n: x[_with(torch.zeros(4), x).bool()],
}


def _with(y: Tensor, x: Tensor) -> Tensor:
    y[:2] = x[0, :2]
    return y


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_depends_on_more_than_static_values_is_refused(name: str) -> None:
    model = Model(UNKNOWN[name])
    with pytest.raises(CaptureError, match="depends on the values of other tensors"):
        capture(model, *with_static(((X_BD, COUNTS), {}), ["n"], model.forward))


def test_a_write_into_a_view_of_the_models_own_tensor_is_refused() -> None:
    model = Model(lambda m, x, n: x * m.plain.view_as(n).add_(1).sum())
    with pytest.raises(CaptureError, match=r"writes into a view of a tensor that the model keeps .*test_values.py:"):
        capture(model, *with_static(((X_BD, COUNTS), {}), ["n"], model.forward))
    assert model.plain.tolist() == [3, 1, 1, 1]


TAKES: tuple[tuple[Any, str], ...] = (
    (2, r"static_argnames=…\) has 'n', which holds a int \(2\) in this call, and only tensors can be made static"),
    ([COUNTS, 2.5], r"'n', which holds a float \(2.5\)"),
    (torch.ones(4, requires_grad=True), r"'n', which needs a gradient in this call.*; give n.detach\(\)"),
    (torch.ones(4, device="meta"), r"'n', which has no values in this call .*; give a tensor with values"),
)


@pytest.mark.parametrize(("value", "message"), TAKES, ids=str)
def test_what_cannot_be_static_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        with_static(((X_BD,), {"n": value}), ["n"], Model(_branch).forward)


def test_equal_values_are_one_kind_of_call_and_none_stays_none() -> None:
    forward = Model(_branch).forward
    texts = [repr(StaticTensor.of(each)) for each in (COUNTS, COUNTS.clone(), COUNTS + 1, COUNTS.int(), COUNTS[None])]
    assert texts[0] == texts[1] == "static int64[4] = [1, 2, 0, 1]"
    assert len(set(texts)) == 4
    large = torch.arange(100.0)
    other = large + (large == 99)
    assert repr(StaticTensor.of(large)) == repr(StaticTensor.of(large.clone())) != repr(StaticTensor.of(other))
    assert repr(StaticTensor.of(large.bfloat16()[::2])).startswith("static bfloat16[50] = sha256 ")
    assert with_static(((X_BD, None), {}), ["n"], forward) == ((X_BD, None), {})
