"""Branches on values: an error names all of them by file and line, in words that `assume=` takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.capture.assumptions import Assumption, Place, assumptions_of, passing_value
from autopar.capture.export import capture
from autopar.errors import CaptureError, InputError
from tests.support.eager import assert_as_eager

X = torch.rand(2, 4) + 1


class Model(nn.Module):
    """A linear layer, and what a test does with its output."""

    def __init__(self, forward: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x, self.linear(x))


def _asserts(self: Any, x: Tensor, h: Tensor) -> Tensor:  # ProphetNet
    assert torch.all(x >= 0).item(), "only positive values"
    return h.sum()


def _is_nan(self: Any, x: Tensor, h: Tensor) -> Tensor:  # I-BERT
    assert not h.isnan().any() and not x.isnan().any(), "NaN"
    assert h.isnan().sum() == 0, "NaN detected"
    return h.sum()


def _is_finite(self: Any, x: Tensor, h: Tensor) -> Tensor:  # DETR
    if not torch.isfinite(h).all():
        h = torch.clamp(h, -1, 1)
    return h.sum()


def _largest(self: Any, x: Tensor, h: Tensor) -> Tensor:  # Wav2Vec2-CTC
    if x is not None and x.max() >= 100:
        raise ValueError("labels must be smaller than the vocabulary")
    return h.sum()


def _any(self: Any, x: Tensor, h: Tensor) -> Tensor:  # FSMT
    mask = x.eq(100)
    if not mask.any():
        mask = None
    return h.sum() if mask is None else h[0].sum()


def _global(self: Any, x: Tensor, h: Tensor) -> Tensor:  # Longformer: read at one line, tested at others
    is_global = (x > 100).flatten().any().item()
    for _ in range(2):
        h = h * 2 if is_global else h * 3
    if is_global:
        h = h + 1
    return h.sum()


def _of_torch(self: Any, x: Tensor, h: Tensor) -> Tensor:  # a check that torch makes
    normal = torch.distributions.Normal(h, 1.0, validate_args=True)  # TorchDynamo turns the default off for good
    return F.gaussian_nll_loss(h, x, h.exp()) + normal.log_prob(x).sum()


def _refused(forward: Callable[..., Tensor], *assumed: str) -> str:
    with pytest.raises(CaptureError) as error:
        capture(Model(forward), (X,), {}, assume=assumptions_of(assumed))
    return str(error.value)


def _line(forward: Callable[..., Tensor], offset: int) -> str:
    return f"{Path(__file__).name}:{forward.__code__.co_firstlineno + offset}"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("forward", "lines", "value"),
    [
        (_asserts, [1], ""),
        (_is_nan, [1, 2], ""),
        (_is_finite, [1], "=True"),
        (_largest, [1], ""),
        (_any, [2], "=False"),
        (_global, [1], "=False"),
        (_of_torch, [1, 2], ""),
    ],
)
def test_what_an_error_names_can_be_assumed(forward: Callable[..., Tensor], lines: list[int], value: str) -> None:
    text, places = _refused(forward), [_line(forward, offset) for offset in lines]
    assert all(f"{place}, in {forward.__name__}: " in text for place in places), text
    specified = re.findall(r'"([\w.]+:\d+(?:=\w+)?)"', text)
    assert specified == ([f"{places[0]}=True", f"{places[0]}=False"] if value else places), text
    assumed = [place + value for place in places]
    model = Model(forward)
    assert_as_eager(model, (X,), assume=assumptions_of(assumed))
    program = capture(model, (X,), {}, assume=assumptions_of(assumed))
    assert list(dict.fromkeys(each.partition(",")[0] for each in program.assumed)) == places


def test_the_other_value_takes_the_other_branch() -> None:
    nodes = {
        value: capture(Model(_is_finite), (X,), {}, assume=assumptions_of([f"{_line(_is_finite, 1)}={value}"]))
        for value in (True, False)
    }
    taken = {value: [str(node.target) for node in program.graph.nodes] for value, program in nodes.items()}
    assert "aten.clamp.default" in taken[False] and "aten.clamp.default" not in taken[True]


def test_a_branch_that_is_no_check_needs_its_value() -> None:
    assert f'"{_line(_is_finite, 1)}=True" or' in _refused(_is_finite, _line(_is_finite, 1))


def test_no_value_is_named_with_which_the_model_cannot_be_traced() -> None:
    def neither(self: Any, x: Tensor, h: Tensor) -> Tensor:  # as Qwen2-VL, which reads the sizes of images
        scale = 2.0 if x.sum() > 0 else 1.0
        return h.sum() * scale * float(x.sum())

    def half(self: Any, x: Tensor, h: Tensor) -> Tensor:
        if x.sum() > 0:
            return h.sum()
        return h.sum() * float(x.sum())

    text = _refused(neither)
    assert f"What follows {_line(neither, 1)} needs the value itself" in text and "assume=" not in text, text
    text = _refused(half)
    assert f'add "{_line(half, 1)}=True" to Capture(assume' in text and "=False" not in text, text


def test_a_number_made_of_a_tensor_is_named_by_its_line() -> None:
    def forward(self: Any, x: Tensor, h: Tensor) -> Tensor:
        return h.sum() / float(x.max())

    assert f"value of a tensor while it runs at {_line(forward, 1)}, in forward: return" in _refused(forward)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("assert x.all()", True),
        ("assert not x.any()", False),
        ("assert not (x.any() or y.any())", False),
        ("assert x is None or not x.any()", None),
        ("if x.any():\n  raise ValueError", False),
        ("if not x.all():\n  raise ValueError", True),
        ("if x.any():\n  y = 1", None),
        ("y = x.any()", None),
    ],
)
def test_the_value_with_which_a_check_passes(code: str, value: bool | None, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(code)
    assert passing_value(str(tmp_path / "model.py"), 1) is value


def test_an_assumption_names_a_file_by_the_end_of_its_path() -> None:
    place = Place("/models/detr/model.py", 3, "forward")
    specified = {
        text: assumptions_of([text])[0].names(place)
        for text in ("model.py:3", "detr/model.py:3", "l.py:3", "model.py:4")
    }
    assert specified == {"model.py:3": True, "detr/model.py:3": True, "l.py:3": False, "model.py:4": False}
    assert assumptions_of(["model.py:3=False"]) == (Assumption("model.py", 3, False),)


@pytest.mark.parametrize("specified", ["model.py:3", ["model.py"], ["model.py:3=1"], [3], 3])
def test_what_names_no_branch_is_refused(specified: Any) -> None:
    with pytest.raises(InputError, match=r"assume.*model\.py:12"):
        autopar.plan(Model(_asserts), autopar.Mesh({"dp": 2}), (X,), capture=autopar.Capture(assume=specified))


def test_a_plan_says_what_was_assumed() -> None:
    assumed = [_line(_asserts, 1)]
    plan = autopar.plan(Model(_asserts), autopar.Mesh({"dp": 2}), (X,), capture=autopar.Capture(assume=assumed))
    (note,) = [each for each in plan.notes if each.startswith("assumed")]
    assert note.startswith(f"assumed, not checked: {assumed[0]}, in _asserts: assert")
    assert note in " ".join(str(plan).split())
    assert plan.attach(Model(_asserts), (X,), capture=autopar.Capture(assume=assumed)).verify().ok
    with pytest.raises(CaptureError, match=re.escape(assumed[0])):
        autopar.plan(Model(_asserts), autopar.Mesh({"dp": 2}), (X,))
