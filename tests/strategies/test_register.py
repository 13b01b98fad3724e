"""Rules that users register: for which operations, what is refused, and what planning makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.export import capture
from autopar.costs.pricing.operations import flops
from autopar.errors import RuleError
from autopar.strategies.registered import REGISTERED
from autopar.strategies.roles import RoledProgram
from tests.support.own_operations import Own, Squashed, batch, energy, forget_rules, project, register_own
from tests.support.parity import SLOW_DEVICES

PROJECT = "~... k, ~o k, +o -> ... o"


@pytest.fixture(autouse=True)
def _only_own_rules() -> Iterator[None]:
    others = dict(REGISTERED)
    forget_rules()
    yield
    forget_rules()
    REGISTERED.update(others)


def _rules() -> dict[str, str]:
    program = capture(Own(), (batch(0),), {})
    return {name: str(call.bound.rule) for name, call in RoledProgram.of(program).calls.items()}


@pytest.mark.parametrize(
    "operation",
    [
        "autopar_own::project",
        "autopar_own::project.default",
        project,
        torch.ops.autopar_own.project,
        torch.ops.autopar_own.project.default,
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_operator_is_named_in_many_ways(operation: Any) -> None:
    autopar.register_rule(operation, PROJECT)
    assert list(REGISTERED) == [torch.ops.autopar_own.project.default]


def test_a_term_stands_for_an_argument_whether_it_is_left_out_or_a_list() -> None:
    register_own()
    found = _rules()
    assert found["project_default"] == "~...0 ...1 k, ~o k, +o -> ...0 ...1 o"
    assert found["project_default_1"] == "~...0 ...1 k, ~o k -> ...0 ...1 o", "its bias is None"
    assert found["energy_default"] == "...0 ...1 d, ...0 ...1 d, d -> ...0 ...1, ...0 ...1 d", "a list of two"
    assert found["squashed"] == "...0 ...1 d, d -> ...0 ...1 d, ...0 ...1 d", "its number is passed over"


def test_a_rule_gives_its_factors_roles_for_presets_and_annotations() -> None:
    register_own()
    roles = RoledProgram.of(capture(Own(), (batch(0),), {})).calls["project_default"].roles
    assert roles == {"...0": "data", "...1": "sequence", "k": "row", "o": "column"}


@pytest.mark.parametrize(
    ("specified", "expected"),
    [
        (None, 2 * 4 * 6 * 8 * 16),
        (2, 2 * 4 * 6 * 8 * 16),
        (3, 3 * 4 * 6 * 8 * 16),
        (lambda x, weight, bias: 7 * weight[0] + (bias is None), 7 * 16),
    ],
)
def test_flops_are_a_number_per_point_or_a_function_of_the_shapes(specified: Any, expected: int) -> None:
    autopar.register_rule(project, PROJECT, flops=specified)
    call = RoledProgram.of(capture(Own(), (batch(0),), {})).calls["project_default"]
    assert flops(call.call, call.op, call.bound) == expected


def test_flops_are_priced_and_stand_in_formulas() -> None:
    seconds = {}
    for number in (2, 2000):
        autopar.register_rule(project, PROJECT, flops=number, override=True)
        plan = autopar.plan(Own(), autopar.Mesh({"tp": 2}), (batch(0),), hardware=SLOW_DEVICES)
        seconds[number] = plan.seconds
        assert plan.verify().ok and plan.reprice(batch=4).seconds == pytest.approx(plan.seconds)
        assert plan.reprice(batch=8).flops == pytest.approx(2 * plan.reprice(batch=4).flops, rel=0.05)
    assert seconds[2000] > 50 * seconds[2]


def test_a_rule_that_is_registered_later_is_seen() -> None:
    def unruled() -> set[str]:
        plan = autopar.plan(Own(), autopar.Mesh({"tp": 2}), (batch(0),), hardware=SLOW_DEVICES)
        return {row.operation for row in plan.rows if row.name in (plan.unruled or {})}

    whole = unruled()
    register_own()
    assert len(whole) == 3 and not unruled()


def test_a_rule_is_replaced_only_on_request() -> None:
    autopar.register_rule(project, PROJECT)
    autopar.register_rule(project, PROJECT)  # the same, as when a notebook's cell runs again
    with pytest.raises(RuleError, match=r'autopar_own.project.default has the rule "~... k.*override=True'):
        autopar.register_rule(project, "... k, o k, o -> ... o")
    autopar.register_rule(project, "b _ k, o k, o -> b _ o", override=True)
    assert "_" in str(REGISTERED[torch.ops.autopar_own.project.default].rule)
    with pytest.raises(RuleError, match=r"aten.mm.default has a rule that autopar brings along.*override=True"):
        autopar.register_rule("aten::mm", "m k, k n -> m n")
    autopar.register_rule("aten::mm", "m k, k _ -> m _", override=True)


@pytest.mark.parametrize(
    ("operation", "rule", "options", "found"),
    [
        ("autopar_own::missing", "b -> b", {}, r'no operator "autopar_own::missing"; write "library::operator", and'),
        ("project", "b -> b", {}, 'no operator "project"'),
        ("autopar_own::project.other", "b -> b", {}, "means no overload; there are autopar_own::project.default"),
        (nn.Linear, "b -> b", {}, "in the place of an operation; give the name"),
        (project, "b k, o k, o", {}, "found 0 arrows"),
        (project, "b (k, o k, o -> b o", {}, "a group that is never closed"),
        (
            project,
            "b k, o k -> b o",
            {},
            "has 2 terms for inputs and 1 for outputs; autopar_own.project.default takes 3",
        ),
        (energy, "b d, d -> b", {}, "has 2 terms for inputs and 1 for outputs; .* and gives 2"),
        (project, "b k, o k, o -> b z", {}, '"z" stands on the right only.*write "_"'),
        (Squashed, "b d, d, d, d -> b d", {}, "4 terms for inputs; .*Squashed takes 3 arguments"),
        (project, PROJECT, {"flops": -1}, "flops=-1; give a whole number"),
        (project, PROJECT, {"flops": "2*k"}, "flops='2"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(operation: Any, rule: str, options: dict[str, Any], found: str) -> None:
    with pytest.raises(RuleError, match=found):
        autopar.register_rule(operation, rule, **options)
    assert not REGISTERED


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"project": "b k, o k, o -> b o"}, r'project_default in layers.0: .*fit: .*"b k" has 2 dims, .*override'),
        ({"project": "... k, k o, o -> ... o"}, r'factor "k" is 8 in one term and 16'),
        ({"squashed": "... d -> ... d, ... d"}, r"in layers.0: .*Squashed does not fit: .*2 tensor arguments, and"),
        ({"squashed": "... d, d -> ... d"}, "found 2 outputs, and the rule has 1"),
    ],
    ids=str,
)  # fmt: skip
def test_a_rule_that_does_not_fit_a_call_is_an_error_with_its_place(changed: dict[str, str], found: str) -> None:
    register_own(**changed)
    with pytest.raises(RuleError, match=found):
        autopar.plan(Own(), autopar.Mesh({"tp": 2}), (batch(0),))


# Whether a rule is right


def _tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def test_a_right_rule_is_right_in_every_way_it_allows() -> None:
    register_own()
    x, weight, bias = _tensors((4, 6, 8), (16, 8), (16,))
    assert autopar.check_rule(project, x, weight, bias, 0.5) == (
        "...0: S(0), R, R -> S(0)",
        "...1: S(1), R, R -> S(1)",
        "k: S(2), S(1), P -> P",
        "o: R, S(0), S(0) -> S(2)",
        "-: I, I, I -> I",
        "P0: P, R, P -> P",
        "P1: R, P, P -> P",
    )
    assert autopar.check_rule(project, x, weight, None, scale=2.0)
    assert autopar.check_rule("autopar_own::energy", [x, x + 1], weight[0])[2] == "d: S(2), S(2), S(0) -> P, S(2)"
    assert autopar.check_rule(Squashed, x, weight[0], 3.0, num_ranks=2)[-1] == "-: I, I -> I, I"
    assert autopar.check_rule("aten::mm", weight, x[0].T, num_ranks=2)


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        ("~... k, ~o k, o -> ... o", r"  k: S\(2\), S\(1\), R -> P: output 0 is not the sum over the ranks"),
        ("~... _, ~o _, ~o -> ... o", r"  P0: P, R, R -> P: output 0 is not the sum"),
    ],
)
def test_a_wrong_rule_is_found(rule: str, found: str) -> None:
    register_own(project=rule)
    with pytest.raises(RuleError, match=found):
        autopar.check_rule(project, *_tensors((4, 6, 8), (16, 8), (16,)), 0.5)


def test_a_wrong_gradient_is_found_though_the_values_are_right() -> None:
    class Centred(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient - gradient.mean(0)

    autopar.register_rule(Centred, "b d -> b d")
    with pytest.raises(RuleError, match=r"  b: S\(0\) -> S\(0\): the gradient of input 0 is not the concatenation"):
        autopar.check_rule(Centred, *_tensors((4, 6)))


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(RuleError, match="has no rule; give it one with"):
        autopar.check_rule(project, *_tensors((4, 6, 8), (16, 8), (16,)), 0.5)
    register_own()
    with pytest.raises(RuleError, match=r"...1, k, o cannot be split into 4 equal parts"):
        autopar.check_rule(project, *_tensors((4, 6, 7), (15, 7), (15,)), 0.5, num_ranks=4)
