"""Memory of a stage with several micro-batches per step, and the part of its time that is spent once per step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import Precision
from autopar.capture.export import capture
from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Hardware, Link
from autopar.costs.memory.microbatches import END, Microbatches, Phase
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import MemoryRow, Role
from autopar.costs.memory.peak import bytes_by_moment, memory_use
from autopar.costs.memory.resident_parts import bytes_in, parts_of
from autopar.costs.plans.plan import Plan
from autopar.costs.space.build import build_space
from autopar.costs.space.space import Space
from autopar.errors import PipelineError, PlanError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.formulation import Formulation
from autopar.planning.options.groups import Memory, Recompute
from autopar.planning.pipeline.stages.blocks import blocks_of
from autopar.planning.pipeline.stages.splitting import split
from autopar.planning.planner import make_plan
from autopar.planning.settings import Settings, context_of
from autopar.planning.step_seconds import step_seconds_of
from autopar.runtime.module.compiled_module import ParallelModule
from autopar.runtime.module.stage import Stage
from autopar.tools.benchmarking.meters import peak_bytes
from tests.costs.memory.test_model import split_samples, whole
from tests.support.moments import at_moment
from tests.support.planned import IDS_BS, X_BD, Attention, TwoLinears, space_of
from tests.support.ranks import Ranks, mesh

PIPEDREAM = Microbatches(6, 3, stashes=True)


class CastLinear(nn.Module):
    """A linear layer that computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x_BD: Tensor) -> Tensor:
        return F.linear(x_BD.to(torch.bfloat16), self.weight.to(torch.bfloat16)).float().square().sum()


class Chain(nn.Module):
    """Linear layers in a row, to be cut into stages."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(depth))

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BD = torch.tanh(layer(x_BD))
        return x_BD.square().mean()


def stored(space: Space, weight: str, layout: str, saved: bool) -> list[int]:
    """The choices that leave everything whole but one weight: stored in a layout, and kept once gathered or not."""
    choices, number = list(whole(space)), space.index[space.program.parameters[weight]]
    strategies = space.decisions[number].candidates.strategies
    choices[number] = next(i for i, s in enumerate(strategies) if str(s.outputs[0]) == layout and s.saved == saved)
    split_samples(space, choices, number)
    return choices


def kept_by_one(memory: MemoryModel, choices: Sequence[int]) -> int:
    """Return the bytes that one micro-batch saves from its forward to its backward."""
    own = sum(int(a[0][c]) for n, c in enumerate(choices) if (a := memory.saved.own(n)) is not None)
    saved = ((w, memory.saved.edge(w)) for w in memory.space.edges)
    return own + sum(int(a[0][choices[w.source], choices[w.target]]) for w, a in saved if a is not None)


def use_of(space: Space, choices: Sequence[int], count: int, in_flight: int) -> tuple[int, dict[str, int]]:
    peak, use, _ = memory_use(MemoryModel(space, Microbatches(count, in_flight)), choices, {})
    return peak, dict(use.parts)


@pytest.mark.parametrize(("count", "in_flight"), [(2, 3), (2, 0), (0, 0)])
def test_more_in_flight_than_there_are_is_refused(count: int, in_flight: int) -> None:
    with pytest.raises(PipelineError, match="give at least 1 in flight, and no more than"):
        Microbatches(count, in_flight)


def test_all_forwards_first_has_two_fullest_backwards_and_alternating_has_one() -> None:
    assert Microbatches(4, 4).phases == (Phase(3, True), Phase(2, False), END)
    assert Microbatches(4, 2).phases == (Phase(1, False), END)
    assert Microbatches().phases == (Phase(0, True),)


def test_where_each_updates_the_weights_every_backward_is_a_first_one_and_the_others_wait_behind_it() -> None:
    assert PIPEDREAM.phases == (Phase(2, True), replace(END, others=2))
    working = replace(PIPEDREAM, works=True).phases
    assert working == (*PIPEDREAM.phases, Phase(2, False, end=True, steps=True))


@pytest.mark.parametrize("model", [Chain(), Attention(False), CastLinear()])
def test_each_in_flight_has_the_weights_of_its_forward(model: nn.Module) -> None:
    """Check the weights that each micro-batch in flight saves from its forward.

    Weights that are used as stored are copied. Weights that are cast or gathered exist once for each micro-batch.
    Gradients are those of one micro-batch.
    """
    example = X_BD if not isinstance(model, Attention) else IDS_BS
    space = space_of(model, (example,), dp=2)
    kept_once, of_each = (MemoryModel(space, replace(PIPEDREAM, stashes=each)) for each in (False, True))
    _, use, _ = memory_use(of_each, whole(space), {})
    cast = 2 if isinstance(model, CastLinear) else 1
    assert use.parts["moved weights"] == 3 * use.parts["parameters"] // cast
    whole_weights = memory_use(kept_once, whole(space), {})[1].parts
    assert whole_weights.get("moved weights", 0) == (use.parts["moved weights"] // 3 if cast > 1 else 0)
    (end,) = [each.num_bytes for each in use.timeline if each.name == "end of the step"]
    assert end > 2 * kept_by_one(of_each, whole(space)) + use.parts["moved weights"]


def test_one_microbatch_is_planned_as_without_them() -> None:
    space = space_of(Attention(False), (IDS_BS,))
    limit = int(0.9 * make_plan(space, {})[0].peak_bytes)
    for memory in (None, limit):
        one, other = (
            make_plan(space, {}, Settings(Memory(memory)), microbatches=m)[0].to_json() for m in (None, Microbatches())
        )
        assert one == other


def test_each_microbatch_in_flight_adds_what_one_keeps() -> None:
    space = space_of(Attention(False), (IDS_BS,), dp=2)
    choices = whole(space)
    peaks = [use_of(space, choices, 9, in_flight)[0] for in_flight in (1, 2, 5)]
    one = kept_by_one(MemoryModel(space, Microbatches(9)), choices)
    assert one > 0 and [peaks[1] - peaks[0], peaks[2] - peaks[0]] == [one, 4 * one]


def test_inputs_are_there_for_all_microbatches() -> None:
    space = space_of(TwoLinears(), (X_BD,))
    alone, many = (use_of(space, whole(space), count, 1)[1]["buffers and inputs"] for count in (1, 6))
    assert (alone, many) == (4 * 8 * 4, 6 * 4 * 8 * 4)


@pytest.mark.parametrize(("saved", "moved"), [(True, 8 * 8 * 4), (False, 0)])
def test_a_gathered_weight_is_held_once_unless_it_is_gathered_again(saved: bool, moved: int) -> None:
    space = space_of(Attention(False), (IDS_BS,), dp=2)
    choices = stored(space, "query.weight", "S(0)", saved)
    for in_flight in (1, 3):
        parts = use_of(space, choices, 4, in_flight)[1]
        assert parts.get("moved weights", 0) == moved


def test_an_embedding_that_is_gathered_is_held_until_the_end() -> None:
    space = space_of(Attention(False), (IDS_BS,), dp=2)
    choices = stored(space, "embed.weight", "S(0)", False)
    assert use_of(space, choices, 4, 1)[1]["moved weights"] == 12 * 8 * 4


def added_up(space: Space, choices: Sequence[int]) -> int:
    """Bytes of all gradients that micro-batches add up."""
    memory = MemoryModel(space, Microbatches(4))
    parts = (part for edge in space.edges for part in parts_of(memory, edge) if part.role is Role.GRADIENT)
    return sum(int(part.modes[0][choices[part.ends[0]], choices[part.ends[1]]]) for part in parts)


def test_a_gathered_weights_gradient_is_added_up_whole_and_a_regathered_ones_in_parts() -> None:
    space = space_of(Attention(False), (IDS_BS,), dp=2)
    everything = sum(p.numel() for p in Attention(False).parameters()) * 4
    size = 8 * 8 * 4
    found = [added_up(space, stored(space, "query.weight", "S(0)", saved)) for saved in (True, False)]
    assert found == [everything, everything - size // 2]


def test_gradients_of_weights_in_bfloat16_are_added_up_in_float32() -> None:
    space = space_of(CastLinear(), (X_BD,), dp=2)
    choices = whole(space)
    parts = use_of(space, choices, 4, 1)[1]
    assert parts["moved weights"] == 8 * 8 * 2
    assert added_up(space, choices) == 8 * 8 * 4


def test_at_the_end_gradients_that_are_reduced_are_there_twice() -> None:
    alone = space_of(Chain(), (X_BD,), dp=1)
    use = memory_use(MemoryModel(alone, Microbatches(4)), whole(alone), {})[1]
    assert use.timeline[-1].num_bytes == 4 * (8 * 8 * 4) * 4 + 4 * (4 * 8 * 4)
    model = Chain()
    context = context_of(autopar.plan(model, Mesh({"dp": 2}), (X_BD,), strategy="data_parallel"))
    space, choices = context.space, context.choices
    use = memory_use(MemoryModel(space, Microbatches(4)), choices, {})[1]
    size, inputs = 8 * 8 * 4, 4 * 8 * 4
    end = use.timeline[-1]
    assert end.name == "end of the step"
    assert end.num_bytes == 4 * (size + 2 * size) + 4 * inputs + 2 * 4 * size
    large = space_of(model, (torch.ones(4096, 8),), dp=2)
    peak, use, _ = memory_use(MemoryModel(large, Microbatches(4)), whole(large), {})
    assert use.timeline[-1].num_bytes < peak


def test_all_gradients_are_there_in_a_later_backward_and_none_in_the_first() -> None:
    space = space_of(Chain(), (X_BD,), tp=1)
    choices, size = whole(space), 8 * 8 * 4
    alternating = memory_use(MemoryModel(space, Microbatches(9, 2)), choices, {})[1]
    forwards_first = memory_use(MemoryModel(space, Microbatches(2, 2)), choices, {})[1]
    one = memory_use(MemoryModel(space), choices, {})[1]
    inputs = 4 * 8 * 4
    saved = kept_by_one(MemoryModel(space, Microbatches(2)), choices)
    start, *_ = (each.num_bytes for each in one.timeline if not each.backward)
    alternating_start, *_ = (each.num_bytes for each in alternating.timeline if not each.backward)
    first_start, *_ = (each.num_bytes for each in forwards_first.timeline if not each.backward)
    assert alternating_start == start + 8 * inputs + saved + 4 * size
    assert first_start in (start + inputs + saved, start + inputs + 4 * size)


@pytest.mark.parametrize("microbatches", [Microbatches(6, 3), Microbatches(3, 3), Microbatches(2, 1), PIPEDREAM])
@pytest.mark.parametrize("model", [Attention(False), CastLinear()])
def test_a_row_counts_what_the_prediction_counts(model: nn.Module, microbatches: Microbatches) -> None:
    inputs = (IDS_BS,) if isinstance(model, Attention) else (X_BD,)
    space = space_of(model, inputs, dp=2, tp=2)
    _, best = make_plan(space, {}, microbatches=microbatches)
    for choices in (best, whole(space)):
        memory = MemoryModel(space, microbatches)
        peak, use, fullest = memory_use(memory, choices, {})
        assert at_moment(memory, choices, fullest) == max(each.num_bytes for each in use.timeline) == peak
        assert sum(use.parts.values()) == peak
        by_moment, count = bytes_by_moment(memory, choices, {}), len(memory.lifetimes.calls)
        for number, phase in enumerate(microbatches.phases):
            if phase.end:
                assert at_moment(memory, choices, number * count) == by_moment[number * count]
        if len(microbatches.phases) == 2:  # the timeline is that of the only backward that can be the fullest
            backward = [each.num_bytes for each in use.timeline if each.backward][:-1]
            assert [at_moment(memory, choices, place) for place in range(len(memory.lifetimes.calls))] == backward[::-1]


def test_a_limit_holds_for_all_microbatches_in_flight() -> None:
    space = space_of(Attention(False), (IDS_BS,), dp=2, tp=2)
    free, _ = make_plan(space, {}, microbatches=Microbatches(8, 4))
    alone, _ = make_plan(space, {})
    limit = int(0.8 * free.peak_bytes)
    assert alone.peak_bytes < limit
    within, _ = make_plan(space, {}, Settings(Memory(limit)), microbatches=Microbatches(8, 4))
    assert within.peak_bytes <= limit < free.peak_bytes and within.choices != free.choices


def test_buffers_are_there_for_inputs_of_those_in_flight_and_one_gradient() -> None:
    program = capture(Chain(), (X_BD,), {})
    blocks = blocks_of(program, 2)
    first, last = split(program, blocks, (0, len(blocks) // 2))
    size = 4 * 8 * 4
    for stage, buffers in ((first, 1), (last, 3)):
        space = build_space(stage, Mesh({"pp": 1}), load("cpu"), input_layouts={})
        parts = use_of(space, whole(space), 6, 3)[1]
        assert parts.get("received inputs", 0) + parts.get("received gradients", 0) == buffers * size
        # tanh keeps its result for its own backward, so that what is sent costs nothing more
        assert parts.get("sent tensors", 0) == 0
    assert first.num_sent == 1 and len(last.received) == 1


class Doubled(nn.Module):
    """Its first half ends in a sum, which nothing but the sender keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x_BD: Tensor) -> Tensor:
        summed_BD = self.up(x_BD) + self.up(x_BD * 2)
        return self.down(summed_BD).sum()


def test_a_sent_tensor_that_no_backward_needs_is_there_until_the_next_one_is_sent() -> None:
    program = capture(Doubled(), (X_BD,), {})
    blocks = blocks_of(program, 2)
    stages = [split(program, blocks, (0, cut)) for cut in range(1, len(blocks))]
    first = next(s for s, _ in stages if s.num_sent == 1 and str(s.output[0]).startswith("add"))
    space = build_space(first, Mesh({"pp": 1}), load("cpu"))
    assert use_of(space, whole(space), 6, 3)[1]["sent tensors"] == 2 * 4 * 8 * 4


@pytest.mark.parametrize("name", ["two linears", "attention", "cast"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_parts_of_a_step_add_up_to_it(name: str, recompute: Recompute) -> None:
    models = {
        "two linears": (TwoLinears(True), X_BD),
        "attention": (Attention(True), IDS_BS),
        "cast": (CastLinear(), X_BD),
    }
    model, inputs = models[name]
    space = space_of(model, (inputs,), load("h100"), dp=2, tp=2)
    for microbatches in (None, Microbatches(5, 2)):
        plan, choices = make_plan(space, {}, Settings(Memory(recompute=recompute)), microbatches=microbatches)
        parts = step_seconds_of(context_of(plan).memory_model, choices, plan.recompute)
        assert parts.seconds == pytest.approx(plan.seconds, rel=1e-9)
        assert min(parts) > 0 and plan.bound <= plan.seconds * (1 + 1e-9)
        assert parts.forward + parts.once >= sum(row.forward_seconds for row in plan.rows) * (1 - 1e-9)


def test_what_the_search_makes_least_is_a_microbatch_with_its_share_of_the_step() -> None:
    space = space_of(Attention(False), (IDS_BS,), dp=2, tp=2)
    memory, draw = MemoryModel(space, Microbatches(7)), random.Random(0)
    problem = Formulation(space, memory).problem({})
    for _ in range(30):
        choices = [draw.randrange(len(decision.candidates.strategies)) for decision in space.decisions]
        expected = step_seconds_of(memory, choices, {}).per_microbatch(7)
        if np.isfinite(expected):
            assert problem.seconds_of(choices) == pytest.approx(expected, rel=1e-9)


def test_many_microbatches_would_rather_move_weights_than_activations() -> None:
    slow = Hardware("slow devices", {"float32": 3e6}, 1e12, 10**12, 0.0, (Link("wire", None, 1e-6, 1e6),))
    space = space_of(Chain(2), (X_BD,), slow, dp=2)
    memory = MemoryModel(space, Microbatches(50))
    _, choices = make_plan(space, {}, microbatches=Microbatches(50))
    _, alone = make_plan(space, {})
    many, one = step_seconds_of(memory, choices, {}), step_seconds_of(memory, alone, {})
    assert many.per_microbatch(50) < 0.9 * one.per_microbatch(50)
    assert one.per_microbatch(1) < 0.9 * many.per_microbatch(1)


@pytest.mark.parametrize("share", [None, 0.8])
def test_a_plan_for_many_microbatches_is_verified_saved_and_loaded(share: float | None, tmp_path: Path) -> None:
    space = space_of(Attention(False), (IDS_BS,), dp=2, tp=2)
    free, _ = make_plan(space, {}, microbatches=Microbatches(8, 4))
    limit = None if share is None else int(share * free.peak_bytes)
    plan, _ = make_plan(space, {}, Settings(Memory(limit)), microbatches=Microbatches(8, 4))
    assert plan.verify().ok and plan.verify().bound <= plan.seconds * (1 + 1e-9)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.peak_bytes == plan.peak_bytes and loaded.seconds == plan.seconds
    assert loaded.reprice().seconds == pytest.approx(plan.seconds) and not any("memory" in f for f in loaded.formulas)
    with pytest.raises(PlanError, match="its choices take"):
        replace(plan, peak_bytes=plan.peak_bytes // 2).verify()


def test_arrays_of_equal_edges_are_one_object() -> None:
    space = space_of(Chain(), (X_BD,), dp=2)
    memory = MemoryModel(space, Microbatches(4, 2))
    row = MemoryRow(((0, 1),))
    kinds: dict[object, np.ndarray] = {}
    for edge in space.edges:
        for part in parts_of(memory, edge):
            if part.role is Role.MOVED:
                assert kinds.setdefault(space.kind(edge), part.modes[0]) is part.modes[0]
    assert kinds and bytes_in(memory, space.edges[0], row) is not None


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BD = torch.relu(layer(x_BD))
        return x_BD.mean()


def _predicted_and_real(
    strategy: str, batch: int, num_microbatches: int, in_flight: int, precision: Any = None
) -> tuple[int, int]:
    """Peak bytes of a step on this rank as predicted, and as its tensors are; predicted 0 where this rank plans not."""
    x_BD = torch.randn(batch * num_microbatches, 64)
    on = mesh((2,), ("dp",))
    model = autopar.compile(_Mlp(), on, (x_BD,), strategy=strategy, precision=precision, microbatches=num_microbatches)
    assert isinstance(model, ParallelModule)
    optimizer = torch.optim.AdamW(model.parameters())
    microbatches = [((each,), {}) for each in x_BD.split(batch)]
    executable = model.prepare((x_BD,), {})
    stage = Stage(executable, model)

    def step() -> None:
        stage.begin(microbatches, 0)
        losses: list[Tensor] = []
        for number in range(num_microbatches):
            stage.microbatch = number
            losses.append(stage()[0])
            if len(losses) == in_flight:
                losses.pop(0).backward()
        for loss in losses:
            loss.backward()
        stage.finish()

    step()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    held = [*model.parameters(), x_BD, *states]
    real = peak_bytes(step, optimizer.zero_grad, lambda: held)
    if executable.plan.context is None:
        return 0, real
    context = context_of(executable.plan)
    runs = Microbatches(num_microbatches, in_flight, executable.plan.reduce_each)
    memory = MemoryModel(context.space, runs)
    return memory_use(memory, context.choices, executable.plan.recompute)[0], real


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:zero1")
@pytest.mark.parametrize("strategy", ["data_parallel", "zero1", "zero2", "zero3"])
def test_the_prediction_is_what_a_step_of_many_microbatches_holds(strategy: str, ranks: Ranks) -> None:
    for batch, in_flight in ((8, 1), (256, 1), (256, 3), (256, 4)):
        predicted, real = ranks.run(_predicted_and_real, strategy, batch, 4, in_flight, world_size=2)[0]
        assert predicted == pytest.approx(real, rel=0.1), f"{batch} samples, {in_flight} in flight"


@pytest.mark.parametrize("strategy", ["data_parallel", "zero1", "zero2"])
def test_sums_of_micro_batches_take_the_bytes_of_the_dtype_they_are_reduced_in(strategy: str, ranks: Ranks) -> None:
    wide, narrow = (
        ranks.run(_predicted_and_real, strategy, 8, 4, 1, Precision(torch.float32, torch.bfloat16, reduce))[0]
        for reduce in (torch.float32, torch.bfloat16)
    )
    for predicted, real in (wide, narrow):
        assert predicted == pytest.approx(real, rel=0.1)
    assert (narrow[1] < 0.95 * wide[1]) == (strategy != "zero2")  # whose sums are parts, in float32


@pytest.mark.parametrize("reduce_each", [False, True])
def test_no_bytes_follow_from_other_waits_but_where_micro_batches_reduce_gradients(reduce_each: bool) -> None:
    space, runs = space_of(Chain(), (X_BD,), dp=2, tp=2), Microbatches(4, 4, reduce_each=reduce_each)
    memory, waiting = MemoryModel(space, runs), space.waiting_for({"all_gather": 0.5})
    use = memory_use(memory, whole(space), {})
    assert (parts_of(memory.on(waiting), 0) is parts_of(memory, 0)) == (not reduce_each)
    for other in (memory.on(waiting), MemoryModel(waiting, runs)):
        assert memory_use(other, whole(space), {}) == use
    uneven = memory.on(replace(space, imbalance=2.0))
    assert parts_of(uneven, 0) is not parts_of(memory, 0), "its edges have other numbers"
