"""Collectives copy where `ir.sharding.rearranged` says so and the price counts it: once on a side, and else nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

import autopar
from autopar.costs.pricing.moves import Move, MovedTensor, transfers
from autopar.ir.sharding.layout import I, Layout, P, Placement, R, S, Z
from autopar.ir.sharding.mesh import Mesh
from autopar.ir.sharding.rearranged import READ_AND_WRITTEN
from autopar.models.catalogue import LanguageModel
from autopar.runtime.collectives import layout_moves as functions
from autopar.runtime.collectives.mesh_axes import record_traffic, use_mesh
from autopar.runtime.rewrite.moves import move_call
from autopar.tools.benchmarking.baselines import dtensor_sequence
from tests.support.simulation.fake_mesh import fake_mesh

RANKS = 8
COPIES = ("cat", "clone", "copy_", "_to_copy", "stack", "index", "constant_pad_nd")
MOVING = ("raw_all_gather", "raw_reduce_scatter", "raw_all_to_all")


@dataclass
class Copies(TorchDispatchMode):
    """Bytes that each copy writes, and of those that collectives make."""

    every: list[int] = field(default_factory=list)
    of_collectives: list[int] = field(default_factory=list)
    moving: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and func._opname in COPIES:
            self.every.append(result.nbytes)
            if self.moving:
                self.of_collectives.append(result.nbytes)
        return result


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    """Count copies in the block, and tell those apart that collectives make."""
    copies = Copies()

    def watched(move: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def moved(*args: Any, **kwargs: Any) -> Tensor:
            copies.moving = True
            try:
                return move(*args, **kwargs)
            finally:
                copies.moving = False

        return moved

    with monkeypatch.context() as patched, copies:
        for name in MOVING:
            patched.setattr(functions, name, watched(getattr(functions, name)))
        yield copies


def _divides(shape: tuple[int, ...], *placements: Placement) -> bool:
    return all(shape[each.dim] % (2 * RANKS) == 0 for each in placements if each.is_split)


SHAPES = ((1, 16, 16), (2, 16, 16), (16, 16, 16), (1, 1, 16, 16))
MOVES = (
    (S(1), R),
    (S(1), I),
    (I, S(1)),
    (P, S(1)),
    (S(0), R),
    (P, S(0)),
    (Z(1), R),
    (P, Z(1)),
    (S(1), S(2)),
    (Z(1), S(2)),
)
OF_ONE_POSITION = tuple((*move, (2, RANKS, 16)) for move in ((S(1), R), (P, S(1)), (S(1), S(2))))


@pytest.mark.parametrize(
    ("source", "target", "shape"),
    [*((*move, shape) for move in MOVES for shape in SHAPES if _divides(shape, *move)), *OF_ONE_POSITION],
    ids=str,
)
def test_a_move_copies_what_its_price_counts(
    source: Placement, target: Placement, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    abstract, tensor = Mesh({"x": RANKS}), MovedTensor(shape, torch.float32, True)
    move = Move((0,), Layout((source,)), Layout((target,)))
    call = move_call(move, shape, abstract)
    priced = [
        num_bytes for each in transfers(move, tensor, abstract, False) for num_bytes in (each.packed, each.unpacked)
    ]
    with fake_mesh({"x": RANKS}) as mesh, use_mesh(mesh):
        x = torch.randn(move.before.local_shape(shape, (RANKS,)), requires_grad=True)
        cotangent = torch.randn(move.after.local_shape(shape, (RANKS,)))
        with counted(monkeypatch) as copies:
            call.function(x, *call.args, **call.kwargs).backward(cotangent)
    assert [READ_AND_WRITTEN * each for each in copies.of_collectives] == [each for each in priced if each]


def test_uneven_parts_are_padded_and_cut_without_a_further_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_mesh({"x": RANKS}) as mesh, use_mesh(mesh), counted(monkeypatch) as copies:
        x = torch.randn(1, 13, 4, requires_grad=True)
        functions.reduce_scatter(x, "x", 1).backward(torch.randn(1, 2, 4))
    assert copies.of_collectives == [4 * 16 * 4], "the padding alone"


def _llama(samples: int) -> tuple[LanguageModel, tuple[Tensor, Tensor]]:
    """A model whose heads, of keys too, divide over the ranks, and tokens for it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=RANKS,
        num_key_value_heads=RANKS,
    )
    ids = torch.randint(0, 64, (samples, 32))
    return LanguageModel(config), (ids, ids.roll(-1, 1))


def _step(model: Any, inputs: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> Copies:
    """The copies of a second step, forward and backward."""
    model(*inputs).backward()
    with counted(monkeypatch) as copies:
        model(*inputs).backward()
    return copies


def _by_autopar(
    strategy: Any, samples: int, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, recompute: Any = "none"
) -> tuple[Copies, int]:
    """The copies of a step, and how many collectives of activations it has."""
    model, inputs = _llama(samples)
    compiled = autopar.compile(
        model, mesh, inputs, strategy=strategy, memory=autopar.Memory(recompute=recompute), hardware="h100"
    )
    with record_traffic() as traffic:
        copies = _step(compiled, inputs, monkeypatch)
    moved = sum(times for (name, _), times in traffic.calls.items() if name != "all_reduce")
    return copies, moved // 2


@pytest.mark.parametrize("strategy", ["megatron_sequence", "megatron_regather"])
def test_tensor_and_sequence_parallelism_copies_nothing_for_one_sample(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_mesh({"tp": RANKS}) as mesh:
        for recompute in ("none", "full"):
            copies, count = _by_autopar(strategy, 1, mesh, monkeypatch, recompute)
            assert count and not copies.of_collectives


@pytest.mark.parametrize("strategy", ["megatron_sequence", "megatron_regather"])
def test_it_copies_once_for_each_collective_of_two_samples(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_mesh({"tp": RANKS}) as mesh:
        copies, count = _by_autopar(strategy, 2, mesh, monkeypatch)
        assert 0 < len(copies.of_collectives) <= count


@pytest.mark.parametrize("samples", [1, 2])
def test_it_copies_no_more_than_dtensor(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_mesh({"tp": RANKS}) as mesh:
        ours, _ = _by_autopar("megatron_sequence", samples, mesh, monkeypatch)
        model, inputs = _llama(samples)
        peer = dtensor_sequence(model, mesh, inputs)
        with peer.context():
            theirs = _step(peer.model, peer.inputs, monkeypatch)
    assert sum(ours.every) <= 1.1 * sum(theirs.every)
