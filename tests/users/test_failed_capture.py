"""A model that is refused leaves PyTorch as it was: the rest of the notebook works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._subclasses import FakeTensorMode
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import autopar
from autopar.errors import AutoparError
from autopar.ir.sharding.mesh import Mesh
from tests.capture.test_refusals import FORMS, Holding

X_BH = torch.arange(16.0).reshape(4, 4).sin()
LEFT: list[object] = []
"""Blocks that a forward enters and never leaves."""


class Forward(nn.Linear):
    """A layer with a forward of its own."""

    def __init__(self, run: Callable[[Forward, Tensor], object]) -> None:
        super().__init__(4, 4)
        self.run = run

    def forward(self, input: Tensor) -> Any:
        return self.run(self, input)


def _rows_of_rows(layer: Forward, x: Tensor) -> Tensor:
    choose: Callable[[Tensor], Tensor] = lambda row: row if row.sum() > 0 else -row  # noqa: E731
    return torch.func.vmap(torch.func.vmap(choose))(layer.weight @ x.view(2, 2, 4).mT)


def _entered(block: Callable[[], object]) -> Callable[[Forward, Tensor], Tensor]:
    def run(layer: Forward, x: Tensor) -> Tensor:
        entered = block()
        LEFT.append(entered)
        getattr(entered, "__enter__", lambda: None)()
        raise ValueError("the forward fails")

    return run


def _levels() -> None:
    functorch._vmap_increment_nesting(3, "error")
    functorch._grad_increment_nesting()
    torch.autograd.forward_ad.enter_dual_level()


def _sparse(layer: Forward, x: Tensor) -> Tensor:
    return torch.mm(x.to_sparse(), layer.weight)


REFUSED: dict[str, nn.Module] = {
    "rows of rows": Forward(_rows_of_rows),
    "levels of torch.func": Forward(_entered(_levels)),
    "a fake mode": Forward(_entered(FakeTensorMode)),
    "no gradients": Forward(_entered(lambda: torch.set_grad_enabled(False))),
    "autocast": Forward(_entered(lambda: torch.autocast("cpu"))),
    "a default device": Forward(_entered(lambda: torch.set_default_device("meta"))),
    "a default dtype": Forward(_entered(lambda: torch.set_default_dtype(torch.float64))),
    "determinism": Forward(_entered(lambda: torch.use_deterministic_algorithms(True))),
    "a random number": Forward(lambda layer, x: x * float(torch.empty(1).uniform_() + x.sum())),
    "a branch": Forward(lambda layer, x: layer.weight if x.sum() > 0 else x),
    "a seed": Forward(lambda layer, x: torch.manual_seed(0)),
    "a sparse tensor": Forward(_sparse),
    "backward": Forward(lambda layer, x: (x @ layer.weight).sum().backward()),
    "a number": Forward(lambda layer, x: x * x.sum().item()),
    "a least squares": Forward(lambda layer, x: torch.linalg.lstsq(layer.weight, x).solution),
    **{
        f"{form} in {how}": Holding(how, make()) for form, make in FORMS.items() for how in ("a buffer", "an attribute")
    },
}


def _state() -> dict[str, object]:
    return {
        "functions": _get_current_function_mode_stack(),
        "dispatch": _get_current_dispatch_mode_stack(),
        "levels": functorch.get_dynamic_layer_stack_depth(),
        "dual": torch.autograd.forward_ad._current_level,
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "determinism": torch.are_deterministic_algorithms_enabled(),
        "compiling": (torch.compiler.is_compiling(), torch.compiler.is_exporting()),
        "patched": (
            torch.autograd.grad.__globals__["_engine_run_backward"],
            torch.Tensor.detach,
            torch.Tensor.item,
            nn.Module._apply,
        ),
        "random": torch.get_rng_state().tolist(),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_after_a_refused_model_pytorch_works_as_before(name: str) -> None:
    before = _state()
    with pytest.raises(AutoparError):
        autopar.plan(REFUSED[name], Mesh({"dp": 2}), (torch.ones(4) if isinstance(REFUSED[name], Holding) else X_BH,))
    assert _state() == before
    with torch.random.fork_rng():
        assert torch.randn(3).isfinite().all()
    slopes = torch.func.vmap(torch.func.grad(lambda row: row.square().sum()))(X_BH)
    torch.testing.assert_close(slopes, 2 * X_BH)
    layer = nn.Linear(4, 4)
    exported = torch.export.export(layer, (X_BH,), strict=False).module()
    loss = exported(X_BH).square().sum()
    loss.backward()
    assert loss.item() == pytest.approx(layer(X_BH).square().sum().item())
