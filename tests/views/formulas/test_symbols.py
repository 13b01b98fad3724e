"""Sizes that remember their symbols, the equations between them, and what they say of captured models."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, cast

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from sympy.parsing.sympy_parser import parse_expr
from torch import Tensor, nn

from autopar.costs.plans.expressions import evaluate
from autopar.costs.pricing.operations import larger, smaller
from autopar.costs.pricing.optimizer import Optimizer
from autopar.costs.pricing.optimizer_step import step_seconds
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.layout import I, Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.views.formulas.equations import Equation, Equations
from autopar.views.formulas.repetition import stacks_of
from autopar.views.formulas.symbolic_shapes import SymbolicShapes, symbolic_shapes
from autopar.views.formulas.symbols import Polynomial, Size
from tests.support.families import FAMILIES
from tests.support.parity import SLOW_DEVICES
from tests.support.planned import space_of

VALUES = {"batch": 12, "sequence": 8, "tp": 4}
OPERATIONS = (
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    lambda a, b: a // b if b else a,
    lambda a, b: -(-a // b) if b else a,
)
SIZES = st.recursive(
    st.sampled_from([Size.symbol(name, value) for name, value in VALUES.items()] + [Size.of(3)]),
    lambda inner: st.builds(lambda a, b, op: op(a, b), inner, inner, st.sampled_from(OPERATIONS)),
    max_leaves=6,
)


def test_seconds_remember_sizes_and_write_each_function_once() -> None:
    batch, tp = Size.symbol("batch", 8), Size.symbol("tp", 2)
    assert str(batch / 2.0 + 3.0 - tp / 4) == "3.0 + 0.5*batch - tp/4"
    assert str(1 - 1 / tp) == "1 - 1/tp" and str(batch / (tp + 1 / tp)) == "batch/(1/tp + tp)"
    longer: Any = larger(cast(float, batch / 4.0), 1.0)
    assert str(longer * 2 + longer * tp + 1) == "1 + (2 + tp)*Max(0.25*batch, 1.0)"
    assert str(smaller(0.5, tp)) == "Min(0.5, tp)" and (larger(2.0, 3.0), smaller(2.0, 3.0)) == (3.0, 2.0)


@given(SIZES)
def test_a_size_is_the_value_of_its_polynomial(size: Size) -> None:
    assert evaluate(str(size.polynomial), {name: Fraction(value) for name, value in VALUES.items()}) == int(size)


def test_an_optimizer_s_step_costs_at_other_sizes_what_it_costs_there() -> None:
    def seconds(hidden: int, optimizer: Optimizer) -> float:
        return step_seconds(info(hidden), Layout((I,)), Mesh({"dp": 2}), SLOW_DEVICES, optimizer, matrix=True)

    def info(hidden: int) -> TensorInfo:
        return TensorInfo((hidden, 4 * hidden), torch.float32, True)

    for optimizer in (Optimizer(), Optimizer("muon"), Optimizer("galore", rank=4)):
        formula = str(seconds(Size.symbol("hidden", 32), optimizer))
        assert float(evaluate(formula, {"hidden": Fraction(64)})) == pytest.approx(seconds(64, optimizer), rel=1e-12)


@given(SIZES)
def test_a_polynomial_is_text_that_sympy_reads(size: Size) -> None:
    symbols: dict[str, Any] = {name: sympy.Symbol(name) for name in VALUES}
    expression = parse_expr(str(size.polynomial), local_dict=symbols)
    assert expression.subs([(symbols[name], value) for name, value in VALUES.items()]) == int(size)


def test_a_quotient_that_is_whole_now_is_kept_as_a_quotient() -> None:
    batch, tp = Size.symbol("batch", 8), Size.symbol("tp", 2)
    assert str(Polynomial.of(16 * batch // tp)) == "16*batch/tp"
    assert str((batch * 3 // (4 * tp)).polynomial) == "3*batch/(4*tp)"


def test_a_quotient_that_is_rounded_up_now_is_rounded_up_at_all_values() -> None:
    parts = -(-Size.of(257) // Size.symbol("tp", 2))
    assert parts == 129
    assert evaluate(str(parts.polynomial), {"tp": 4}) == 65


def test_a_size_takes_the_way_of_its_number() -> None:
    size = Size.symbol("batch", 4)
    assert size == 4 and hash(size) == hash(4) and size < 5 and size % 2 == 0 and isinstance(size, int)
    assert math.prod([size, 3, size]) == 48
    assert str(Polynomial.of(math.prod([size, 3, size]))) == "3*batch**2"


def test_what_is_known_of_a_product_and_all_but_one_factor_gives_that_factor() -> None:
    equations = Equations()
    whole, heads, width = (equations.variable(number) for number in (32, 4, 8))
    equations.add(Equation(whole, (heads, width), is_product=True))
    equations.learn(whole, Size.symbol("hidden", 32))
    equations.settle()
    assert str(Polynomial.of(equations.size(heads) or 0)) == "hidden/8"


def test_a_size_that_would_have_two_values_is_a_conflict_that_names_the_place() -> None:
    equations = Equations()
    left, right = equations.variable(16), equations.variable(16)
    equations.learn(left, Size.symbol("sequence", 16))
    equations.learn(right, Size.of(16))
    equations.equal(left, right, "add_1")
    assert equations.conflicts == {"sequence": "add_1: sequence has to equal 16"}


Texts = dict[str, list[str]]


def shapes_of(model: nn.Module, inputs: Any) -> tuple[SymbolicShapes, Texts]:
    """The symbolic shapes of a model, and as texts by the names of parameters and nodes."""
    space = space_of(model, inputs)
    found = symbolic_shapes(space, stacks_of(space.program))
    names = {node: name for name, node in space.program.parameters.items()}
    texts = {
        names.get(node, node): [str(Polynomial.of(size)) for size in shape]
        for (node, position), shape in found.shapes.items()
        if position == 0
    }
    return found, texts


def family(name: str) -> tuple[SymbolicShapes, Texts]:
    args, kwargs = FAMILIES[name].inputs(0)
    return shapes_of(FAMILIES[name].build(), kwargs or args)


def test_positions_and_shifted_labels_follow_the_sequence() -> None:
    found, texts = family("llama")
    assert found.symbols == {"batch": 4, "sequence": 16, "hidden": 32} and not found.fixed
    assert texts["arange_default"] == ["sequence"]
    assert texts["pad_default"] == ["batch", "1 + sequence"]
    assert texts["cross_entropy_loss_default"] == []


def test_more_hidden_units_are_more_heads_of_the_same_width() -> None:
    _, texts = family("llama")
    assert texts["scaled_dot_product_attention_default"] == ["batch", "hidden/8", "sequence", "8"]
    assert texts["model.layers.0.self_attn.k_proj.weight"] == ["hidden/2", "hidden"]
    assert texts["model.layers.0.mlp.up_proj.weight"] == ["64", "hidden"]


def test_packed_projections_are_three_times_as_wide_as_the_model() -> None:
    assert family("gpt2")[1]["transformer.h.0.attn.c_attn.weight"] == ["hidden", "3*hidden"]
    assert family("transformer_encoder")[1]["encoder.layers.1.self_attn.in_proj_weight"] == ["3*hidden", "hidden"]


def test_the_mask_of_a_sliding_window_follows_the_sequence() -> None:
    _, texts = family("mistral")
    assert texts["le_tensor"] == ["1", "1", "sequence", "sequence"]


def test_images_have_a_batch_and_no_sequence() -> None:
    found, texts = family("vit")
    assert found.symbols == {"batch": 4, "hidden": 32}
    assert texts["cat_default"] == ["batch", "17", "hidden"]


class Margins(nn.Module):
    """A sequence that is lengthened, and joined with one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSD = self.embed(ids_BS)
        padded = nn.functional.pad(x_BSD, (0, 0, 2, 1))
        return torch.cat([padded, x_BSD], 1)


def test_what_pads_and_joins_a_sequence_adds_to_it() -> None:
    _, texts = shapes_of(Margins(), (torch.zeros(4, 10, dtype=torch.long),))
    assert texts["pad_default"] == ["batch", "3 + sequence", "8"]
    assert texts["cat_default"] == ["batch", "3 + 2*sequence", "8"]


class Positions(nn.Module):
    """A learned table of positions that is exactly as long as the input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.positions = nn.Parameter(torch.ones(10, 8))

    def forward(self, ids_BS: Tensor) -> Tensor:
        return (self.embed(ids_BS) + self.positions).sum()


def test_a_learned_table_of_positions_fixes_the_sequence() -> None:
    found, texts = shapes_of(Positions(), (torch.zeros(4, 10, dtype=torch.long),))
    assert found.symbols == {"batch": 4}
    assert found.fixed == {"sequence": "the parameter positions has a dim of 10, which is sequence"}
    assert texts["positions"] == ["10", "8"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_shape_has_the_value_that_it_has_now(name: str) -> None:
    args, kwargs = FAMILIES[name].inputs(0)
    space = space_of(FAMILIES[name].build(), kwargs or args)
    stacks = stacks_of(space.program)
    found = symbolic_shapes(space, stacks)
    for decision in space.decisions:
        infos = decision.candidates.call.outputs if decision.candidates.call else (decision.node.meta["tensor"],)
        if decision.kind in ("shared_reshard", "output"):
            continue
        for position, info in enumerate(infos):
            shape = found.shapes[decision.node.name, position]
            assert shape == info.shape
            assert [evaluate(str(Polynomial.of(s)), found.symbols) for s in shape] == list(info.shape)
    expected = {"t5": 2, "bart": 2, "resnet": 0, "unet": 0, "mlp": 0}
    assert len(stacks) == expected.get(name, 1)
