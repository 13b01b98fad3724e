"""Formulas of plans: equal to the numeric cost, at other sizes to that of a fresh capture, and to published ones."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import autopar
from autopar.capture.export import capture
from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Hardware
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.peak import memory_use
from autopar.costs.plans.formula_names import MEMORY, is_rate, rate_name, rate_of
from autopar.costs.plans.plan import Plan
from autopar.costs.space.build import build_space
from autopar.costs.space.space import Space
from autopar.errors import PlanError
from autopar.ir.program.saved_tensors import saved_in
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.annotations.annotate import annotate, pins_of
from autopar.planning.options.groups import Memory, Recompute
from autopar.planning.planner import make_plan
from autopar.planning.record import evaluate
from autopar.planning.settings import Settings
from autopar.strategies.presets import annotations_for
from autopar.views.formulas.autograd_bytes import hidden_bytes
from autopar.views.formulas.formulas import formulas_of
from autopar.views.formulas.repetition import stacks_of
from autopar.views.formulas.symbolic_shapes import input_keys, symbolic_shapes
from autopar.views.formulas.symbols import Polynomial
from tests.support.families import BATCH, FAMILIES, HIDDEN, MLP, SEQUENCE
from tests.support.parity import SLOW_DEVICES
from tests.support.planned import SLOW_LINKS, X_BD, Planned, TwoLinears, planned, space_of

ITEMSIZE = 4
REACHED = {"attention_efficiency": 0.3, "product_efficiency": 0.8, "product_wave": 5e3}
REACHED |= {"attention_length": 7.0, "attention_head": 5.0}
HARDWARE = {each.name: each for each in (SLOW_LINKS, replace(SLOW_DEVICES, **REACHED))}


def formulated(found: Planned) -> Plan:
    """The plan with formulas, without those of its peak: at other sizes another moment may be the fullest."""
    symbols, formulas = formulas_of(found.space, found.choices, MemoryModel(found.space), {})
    lasting = {name: text for name, text in formulas.items() if not name.startswith(MEMORY)}
    return replace(found.plan, symbols=symbols, formulas=lasting)


def space_at(family: str, hardware: Hardware, batch: int = 1, sequence: int = 1, dp: int = 2, tp: int = 2) -> Space:
    """The space of a family on inputs that are so many times as large."""

    def larger(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = torch.cat([leaf] * batch)
        return torch.cat([leaf] * sequence, 1) if leaf.ndim == 2 and not leaf.is_floating_point() else leaf

    args, kwargs = pytree.tree_map(larger, FAMILIES[family].inputs(0))
    return build_space(capture(FAMILIES[family].build(), args, kwargs), Mesh({"dp": dp, "tp": tp}), hardware)


@cache
def found_at_first(family: str, hardware: str, batch: int = 1) -> Planned:
    space = space_at(family, HARDWARE[hardware], batch)
    return Planned(space, *make_plan(space, {}))


def same_choices(found: Planned, other: Space) -> tuple[int, ...]:
    """The strategies of the same names for the same decisions of another space."""
    return tuple(
        [str(strategy) for strategy in decision.candidates.strategies].index(found.strategy(decision.name))
        for decision in other.decisions
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("family", ["mlp", "llama", "gpt2", "bert", "t5", "vit", "resnet", "unet"])
def test_at_the_sizes_of_the_plan_the_formulas_are_its_numbers(family: str, hardware: str) -> None:
    found = found_at_first(family, hardware)
    again = formulated(found).reprice()
    assert again.seconds == pytest.approx(evaluate(found.space, found.choices), rel=1e-9)
    assert again.traffic == {key: count for key, count in found.plan.traffic.items() if count}


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_plan_makes_its_formulas_when_it_is_requested_with_what_it_computes_again(recompute: Recompute) -> None:
    plan, _ = make_plan(found_at_first("gpt2", SLOW_DEVICES.name).space, {}, Settings(Memory(recompute=recompute)))
    assert not plan.formulas and (recompute == "none") == (not any(row.recompute_seconds for row in plan.rows))
    assert plan.reprice().seconds == pytest.approx(plan.seconds, rel=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", ["zero3", "data_parallel"])
def test_formulas_of_a_plan_with_a_precision_are_its_numbers(strategy: str) -> None:
    _, inputs = FAMILIES["llama"].inputs(0)
    on = Mesh({"dp": 2}, hardware="h100")
    plan = autopar.plan(FAMILIES["llama"].build(), on, inputs, strategy=strategy, precision="bf16-mixed")
    again = plan.reprice()
    assert again.seconds == pytest.approx(plan.seconds, rel=1e-9)
    assert again.memory["memory"] == plan.peak_bytes
    assert again.traffic == {key: count for key, count in plan.traffic.items() if count}


@pytest.mark.sample(1)
@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("family", ["mlp", "llama", "mistral", "gpt2", "bert", "t5", "vit", "resnet", "unet"])
def test_another_batch_and_sequence_cost_what_a_fresh_capture_costs(family: str, hardware: str) -> None:
    # Formulas copy for messages what the plan copies; of one sample on a rank that would be nothing.
    found = found_at_first(family, hardware, batch=2)
    plan = formulated(found)
    for batch, sequence in ((6, 1), (4, 2)):
        values = {"batch": batch * BATCH}
        if "sequence" in plan.symbols:
            values["sequence"] = sequence * SEQUENCE
        other = space_at(family, HARDWARE[hardware], batch, sequence if "sequence" in values else 1)
        choices = same_choices(found, other)
        again = plan.reprice(**values)
        assert again.seconds == pytest.approx(evaluate(other, choices), rel=1e-9)
        fresh = formulated(Planned(other, found.plan, choices)).reprice()
        assert (again.traffic, again.memory, again.flops) == (fresh.traffic, fresh.memory, fresh.flops)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["mlp", "gpt2", "bert"])
def test_another_mesh_costs_what_a_fresh_space_costs(family: str) -> None:
    found = found_at_first(family, SLOW_LINKS.name)
    plan = formulated(found)
    for dp, tp in ((4, 2), (2, 4), (4, 4)):
        other = space_at(family, SLOW_LINKS, dp=dp, tp=tp)
        choices = same_choices(found, other)
        again = plan.reprice(dp=dp, tp=tp)
        assert again.seconds == pytest.approx(evaluate(other, choices), rel=1e-9)
        fresh = formulated(Planned(other, found.plan, choices)).reprice()
        assert (again.traffic, again.memory) == (fresh.traffic, fresh.memory)


@pytest.mark.parametrize("strategy", ["data_parallel", "zero3"])
def test_joined_axes_cost_on_another_mesh_what_they_cost_there(strategy: str) -> None:
    def planned_on(dp: int, tp: int) -> Plan:
        mesh = Mesh({"dp": dp, "tp": tp}, "h100")
        return autopar.plan(MLP(), mesh, (torch.ones(64, HIDDEN),), strategy=strategy)

    plan = planned_on(2, 2)
    assert plan.formula("all_reduce/dp_tp" if strategy == "data_parallel" else "all_gather/dp_tp") != 0
    for dp, tp in ((4, 2), (2, 4), (8, 2)):  # the last are on two nodes
        again, fresh = plan.reprice(dp=dp, tp=tp), planned_on(dp, tp)
        assert again.traffic == fresh.reprice().traffic
        assert again.seconds - plan.host_seconds == pytest.approx(fresh.device_seconds, rel=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5", "resnet"])
def test_memory_at_another_batch_and_sequence_is_that_of_a_fresh_capture_at_the_same_moment(
    family: str, recompute: Recompute
) -> None:
    space = found_at_first(family, SLOW_DEVICES.name).space
    plan, choices = make_plan(space, {}, Settings(Memory(recompute=recompute)))
    assert plan.memory is not None
    parts = {f"memory/{name}": count for name, count in plan.memory.parts.items() if count}
    again = plan.reprice().memory
    assert again["memory"] == plan.peak_bytes
    assert {name: count for name, count in again.items() if name.startswith("memory/")} == parts
    peak = max(plan.memory.timeline, key=lambda instant: (instant.num_bytes, instant.backward))
    sequence = 1 if family == "resnet" else 2
    other = space_at(family, SLOW_DEVICES, 2, sequence)
    fresh = memory_use(MemoryModel(other), same_choices(Planned(space, plan, choices), other), plan.recompute)[1]
    (moment,) = (each for each in fresh.timeline if (each.name, each.backward) == (peak.name, peak.backward))
    values = {"batch": 2 * BATCH} | ({"sequence": sequence * SEQUENCE} if sequence > 1 else {})
    assert plan.reprice(**values).memory["memory"] == moment.num_bytes


def test_what_autograd_keeps_next_to_inputs_and_outputs_grows_with_the_dims_it_is_made_of() -> None:
    space = space_at("llama", SLOW_DEVICES)
    shapes, saved = symbolic_shapes(space, stacks_of(space.program)), saved_in(space.program)
    found = {}
    for name in ("scaled_dot_product_attention_default", "cross_entropy_loss_default"):
        decision = space.decisions[space.index[name]]
        assert decision.candidates.call is not None
        inputs = [shapes.shapes[key] for key in input_keys(space, decision)]
        kept = saved[decision.node].other_bytes
        found[name] = hidden_bytes(decision.node, decision.candidates.call, inputs, kept, shapes.symbols)
        assert found[name] == kept > 0
    statistics, probabilities = map(str, map(Polynomial.of, found.values()))
    assert statistics == "batch*hidden*sequence/2"  # a float32 per query and head of eight
    assert probabilities == "4 + 1024*batch*sequence"  # a float32 per class, and the divisor


def test_links_are_looked_up_again_where_an_axis_has_another_size() -> None:
    space = build_space(capture(TwoLinears(), (torch.ones(64, 8),), {}), Mesh({"dp": 8}, "h100"), load("h100"))
    model = annotate(annotate(TwoLinears(), "*", dp="data"), "*.weight", dp=None)
    found = planned(space, model)
    across_nodes = build_space(capture(TwoLinears(), (torch.ones(64, 8),), {}), Mesh({"dp": 16}, "h100"), load("h100"))
    expected = evaluate(across_nodes, same_choices(found, across_nodes))
    again = formulated(found).reprice(dp=16)
    assert again.seconds == pytest.approx(expected, rel=1e-9) and again.seconds > found.plan.seconds


def transformer(num_layers: int, hidden: int = 32, dp: int = 2) -> tuple[nn.Module, Space]:
    """Llama with data parallelism and as many layers and hidden units, in heads of eight and groups of two."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 8,
        num_key_value_heads=hidden // 16,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    annotate(model, "*", dp="data")
    _, kwargs = FAMILIES["llama"].inputs(0)
    return model, space_of(model, kwargs, SLOW_DEVICES, dp=dp, tp=2)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("layers", "hidden"), [(5, 32), (2, 64), (3, 64)])
def test_more_layers_and_hidden_units_cost_what_a_fresh_capture_costs(layers: int, hidden: int) -> None:
    def by_preset(space: Space) -> Planned:
        """All but pinned: of plans that cost nearly the same, the larger model may have another one."""
        pins = pins_of(annotations_for("megatron", space.program, space.mesh), space, "semi_auto", {})
        return Planned(space, *make_plan(space, pins))

    found, other = by_preset(transformer(2)[1]), transformer(layers, hidden)[1]
    expected = by_preset(other)
    again, fresh = formulated(found).reprice(layers=layers, hidden=hidden), formulated(expected).reprice()
    assert again.seconds == pytest.approx(evaluate(other, expected.choices), rel=1e-9)
    assert (again.traffic, again.memory, again.flops) == (fresh.traffic, fresh.memory, fresh.flops)


def symbols_of(plan: Plan) -> dict[str, Any]:
    return {name: sympy.Symbol(name, positive=True, integer=True) for name in plan.symbols}


def test_megatron_all_reduces_four_activations_per_layer() -> None:
    """Shoeybi et al., Megatron-LM (2019), section 3: two all-reduces forward and two backward in a layer."""
    model = FAMILIES["llama"].build()
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        annotate(model, f"layers.*.{name}", tp="column")
    for name in ("o_proj", "down_proj"):
        annotate(model, f"layers.*.{name}", tp="row")
    plan = formulated(planned(space_of(model, FAMILIES["llama"].inputs(0)[1], SLOW_LINKS), model))
    s = symbols_of(plan)
    published = (2 + 2) * s["layers"] * s["batch"] * s["sequence"] * s["hidden"] * ITEMSIZE
    assert sympy.simplify(plan.formula("all_reduce") - published) == 0
    assert all(plan.formula(name) == 0 for name in ("all_gather", "reduce_scatter", "all_to_all"))


class Block(nn.Module):
    """A layer of a transformer, its queries, keys and values apart."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        normed_BSD = self.norm1(x_BSD)
        q_BHSE, k_BHSE, v_BHSE = (
            layer(normed_BSD).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed_BSD = F.scaled_dot_product_attention(q_BHSE, k_BHSE, v_BHSE).transpose(1, 2).flatten(2)
        x_BSD = x_BSD + self.out(mixed_BSD)
        return x_BSD + self.down(F.gelu(self.up(self.norm2(x_BSD))))


class Transformer(nn.Module):
    """Embedded tokens through three layers, every parameter stored whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSD = self.embed(ids_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return x_BSD.square().mean()


IDS_BS = torch.zeros(4, 16, dtype=torch.long)


def test_megatron_with_sequence_parallelism_gathers_and_scatters_instead() -> None:
    """Korthikanti et al., Reducing Activation Recomputation (2022), section 4.2.2: where Megatron has an all-reduce, an
    all-gather and a reduce-scatter, twice forward and twice backward in a layer."""
    model = Transformer()
    for name, role in (("query", "column"), ("key", "column"), ("value", "column"), ("up", "column")):
        annotate(model, f"layers.*.{name}", tp=role)
    for name, role in (("out", "row"), ("down", "row"), ("norm1", "sequence"), ("norm2", "sequence")):
        annotate(model, f"layers.*.{name}", tp=role)
    annotate(model, "add", tp="sequence")
    annotate(model, "layers.*norm*.*", tp=None)
    plan = formulated(planned(space_of(model, (IDS_BS,), SLOW_LINKS), model))
    s = symbols_of(plan)
    activation = s["batch"] * s["sequence"] * s["hidden"] * ITEMSIZE
    for name in ("all_gather", "reduce_scatter"):
        per_layer = sympy.expand(plan.formula(name)).coeff(s["layers"])
        assert sympy.simplify(per_layer - (2 + 2) * activation) == 0, name


def test_data_parallelism_all_reduces_the_parameters_once() -> None:
    """Rajbhandari et al., ZeRO (2020), section 7.1: an all-reduce of all gradients, Ψ."""
    model = annotate(FAMILIES["llama"].build(), "*", dp="data")
    for name, _ in model.named_parameters():
        annotate(model, name, dp=None)
    plan = formulated(planned(space_of(model, FAMILIES["llama"].inputs(0)[1], SLOW_LINKS, dp=2), model))
    of_the_loss = sympy.simplify(plan.formula("all_reduce") - plan.formula("parameter_bytes"))
    assert of_the_loss.is_number and 0 < of_the_loss < 32


def test_fsdp_moves_three_times_the_parameters() -> None:
    """Rajbhandari et al., ZeRO (2020), section 7.2.2: two all-gathers and a reduce-scatter of the parameters, 3Ψ."""
    model = annotate(FAMILIES["llama"].build(), "*", dp="data")
    annotate(model, "*", storage="dp")
    annotate(model, "layers.*", regather=True)
    plan = formulated(planned(space_of(model, FAMILIES["llama"].inputs(0)[1], SLOW_LINKS, dp=2), model))
    s = symbols_of(plan)
    of_a_layer = sympy.expand(plan.formula("parameter_bytes") * s["dp"]).coeff(s["layers"])
    assert of_a_layer.has(s["hidden"] ** 2)
    assert sympy.simplify(sympy.expand(plan.formula("all_gather")).coeff(s["layers"]) - 2 * of_a_layer) == 0
    assert sympy.simplify(sympy.expand(plan.formula("reduce_scatter")).coeff(s["layers"]) - of_a_layer) == 0


def test_ulysses_exchanges_four_activations_forward_and_four_backward() -> None:
    """Jacobs et al., DeepSpeed Ulysses (2023), section 3.2: an all-to-all of q, k, v and the output in each pass."""
    model = annotate(Transformer(), "linear", sp="sequence")
    annotate(model, "layer_norm", sp="sequence")
    annotate(model, "scaled_dot_product_attention", sp=1)
    plan = formulated(planned(space_of(model, (IDS_BS,), SLOW_LINKS, sp=2), model))
    s = symbols_of(plan)
    activation = s["batch"] * s["sequence"] * s["hidden"] * ITEMSIZE / s["sp"]
    per_layer = sympy.expand(plan.formula("all_to_all/sp")).coeff(s["layers"])
    assert sympy.simplify(per_layer - (4 + 4) * activation) == 0


class Linears(nn.Module):
    """A stack of linear layers and nothing else."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(num_layers)])

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BD = layer(x_BD)
        return x_BD


def test_what_is_moved_between_layers_is_moved_once_less_than_there_are_layers() -> None:
    plans = {}
    x_BD = torch.ones(4, 8, requires_grad=True)  # so that all layers do the same
    for num_layers in (3, 6):
        model = annotate(Linears(num_layers), "layers.*", tp="column")
        plans[num_layers] = formulated(planned(space_of(model, (x_BD,), SLOW_LINKS), model))
    s = symbols_of(plans[3])
    between = (s["layers"] - 1) * s["batch"] * s["hidden"] * ITEMSIZE
    assert sympy.simplify(plans[3].formula("all_gather") - between) == 0
    assert plans[3].reprice(layers=6).seconds == pytest.approx(plans[6].seconds, rel=1e-9)


def test_a_gradient_that_no_loss_sends_back_is_not_moved() -> None:
    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x_BD: Tensor) -> tuple[Tensor, Tensor]:
            y_BD = self.linear(x_BD)
            return y_BD.sum(), y_BD

    space = space_of(TwoOutputs(), (X_BD,))
    whole = [next(i for i, s in enumerate(d.candidates.strategies) if str(s) in ("I", "-")) for d in space.decisions]
    split = space.decisions[space.index["output:1"]].candidates.strategies
    whole[space.index["output:1"]] = [str(strategy) for strategy in split].index("S(0)")
    edges = [edge for edge in space.edges if edge.target == space.index["output:1"]]
    assert [t.collective for edge in edges for t in space.path(edge, whole).transfers] == ["all_gather"]
    assert formulas_of(space, whole, MemoryModel(space), {})[1]["all_gather"] == "0"


def test_a_linear_layer_does_two_operations_per_weight_and_row_and_twice_that_backward() -> None:
    model = Linears(3)
    plan = formulated(planned(space_of(model, (torch.ones(4, 8, requires_grad=True),), SLOW_LINKS, tp=1), model))
    assert plan.symbols == {"batch": 4, "hidden": 8, "layers": 3}
    s = symbols_of(plan)
    assert plan.formula("flops") == 6 * s["layers"] * s["batch"] * s["hidden"] ** 2


@pytest.mark.slow
def test_a_loaded_plan_is_priced_again_without_its_model(tmp_path: Path) -> None:
    plan = found_at_first("llama", SLOW_DEVICES.name).plan
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.context is None and loaded == plan
    assert loaded.reprice(batch=16, layers=32) == plan.reprice(batch=16, layers=32)
    assert loaded.formula("seconds") == plan.formula("seconds")


def test_a_formula_that_is_not_there_is_an_error_that_lists_those_that_are() -> None:
    plan = formulated(found_at_first("mlp", SLOW_LINKS.name))
    with pytest.raises(PlanError, match=r"no formula 'all_reduced'; it has 'seconds', 'flops', .*'all_reduce'"):
        plan.formula("all_reduced")


def test_a_plan_without_formulas_says_so() -> None:
    plan = replace(found_at_first("mlp", SLOW_LINKS.name).plan, context=None)
    with pytest.raises(PlanError, match="saved without formulas"):
        plan.formula("seconds")


def test_sizes_that_do_not_divide_are_an_error_that_names_them() -> None:
    model = annotate(TwoLinears(), "*", dp="data")
    plan = formulated(planned(space_of(model, (X_BD,), SLOW_LINKS, dp=2), model))
    with pytest.raises(PlanError, match=r"does not fit batch=5, dp=2: batch/dp = 5/2 must be whole"):
        plan.reprice(batch=5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"depth": 3}, "no symbol 'depth'; it has 'batch'"),
        ({"batch": 0}, "batch=0; give a whole number of at least 1"),
        ({"batch": 2.5}, "batch=2.5; give a whole number of at least 1"),
        ({"dp": 1}, "dp=1; give a whole number of at least 2"),
    ],
)
def test_values_that_are_no_sizes_are_an_error(values: dict[str, Any], message: str) -> None:
    plan = formulated(found_at_first("mlp", SLOW_LINKS.name))
    with pytest.raises(PlanError, match=message):
        plan.reprice(**values)


def test_a_sequence_that_a_table_of_the_model_fixes_cannot_be_priced_again() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 8)
            self.positions = nn.Parameter(torch.ones(10, 8))

        def forward(self, ids_BS: Tensor) -> Tensor:
            return (self.embed(ids_BS) + self.positions).sum()

    space = space_of(Positions(), (torch.zeros(4, 10, dtype=torch.long),))
    plan = formulated(Planned(space, *make_plan(space, {})))
    with pytest.raises(PlanError, match="cannot take another sequence: the parameter positions has a dim of 10"):
        plan.reprice(sequence=20)


def test_other_axis_sizes_need_the_hardware_that_the_plan_was_priced_on() -> None:
    model = annotate(TwoLinears(), "*", dp="data")
    plan = replace(formulated(planned(space_of(model, (X_BD,), SLOW_LINKS, dp=2), model)), context=None)
    with pytest.raises(PlanError, match="priced on other hardware than the profile 'cpu'"):
        plan.reprice(dp=4)


def test_an_axis_that_is_called_as_a_size_or_a_keyword_has_a_symbol_of_its_own() -> None:
    model = annotate(TwoLinears(), "*", batch="data")
    plan = formulated(planned(space_of(model, (X_BD,), SLOW_LINKS, **{"batch": 2, "lambda": 1}), model))
    assert plan.symbols == {"batch": 4, "batch_axis": 2}
    assert "batch/batch_axis" in plan.formulas["whole"]


@pytest.mark.parametrize(
    ("axis", "together", "passes"), [("dp", 0, 1), ("dp", 12, 2), ("left_over_right", 0, 1), ("left_over_right", 3, 1)]
)
def test_the_name_of_a_rate_says_what_it_is_the_rate_of(axis: str, together: int, passes: int) -> None:
    assert rate_of(rate_name("all_gather", axis, together, passes)) == ("all_gather", axis, together, passes)
    assert not is_rate(f"all_gather/{axis}")


def test_a_repriced_plan_prints_what_it_costs() -> None:
    text = str(formulated(found_at_first("llama", SLOW_DEVICES.name)).reprice(batch=8))
    assert text.startswith("at batch=8, sequence=16, hidden=32, layers=2, dp=2, tp=2\n")
    assert "seconds" in text and "all_gather over dp" in text and "optimizer" in text
