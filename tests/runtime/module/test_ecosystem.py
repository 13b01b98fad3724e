"""Tools that people use around a model: optimizers, clipping, scalers, checkpoints, torch.compile, autocast.

Each worker compares a compiled model with the same model run eagerly on every rank, and asserts there.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.testing import assert_close

import autopar
from autopar.runtime.module.compiled_module import ParallelModule
from tests.support.families import FAMILIES, HIDDEN, MLP
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh

GRID = ((2, 2), ("dp", "tp"))
PRESETS = {"whole": "data_parallel", "split": "zero3"}
"""Way to store → strategy: every parameter whole on each rank (plain tensors), or in parts (DTensors)."""
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, fused=True),
    "AdamW, loop": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True),
}


def vectors(seed: int = 0) -> Tensor:
    """A batch of vectors, equal on every rank."""
    return torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(seed))


def mlp(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return MLP()


def compiled_mlp(way: str = "grid", seed: int = 3) -> ParallelModule:
    """An MLP on all ranks, stored as `PRESETS` says; "grid": by columns and rows over tp, and in parts over dp."""
    model = mlp(seed)
    if way in PRESETS:
        line = mesh((dist.get_world_size(),), ("dp",))
        return autopar.compile(model, line, (vectors(),), strategy=PRESETS[way], hardware=SLOW_DEVICES)
    autopar.annotate(model, "up", tp="column", storage="dp")
    autopar.annotate(model, "middle", tp="row")
    return autopar.compile(model, mesh(*GRID), (vectors(),), hardware=SLOW_DEVICES)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None = None) -> list[Tensor]:
    """Three steps; the norms of the gradients before they were clipped."""
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        model(vectors(step)).square().mean().backward()
        if max_norm is not None:
            norms.append(whole(clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    return norms  # type: ignore[return-value]


def assert_same_weights(found: nn.Module, expected: nn.Module, exactly: bool = False) -> None:
    theirs = dict(expected.named_parameters())
    rtol, atol = (0.0, 0.0) if exactly else (1e-4, 1e-6)
    for name, parameter in found.named_parameters():
        assert_close(
            whole(parameter), whole(theirs[name]), rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


def _optimizers(way: str) -> None:
    for name, make in OPTIMIZERS.items():
        ours, theirs = compiled_mlp(way), mlp()
        for max_norm in (None, 1e-2):
            found = train(ours, make(ours.parameters()), max_norm)
            expected = train(theirs, make(theirs.parameters()), max_norm)
            assert_close(found, expected, msg=lambda text, n=name: f"norms, {n}: {text}")
            assert_same_weights(ours, theirs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["grid", "whole"])
def test_optimizers_and_clipping_equal_one_process(ranks: Ranks, way: str) -> None:
    ranks.run(_optimizers, way, world_size=4, timeout=120)


def _overflow(make_scaler: Callable[[], Any], way: str) -> list[bool | float]:
    """A step whose gradient overflows on the first rank alone: whether this rank stepped, and the scale after."""
    model = compiled_mlp(way)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make_scaler()
    before = copy.deepcopy(model.state_dict())
    found = []
    for overflows in (True, False):
        optimizer.zero_grad()
        scaler.scale(model(vectors()).square().mean()).backward()
        gradient = next(model.parameters()).grad
        assert isinstance(gradient, DTensor) == (way == "split")
        if overflows and dist.get_rank() == 0:
            local(gradient).view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(local(p), local(before[name])) for name, p in model.named_parameters())
        found += [moved, scaler.get_scale()]
    return found


def local(value: Tensor | None) -> Tensor:
    """This rank's part of a parameter or gradient."""
    assert value is not None
    return value.to_local() if isinstance(value, DTensor) else value


def _sharded_scaler(way: str) -> list[bool | float]:
    # Its default group is the one that was there when its module was imported.
    return _overflow(lambda: ShardedGradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD), way)


@pytest.mark.parametrize("way", PRESETS)
def test_the_sharded_scaler_skips_a_step_on_every_rank(ranks: Ranks, way: str) -> None:
    assert ranks.run(_sharded_scaler, way) == [[False, 4.0, True, 4.0]] * 2


def _save(folder: str, way: str) -> dict[str, Tensor]:
    model = compiled_mlp(way)
    optimizer = OPTIMIZERS["AdamW, loop"](model.parameters())
    train(model, optimizer)
    round_trip = compiled_mlp(way, seed=5)
    round_trip.load_state_dict(model.state_dict())
    assert_same_weights(round_trip, model, exactly=True)
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    train(model, optimizer)
    return {name: whole(p) for name, p in model.named_parameters()}  # type: ignore[misc]


def _load(folder: str, way: str) -> dict[str, Tensor]:
    """Go on training with parameters that are stored another way, from the checkpoint."""
    model = compiled_mlp(way, seed=5)
    optimizer = OPTIMIZERS["AdamW, loop"](model.parameters())
    train(model, optimizer)  # so that the optimizer has a state to load into
    weights, moments = get_state_dict(model, optimizer)
    load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    plain = mlp(5)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(plain, get_model_state_dict(model, options=options), options=options)
    assert_same_weights(plain, model, exactly=True)
    back = compiled_mlp(way, seed=7)
    set_model_state_dict(back, plain.state_dict(), options=options)
    assert_same_weights(back, plain, exactly=True)
    once_more = compiled_mlp(way, seed=8)
    once_more.load_state_dict(plain.state_dict())
    assert_same_weights(once_more, plain, exactly=True)
    from_disk = mlp(9)
    load({"model": from_disk.state_dict()}, checkpoint_id=folder)
    assert_same_weights(from_disk, plain, exactly=True)
    train(model, optimizer)
    return {name: whole(p) for name, p in model.named_parameters()}  # type: ignore[misc]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("source", "target"), [("grid", "split"), ("split", "whole"), ("whole", "grid")])
def test_a_checkpoint_goes_on_on_another_mesh_and_in_a_plain_model(
    ranks: Ranks, source: str, target: str, tmp_path: Any
) -> None:
    saved = ranks.run(_save, str(tmp_path), source, world_size=4)
    for found in ranks.run(_load, str(tmp_path), target, world_size=4):
        assert_close(found, saved[0])


def _state_dicts() -> None:
    for source, target in (("split", "whole"), ("whole", "split")):
        for assign in (False, True):
            theirs, ours = compiled_mlp(source, seed=5), compiled_mlp(target)
            kinds = [type(parameter.data) for parameter in ours.parameters()]
            ours.load_state_dict(theirs.state_dict(), assign=assign)
            assert [type(parameter.data) for parameter in ours.parameters()] == kinds
            assert_same_weights(ours, theirs, exactly=True)
            train(ours, OPTIMIZERS["SGD"](ours.parameters()))


def test_a_state_dict_is_loaded_into_parameters_that_are_stored_another_way(ranks: Ranks) -> None:
    ranks.run(_state_dicts)


class Counting:
    """A backend of torch.compile that runs what it is given and remembers it."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        self.graphs.append(graph)
        return graph.forward


def _compiled_on_top(family: str, backends: Sequence[str], strategy: str | None = None) -> None:
    args, kwargs = FAMILIES[family].inputs(0)

    def step(model: nn.Module) -> dict[str, Tensor | None]:
        model.zero_grad()
        loss = FAMILIES[family].loss(model(*args, **kwargs))
        loss.backward()
        return {"": whole(loss), **{name: whole(p.grad) for name, p in model.named_parameters()}}

    source = FAMILIES[family].build()
    regathers = family == "mlp" and strategy is None
    if regathers:
        autopar.annotate(source, "linear", dp="data")
        autopar.annotate(source, "*.weight", storage="dp", regather=True)
    on = mesh((2,), ("dp",)) if dist.get_world_size() == 2 else mesh(*GRID)
    model = autopar.compile(source, on, kwargs or args, hardware=SLOW_DEVICES, strategy=strategy)
    assert not regathers or model.prepare(args, kwargs).graph.regathers
    expected = step(model)
    counting = Counting()
    for backend in (counting, *backends):
        torch._dynamo.reset()
        on_top: Any = torch.compile(model, backend=backend)
        for _ in range(2):
            found = {name.removeprefix("_orig_mod."): value for name, value in step(on_top).items()}
            assert found.keys() == expected.keys()
            assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert len(counting.graphs) == 1, "graph breaks:\n" + "\n".join(str(g.graph) for g in counting.graphs)[:4000]
    torch._dynamo.reset()


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", [None, "data_parallel"])
def test_torch_compile_takes_the_graph_of_the_rank_whole(ranks: Ranks, strategy: str | None) -> None:
    ranks.run(_compiled_on_top, "mlp", ("aot_eager",), strategy, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "backend"), [("gpt2", "aot_eager"), ("mlp", "inductor"), ("llama", "inductor")])
def test_torch_compile_gives_the_same_step(ranks: Ranks, family: str, backend: str) -> None:
    ranks.run(_compiled_on_top, family, (backend,), world_size=4, timeout=400)


def _autocast(way: str) -> None:
    model, eager = compiled_mlp(way), mlp()
    losses = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        for name, each in (("ours", model), ("theirs", eager)):
            each.zero_grad()
            low = torch.autocast("cpu", torch.bfloat16) if dtype is torch.bfloat16 else contextlib.nullcontext()
            with low:
                output = each(vectors())
                assert output.dtype == dtype
            loss = output.float().square().mean()
            loss.backward()
            losses[name] = whole(loss)
        rtol = 2e-2 if dtype is torch.bfloat16 else 1e-5
        assert_close(losses["ours"], losses["theirs"], rtol=rtol, atol=1e-6)
        theirs = dict(eager.named_parameters())
        for name, parameter in model.named_parameters():
            gradient = theirs[name].grad
            assert parameter.grad is not None and parameter.grad.dtype == torch.float32 and gradient is not None
            error = (whole(parameter.grad) - gradient).norm() / gradient.norm()  # type: ignore[operator]
            assert error < rtol, f"{name}: {error}"


@pytest.mark.parametrize("way", ["grid", "whole"])
def test_autocast_around_a_call_is_its_own_kind_of_input(ranks: Ranks, way: str) -> None:
    ranks.run(_autocast, way, world_size=4)
