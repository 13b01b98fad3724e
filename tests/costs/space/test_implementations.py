"""A rule with several implementations: all are candidates, and each is priced, saved, and run as it states.

Each case adds a second implementation to an existing one: the vocabulary-parallel loss, and causal attention by
queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.costs.hardware.collectives import transfer_seconds
from autopar.costs.hardware.profile import Hardware
from autopar.costs.plans.plan import Plan
from autopar.costs.plans.strategy_names import strategy_name
from autopar.costs.pricing.operations import backward_share, bandwidth, flops, forward_seconds
from autopar.costs.space.call_candidates import Candidates
from autopar.costs.space.strategy import Strategy
from autopar.ir.sharding.mesh import Mesh
from autopar.ir.sharding.operation import ATEN, Call, Efficiency, Implementation, LocalSizes, OpRule
from autopar.planning.record import choices_of
from autopar.planning.settings import context_of
from autopar.runtime.implementations import loss
from autopar.runtime.rewrite.per_rank_graph import rewrite
from autopar.strategies import RULES, rule_of
from autopar.strategies.ruled import ruled
from autopar.strategies.rules.layers.loss_rules import COPIES_OF_PARTS
from tests.support import parity
from tests.support import planned as support

aten = torch.ops.aten
OVERLAPPED = "overlapped"
SLOW_DEVICES, SLOW_LINKS = (
    replace(each, communication_share=0.0) for each in (parity.SLOW_DEVICES, support.SLOW_LINKS)
)
"""Whose collectives take nothing from what computes."""
Change = Callable[[OpRule], OpRule]


class Classifier(nn.Module):
    """A product whose outputs only the loss takes: split by classes, it is vocabulary parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 64, bias=False)

    def forward(self, x_BD: Tensor, labels_B: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x_BD), labels_B)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8, bias=False)

    def forward(self, x_BHSD: Tensor) -> Tensor:
        x_BHSD = self.project(x_BHSD)
        return F.scaled_dot_product_attention(x_BHSD, x_BHSD, x_BHSD, is_causal=True)


@pytest.fixture
def with_another(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, Change], None]]:
    """Change the rule of an operation for the length of a test."""

    def change(target: Any, changed: Change) -> None:
        entry = RULES[target]
        assert callable(entry)

        def other(call: Call) -> OpRule:
            found = entry(call)
            assert isinstance(found, OpRule)
            return changed(found)

        monkeypatch.setitem(RULES, target, other)
        ruled.cache_clear()

    yield change
    monkeypatch.undo()
    ruled.cache_clear()


def second(efficiency: Efficiency | None = None, **costs: Any) -> Change:
    """The same implementation once more, by another name and with other methods."""

    def changed(op: OpRule) -> OpRule:
        first = op.implementations[0]
        specified = {each.name: getattr(first, each.name) for each in fields(first)}
        own = type("Overlapped", (type(first),), {"__slots__": (), **costs})
        other = own(**{**specified, "name": OVERLAPPED, "efficiency": efficiency})
        return replace(op, implementations=(*op.implementations, other))

    return changed


def hides(share: float) -> Change:
    return second(hidden_share=lambda self, call, local: share)


def planned(hardware: Hardware = SLOW_DEVICES, training: bool = True) -> Plan:
    """The best plan in which the classes of head and loss are split."""
    model = Classifier()
    autopar.annotate(model, "head", tp="column")
    autopar.annotate(model, "cross_entropy_loss", tp="column")
    inputs = torch.ones(8, 16), torch.zeros(8, dtype=torch.int64)
    return autopar.plan(model, Mesh({"tp": 2}), inputs, hardware=hardware, training=training)


def loss_of(plan: Plan) -> tuple[Candidates, Strategy]:
    """Return the candidates of the loss and the chosen one."""
    space, choices = context_of(plan).space, context_of(plan).choices
    number = space.index["cross_entropy_loss_default"]
    return space.decisions[number].candidates, space.decisions[number].candidates.strategies[choices[number]]


def test_the_candidates_is_the_union_of_what_the_aten_call_and_the_implementations_offer(with_another: Any) -> None:
    before, _ = loss_of(planned())
    with_another(aten.cross_entropy_loss.default, second())
    after, _ = loss_of(planned())
    names = [str(each) for each in after.strategies]
    assert len(set(names)) == len(names)
    assert [name for name in names if "via" not in name] == [str(each) for each in before.strategies]
    for each in after.strategies:
        twin = str(each).removesuffix(f" via {OVERLAPPED}")
        assert each.implemented == (str(each) in {"v", "n"} or OVERLAPPED in str(each)), str(each)
        assert twin in names
    assert {name for name in names if "via" in name} == {f"v via {OVERLAPPED}", f"n via {OVERLAPPED}"}


def test_what_is_split_needs_one_implementation_that_serves_all_of_it() -> None:
    ring = Implementation("m:ring", frozenset("s"), name="ring")
    heads = Implementation("m:heads", frozenset("hs"), name="heads")
    op = OpRule("b s h -> b s h", (ring, heads))
    assert op.ways({"b"}) == (ATEN,)
    assert op.ways({"s"}) == (ring, heads)
    assert op.ways({"h", "b"}) == (heads,)
    assert op.ways({"s", "h"}) == (heads,)
    assert OpRule("b s h -> b s h", (ring,)).ways({"s", "h"}) == (ring,)
    drawing = Implementation("m:draw", None, random=True)
    assert OpRule("b -> b", (drawing,)).ways(()) == (drawing,)
    apart = OpRule("b s h -> b s h", (ring, Implementation("m:columns", frozenset("h"), name="columns")))
    assert apart.ways({"s", "h"}) == (), "no one serves both"
    requested = replace(heads, on_demand=True)
    some = OpRule("b s h -> b s h", (ring, requested))
    assert some.offering(()).ways({"s"}) == (ring,) and some.offering({"heads"}).ways({"s"}) == (ring, requested)


def test_implementations_of_one_rule_have_names_of_their_own() -> None:
    with pytest.raises(AssertionError, match="names of their own"):
        OpRule("b -> b", (Implementation("m:one", frozenset("b")), Implementation("m:two", frozenset("b"))))
    with pytest.raises(AssertionError, match="has no name to ask for it by"):
        Implementation("m:one", None, on_demand=True)
    assert strategy_name(("s", "-"), False, "ring") == "s - via ring"


def test_no_implementation_hides_more_than_all_of_its_collectives(with_another: Any) -> None:
    with_another(aten.cross_entropy_loss.default, hides(1.5))
    with pytest.raises(AssertionError, match=r"loss:cross_entropy hides 1.5 of its collectives"):
        planned()


def test_an_implementation_costs_what_the_aten_call_does_until_it_says_otherwise(with_another: Any) -> None:
    class AsTheCall(Implementation):
        """One that overrides nothing."""

    def added(op: OpRule) -> OpRule:
        first = op.implementations[0]
        names = ("function", "factors", "joined", "padded")
        other = AsTheCall(**{name: getattr(first, name) for name in names}, name=OVERLAPPED)
        return replace(op, implementations=(*op.implementations, other))

    with_another(aten.cross_entropy_loss.default, added)
    candidates, _ = loss_of(planned())
    number = [str(each) for each in candidates.strategies].index(f"v via {OVERLAPPED}")
    call, op, bound, strategy = _call(candidates), candidates.op, candidates.bound, candidates.strategies[number]
    assert op is not None and bound is not None and strategy.transfers == ()
    computing = flops(call, op, bound) / 2 / SLOW_DEVICES.flops_of(torch.float32)
    moving = op.moved_bytes(4 * 8 * 32 + 8 * 8, 4) / bandwidth(op, bound, SLOW_DEVICES)
    assert candidates.forward_seconds[number] == pytest.approx(max(computing, moving) + SLOW_DEVICES.op_latency_s)


def test_equal_calls_get_equal_implementations() -> None:
    entry = RULES[aten.cross_entropy_loss.default]
    call = _call(loss_of(planned())[0])
    assert callable(entry) and entry(call) == entry(call)


def test_an_implementation_that_hides_its_collectives_is_chosen_and_run(with_another: Any) -> None:
    plain = planned()
    with_another(aten.cross_entropy_loss.default, hides(1.0))
    plan = planned()
    name = "cross_entropy_loss_default"
    assert plan.choices[name] == f"v via {OVERLAPPED}" and plain.choices[name] == "v"
    candidates, chosen = loss_of(plan)
    computing = float(candidates.forward_seconds[candidates.strategies.index(chosen)]) * _passes(candidates)
    whole = sum(transfer_seconds(each, plan.mesh, SLOW_DEVICES) for each in chosen.transfers)
    assert whole > 0 and sum(chosen.waits) == pytest.approx(max(whole - computing, 0.0))
    assert plan.seconds < plain.seconds and plan.traffic == plain.traffic
    row = next(row for row in plan.rows if row.name == name)
    assert sum(moved.seconds for moved in row.transfers) == pytest.approx(sum(chosen.waits))
    assert plan.verify().ok and Plan.from_json(plan.to_json()) == plan
    assert choices_of(plan, context_of(plan).space) == context_of(plan).choices
    assert plan.reprice().seconds == pytest.approx(plan.seconds, rel=1e-6)
    graph = rewrite(context_of(plan).space, context_of(plan).choices).module.graph
    assert loss.cross_entropy in {node.target for node in graph.nodes}


@pytest.mark.parametrize("hardware", [SLOW_DEVICES, SLOW_LINKS], ids=lambda each: each.name)
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_what_is_hidden_in_part_is_waited_for_in_part(share: float, hardware: Hardware, with_another: Any) -> None:
    with_another(aten.cross_entropy_loss.default, hides(share))
    plan = planned(hardware)
    candidates, chosen = loss_of(plan)
    assert OVERLAPPED in str(chosen)
    each = [transfer_seconds(transfer, plan.mesh, hardware) for transfer in chosen.transfers]
    computing = float(candidates.forward_seconds[candidates.strategies.index(chosen)]) * _passes(candidates)
    assert sum(chosen.waits) == pytest.approx(sum(each) - min(share * sum(each), computing))
    assert chosen.waits == pytest.approx([seconds * sum(chosen.waits) / sum(each) for seconds in each])
    assert plan.reprice().seconds == pytest.approx(plan.seconds, rel=1e-9) and plan.verify().ok


def test_an_implementation_has_its_own_flops_bytes_and_efficiency(with_another: Any) -> None:
    def local_flops(self: Implementation, call: Call, local: LocalSizes) -> int:
        return 10**6 * local["v"]

    def twice(self: Implementation, op: OpRule, call: Call, local: LocalSizes, inputs: int, outputs: int) -> int:
        return 2 * (inputs + outputs)

    with_another(aten.cross_entropy_loss.default, second("attention", flops=local_flops, moved_bytes=twice))
    hardware = replace(SLOW_DEVICES, attention_efficiency=0.5)
    plan = planned(hardware)
    candidates, _ = loss_of(plan)
    call, op, bound = _call(candidates), candidates.op, candidates.bound
    assert op is not None and bound is not None
    for number, strategy in enumerate(candidates.strategies):
        if not strategy.implemented or OVERLAPPED not in str(strategy):
            continue
        expected = forward_seconds(
            call,
            op,
            10**6 * strategy.local_sizes(bound.sizes, plan.mesh)["v"],
            (strategy.inputs, strategy.outputs),
            plan.mesh.sizes,
            hardware,
            bandwidth(op, bound, hardware),
            strategy.implementation,
        )
        assert candidates.forward_seconds[number] == pytest.approx(expected)
        arithmetic = (
            10**6 * (64 // 2 if str(strategy).startswith("v") else 64) / (0.5 * hardware.flops_of(torch.float32))
        )
        assert expected == pytest.approx(arithmetic + hardware.op_latency_s)
    assert flops(call, op, bound) < 10**6
    assert rule_of(call) is not op


def test_what_an_implementation_saves_is_counted_and_formulated(with_another: Any) -> None:
    saved = 4096
    plain = planned()
    with_another(
        aten.cross_entropy_loss.default,
        second(hidden_share=lambda self, call, local: 1.0, saved_bytes=lambda self, call, local: saved * local["n"]),
    )
    plan = planned()
    _, chosen = loss_of(plan)
    assert OVERLAPPED in str(chosen)
    name = "cross_entropy_loss_default"
    held, before = (next(row.saved_bytes for row in each.rows if row.name == name) for each in (plan, plain))
    assert held - before == pytest.approx(saved * 8, abs=8 * 64 * 4)
    assert plan.reprice().memory["memory"] == plan.peak_bytes > plain.peak_bytes
    assert plan.reprice(batch=16).memory["memory"] > plan.peak_bytes + saved * 7


def test_what_an_implementation_works_on_without_a_backward_is_counted(with_another: Any) -> None:
    plain = planned(training=False)
    large = plain.peak_bytes
    costs = {"hidden_share": lambda self, call, local: 1.0, "inference_bytes": lambda self, call, local: large}
    with_another(aten.cross_entropy_loss.default, second(**costs))
    plan = planned(training=False)
    assert OVERLAPPED in str(loss_of(plan)[1]) and large < plan.peak_bytes <= 2 * large
    candidates, _ = loss_of(plain)
    first = next(each.implementation for each in candidates.strategies if str(each) == "v")
    assert first.inference_bytes(_call(candidates), {"n": 8, "v": 32}) == COPIES_OF_PARTS * 4 * 8 * 32
    assert first.inference_bytes(_call(candidates), {"n": 4, "v": 64}) is None, "PyTorch's own loss"


def test_any_call_may_work_on_something_without_a_backward(with_another: Any) -> None:
    model, mesh, inputs = Attention(), Mesh({"sp": 2}), (torch.ones(2, 4, 8, 8),)
    with_another(aten.scaled_dot_product_attention.default, second(inference_bytes=lambda self, call, local: 10**6))
    autopar.annotate(model, "scaled_dot_product_attention", sp=f"factor:s via {OVERLAPPED}")
    assert autopar.plan(model, mesh, inputs, hardware=SLOW_DEVICES, training=False).peak_bytes > 10**6


def test_causal_attention_by_queries_has_room_for_a_second_way(with_another: Any) -> None:
    with_another(aten.scaled_dot_product_attention.default, second())
    plan = autopar.plan(Attention(), Mesh({"sp": 2}), (torch.ones(2, 4, 8, 8),), hardware=SLOW_DEVICES)
    space = context_of(plan).space
    candidates = space.decisions[space.index["scaled_dot_product_attention_default"]].candidates
    names = [str(each) for each in candidates.strategies]
    assert {"s", f"s via {OVERLAPPED}", "h"} <= set(names) and f"h via {OVERLAPPED}" not in names
    of_queries = [i for i, name in enumerate(names) if name.split()[0] == "s"]
    assert np.ptp(candidates.seconds[of_queries]) == 0, "equal costs until one says otherwise"


def _call(candidates: Candidates) -> Call:
    assert candidates.call is not None
    return candidates.call


def _passes(candidates: Candidates) -> float:
    """Forward and backward, each as often as a forward."""
    assert candidates.op is not None
    return 1 + backward_share(_call(candidates), candidates.op)
