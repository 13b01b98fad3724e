"""A segment that is computed again in the backward gives the same loss and the same gradients, bit by bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import autopar
from autopar.costs.plans.plan import Plan
from autopar.errors import PlanError
from autopar.ir.program.calls import source_of
from autopar.ir.program.program import Program, tensor_inputs
from autopar.ir.program.recompute_segments import (
    MODES,
    OFFLOAD,
    RECOMPUTATIONS,
    offloadable,
    recomputation,
    segments_of,
)
from autopar.ir.program.saved_tensors import saved_in
from autopar.planning.memory_limit.answers import Answer
from autopar.planning.record import written_down
from autopar.planning.settings import context_of
from autopar.runtime.collectives.mesh_axes import Axis, record_traffic, use_axes
from autopar.runtime.collectives.regather import Regather
from autopar.runtime.implementations.randomness import use_randomness
from autopar.runtime.recompute import prepared_calls, saved_handles
from autopar.runtime.recompute.run import run, steps_of
from autopar.runtime.rewrite.per_rank_graph import LocalProgram, rewrite
from autopar.runtime.rewrite.printing import readable_code
from autopar.strategies.roles import RoledProgram
from tests.runtime.module.test_parity import modes
from tests.runtime.rewrite import test_simulated
from tests.support.families import FAMILIES
from tests.support.options import by_flag
from tests.support.parity import Case, build, inputs, traced_once
from tests.support.planned import planned, space_of
from tests.support.ranks import Ranks, mesh

ALONE = {"tp": Axis("tp", "", 1, 0)}
"""The axes of a mesh of one rank."""
COMPUTED = ("selective", "full_save_collectives", "full")
NEXT_TO_NONE = (*COMPUTED, OFFLOAD)


@dataclass(frozen=True, slots=True)
class Alone:
    """A family on one rank, its graph rewritten for each mode."""

    program: Program
    graphs: Mapping[str, LocalProgram]
    given: Mapping[str, Any]
    """Placeholder → value; buffers are to be copied."""
    learned: tuple[Tensor, ...]

    def inputs(self) -> list[Any]:
        buffers = self.program.buffers.values()
        return [self.given[n].clone() if n in buffers else self.given[n] for n in self.graphs["none"].placeholders]

    def forward(self, mode: str, given: list[Any], deterministic: bool = False, step: int = 0) -> tuple[Any, ...]:
        """The graph's outputs on one rank."""
        graph = self.graphs[mode].module.graph
        with use_axes(ALONE), use_randomness(0, step, deterministic):
            return run(steps_of(graph), *given)


def alone(family: str, dropout: float = 0.0) -> Alone:
    return of_model(FAMILIES[family].build(**({"dropout": dropout} if dropout else {})), *FAMILIES[family].inputs(0))


def of_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Alone:
    space = space_of(model, kwargs or args, tp=1)
    program, found = space.program, planned(space, model)
    graphs = {
        mode: rewrite(space, found.choices, {segment.name: mode for segment in segments_of(program)}) for mode in MODES
    }
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    given: dict[str, Any] = dict(program.constants)
    given |= {placeholder: parameters[name] for name, placeholder in program.parameters.items()}
    given |= {placeholder: buffers[name] for name, placeholder in program.buffers.items()}
    leaves = zip(program.inputs, pytree.tree_leaves((args, kwargs)), strict=True)
    given |= {placeholder: leaf for placeholder, leaf in leaves if placeholder is not None}
    return Alone(program, graphs, given, tuple(p for p in parameters.values() if p.requires_grad))


def loss_of(outputs: tuple[Any, ...]) -> Tensor:
    return next(x for x in outputs if isinstance(x, Tensor) and x.ndim == 0 and x.requires_grad)


def assert_equal(found: Any, expected: Any) -> None:
    """Equal bit by bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "dropout", "deterministic"),
    [("llama", 0, False), ("vit", 0, False), ("gpt2", 0.1, False), ("gpt2", 0.1, True), ("resnet", 0, False)],
)
def test_what_is_computed_again_is_the_same_bit_by_bit(family: str, dropout: float, deterministic: bool) -> None:
    model = alone(family, dropout)

    def two_steps(mode: str) -> list[Any]:
        """Forward, forward, backward, backward: the second run of a step is far from the first."""
        torch.manual_seed(0)
        given = [model.inputs(), model.inputs()]
        losses = [loss_of(model.forward(mode, x, deterministic, step)) for step, x in enumerate(given)]
        drawn_before = torch.get_rng_state()
        gradients = [torch.autograd.grad(loss, model.learned) for loss in losses]
        assert torch.equal(torch.get_rng_state(), drawn_before)
        return [*losses, *gradients, *given]

    expected = two_steps("none")
    for mode in NEXT_TO_NONE:
        assert_equal(two_steps(mode), expected)


@contextmanager
def watched() -> Iterator[dict[int, weakref.ref[torch.UntypedStorage]]]:
    """The storages of everything that is held for a backward."""
    found: dict[int, weakref.ref[torch.UntypedStorage]] = {}
    hold = Regather.hold

    def note(x: Tensor, since: int = 0) -> object:
        storage = x.untyped_storage()
        found[storage._cdata] = weakref.ref(storage)
        return hold(x, since)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Regather, "hold", staticmethod(note))
        yield found


def held_bytes(model: Alone, mode: str) -> int:
    """Return the resident bytes after the forward, its inputs and the loss itself excluded."""
    given = model.inputs()
    with watched() as storages:
        loss = loss_of(model.forward(mode, given))
    gc.collect()
    known = {x.untyped_storage()._cdata for x in given}
    alive = [storage for ref in storages.values() if (storage := ref()) is not None]
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in alive if storage._cdata not in known)


def predicted_bytes(program: Program, mode: str) -> int:
    """The same, by what calls save and what recomputation leaves of that."""
    saved = saved_in(program)
    rerun_of = {
        node: again.rerun
        for segment in segments_of(program)
        for again in (recomputation(program, segment, mode, RoledProgram.of(program).products),)
        for node in segment.nodes
    }

    def memory_of(node: fx.Node) -> fx.Node:
        maker, position = source_of(node)
        alias = maker.op == "call_function" and position in saved[maker].aliases
        return memory_of(tensor_inputs(maker)[0]) if alias else node

    kept: set[fx.Node] = set()
    other = 0
    offloaded = {n for each in segments_of(program) for n in each.nodes} if mode == OFFLOAD else set()
    leave = offloadable(program)
    for node, what in saved.items():
        rerun = rerun_of.get(node, frozenset())
        inputs_of_node = [memory_of(each) for each in tensor_inputs(node)]
        requested = {inputs_of_node[i] for i in what.inputs} | ({node} if what.outputs else set())
        if node in rerun and not what.aliases:
            requested.update(inputs_of_node)
        other += what.other_bytes if node not in rerun and not (node in offloaded and node in leave) else 0
        gone = {each for each in requested if source_of(each)[0] in leave} if node in offloaded else set()
        kept.update(each for each in requested - gone if source_of(each)[0] not in rerun)
    return other + sum(node.meta["tensor"].num_bytes for node in kept if node.op == "call_function")


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["llama", "gpt2", "vit", "resnet", "bart"])
def test_the_bytes_that_are_kept_are_those_that_the_segments_predict(family: str) -> None:
    model = alone(family)
    found = [held_bytes(model, mode) for mode in MODES]
    assert found == [predicted_bytes(model.program, mode) for mode in MODES]
    none, selective, saves_collectives, full, offloaded = found
    assert none > selective > saves_collectives == full and none > offloaded, "one rank has no collectives to save"


def test_nothing_is_held_once_the_backward_is_done() -> None:
    model = alone("gpt2")
    with watched() as storages:
        given = model.inputs()
        loss_of(model.forward("full", given)).backward()
    gc.collect()
    known = {x.untyped_storage()._cdata for x in given}
    left = [address for address, ref in storages.items() if ref() is not None and address not in known]
    assert not left


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
def test_a_forward_without_a_backward_leaves_nothing_behind(mode: str) -> None:
    """Nothing waits for the collector of cycles."""
    model = alone("llama")
    given = model.inputs()
    gc.collect()
    gc.disable()
    try:
        with watched() as storages:
            model.forward(mode, given)
        known = {x.untyped_storage()._cdata for x in given}
        assert not [address for address, ref in storages.items() if ref() is not None and address not in known]
    finally:
        gc.enable()


class Blocks(nn.Module):
    """Two blocks of a function each."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), Applied(function)) for _ in range(2)])

    def forward(self, x_BD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BD = block(x_BD)
        return x_BD.square().mean()


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def blocks(function: Callable[[Tensor], Tensor]) -> Alone:
    return of_model(Blocks(function), (torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),), {})


class Mixed(Blocks):
    """The blocks in bfloat16, with casts of the weights."""

    def forward(self, x_BD: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x_BD).float()


@pytest.mark.slow
def test_casts_of_weights_are_made_again() -> None:
    model = of_model(Mixed(torch.sin), (torch.randn(4, 8),), {})
    found = [torch.autograd.grad(loss_of(model.forward(mode, model.inputs())), model.learned) for mode in MODES]
    for each in found[1:]:
        assert_equal(each, found[0])
    assert [held_bytes(model, each) for each in RECOMPUTATIONS] == [
        predicted_bytes(model.program, each) for each in RECOMPUTATIONS
    ]
    assert held_bytes(model, OFFLOAD) >= 2 * 8 * 8  # the second weight in bfloat16 does not leave
    assert held_bytes(model, "none") - held_bytes(model, "selective") >= 2 * 8 * 8  # the second weight in bfloat16


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the calls of graphs that are prepared from now on, as they run."""
    names: list[str] = []
    function_of = prepared_calls.function_of

    def counting(node: fx.Node, function: Any) -> Callable[..., Any]:
        run = function_of(node, function)
        return lambda *given: (names.append(node.name), run(*given))[1]

    monkeypatch.setattr(prepared_calls, "function_of", counting)
    return names


@pytest.mark.parametrize("mode", COMPUTED)
def test_the_calls_that_run_again_are_those_that_the_segments_say(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = alone("llama")
    names = count_calls(monkeypatch)
    loss = loss_of(model.forward(mode, model.inputs()))
    names.clear()
    loss.backward()
    again = [
        recomputation(model.program, segment, mode, RoledProgram.of(model.program).products)
        for segment in segments_of(model.program)
    ]
    views = {node.name for node, what in saved_in(model.program).items() if what.aliases}
    assert set(names) - views == {node.name for each in again for node in each.rerun} - views
    assert len(names) == len(set(names))


def test_a_segment_runs_again_once_per_backward_and_again_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model = blocks(lambda x: x.tanh().sin())
    names = count_calls(monkeypatch)
    loss = loss_of(model.forward("full", model.inputs()))
    names.clear()
    first = torch.autograd.grad(loss, model.learned, retain_graph=True)
    once = list(names)
    some = torch.autograd.grad(loss, model.learned[2:], retain_graph=True)
    second = torch.autograd.grad(loss, model.learned)
    assert once and names[-len(once) :] == once
    assert_equal(second, first)
    assert_equal(some, first[2:])


def test_no_value_of_a_segment_stays_for_another_backward() -> None:
    model = blocks(lambda x: x.tanh().sin())
    loss = loss_of(model.forward("full", model.inputs()))
    claims: list[Any] = []
    meet = saved_handles.Frame.meet

    def noting(frame: Any, claim: Any) -> Tensor:
        claims.append(claim)
        return meet(frame, claim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_handles.Frame, "meet", noting)
        loss.backward(retain_graph=True)
    assert len({id(claim.frame) for claim in claims}) == 2
    assert all(claim.value is None for claim in claims)


def test_second_derivatives_pass_through_a_segment() -> None:
    model = blocks(lambda x: x.tanh().sin())
    found = []
    for mode in MODES:
        first = torch.autograd.grad(loss_of(model.forward(mode, model.inputs())), model.learned, create_graph=True)
        total = torch.stack([g.square().sum() for g in first]).sum()
        found.append(torch.autograd.grad(total, model.learned))
    for each in found[1:]:
        assert_equal(each, found[0])


def test_complex_views_and_several_outputs_are_computed_again() -> None:
    def rotated(x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.tanh().reshape(4, 4, 2)) * torch.complex(torch.tensor(0.6), torch.tensor(0.8))
        left, right = torch.view_as_real(turned * turned.conj()).flatten(1).chunk(2, -1)
        values, _ = torch.cat([left.exp(), right.sin()], -1).sort(-1)
        return values

    model = blocks(rotated)
    found = [torch.autograd.grad(loss_of(model.forward(mode, model.inputs())), model.learned) for mode in MODES]
    for each in found[1:]:
        assert_equal(each, found[0])


def test_a_parameter_changed_before_the_backward_is_an_error() -> None:
    model = blocks(torch.tanh)
    loss = loss_of(model.forward("full", model.inputs()))
    with torch.no_grad():
        model.learned[1].add_(1)
    with pytest.raises(
        RuntimeError, match=r"shape \[8\] was changed in place after the forward .* call backward\(\) before"
    ):
        loss.backward()


def test_autocast_around_the_backward_changes_nothing() -> None:
    model = blocks(torch.tanh)
    found = []
    for mode in MODES:
        loss = loss_of(model.forward(mode, model.inputs()))
        with torch.autocast("cpu", torch.bfloat16):
            found.append(torch.autograd.grad(loss, model.learned))
    for each in found[1:]:
        assert_equal(each, found[0])


def test_a_graph_says_which_sections_are_computed_again() -> None:
    model = blocks(torch.tanh)
    assert "(recomputed" not in readable_code(model.graphs["none"].module, ("tp",))
    code = readable_code(model.graphs["selective"].module, ("tp",))
    assert "# blocks.0.0 (recomputed: selective)\n" in code
    assert "# blocks.0.0 (saved on the host)\n" in readable_code(model.graphs[OFFLOAD].module, ("tp",))
    assert "# model\n" in code


def test_a_mode_for_an_unknown_segment_is_an_error() -> None:
    model = Blocks(torch.tanh)
    space = space_of(model, (torch.ones(4, 8),), tp=1)
    choices = planned(space, model).choices
    with pytest.raises(
        PlanError, match=r'"full" for segment "layers\.7"; the program has segments blocks\.0, blocks\.1'
    ):
        rewrite(space, choices, {"layers.7": "full"})
    with pytest.raises(PlanError, match=r'"all" for segment "blocks\.1".* modes are none, selective, full'):
        rewrite(space, choices, {"blocks.1": "all"})


CASES = (
    pytest.param(Case("llama", (2, 2)), "megatron", False, marks=pytest.mark.slow),
    (Case("llama", (2, 2)), "data+sequence", False),
    (Case("gpt2", (2, 2), dropout=0.1), "storage+column", False),
    (Case("gpt2", (2, 2), dropout=0.1), "data+column", True),
    pytest.param(Case("resnet", (2, 2)), "data", False, marks=pytest.mark.slow),
)


def _trained(case: Case, deterministic: bool) -> dict[str, Any]:
    """Losses, gradients, buffers and traffic of two micro-steps, then their backwards, for every mode on this rank."""
    found: dict[str, Any] = {}
    options: dict[str, Any] = {**case.options, "recompute": "none", "deterministic": deterministic, "seed": 1}
    for mode in MODES:
        model = build(case)
        for pattern, keywords in case.annotations:
            autopar.annotate(model, pattern, **keywords)
        args, kwargs = inputs(case, 0, 0)
        with traced_once(case.graph):
            compiled = autopar.compile(model, mesh(case.mesh, case.axes), kwargs or args, **by_flag(**options))
        executable = compiled.prepare(args, kwargs)
        later = MODES[min(MODES.index(mode) + 1, len(RECOMPUTATIONS) - 1)]
        names = names_of(executable.program)
        if executable.plan.context is not None:  # on the rank that has planned
            found["planned"] = planned_traffic(executable.plan, names)
        options["plan"] = replace(executable.plan, recompute=dict.fromkeys(names, later))
        torch.manual_seed(0)
        with record_traffic() as traffic:
            batches = [inputs(case, 0, micro) for micro in range(2)]
            losses = [FAMILIES[case.family].loss(compiled(*args, **kwargs)) for args, kwargs in batches]
            for loss in losses:
                loss.backward()
        gradients = [p.grad for p in compiled.parameters() if p.grad is not None]
        found[mode] = [local(x) for x in (*losses, *gradients, *compiled.buffers())]
        found[f"{mode} traffic"] = dict(traffic.calls), dict(traffic.num_bytes)
        found["regathers"] = executable.graph.regathers
    return found


def planned_traffic(plan: Plan, segments: list[str]) -> dict[str, dict[tuple[str, str], int]]:
    """The bytes of each collective that a plan's choices come to, by the mode of all segments."""
    context, found = context_of(plan), {}
    for mode in RECOMPUTATIONS:
        modes = dict.fromkeys(segments, mode)
        answer = Answer(context.choices, modes, 0.0, 0.0, plan.solver, plan.multiplier, context.problem)
        found[mode] = dict(written_down(context, answer).traffic)
    return found


def names_of(program: Program) -> list[str]:
    return [segment.name for segment in segments_of(program)]


def local(x: Tensor) -> Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("case", "split", "deterministic"), CASES)
def test_ranks_compute_again_and_communicate_again_what_the_plan_says(
    case: Case, split: str, deterministic: bool, ranks: Ranks
) -> None:
    annotations = modes(case.family, 2)[split]
    if "storage" in split:
        annotations = (*annotations, ("*", {"storage": "dp", "regather": True}))
    case = replace(case, annotations=annotations)
    every = ranks.run(_trained, case, deterministic, world_size=4)
    planned = every[0]["planned"]
    more = {
        mode: {key: planned[mode][key] - num_bytes for key, num_bytes in planned["none"].items()} for mode in COMPUTED
    }
    for found in every:
        for mode in COMPUTED:
            assert_equal(found[mode], found["none"])
            none, counted = found["none traffic"][1], found[f"{mode} traffic"][1]
            if mode != "full" or not deterministic:  # then dropout saves its mask, and to make it again needs its input
                assert {key: num_bytes + 2 * more[mode][key] for key, num_bytes in none.items()} == counted
        assert found["regathers"] == ("storage" in split)
    assert any(more["full"].values()) and not any(more["full_save_collectives"].values())


@pytest.mark.slow
def test_simulated_ranks_compute_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopar, "compile", partial(autopar.compile, memory=autopar.Memory(recompute="full")))
    found = test_simulated.on_simulated_ranks("transformer_encoder", test_simulated.THREE_ROLES)
    test_simulated.assert_equal(found, test_simulated.on_one_process("transformer_encoder"))
