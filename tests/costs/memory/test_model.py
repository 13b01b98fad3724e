"""Predicted memory: what autograd really holds for each family, and what each storage and optimizer takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import autopar
from autopar.capture.export import capture, skeleton
from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Link
from autopar.costs.memory.microbatches import Phase
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import (
    COMPUTING,
    GATHERING,
    REDUCING,
    MemoryRow,
    Moment,
    Role,
)
from autopar.costs.memory.peak import memory_use
from autopar.costs.memory.resident_parts import bytes_in, parts_of
from autopar.costs.memory.tensor_bytes import TensorBytes
from autopar.costs.pricing import message_sizes as messages
from autopar.costs.pricing.optimizer import Optimizer
from autopar.costs.space.build import build_space
from autopar.costs.space.space import Space, TensorEdge
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.settings import context_of
from autopar.runtime.module.inputs import call_signature, canonical_arguments
from tests.support.eager import run
from tests.support.families import FAMILIES, Family
from tests.support.moments import at_moment
from tests.support.parity import SLOW_DEVICES
from tests.support.planned import IDS_BS, X_BD, Attention, TwoLinears, space_of


def whole(space: Space) -> tuple[int, ...]:
    """The choices that leave everything whole on every device."""
    found = []
    for decision in space.decisions:
        names = [
            set(s.choices) | {str(p) for layout in s.outputs for p in layout} for s in decision.candidates.strategies
        ]
        found.append(
            next(i for i, name in enumerate(names) if not any(each.startswith(("S", "Z", "P")) for each in name))
        )
    return tuple(found)


def held_for_the_backward(family: Family) -> tuple[Space, int]:
    """The space of a family on one device, and the bytes its program really keeps besides parameters and inputs."""
    model, (args, kwargs) = family.build(), family.inputs(0)
    arguments = canonical_arguments(call_signature(model), args, kwargs)
    program = capture(skeleton(model), *arguments)
    is_offloaded = pytree.tree_leaves(arguments)
    there = (*model.parameters(), *model.buffers(), *program.constants.values(), *is_offloaded)
    known = {each.untyped_storage()._cdata for each in there if isinstance(each, torch.Tensor)}
    held: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            held[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = run(program, dict(model.named_parameters()), dict(model.named_buffers()), is_offloaded)
    del outputs
    space = build_space(program, Mesh({"dp": 1}), load("cpu"))
    return space, sum(storage.nbytes() for storage in held.values())


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_predicted_activations_are_what_autograd_holds(name: str) -> None:
    space, held = held_for_the_backward(FAMILIES[name])
    memory = MemoryModel(space)
    choices = whole(space)
    _, use, _ = memory_use(memory, choices, {})
    own = sum(int(arrays[0][c]) for n, c in enumerate(choices) if (arrays := memory.saved.own(n)) is not None)
    edges = sum(
        int(arrays[0][choices[w.source], choices[w.target]])
        for w in space.edges
        if (arrays := memory.saved.edge(w)) is not None
    )
    # A statistic or a mask may be counted at both ends of a chain of views.
    assert held <= own + edges <= held * 1.006
    assert use.parts.get("activations", 0) <= own + edges


def test_the_timeline_rises_to_the_loss_and_ends_with_all_gradients() -> None:
    space, _ = held_for_the_backward(FAMILIES["mlp"])
    peak, use, _ = memory_use(MemoryModel(space), whole(space), {})
    forward = [each.num_bytes for each in use.timeline if not each.backward]
    assert forward == sorted(forward)
    assert peak == max(each.num_bytes for each in use.timeline)
    parameters = sum(p.numel() for p in FAMILIES["mlp"].build().parameters()) * 4
    assert use.parts["parameters"] == parameters and use.parts["optimizer"] == 2 * parameters


@pytest.mark.parametrize(
    ("optimizer", "dtype", "state", "master"),
    [
        (Optimizer("adamw"), torch.float32, 8.0, 0),
        (Optimizer("adamw"), torch.bfloat16, 4.0, 0),
        (Optimizer("adamw", master_copies=True), torch.bfloat16, 8.0, 4),
        (Optimizer("adamw", master_copies=True), torch.float32, 8.0, 0),
        (Optimizer("adamw-8bit"), torch.float32, 2.03125, 0),
        (Optimizer("sgd"), torch.float32, 0.0, 0),
        (Optimizer("none"), torch.float32, 0.0, 0),
    ],
)
def test_an_optimizer_takes_its_bytes_per_element(
    optimizer: Optimizer, dtype: torch.dtype, state: float, master: int
) -> None:
    info = TensorInfo((4,), dtype, True)
    assert (optimizer.state_bytes(info), optimizer.master_bytes(info)) == (state, master)
    assert optimizer.state_bytes(TensorInfo((4,), dtype)) == 0


def test_moments_of_8_bits_are_whole_where_a_device_has_few_elements_or_no_full_blocks() -> None:
    info, elements = TensorInfo((4,), torch.bfloat16, True), np.array([4095, 4096, 4097, 8192, 256])
    found = Optimizer("adamw-8bit").state_bytes_of("optimizer", info, elements)
    tables = 2 * 256 * 4
    assert found.tolist() == [4 * 4095, 4096 * 65 // 32 + tables, 4 * 4097, 8192 * 65 // 32 + tables, 4 * 256]
    other = Optimizer("adamw-8bit", master_copies=True)
    assert other.state_bytes_of("optimizer", info, elements)[0] == 8 * 4095
    assert other.state_bytes_of("master copies", info, elements)[0] == 4 * 4095


def test_activations_count_once_in_the_layout_in_which_they_arrive() -> None:
    space = space_of(TwoLinears(), (X_BD,))
    memory = MemoryModel(space)
    number = space.index["relu_default"]
    strategies = space.decisions[number].candidates.strategies
    own = memory.saved.own(number)
    assert own is not None
    by_layout = {str(s.outputs[0]): int(b) for s, b in zip(strategies, own[0], strict=True)}
    assert by_layout["I"] == 4 * 16 * 4
    assert by_layout["S(0)"] == by_layout["S(1)"] == 4 * 16 * 2
    assert (
        memory.saved.own(space.index["linear_default"]) is None
    )  # relu keeps its output, so nobody needs what it was made of
    (edge,) = (w for w in space.edges if w.source == number)
    arrays = memory.saved.edge(edge)
    assert arrays is not None
    rows, columns = ([str(x) for x in layouts] for layouts in (space.source_layouts(edge), space.target_layouts(edge)))
    moved = arrays[0][rows.index("S(0)"), columns.index("I")]
    assert (moved, arrays[0][rows.index("S(0)"), columns.index("S(0)")]) == (4 * 16 * 4, 0)


def _stored(sizes: dict[str, int], layout: str, saved: bool) -> tuple[Space, list[int], int]:
    """Attention with its query weight stored in a layout, everything else whole, and the number of that parameter."""
    program = capture(skeleton(Attention(False)), (IDS_BS,), {})
    space = build_space(program, Mesh(sizes), load("cpu"))
    number = space.index[program.parameters["query.weight"]]
    choices = list(whole(space))
    strategies = space.decisions[number].candidates.strategies
    choices[number] = next(i for i, s in enumerate(strategies) if str(s.outputs[0]) == layout and s.saved == saved)
    split_samples(space, choices, number)
    return space, choices, number


def split_samples(space: Space, choices: list[int], weight: int) -> None:
    """Let the call that takes a weight split its samples: gradients that are equal everywhere need no reduction."""
    (edge,) = (w for w in space.edges if w.source == weight)
    strategies = space.decisions[edge.target].candidates.strategies
    wanted = next(i for i, s in enumerate(strategies) if set(map(str, s.inputs[edge.target_input])) == {"R"})
    choices[edge.target] = wanted


def _by_role(memory: MemoryModel, edge: TensorEdge) -> dict[Role, np.ndarray]:
    return {part.role: part.modes[0] for part in parts_of(memory, edge)}


def test_a_weight_that_is_gathered_for_equal_gradients_is_kept() -> None:
    space, choices, number = _stored({"dp": 2}, "S(0)", saved=False)
    (edge,) = (w for w in space.edges if w.source == number)
    memory = MemoryModel(space)
    arrays, again = memory.saved.edge(edge), _by_role(memory, edge)[Role.GATHERED_AGAIN]
    assert arrays is not None
    found = {}
    for target in (choices[edge.target], whole(space)[edge.target]):
        choices[edge.target] = target
        ends = choices[number], target
        found[str(space.path(edge, choices))] = (
            int(arrays[0][ends]),
            int(again[ends]),
            any(space.path(edge, choices).regathered),
        )
    assert found == {"S(0) → R": (0, 256, True), "S(0) → I": (256, 0, False)}


def test_a_weight_in_parts_is_held_whole_only_where_it_is_kept_and_while_its_layer_runs() -> None:
    size = 8 * 8 * 4
    used = {}
    for saved in (False, True):
        space, choices, number = _stored({"dp": 2}, "S(0)", saved)
        memory = MemoryModel(space)
        (edge,) = (w for w in space.edges if w.source == number)
        ends = choices[edge.source], choices[edge.target]
        arrays, found = memory.saved.edge(edge), _by_role(memory, edge)
        assert arrays is not None
        used[saved] = int(arrays[0][ends]), int(found[Role.GATHERED][ends]), int(found[Role.UNREDUCED][ends])
        assert sum(int(a[choices[number]]) for a in memory.stored(number).values()) == size // 2 * 3
    assert used == {False: (0, size, size), True: (size, 0, size)}


@pytest.mark.parametrize(("rows", "large", "copied"), [(8, 1, 0), (8, messages.LARGE, 8), (7, 1, 7)])
def test_a_gradient_is_copied_to_be_sent_but_for_that_of_a_weight_gathered_alone(
    rows: int, large: int, copied: int
) -> None:
    """Check the bytes of a gradient's copy for sending; it is padded if rows do not divide over ranks."""
    with mock.patch.object(messages, "LARGE", large):
        space = space_of(nn.Linear(8, rows, bias=False), (torch.randn(4, 8),), SLOW_DEVICES, dp=2)
        memory = MemoryModel(space)
        (edge,) = (w for w in space.edges if w.tensor.requires_grad and space.is_weight(w.source))
        stored = next(
            n for n, s in enumerate(space.decisions[edge.source].candidates.strategies) if str(s.outputs[0]) == "S(0)"
        )
        used = next(
            n for n, s in enumerate(space.decisions[edge.target].candidates.strategies) if str(s.inputs[1]) == "R"
        )
        found = _by_role(memory, edge)
    assert int(found[Role.LAST_MADE][stored, used]) == rows * 8 * 4
    assert int(found[Role.SENT_OFF][stored, used]) == copied * 8 * 4


def test_of_every_pair_of_layouts_it_is_told_whether_a_weight_is_gathered_alone() -> None:
    """On two axes of different links, with weights on both sides of every limit."""
    links = Link("near", 4, 1e-9, 1e12), Link("far", None, 1.0, 1e9)
    hardware, model = replace(SLOW_DEVICES, links=links), nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64))
    with mock.patch.object(messages, "LARGE", 16 * 64 * 4):
        space = space_of(model, (torch.randn(8, 16),), hardware, dp=2, tp=4)
        tensors, found = MemoryModel(space).tensors, list[float]()
        for edge in space.edges:
            if space.is_weight(edge.source):
                sources, targets = space.source_layouts(edge), space.target_layouts(edge)
                sizes = tensors.bytes_at_ends(edge)[1].tolist()
                ends, where = list(zip(targets, sizes, strict=True)), (space.mesh, hardware)
                each = [[messages.gathered_alone(s, t, size, *where) for t, size in ends] for s in sources]
                assert tensors.gathered_alone(edge).tolist() == each
                found.append(float(np.mean(each)))
    assert found[0] < found[2] and found[2] > 0 and found[1] == 0  # a bias is small


def test_the_hidden_tensors_of_a_large_vocabulary_are_counted() -> None:
    """The log-probabilities of a loss: their bytes times their elements are beyond 64 bits."""

    class Loss(nn.Module):
        def forward(self, logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(logits_NV * self.scale, labels_N)

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), device="meta"))

    shape = (64 * 4096, 128256)
    inputs = torch.empty(shape, device="meta"), torch.empty(shape[0], dtype=torch.int64, device="meta")
    space = space_of(Loss(), inputs)
    number = space.index["cross_entropy_loss_default"]
    own = MemoryModel(space).saved.own(number)
    assert own is not None
    assert own[0].max() >= shape[0] * shape[1] * 4 and own[0].min() > 0


def _three_linears(strategy: str = "data_parallel") -> tuple[MemoryModel, Sequence[int]]:
    """A layer of two matrices and a layer of one, on two devices."""
    layer = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model = nn.Sequential(layer, nn.Linear(8, 8, bias=False))
    context = context_of(autopar.plan(model, Mesh({"dp": 2}), (X_BD,), strategy=strategy))
    return MemoryModel(context.space), context.choices


def _at(memory: MemoryModel, edge: TensorEdge, choices: Sequence[int], place: int) -> int:
    """Return the bytes of an edge while the call at that position runs backward."""
    found = bytes_in(memory, edge, MemoryRow(((place, 1),)))
    return 0 if found is None else int(found[0][choices[edge.source], choices[edge.target]])


def test_a_gradient_to_be_reduced_is_held_after_its_calls_backward_to_the_end_of_the_layers() -> None:
    memory, choices = _three_linears()
    weights = [edge for edge in memory.space.edges if memory.space.is_weight(edge.source)]
    size = 8 * 8 * 4
    by_call = [[_at(memory, edge, choices, place) for edge in weights] for place in range(3)]
    assert by_call == [[0, size, 0], [0, 0, 0], [0, 0, 0]]  # the call's own gradient is in its working set


def _moments(memory: MemoryModel) -> dict[int, list[int]]:
    """Kind of moment → the places that have one."""
    return {
        COMPUTING: list(range(len(memory.lifetimes.calls))),
        GATHERING: list(memory.lifetimes.last_gather.values()),
        REDUCING: list(memory.lifetimes.first_reduction.values()),
    }


@pytest.mark.parametrize("strategy", ["data_parallel", "zero2", "zero3"])
def test_a_limit_counts_what_the_report_counts(strategy: str) -> None:
    memory, choices = _three_linears(strategy)
    count = len(memory.lifetimes.calls)
    timeline = memory_use(memory, choices, {})[1].timeline
    backward = [each.num_bytes for each in timeline if each.backward][::-1]
    rows: dict[int, list[int]] = defaultdict(list)
    for kind, places in _moments(memory).items():
        for place in places:
            rows[place].append(at_moment(memory, choices, place + kind * count))
    assert [max(rows[place]) for place in range(count)] == backward


def test_weights_are_there_twice_while_they_are_gathered_again_and_gradients_while_they_are_reduced() -> None:
    """Three layers of one matrix each, a fourth that is kept: of 2 devices, each stores half of them."""
    size = 8 * 8 * 4
    memory, choices = _three_linears("zero3")
    peak, use, moment = memory_use(memory, choices, {})
    whole = {"parameters": 3 * size // 2, "optimizer": 3 * size}
    assert {name: use.parts[name] for name in whole} == whole
    assert memory.presence.moment(moment) == Moment(0, Phase(0, True), REDUCING)
    # As they were made and as they are sent, those of the first layer; in parts, all.
    assert use.parts["gradients"] == 2 * 2 * size + 3 * size // 2
    assert peak == sum(use.parts.values())
    row = MemoryRow(((2 + GATHERING * 3, 1),))
    weights = [w for w in memory.space.edges if memory.space.is_weight(w.source)]
    found = [bytes_in(memory, w, row) for w in weights]
    gathered = [
        0 if f is None else int(f[0][choices[w.source], choices[w.target]]) for w, f in zip(weights, found, strict=True)
    ]
    assert gathered == [0, 0, 2 * size]


def test_the_backward_of_a_loss_works_on_the_gradient_of_its_probabilities() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 32)

        def forward(self, x_BD: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.head(x_BD), labels_B)

    space = space_of(Loss(), (X_BD, torch.zeros(len(X_BD), dtype=torch.int64)))
    modes = MemoryModel(space).saved.working(space.index["cross_entropy_loss_default"])
    assert modes is not None
    (working,) = modes
    assert working is not None
    assert working.max() == 2 * len(X_BD) * 32 * 4 + 2 * 4  # the logits', too; the loss and what it was divided by


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_edges_that_share_their_bytes_have_those_that_each_has_by_itself(family: str) -> None:
    build, (args, kwargs) = FAMILIES[family].build, FAMILIES[family].inputs(0)
    space = build_space(capture(build(), args, kwargs), Mesh({"tp": 2}), load("cpu"))
    memory = MemoryModel(space, offloads=True)
    for edge in space.edges:
        unshared = MemoryModel(space, tensors=TensorBytes(space, memory.lifetimes))
        found, alone = memory.saved.edge(edge), unshared.saved.edge(edge)
        assert found is alone is None or (found and alone and len(found) == len(alone))
        for ours, theirs in zip(found or (), alone or (), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    arrays = {tuple(map(id, found)) for edge in space.edges if (found := memory.saved.edge(edge))}
    assert len(arrays) < 0.7 * sum(memory.saved.edge(edge) is not None for edge in space.edges), "layers share them"
