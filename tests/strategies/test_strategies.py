"""The rule tables: every call of every family has a rule that fits, and rules made from shapes say what they should."""

from __future__ import annotations

import doctest
import operator
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.capture.export import capture
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.layout import S
from autopar.ir.sharding.operation import Call
from autopar.ir.sharding.rule import ANY_OF, Choice, Rule
from autopar.runtime.collectives.mesh_axes import record_traffic
from autopar.strategies import BY_NAME, RULES, TABLES, notation, rule_of
from autopar.strategies.notation import broadcast
from autopar.strategies.rules import view
from autopar.strategies.rules.view import reshaped
from autopar.tools.validation.sharded_values import split
from autopar.tools.validation.whole_call import Whole
from tests.support.families import FAMILIES
from tests.support.simulation.validate import check, only_implementation
from tests.support.simulation.validate_implementations import AXIS, implemented_choices, run_implementation

aten = torch.ops.aten

WITHOUT_RULE: frozenset[str] = frozenset()
"""Operations of the families that run replicated on purpose."""


def x(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def index(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def mask(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


def rule_text(target: Any, *args: Any, **kwargs: Any) -> str | None:
    """The rule of a call as it is printed, after it has been fitted to the call's shapes."""
    whole = Whole.of(target, args, kwargs)
    op = rule_of(whole.call)
    if op is None:
        return None
    whole.bind(op)
    return str(Rule.parse(op.rule))


# The families


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_call_of_a_family_has_a_rule_that_fits(name: str) -> None:
    args, kwargs = FAMILIES[name].inputs(0)
    program = capture(FAMILIES[name].build(), args, kwargs)
    nodes = [n for n in program.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    assert nodes
    without = set()
    for node in nodes:
        call = Call.of(node)
        op = rule_of(call)
        if op is None:
            without.add(str(call.target))
            continue
        Rule.parse(op.rule).bind([info.shape for info in call.inputs], [info.shape for info in call.outputs])
    assert without <= WITHOUT_RULE


def test_a_call_that_no_table_knows_has_no_rule() -> None:
    assert rule_text(aten.block_diag.default, [x(2, 3), x(2, 3)]) is None


@pytest.mark.parametrize("module", [notation, view])
def test_the_examples_of_the_docstrings_hold(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


def test_no_two_tables_speak_of_one_operation() -> None:
    assert len(RULES) == sum(len(table.RULES) for table in TABLES)


def test_every_text_of_the_tables_is_a_rule() -> None:
    texts = [entry for entry in (*RULES.values(), *BY_NAME.values()) if isinstance(entry, str)]
    assert texts
    for text in texts:
        Rule.parse(text)


def test_an_operation_of_a_library_that_is_not_there_has_a_rule_by_its_name() -> None:
    class GroupedMM:
        def __call__(self) -> None: ...

        def __str__(self) -> str:
            return "transformers.grouped_mm_fallback.default"

    infos = [TensorInfo((12, 16), torch.float32), TensorInfo((3, 16, 10), torch.float32)]
    offsets = TensorInfo((3,), torch.int32)
    call = Call(
        GroupedMM(),
        (*infos, offsets),
        (TensorInfo((12, 10), torch.float32),),
        {"input": infos[0], "weight": infos[1], "offs": offsets},
    )
    op = rule_of(call)
    assert op is not None and (op.rule, op.flops) == ("~_ k, ~_ k o, _ -> _ o", 2 * 12 * 16 * 10)


# Reshapes


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ((2, 3, 20), (2, 3, 4, 5), "a b (c d) -> a b c d"),
        ((2, 3, 7), (6, 7), "a b c -> (a b) c"),
        ((4, 6), (6, 4), "_ _ -> _ _"),
        ((4, 6, 5), (6, 4, 5), "_ _ d -> _ _ d"),
        ((2, 6), (4, 3), "a (b c) -> (a b) c"),
        ((2, 3, 4), (3, 4, 2), "_ _ _ -> _ _ _"),
        ((1, 5, 1), (5,), "1 a 1 -> a"),
        ((4, 8, 1, 1), (4, 8), "a b 1 1 -> a b"),
        ((), (1, 1), "() -> 1 1"),
        ((0, 3), (3, 0), "_ _ -> _ _"),
    ],
)
def test_a_reshape_keeps_the_factors_of_both_shapes(
    source: tuple[int, ...], target: tuple[int, ...], text: str
) -> None:
    left, right = reshaped(source, target)
    assert f"{' '.join(left) or '()'} -> {' '.join(right)}" == text


@st.composite
def groupings(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of the same elements, each a grouping of the same or of other factors."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5))

    def grouped(sizes: list[int]) -> tuple[int, ...]:
        shape = [1]
        for size in sizes:
            if draw(st.booleans()):
                shape.append(size)
            else:
                shape[-1] *= size
        return tuple(shape)

    return grouped(factors), grouped(draw(st.permutations(factors)))


@settings(max_examples=50, deadline=None)
@given(groupings())
def test_every_split_of_a_reshape_is_right(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    arguments = x(*shapes[0]), list(shapes[1])
    op = rule_of(Whole.of(aten.view.default, arguments, {}).call)
    assert op is not None
    for num_ranks in (2, 3):
        assert check(aten.view.default, arguments, {}, op, num_ranks).wrong == []


# Rules made from the arguments of a call


def test_a_dim_of_size_one_is_broadcast() -> None:
    assert broadcast((1, 3), (5, 4, 3), ["a", "b", "c"]) == ["1", "c"]
    assert broadcast((1,), (1,), ["a"]) == ["a"]


@pytest.mark.parametrize(
    ("text", "target", "args", "kwargs"),
    [
        ("+a b, +b -> a b", aten.add.Tensor, (x(4, 6), x(6)), {}),
        ("a b -> a b", aten.add.Tensor, (x(4, 6), 2.0), {}),
        ("a b, a b -> a b", aten.add.Tensor, (index(4, 6), mask(4, 6)), {}),
        ("~a b, a 1 -> a b", aten.mul.Tensor, (x(4, 6), mask(4, 1)), {}),
        ("~a b, 1 b -> a b", aten.div.Tensor, (x(4, 6), x(1, 6)), {}),
        ("b, ~a b, +() -> a b", aten.where.self, (mask(6), x(4, 6), x()), {}),
        ("a, ~a -> a", aten.where.ScalarOther, (mask(6), x(6), 0.0), {}),
        ("a, a -> a", aten.where.ScalarOther, (mask(6), x(6), -1.0), {}),
        ("~a, a -> a", aten.masked_fill.Scalar, (x(6), mask(6), 0.0), {}),
        ("a, a -> a", aten.masked_fill.Scalar, (x(6), mask(6), 1.0), {}),
        ("~a -> a", aten.to.dtype, (index(6), torch.float32), {}),
        ("a -> a", aten.to.dtype, (x(6), torch.int64), {}),
        ("a -> a", aten.to.dtype, (index(6), torch.bool), {}),
        ("~1 b -> a b", aten.expand.default, (x(1, 6), [4, 6]), {}),
        ("~a b -> a (b r0)", aten.repeat_interleave.self_int, (x(4, 6), 2, 1), {}),
        ("~_ b -> _ b", aten.repeat.default, (x(4, 6), [2, 1]), {}),
        ("~a (b b0) -> a b b0", aten.unflatten.int, (x(4, 6), 1, [-1, 2]), {}),
        ("~a _ -> a _ _", aten.unflatten.int, (x(4, 6), 1, [3, 2]), {}),
        ("~a _ -> a _", aten.slice.Tensor, (x(4, 6), 1, 0, 3), {}),
        ("~a b -> a b", aten.slice.Tensor, (x(4, 6), 1, 0, 2**63 - 1), {}),
        ("+a _ c, +a _ c -> a _ c", aten.cat.default, ([x(4, 1, 2), x(4, 6, 2)], 1), {}),
        ("~a _ -> a _, a _", aten.split.Tensor, (x(4, 6), 3, -1), {}),
        ("~a _, a b -> a b", aten.gather.default, (x(4, 6), 1, index(4, 2)), {}),
        ("~_ _, _ b -> _ b", aten.gather.default, (x(4, 6), 1, index(3, 2)), {}),
        ("~_ b, a0 b0 -> a0 b0 b", aten.index.Tensor, (x(4, 6), [index(3, 2)]), {}),
        ("~_ b _, 1 b0, a0 1 -> a0 b0 b", aten.index.Tensor, (x(4, 6, 5), [index(1, 2), None, index(3, 1)]), {}),
        ("+a _, a0, ~a a0 -> a _", aten.index_put.default, (x(4, 6), [None, index(3)], x(4, 3), True), {}),
        ("+a _, _, ~a _ -> a _", aten.index_put.default, (x(4, 6), [None, index(3)], x(4, 3)), {}),
        ("+_ b, a, ~a b -> _ b", aten.index_add.default, (x(4, 6), 0, index(3), x(3, 6)), {}),
        ("~a b c -> a c", aten.sum.dim_IntList, (x(4, 6, 2), [1]), {}),
        ("a b -> b", aten.sum.dim_IntList, (mask(4, 6), [0]), {}),
        ("a _ -> a 1", aten.amax.default, (x(4, 6), [1], True), {}),
        ("~... k, ~o k -> ... o", aten.linear.default, (x(4, 6), x(3, 6)), {}),
        ("+o, ~m k, ~k o -> m o", aten.addmm.default, (x(3), x(4, 6), x(6, 3)), {}),
        ("~a0 m k, ~k o -> a0 m o", aten.matmul.default, (x(4, 5, 6), x(6, 3)), {}),
        ("~a0 1 m k, ~b0 k n -> a0 b0 m n", aten.matmul.default, (x(4, 1, 5, 6), x(2, 6, 3)), {}),
        ("~i0 k0, ~k0 j0 -> i0 j0", aten.einsum.default, ("ik,kj", [x(4, 6), x(6, 3)]), {}),
        ("~n k _ _, ~o k _ _, +o -> n o _ _", aten.conv2d.default, (x(2, 3, 8, 8), x(5, 3, 3, 3), x(5)), {}),
        (
            "~n k (h h0) (w w0), ~o k _ _ -> n o h w",
            aten.conv2d.default,
            (x(2, 3, 8, 8), x(5, 3, 4, 4), None, [4, 4]),
            {},
        ),
        (
            "~n _ _, ~_ _ _ -> n _ _",
            aten.conv1d.default,
            (x(2, 4, 8), x(4, 2, 3), None, [1], [0], [1], 2),
            {},
        ),
        ("n _, ~_, +_ -> n _", aten.group_norm.default, (x(4, 6), 2, x(6), x(6)), {}),
        ("a b _, ~_ -> a b _", aten.rms_norm.default, (x(4, 5, 6), [6], x(6)), {}),
        ("~_ _, _ -> ()", aten.nll_loss.default, (x(4, 6), index(4)), {}),
    ],
)
def test_a_rule_made_from_arguments(text: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert rule_text(target, *args, **kwargs) == text


def test_query_heads_share_key_heads_and_queries_may_be_split() -> None:
    query, key = x(2, 8, 5, 4), x(2, 4, 5, 4)
    causal = rule_text(aten.scaled_dot_product_attention.default, query, key, key, is_causal=True, enable_gqa=True)
    assert causal == "a0 (h r) s _, a0 h t _, ~a0 h t _ -> a0 (h r) s _; q = h r"
    mask = x(1, 8, 1, 5)
    learned = rule_text(aten.scaled_dot_product_attention.default, query, query, query, mask)
    assert learned == "a0 h s _, a0 h _ _, ~a0 h _ _, 1 h 1 _ -> a0 h s _"
    assert rule_text(aten.scaled_dot_product_attention.default, query, query, query, mask.detach()) == learned
    truths = rule_text(aten.scaled_dot_product_attention.default, query, query, query, mask.detach() > 0)
    assert truths == "a0 h s _, a0 h t _, ~a0 h t _, 1 h 1 t -> a0 h s _"


def test_attention_has_the_flops_of_its_two_products() -> None:
    query = x(2, 4, 5, 8)
    op = rule_of(Whole.of(aten.scaled_dot_product_attention.default, (query, query, query), {}).call)
    assert op is not None and op.flops == 4 * 2 * 4 * 5 * 5 * 8


def test_running_statistics_keep_the_channels_whole_only_while_they_are_written() -> None:
    statistics = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    training = rule_text(aten.batch_norm.default, x(4, 6), x(6), x(6), *statistics, True, 0.1, 1e-5, False)
    assert training == "n _, ~_, +_, _, _ -> n _"
    running = rule_text(aten.batch_norm.default, x(4, 6), x(6), x(6), *statistics, False, 0.1, 1e-5, False)
    assert running == "n c, ~c, +c, c, c -> n c"
    without = rule_text(aten.batch_norm.default, x(4, 6), x(6), x(6), None, None, True, 0.1, 1e-5, False)
    assert without == "n c, ~c, +c -> n c"


def test_dropout_is_implemented_only_where_it_draws() -> None:
    drawing, idle = (rule_of(Whole.of(aten.dropout.default, (x(4), p, True), {}).call) for p in (0.5, 0.0))
    assert drawing is not None and idle is not None
    found = only_implementation(drawing)
    assert found is not None and found.random
    assert idle is not None and only_implementation(idle) is None


def test_a_view_states_a_local_shape_and_a_flatten_does_not() -> None:
    stated, implied = (
        rule_of(Whole.of(target, args, {}).call)
        for target, args in ((aten.view.default, (x(4, 6), [24])), (aten.flatten.using_ints, (x(4, 6),)))
    )
    assert stated is not None and implied is not None
    assert (stated.rule, stated.shape_argument) == (implied.rule, 1)
    assert implied.shape_argument is None


def test_all_queries_may_share_one_head_of_keys() -> None:
    query, key = x(2, 8, 5, 4), x(2, 1, 5, 4)
    for grouped in (True, False):
        found = rule_text(aten.scaled_dot_product_attention.default, query, key, key, enable_gqa=grouped)
        assert found == "a0 h s _, a0 1 t _, ~a0 1 t _ -> a0 h s _"


def test_probabilities_are_split_by_samples_and_linear_unless_they_are_smoothed() -> None:
    call = x(4, 6), x(4, 6).detach().softmax(1), x(6).detach(), 1, -100
    assert rule_text(aten.cross_entropy_loss.default, *call) == "n _, ~n _, ~_ -> ()"
    assert rule_text(aten.cross_entropy_loss.default, *call, 0.1) == "n _, n _, ~_ -> ()"


# What implementations say they communicate


def predicted_bytes(whole: Whole, choice: Choice, num_ranks: int) -> int:
    """Bytes of the collectives that the rule's traffic function names for splitting one factor."""
    op = rule_of(whole.call)
    assert op is not None
    one = only_implementation(op)
    assert one is not None
    sizes = dict(whole.bind(op).sizes)
    assert choice.factors
    split = choice.factors[0]
    sizes[split] //= num_ranks
    return sum(each.num_bytes for each in one.traffic(whole.call, sizes) if split in each.factor.lstrip(ANY_OF).split())


def statistics(num_channels: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(num_channels), torch.ones(num_channels)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.cross_entropy_loss.default, (x(4, 6), index(4))),
        (aten.cross_entropy_loss.default, (x(4, 6).detach().float().requires_grad_(), index(4), None, 2)),
        (aten.cross_entropy_loss.default, (x(4, 6).detach().bfloat16().requires_grad_(), index(4), None, 0)),
        (aten.cross_entropy_loss.default, (x(4, 6), index(4), None, 1, -100, 0.1)),
        (aten.cross_entropy_loss.default, (x(4, 6, 8), index(4, 8), torch.ones(6).double())),
        (aten.cross_entropy_loss.default, (x(4, 6), index(4), torch.ones(6).double(), 1, -100, 0.1)),
        (aten.batch_norm.default, (x(4, 6, 3), x(6), x(6), None, None, True, 0.1, 1e-5, False)),
        (
            aten.batch_norm.default,
            (torch.randn(4, 6, requires_grad=True), None, None, *statistics(6), True, 0.1, 1e-5, False),
        ),
        (aten.batch_norm.default, (torch.randn(4, 6), None, None, None, None, True, 0.1, 1e-5, False)),
    ],
)
def test_an_implementation_moves_the_bytes_that_its_rule_predicts(target: Any, args: tuple[Any, ...]) -> None:
    whole = Whole.of(target, args, {})
    op = rule_of(whole.call)
    assert op is not None
    bound = whole.bind(op)
    choices = [choice for choice in implemented_choices(op, bound) if choice.factors]
    assert choices
    for choice in choices:
        inputs = [split(each, placement, 2) for each, placement in zip(whole.inputs, choice.inputs, strict=True)]
        cotangents = [
            None if g is None else split(g, placement.transposed, 2)
            for g, placement in zip(whole.cotangents, choice.outputs, strict=True)
        ]
        with record_traffic() as traffic:
            run_implementation(whole, op, bound, choice, inputs, cotangents)
        assert sum(traffic.num_bytes.values()) == predicted_bytes(whole, choice, 2), choice.name
        assert all(axis == AXIS for _, axis in traffic.num_bytes)


def test_a_split_factor_splits_the_dim_that_it_stands_on() -> None:
    whole = Whole.of(aten.cross_entropy_loss.default, (x(4, 6), index(4)), {})
    op = rule_of(whole.call)
    assert op is not None
    found = {choice.name: choice.inputs for choice in implemented_choices(op, whole.bind(op))}
    assert found["n"] == (S(0), S(0))
    assert found["v"][0] == S(1)
