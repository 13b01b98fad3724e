"""The rule notation: reading and printing, fitting to shapes, the choices of one mesh axis, and every refusal."""

import doctest
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar.ir.sharding.rule
from autopar.errors import RuleError
from autopar.ir.sharding.layout import I, P, R
from autopar.ir.sharding.rule import Choice, Rule, Term

LINEAR = "~... k, ~o k, +o -> ... o"


@st.composite
def dims_of(draw: st.DrawFn) -> tuple[tuple[str, ...], ...]:
    """The dims of a term: no factor twice, groups of two or three factors, whole dims and dims of size one."""
    names = draw(st.lists(st.sampled_from(["a", "b", "k", "o", "x", "h2", "head"]), unique=True, max_size=5))
    dims: list[tuple[str, ...]] = []
    while names:
        taken = draw(st.integers(1, min(3, len(names))))
        dims.append(tuple(names[:taken]))
        names = names[taken:]
    if draw(st.booleans()):
        dims.insert(draw(st.integers(0, len(dims))), ("...",))
    for special in draw(st.lists(st.sampled_from(["_", "1"]), max_size=2)):
        dims.insert(draw(st.integers(0, len(dims))), (special,))
    return tuple(dims)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    inputs = draw(st.lists(st.builds(Term, dims_of(), st.sampled_from(["", "+", "~"])), max_size=3))
    outputs = draw(st.lists(st.builds(Term, dims_of()), max_size=2))
    if not any(("...",) in term.dims for term in inputs):
        outputs = [Term(tuple(dim for dim in term.dims if dim != ("...",))) for term in outputs]
    return Rule(tuple(inputs), tuple(outputs))


def choice(
    text: str, name: str, *shapes: tuple[int, ...], joined: frozenset[str] = frozenset(), weight_only: bool = False
) -> str:
    """The placements that the choice `name` asks and gives, the last shapes being those of the outputs."""
    rule = Rule.parse(text)
    bound = rule.bind(shapes[: len(rule.inputs)], shapes[len(rule.inputs) :])
    (found,) = (each for each in bound.choices(joined, weight_only) if each.name == name)
    return f"{' '.join(map(repr, found.inputs))} -> {' '.join(map(repr, found.outputs))}"


def names(text: str, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]]) -> set[str]:
    """The choices' names; their order is the planner's to use."""
    return {each.name for each in Rule.parse(text).bind(inputs, outputs).choices()}


# Reading and printing


@settings(deadline=None)
@given(rules())
def test_a_rule_is_read_as_printed(rule: Rule) -> None:
    assert Rule.parse(str(rule)) == rule


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("…  k,o k->… o", "... k, o k -> ... o"),
        ("(h d) -> h d", "(h d) -> h d"),
        ("( h  d )->(h) d", "(h d) -> h d"),
        ("~a, + b, c -> a b c", "~a, +b, c -> a b c"),
        ("() -> ()", "() -> ()"),
        ("a b -> ", "a b -> "),
        (" -> a", " -> a"),
        ("_ 1 a->_ 1 a", "_ 1 a -> _ 1 a"),
        ("~() -> ()", "~() -> ()"),
        ("a _ -> a _, a _", "a _ -> a _, a _"),
    ],
)
def test_a_rule_has_one_printed_form(text: str, printed: str) -> None:
    assert str(Rule.parse(text)) == printed
    assert str(Rule.parse(printed)) == printed


def test_a_name_for_several_factors_has_the_product_of_their_sizes() -> None:
    bound = Rule.parse("(h r), h -> (h r) ;q=h r").bind([(12,), (3,)], [(12,)])
    assert str(bound.rule) == "(h r), h -> (h r); q = h r" and bound.sizes == {"h": 3, "r": 4, "q": 12}


def test_factors_are_listed_once_in_the_order_they_appear() -> None:
    assert Rule.parse("b (h d) _, 1 d -> h b e").factors == ("b", "h", "d", "e")


def test_a_factor_is_split_on_the_dim_where_it_is_outermost() -> None:
    (term,) = Rule.parse("b (h d) -> b").inputs
    assert [term.dim_of(factor) for factor in ("b", "h", "d", "e")] == [0, 1, None, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b", 'rule "a b": found 0 arrows, needed one: "inputs -> outputs".'),
        ("a -> b -> c", 'rule "a -> b -> c": found 2 arrows, needed one: "inputs -> outputs".'),
        ("a -> ~a", 'rule "a -> ~a": the output "~a" has a mark; marks belong to inputs.'),
        ("a -> ... a", 'rule "a -> ... a": "..." stands on the right only; name those dims on the left too.'),
        (
            "a b -> a; b = a",
            'rule "a b -> a; b = a": cannot read "b = a"; behind ";" stands a new name for several of the factors '
            'a, b: "q = h r".',
        ),
        (
            "(a b), b -> a; q = a c",
            'rule "(a b), b -> a; q = a c": cannot read "q = a c"; behind ";" stands a new name for several of the '
            'factors a, b: "q = h r".',
        ),
        ("a ? b -> a", 'rule "a ? b -> a": cannot read "? b" in the term "a ? b".'),
        ("a 2 -> a", 'rule "a 2 -> a": cannot read "2" in the term "a 2".'),
        ("~+a -> a", 'rule "~+a -> a": cannot read "+a" in the term "~+a".'),
        ("((a) b) -> a", 'rule "((a) b) -> a": a group inside a group in the term "((a) b)".'),
        ("a) -> a", 'rule "a) -> a": an empty or unopened group in the term "a)".'),
        ("a () -> a", 'rule "a () -> a": an empty or unopened group in the term "a ()".'),
        ("(a b -> a", 'rule "(a b -> a": a group that is never closed in the term "(a b".'),
        ("(a _) -> a", 'rule "(a _) -> a": "_" inside a group in the term "(a _)"; name the factor.'),
        ("(a 1) -> a", 'rule "(a 1) -> a": "1" inside a group in the term "(a 1)"; name the factor.'),
        ("(a …) -> a", 'rule "(a …) -> a": "..." inside a group in the term "(a …)"; name the factor.'),
        ("a b a -> b", 'rule "a b a -> b": factor "a" stands twice in the term "a b a".'),
        ("(a b) a -> b", 'rule "(a b) a -> b": factor "a" stands twice in the term "(a b) a".'),
        ("... a ... -> a", 'rule "... a ... -> a": factor "..." stands twice in the term "... a ...".'),
    ],
)
def test_a_text_that_is_no_rule_is_refused(text: str, message: str) -> None:
    with pytest.raises(RuleError) as caught:
        Rule.parse(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["d_model -> d_model", "_k -> _k", "1k -> 1k", "a 10 -> a", "K -> K", "Page k -> k"])
def test_a_name_that_would_read_as_several_dims_or_as_a_pass_is_refused(text: str) -> None:
    with pytest.raises(RuleError, match="cannot read"):
        Rule.parse(text)


# Fitting to shapes


def test_dots_stand_for_any_number_of_leading_dims() -> None:
    for leading in ((), (2,), (2, 3, 4)):
        bound = Rule.parse(LINEAR).bind([(*leading, 5), (7, 5), (7,)], [(*leading, 7)])
        assert bound.sizes == {**{f"...{i}": size for i, size in enumerate(leading)}, "k": 5, "o": 7}
    assert str(bound.rule) == "~...0 ...1 ...2 k, ~o k, +o -> ...0 ...1 ...2 o"


def test_dots_may_be_followed_and_preceded_by_dims() -> None:
    bound = Rule.parse("a ... b, b -> b ... a").bind([(2, 3, 4, 5), (5,)], [(5, 3, 4, 2)])
    assert bound.sizes == {"a": 2, "...0": 3, "...1": 4, "b": 5}


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_a_group_is_the_product_of_its_factors(a: int, b: int, c: int) -> None:
    for text, left, right in (
        ("(a b c) -> a b c", (a * b * c,), (a, b, c)),
        ("(a b) c -> a (b c)", (a * b, c), (a, b * c)),
    ):
        assert Rule.parse(text).bind([left], [right]).sizes == {"a": a, "b": b, "c": c}


def test_the_one_unknown_factor_of_a_group_follows_from_the_others() -> None:
    assert Rule.parse("(h d), d -> d").bind([(12,), (4,)], [(4,)]).sizes == {"h": 3, "d": 4}


@pytest.mark.parametrize(
    ("text", "inputs", "outputs", "message"),
    [
        ("a, a -> a", [(2,)], [(2,)], "found 1 inputs and 1 outputs, needed 2 and 1."),
        ("a -> a", [(2,)], [(2,), (2,)], "found 1 inputs and 2 outputs, needed 1 and 1."),
        ("a b -> a", [(2,)], [(2,)], 'the term "a b" has 2 dims, the tensor [2].'),
        ("... a b -> a", [(2,)], [(2,)], 'the term "a b" has 2 dims, the tensor [2].'),
        ("... a, ... -> a", [(4, 2), (4, 4)], [(2,)], 'the term "...0" has 1 dims, the tensor [4, 4].'),
        ("1 a -> a", [(3, 2)], [(2,)], 'the term "1 a" has a 1 where the tensor has 3.'),
        ("a b, b -> a", [(2, 3), (4,)], [(2,)], 'factor "b" is 3 in one term and 4 in "b".'),
        ("... a -> ...", [(2, 3)], [(5,)], 'factor "...0" is 2 in one term and 5 in "...0".'),
        ("(h d) -> h", [(7,)], [(2,)], 'the group "(h d)" (h=2, d=?) does not make a dim of 7.'),
        ("(h d) -> h d", [(7,)], [(2, 3)], 'the group "(h d)" (h=2, d=3) does not make a dim of 7.'),
        ("(h d) -> ()", [(7,)], [()], 'the group "(h d)" (h=?, d=?) does not make a dim of 7.'),
        ("(h d) -> h", [(0,)], [(0,)], 'the group "(h d)" (h=0, d=?) does not make a dim of 0.'),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    text: str, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(RuleError) as caught:
        Rule.parse(text).bind(inputs, outputs)
    assert str(caught.value) == f'rule "{Rule.parse(text)}": {message}'


# Choices


def test_a_factor_splits_every_dim_that_has_it() -> None:
    assert choice("b m k, b k n -> b m n", "b", (2, 3, 4), (2, 4, 5), (2, 3, 5)) == "S(0) S(0) -> S(0)"


def test_inputs_that_lack_the_factor_are_replicated_with_a_partial_gradient() -> None:
    assert choice("m k, k n -> m n", "m", (3, 4), (4, 5), (3, 5)) == "S(0) R -> S(0)"


def test_a_name_missing_on_the_right_is_summed() -> None:
    assert choice("m k, k n -> m n", "k", (3, 4), (4, 5), (3, 5)) == "S(1) S(0) -> P"


def test_a_name_missing_on_the_left_is_made() -> None:
    assert choice("1 d -> h d", "h", (1, 4), (3, 4)) == "R -> S(0)"


def test_an_added_term_is_partial_where_the_output_is() -> None:
    shapes = (2, 4), (6, 4), (6,), (2, 6)
    assert choice(LINEAR, "k", *shapes) == "S(1) S(1) P -> P"
    assert choice(LINEAR, "o", *shapes) == "R S(0) S(0) -> S(1)"
    assert choice(LINEAR, "...0", *shapes) == "S(0) R R -> S(0)"


def test_a_multiplied_term_that_lacks_the_summed_factor_is_replicated() -> None:
    assert choice("a k, a -> a", "k", (2, 4), (2,), (2,)) == "S(1) R -> P"


def test_what_the_implementation_joins_comes_out_whole() -> None:
    shapes = (2, 4), (2,), ()
    assert choice("b v, b -> ()", "v", *shapes, joined=frozenset("v")) == "S(1) R -> I"
    assert choice("b v, +b -> ()", "v", *shapes, joined=frozenset("v")) == "S(1) R -> I"
    assert choice("b v, b -> ()", "b", *shapes, joined=frozenset("v")) == "S(0) S(0) -> P"


def test_an_inner_factor_of_a_group_cannot_be_split() -> None:
    assert names("(h d) -> h d", [(12,)], [(3, 4)]) == {"h", "-"}
    assert choice("(h d) -> h d", "h", (12,), (3, 4)) == "S(0) -> S(0)"


def test_a_factor_of_size_one_and_a_whole_dim_cannot_be_split() -> None:
    assert names("a b _ -> a b _", [(1, 2, 3)], [(1, 2, 3)]) == {"b", "-"}


def test_a_linear_term_passes_a_partial_value() -> None:
    shapes = (2, 4), (6, 4), (6,), (2, 6)
    assert choice(LINEAR, "P0", *shapes) == "P R P -> P"
    assert choice(LINEAR, "P1", *shapes) == "R P P -> P"


def test_added_terms_pass_partial_values_together() -> None:
    assert choice("+a, +a -> a", "P+", (2,), (2,), (2,)) == "P P -> P"
    assert names("+a, a -> a", [(2,), (2,)], [(2,)]) == {"a", "-"}


def test_a_linear_operation_of_one_input_passes_replicated_values() -> None:
    assert choice("~a -> a, a", "R", (2,), (2,), (2,)) == "R -> R R"
    assert names("a -> a", [(2,)], [(2,)]) == {"a", "-"}
    assert names("~a, ~a -> a", [(2,), (2,)], [(2,)]) == {"a", "P0", "P1", "-"}


def test_any_operation_on_weights_alone_passes_replicated_values() -> None:
    assert choice("a -> a", "R", (2,), (2,), weight_only=True) == "R -> R"
    assert choice("~k o, ... -> ... o", "R", (4, 2), (3,), (3, 2), weight_only=True) == "R R -> R"


def test_a_call_may_always_stay_whole() -> None:
    assert choice(LINEAR, "-", (2, 4), (6, 4), (6,), (2, 6)) == "I I I -> I"
    assert choice(" -> a", "-", (3,)) == " -> I"


def test_only_choices_that_split_have_factors() -> None:
    placements = ((I,), (I,))
    assert [Choice(name, *placements).factors for name in ("-", "R", "P0", "P+")] == [()] * 4
    assert [Choice(name, *placements).factors for name in ("k", "...0", "t+x")] == [("k",), ("...0",), ("t", "x")]


@settings(deadline=None)
@given(rules(), st.data())
def test_every_choice_fits_the_terms(rule: Rule, data: st.DataObject) -> None:
    sizes = {name: data.draw(st.integers(1, 4)) for name in rule.factors if name != "..."}
    leading = tuple(data.draw(st.lists(st.integers(1, 4), max_size=2)))

    def shape_of(term: Term) -> tuple[int, ...]:
        shape: list[int] = []
        for dim in term.dims:
            if dim == ("...",):
                shape.extend(leading)
            else:
                shape.append(math.prod(3 if name == "_" else sizes.get(name, 1) for name in dim))
        return tuple(shape)

    try:
        bound = rule.bind([shape_of(term) for term in rule.inputs], [shape_of(term) for term in rule.outputs])
    except RuleError as error:
        assert "=?" in str(error), "only a group with several unknown factors may fail to fit"
        return
    assert all(bound.sizes[name] == size for name, size in sizes.items())
    for each in bound.choices(weight_only=True):
        placed = [
            *zip(each.inputs, bound.rule.inputs, strict=True),
            *zip(each.outputs, bound.rule.outputs, strict=True),
        ]
        for placement, term in placed:
            if placement.is_split:
                assert term.dims[placement.dim][0] == each.factors[0]
            else:
                assert placement in (I, R, P)
                assert not each.factors or term.dim_of(each.factors[0]) is None
        assert not each.factors or I not in each.inputs


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(autopar.ir.sharding.rule) == (0, 2)
