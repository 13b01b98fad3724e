"""flex_attention in a model becomes one call where its functions are expressions, and plain calls where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from autopar.capture.export import capture, skeleton
from autopar.capture.passes.traced_graph import arguments
from autopar.errors import CaptureError
from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK
from autopar.ir.program.operators.attention.expressions import evaluate, is_differentiable, parse, with_derivative
from autopar.ir.program.program import Program
from tests.support import flex_models
from tests.support.eager import run

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
SOFTMAX = torch.ops.aten._safe_softmax.default


def calls(program: Program, target: Any) -> list[dict[str, Any]]:
    return [arguments(node) for node in program.graph.nodes if node.target is target]


KINDS = {
    "causal": ATTENTION,
    "documents": ATTENTION,
    "by heads": ATTENTION,
    "alibi": ATTENTION_BY_MASK,
    "softcap": ATTENTION_BY_MASK,
    "both": ATTENTION_BY_MASK,
    "learned": SOFTMAX,
    "score alone": ATTENTION_BY_MASK,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_gives_what_the_written_out_model_does(kind: str) -> None:
    model, dense = flex_models.build(kind), flex_models.build(kind, dense=True)
    program = capture(skeleton(model), flex_models.batch(0), {}, training=True)
    found = run(program, dict(model.named_parameters()), dict(model.named_buffers()), flex_models.batch(0))
    found.backward()
    expected = dense(*flex_models.batch(0))
    expected.backward()
    torch.testing.assert_close(found, expected)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), dense.named_parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert len(calls(program, KINDS[kind])) == 2


def test_the_causal_mask_of_flex_attention_is_known() -> None:
    program = capture(flex_models.build("causal"), flex_models.batch(0), {}, training=True)
    assert all(call["is_causal"] and call["attn_mask"] is None for call in calls(program, ATTENTION))


def test_what_a_window_hides_is_known_under_a_function_of_the_scores() -> None:
    program = capture(flex_models.build("both"), flex_models.batch(0), {}, training=True)
    assert [call["reach"] for call in calls(program, ATTENTION_BY_MASK)] == [flex_models.WINDOW - 1] * 2


class Layer(nn.Module):
    """One attention, called as a test wants it."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.proj, self.attend = nn.Linear(8, 24), attend

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.proj(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4))


def _with_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y, aux = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 0.5, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    return y + aux.lse.unsqueeze(-1)


def _capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = create_block_mask(lambda b, h, i, j: (i >= j) & (j > 0), None, None, 16, 16, device="cpu")
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.tanh(s) + h * (j - i), block_mask=seen)


@pytest.mark.parametrize("attend", [_with_lse, _capped])
def test_a_program_gives_what_torch_does(attend: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """A query without keys gets zeros, too; PyTorch's own runs eagerly here."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    model, x = Layer(attend), torch.randn(2, 16, 8)
    program = capture(model, (x,), {}, training=True)
    found = run(program, dict(model.named_parameters()), {}, (x,))
    with torch.no_grad():
        q, k, v = model.proj(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if attend is _with_lse:
            scores = q @ k.mT * 0.25
            expected = scores.softmax(-1) @ v + scores.logsumexp(-1, keepdim=True)
        else:
            expected = model(x)
    torch.testing.assert_close(found, expected)


def test_maxima_of_scores_are_refused() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))[0]

    with pytest.raises(CaptureError, match=r"maxima of its scores .* leave max_scores out"):
        capture(Layer(attend), (torch.randn(2, 16, 8),), {}, training=True)


def test_a_block_mask_among_the_inputs_is_refused() -> None:
    class Given(nn.Module):
        def forward(self, x: Tensor, mask: Any) -> Tensor:
            return flex_attention(x, x, x, block_mask=mask)

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")
    with pytest.raises(CaptureError, match=r"is given a BlockMask.*call create_block_mask in forward"):
        capture(Given(), (torch.randn(2, 2, 16, 4), mask), {}, training=True)


def test_a_block_mask_of_a_module_is_taken_by_its_function() -> None:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")
    program = capture(Layer(lambda q, k, v: flex_attention(q, k, v, block_mask=mask)), (torch.randn(2, 16, 8),), {})
    assert [call["is_causal"] for call in calls(program, ATTENTION)] == [True]


TEXTS = (
    "add(mul(tanh(div(score, 30.0)), 30.0), v0)",
    "masked_fill(sub(square(score), mul(v0, score)), le(v1, v0), -inf)",
    "where(le(v1, v0), exp(score), sigmoid(neg(score)))",
    "rsub(abs(score), div(v1, add(score, 100.0)))",
    "to(mul(score, score), float64)",
)


@pytest.mark.parametrize("text", TEXTS)
def test_derivatives_by_the_scores_are_those_of_autograd(text: str) -> None:
    torch.manual_seed(0)
    expression, vectors = parse(text), (torch.randn(6, 1).double(), torch.randn(5).double())
    assert str(expression) == text and is_differentiable(expression)
    score = torch.randn(2, 6, 5).double().requires_grad_()
    values, change = with_derivative(expression, vectors, score.detach())
    expected = evaluate(expression, vectors, score)
    torch.testing.assert_close(values, expected.detach())
    (gradient,) = torch.autograd.grad(expected.nan_to_num(neginf=0.0).sum(), score)
    torch.testing.assert_close(change.expand_as(gradient), gradient)


def test_a_function_without_a_known_derivative_is_written_out() -> None:
    assert not is_differentiable(parse("where(le(score, 1.0), score, v0)"))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(s < 1, s, 1.0))

    program = capture(Layer(attend), (torch.randn(2, 16, 8),), {}, training=True)
    assert not calls(program, ATTENTION_BY_MASK) and calls(program, SOFTMAX)
