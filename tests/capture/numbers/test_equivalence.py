"""A tensor stands for a number where both programs compute the same for every value, and for no other reason."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.export import capture
from autopar.capture.numbers.equivalence import difference
from autopar.capture.numbers.marked import CANDIDATES, Number, is_replaceable
from autopar.capture.numbers.watched import Watch
from autopar.errors import CaptureError
from autopar.ir.program.precision import precision_of
from autopar.ir.program.program import Program

Function = Callable[[Tensor, Any], Tensor]

X_BD = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x_BD: Tensor, n: Any) -> Tensor:
        return self.function(self.layer(x_BD), n).sum()


def _captured(function: Function, n: Any, precision: str | None = None) -> Program:
    return capture(Net(function), (X_BD, n), {}, precision=precision_of(precision))


def _why_not(function: Function, number: int | float, dtype: torch.dtype, precision: str | None = None) -> str:
    """Return why no tensor of a dtype can stand for a number; "" if it can."""
    watch = Watch()
    try:
        with watch.counting():
            program = _captured(function, watch.of(number), precision)
        other = _captured(function, torch.tensor(number, dtype=dtype).as_subclass(Number), precision)
    except CaptureError as error:
        return str(error)
    return difference(program, other, {1: number}, watch.num_computed)


def _to_its_device(y: Tensor, n: Any) -> Tensor:
    if torch.is_tensor(n):
        n = n.to(y.device)
    return y / n


ALIKE: Mapping[str, Function] = {
    "add": lambda y, n: y + n,
    "add to it": lambda y, n: n + y,
    "subtract": lambda y, n: y - n,
    "subtract from it": lambda y, n: n - y,
    "multiply": lambda y, n: n * y,
    "divide": lambda y, n: y / n,
    "compare": lambda y, n: (y > n) * y + (n >= y) * y,
    "choose": lambda y, n: torch.where(y > 0, y, n),
    "fill": lambda y, n: y.masked_fill(y > 0, n),
    "power": lambda y, n: y.abs() ** n,
    "in Python": lambda y, n: y * (1 - n) + y / (n * 3 + 1) + y * (n / 7),
    "its inverse": lambda y, n: y * (1 / n),
    "min and max": lambda y, n: y * max(0.25, min(n, 9.5)),
    "no dims": lambda y, n: (1 - n) * y.sum() + n * y.mean() * n,
    "to its device": _to_its_device,
    "not at all": lambda y, n: y,
}


def _dtypes(function: Function, number: int | float) -> list[torch.dtype]:
    return [dtype for dtype in CANDIDATES[type(number)] if not _why_not(function, number, dtype)]


@pytest.mark.parametrize("name", ALIKE)
def test_a_tensor_stands_for_a_number(name: str) -> None:
    assert _dtypes(ALIKE[name], 0.7) and _dtypes(ALIKE[name], 5)


def test_what_python_makes_of_an_integer_is_no_integer() -> None:
    assert _dtypes(ALIKE["in Python"], 5) == [torch.float64]
    assert _dtypes(lambda y, n: y * (torch.arange(4) * n), 5) == [torch.int64]


def _in_place(y: Tensor, n: Any) -> Tensor:
    n += 1
    return y * n


def _guarded(y: Tensor, n: Any) -> Tensor:
    return y * 2 if isinstance(n, int | float) and n > 100 else y / n


def _limited(y: Tensor, n: Any) -> Tensor:
    if torch.is_tensor(n):
        n = n.clamp(max=8)
    return y / n


def _rounded(y: Tensor, n: Any) -> Tensor:
    if torch.is_tensor(n):
        n = n.to(torch.int32)
    return y / n


def _halved(y: Tensor, n: Any) -> Tensor:
    return y * 0.5 if torch.is_tensor(n) else y * 0.25


def _cast(y: Tensor, n: Any) -> Tensor:
    return (y * n).to(torch.float64 if torch.is_tensor(n) else torch.float32)


TESTED = "forward tests its value at test_equivalence.py:"
OTHERS: Mapping[str, tuple[Function, str]] = {
    "a branch": (lambda y, n: y if n > 3 else -y, TESTED),
    "a write": (_in_place, "writes into its input n"),
    "a branch for numbers": (_guarded, TESTED),
    "a branch for tensors": (_limited, "forward computes something else of it if it is a tensor"),
    "rounded for tensors": (_rounded, "to of it is not what Python computes"),
    "another constant": (_halved, "mul does not take a tensor in its place"),
    "another dtype": (_cast, "to stands in place of sum"),
    "a set": (lambda y, n: -y if n in {7.0, 8.0} else y, TESTED),
    "a dict": (
        lambda y, n: y * {7.0: 0.5}.get(n, 1.0),
        TESTED,
    ),
    "a dict in Python": (
        lambda y, n: y * UserDict({7.0: 0.5}).get(n, 1.0),
        TESTED,
    ),
    "a name": (lambda y, n: y * {"7.0": 0.5}.get(f"{n}", 1.0), TESTED),
    "a text": (lambda y, n: y * {"7.0": 0.5}.get(str(n), 1.0), TESTED),
    "a tuple": (lambda y, n: -y if n in (7.0, 8.0) else y, TESTED),
    "a size": (lambda y, n: y[:, : int(n)], "decides on the value"),
    "a shape": (lambda y, n: y + torch.full((4,), n), "number"),
    "a new tensor": (lambda y, n: y * torch.tensor(n), "reads, assumes or returns something else"),
    "a remainder": (lambda y, n: y * (n % 3), "remainder of it is not what Python computes"),
    "a division by what may be zero": (lambda y, n: y * (1 / (n - 1)), "of it is not what Python computes"),
    "limits": (lambda y, n: y.clamp(max=n), "clamp does not take a tensor"),
    "divided": (lambda y, n: n / y, "div stands in place of reciprocal"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_tensor_does_not_stand_for_a_number(name: str) -> None:
    function, why = OTHERS[name]
    assert why in _why_not(function, 2.0, torch.float64)


class Keeping(Net):
    """Keeps the number of the last call."""

    def forward(self, x_BD: Tensor, n: Any) -> Tensor:
        self.last = n
        return super().forward(x_BD, n)


def test_a_number_that_forward_keeps_stays_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.Net", Keeping)
    assert "forward keeps it in an attribute" in _why_not(ALIKE["multiply"], 2.0, torch.float64)


def test_numbers_are_promoted_as_before() -> None:
    assert "mul does not take a tensor" in _why_not(lambda y, n: y * (torch.arange(4) * n), 0.7, torch.float64)
    in_half = _why_not(lambda y, n: y.bfloat16().sum() * n, 0.7, torch.float64)
    assert "to of it is not what Python computes" in in_half, "which would be rounded to bfloat16"


def test_an_integer_that_may_overflow_is_no_tensor_of_integers() -> None:
    def function(y: Tensor, n: Any) -> Tensor:
        return y / (n * n * n)

    assert "mul of it is not what Python computes" in _why_not(function, 5, torch.int64)
    assert not _why_not(function, 5, torch.float64)


def test_no_precision_casts_a_number() -> None:
    program = _captured(ALIKE["multiply"], torch.tensor(0.7, dtype=torch.float64).as_subclass(Number), "bf16-mixed")
    number, product = program.inputs[1], next(n for n in program.graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    assert product.args[1] is program.placeholders()[str(number)], "the second operand is not rounded"
    assert product.meta["tensor"].dtype == torch.bfloat16
    assert not _why_not(ALIKE["multiply"], 0.7, torch.float64, "bf16-mixed")
    assert "pow does not take" in _why_not(ALIKE["power"], 0.7, torch.float64, "bf16-mixed")


@pytest.mark.parametrize("number", [2.0, 5])
def test_a_watched_number_is_a_number_until_it_is_tested(number: int | float) -> None:
    for name in ("in Python", "its inverse", "to its device", "power"):
        program = _captured(ALIKE[name], Watch().of(number))
        assert program.lines() == _captured(ALIKE[name], number).lines()
    for test in (lambda n: n * 2 > 3, lambda n: 1 - n == 0, bool, lambda n: -n in {1}, lambda n: f"{n / 2}"):
        with pytest.raises(CaptureError, match="forward tests its value"):
            test(Watch().of(number))


def test_numbers_of_which_python_or_float64_makes_something_else_stay_numbers() -> None:
    assert [each for each in (3, 0.5, True, 0, 0.0, float("nan"), 2**60, "a", None) if is_replaceable(each)] == [3, 0.5]
