"""The checker of rules finds wrong and missing placements, and nothing to say about a right rule."""

import pytest
import torch
from torch import Tensor

from autopar.ir.sharding.layout import I, P, Placement, R, S
from autopar.ir.sharding.operation import Implementation, OpRule
from autopar.ir.sharding.rule import Choice
from autopar.tools.validation.sharded_values import split, value_fault
from autopar.tools.validation.whole_call import Whole, fault_of, show
from tests.support.simulation.validate import check, covers, right_choices

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def linear_arguments() -> tuple[Tensor, ...]:
    return randn(2, 4, 6), randn(10, 6), randn(10)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_right_rule_has_nothing_wrong_and_nothing_missing(num_ranks: int) -> None:
    arguments = randn(6, 12), randn(18, 12), randn(18)
    report = check(aten.linear.default, arguments, {}, OpRule("~... k, ~o k, +o -> ... o"), num_ranks)
    assert str(report) == ""


def test_a_softmax_split_along_its_dim_is_wrong() -> None:
    report = check(aten._softmax.default, (randn(4, 6), 1, False), {}, OpRule("a b -> a b"))
    assert report.wrong == [
        'aten._softmax.default(float64[4, 6], 1, False): "a b -> a b", b: S(1) -> S(1): '
        "output 0 is not the concatenation in dim 1"
    ]
    assert report.missing == []


def test_a_bias_that_is_not_marked_as_added_is_wrong() -> None:
    report = check(aten.linear.default, linear_arguments(), {}, OpRule("~... k, ~o k, o -> ... o"))
    assert report.wrong[0].endswith("k: S(2), S(1), R -> P: output 0 is not the sum over the ranks")
    assert len(report.wrong) == 3
    assert any(line.endswith("lacks S(2), S(1), P -> P") for line in report.missing)


def test_a_reduction_claimed_as_replicated_is_wrong() -> None:
    whole = Whole.of(aten.sum.dim_IntList, (randn(4, 6), [1]), {})
    assert fault_of(whole, (S(1),), (P,), 2) == ""
    for claimed in (I, R):
        assert fault_of(whole, (S(1),), (claimed,), 2) == "output 0 is not the same as the whole on every rank"


def test_a_linear_without_its_output_factor_lacks_column_parallelism() -> None:
    report = check(aten.linear.default, linear_arguments(), {}, OpRule("~... k, ~_ k, +_ -> ... _"))
    assert report.wrong == []
    assert len(report.missing) == 1
    assert report.missing[0].endswith("lacks R, S(0), S(0) -> S(2)")


def test_what_is_lacked_on_purpose_is_not_missing() -> None:
    op = OpRule("~... k, ~_ k, +_ -> ... _")
    report = check(aten.linear.default, linear_arguments(), {}, op, allowed=("R, S(0), S(0) -> S(2)",))
    assert str(report) == ""


def test_a_partial_input_that_the_operation_passes_must_be_marked() -> None:
    report = check(aten.mul.Tensor, (randn(4, 6), randn(6)), {}, OpRule("a b, ~b -> a b"))
    assert [line.split("lacks ")[1] for line in report.missing] == ["P, R -> P"]


def test_a_partial_input_to_an_operation_that_is_not_linear_is_wrong() -> None:
    report = check(aten.gelu.default, (randn(4, 6),), {}, OpRule("~a b -> a b"))
    assert len(report.wrong) == 1
    assert "P0: P -> P: output 0 is not the sum over the ranks" in report.wrong[0]


def test_right_values_with_a_wrong_gradient_are_wrong() -> None:
    whole = Whole.of(aten.mul.Tensor, (randn(4, 6), randn(6)), {})
    assert fault_of(whole, (S(0), R), (S(0),), 2) == ""
    fault = fault_of(whole, (S(0), I), (S(0),), 2)
    assert fault == "the gradient of input 1 is not the same as the whole on every rank"
    assert fault_of(whole, (R, R), (I,), 2) == "the gradient of input 0 is not the sum over the ranks"


def test_every_output_of_several_is_compared() -> None:
    arguments = (randn(4, 6), 2)
    assert str(check(aten.topk.default, arguments, {}, OpRule("a _ -> a _, a _"))) == ""
    report = check(aten.topk.default, arguments, {}, OpRule("a _ -> a _, _ _"))
    assert len(report.wrong) == 1
    assert "S(0) -> S(0), P: output 1 has local shape [2, 2], not [4, 2]" in report.wrong[0]


def test_another_number_of_outputs_is_a_fault() -> None:
    whole = Whole.of(aten.unbind.int, (randn(4, 6),), {})
    assert fault_of(whole, (S(0),), (R,) * 4, 2) == "rank 0 has 2 outputs instead of 4"


def test_a_rank_that_raises_is_a_fault() -> None:
    whole = Whole.of(aten.mm.default, (randn(4, 6), randn(6, 8)), {})
    assert fault_of(whole, (S(1), R), (P,), 2).startswith("rank 0 raises mat1 and mat2 shapes cannot be multiplied")


def test_the_shape_argument_becomes_the_local_shape() -> None:
    arguments = (randn(24), [4, 6])
    assert str(check(aten.view.default, arguments, {}, OpRule("~(a b) -> a b", shape_argument=1))) == ""
    report = check(aten.view.default, arguments, {}, OpRule("~(a b) -> a b"))
    assert "rank 0 raises shape '[4, 6]' is invalid" in report.wrong[0]
    report = check(aten.view.default, arguments, {}, OpRule("~_ -> _ _", shape_argument=1))
    assert [line.split("lacks ")[1] for line in report.missing] == ["S(0) -> S(0)"]


def test_a_call_without_inputs_is_compared_too() -> None:
    arguments = ([4, 6], 2.0)
    assert str(check(aten.full.default, arguments, {}, OpRule("-> a b", shape_argument=0))) == ""
    assert len(check(aten.full.default, arguments, {}, OpRule("-> a _", shape_argument=0)).missing) == 1


def test_a_factor_that_does_not_divide_is_passed_over() -> None:
    assert str(check(aten.exp.default, (randn(3, 4),), {}, OpRule("a b -> a b"))) == ""


def test_an_integer_input_is_the_same_replicated_either_way() -> None:
    arguments = (randn(8, 6), torch.randint(8, (4, 10)))
    assert str(check(aten.embedding.default, arguments, {}, OpRule("~_ d, a b -> a b d"))) == ""


def test_choices_of_an_implementation_are_left_to_its_own_check() -> None:
    arguments = (randn(8, 6), torch.randint(8, (4, 10)))
    op = OpRule("~v d, a b -> a b d", (Implementation("embedding:embedding", frozenset({"v"})),))
    assert str(check(aten.embedding.default, arguments, {}, op)) == ""
    report = check(aten.embedding.default, arguments, {}, OpRule(op.rule))
    assert len(report.wrong) == 1


def test_right_choices_of_a_matrix_product() -> None:
    whole = Whole.of(aten.mm.default, (randn(4, 6), randn(6, 8)), {})
    assert {show(choice) for choice in right_choices(whole, 2)} == {
        "S(0), R -> S(0)",
        "R, S(1) -> S(1)",
        "S(1), S(0) -> P",
        "P, R -> P",
        "R, P -> P",
    }


def test_right_choices_tell_whether_the_gradient_is_partial() -> None:
    whole = Whole.of(aten.type_as.default, (randn(4), randn(6)), {})
    assert {show(choice) for choice in right_choices(whole, 2)} == {
        "S(0), R -> S(0)",
        "S(0), S(0) -> S(0)",
        "S(0), P -> S(0)",
        "R, S(0) -> R",
        "I, S(0) -> I",
        "R, P -> R",
        "I, P -> I",
        "P, R -> P",
        "P, S(0) -> P",
        "P, P -> P",
    }


def test_replicated_and_invariant_differ_where_there_is_a_gradient() -> None:
    ours, theirs = Choice("-", (I, I), (I,)), Choice("-", (I, R), (I,))
    for weight, same in ((randn(6), False), (randn(6).detach(), True)):
        assert covers(ours, theirs, Whole.of(aten.mul.Tensor, (randn(4, 6), weight), {})) is same


def test_what_a_random_operation_lacks_is_not_requested() -> None:
    op = OpRule("_ _ -> _ _", (Implementation("dropout:dropout", None, random=True),))
    assert str(check(aten.dropout.default, (randn(4, 6), 0.0, True), {}, op)) == ""


@pytest.mark.parametrize("placement", [S(0), S(1), I, P])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_parts_join_to_the_value_they_were_split_from(placement: Placement, dtype: torch.dtype) -> None:
    x = (randn(6, 12) * 9).detach().to(dtype)
    parts = split(x, placement, 3)
    assert value_fault(parts, placement, x) == ""
    for rank in range(3):
        assert value_fault([part + (i == rank) for i, part in enumerate(parts)], placement, x) != ""


def test_parts_of_another_type_are_a_fault() -> None:
    x = randn(4, 6).detach()
    assert value_fault([x.float(), x.float()], I, x) != ""


def test_partial_parts_differ_from_the_value() -> None:
    x = randn(4, 6)
    assert not any(torch.allclose(part, x) for part in split(x, P, 2))


def test_the_call_has_its_arguments_by_name() -> None:
    call = Whole.of(aten.add.Tensor, (randn(4, 6), randn(6)), {"alpha": 2}).call
    assert (call["alpha"], str(call["other"]), str(call.outputs[0])) == (2, "float64[6]", "float64[4, 6]")
    assert call.inputs[0].requires_grad and call.outputs[0].requires_grad
