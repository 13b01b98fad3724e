"""The compiled module in use: kinds of input, dropout, evaluation, accumulation, frozen and tied parameters, outputs.

The workers hold a compiled model against the same model run eagerly on every rank, and assert there.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing import assert_close

import autopar
from autopar.runtime.module.compiled_module import ParallelModule
from tests.support.families import HIDDEN, MLP
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, Case, build, check, whole
from tests.support.ranks import Ranks, mesh

OPTIONS: dict[str, Any] = {"hardware": SLOW_DEVICES}
WHOLE_AND_SPLIT = pytest.mark.parametrize("strategy", ["data_parallel", "zero3"])
"""Every parameter whole on each rank, which makes plain tensors of them, and split, which makes DTensors."""


class Normalized(nn.Module):
    """A batch normalisation and a dropout between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.dropout = nn.Dropout(0.5)
        self.down = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.down(self.dropout(self.norm(self.up(x_BD))))


class Thinned(nn.Module):
    """A scale and a dropout, so that the output shows what was kept."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(p)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.dropout(x_BD * self.scale)


class Tied(nn.Module):
    """An embedding and a head that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(16, HIDDEN)
        self.head = nn.Linear(HIDDEN, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids_BS: Tensor) -> Tensor:
        return self.head(self.embedding(ids_BS))


class Repeated(nn.Module):
    """Applies its layer `times` times, a number that the captured graph holds as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x_BD: Tensor, times: int = 1) -> Tensor:
        for _ in range(times):
            x_BD = self.layer(x_BD)
        return x_BD


def vectors(batch: int, seed: int = 0) -> Tensor:
    """A batch of vectors, equal on every rank."""
    return torch.randn(batch, HIDDEN, generator=torch.Generator().manual_seed(seed))


def assert_same_step(compiled: nn.Module, eager: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Outputs and gradients of one step agree; both models are called with the same, whole, inputs."""
    _assert_same(_step(compiled, *args, **kwargs), _step(eager, *args, **kwargs))


def _step(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor | None]:
    model.zero_grad()
    output = model(*args, **kwargs)
    output = getattr(output, "loss", output)
    output.square().mean().backward()
    return {"": whole(output), **{name: whole(p.grad) for name, p in model.named_parameters()}}


def _assert_same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None or found[name] is None:
            assert found[name] is value, name
        else:
            assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n or 'output'}: {text}")


def _stored(model: nn.Module) -> dict[str, tuple[Any, int]]:
    """Return the storage of each parameter: its placements, if it is a DTensor, and the address of its local part."""
    return {
        name: (p.placements, p.to_local().data_ptr()) if isinstance(p, DTensor) else (None, p.data_ptr())
        for name, p in model.named_parameters()
    }


def _kinds() -> None:
    """Data parallelism with and without a parameter that is stored in parts."""
    eager = MLP()
    split = autopar.annotate(copy.deepcopy(eager), "up.weight", storage="dp")
    for model, kind in ((copy.deepcopy(eager), Tensor), (split, DTensor)):
        compiled = autopar.compile(
            model, mesh((2,), ("dp",)), (vectors(4),), strategy="data_parallel", **by_flag(**OPTIONS)
        )
        places = {name: place for name, (place, _) in _stored(compiled).items()}
        whole_place = None if kind is Tensor else (Replicate(),)
        assert places.pop("up.weight") == (None if kind is Tensor else (Shard(0),))
        assert set(places.values()) == {whole_place}
        assert_same_step(compiled, eager, vectors(4))
        assert {type(parameter.grad) for parameter in compiled.parameters()} == {kind}
        assert {type(value) for value in compiled.state_dict().values()} == {kind}


def test_parameters_are_dtensors_where_one_is_split_and_else_plain_tensors(ranks: Ranks) -> None:
    ranks.run(_kinds)


def _batch_sizes() -> None:
    eager = MLP()
    compiled = autopar.compile(copy.deepcopy(eager), mesh((2, 2), ("dp", "tp")), (vectors(4),), **by_flag(**OPTIONS))
    storage, first = _stored(compiled), compiled.plan
    for batch in (4, 8, 4, 3):  # the last does not divide
        assert_same_step(compiled, eager, vectors(batch))
        assert (compiled.plan is first) == (batch == 4)
    assert _stored(compiled) == storage


def _other_values() -> None:
    eager = Repeated()
    compiled = autopar.compile(copy.deepcopy(eager), mesh((2,), ("dp",)), (vectors(4),), **by_flag(**OPTIONS))
    for times in (1, 3, True, 1):
        assert_same_step(compiled, eager, vectors(4), times)
        assert_same_step(compiled, eager, vectors(4), times=times)
    double = eager.double()
    compiled = autopar.compile(copy.deepcopy(double), mesh((2,), ("dp",)), (vectors(4).double(),), **by_flag(**OPTIONS))
    assert_same_step(compiled, double, vectors(4).double())


def test_every_kind_of_input_is_planned_on_the_same_storage_and_comes_back_right(ranks: Ranks) -> None:
    ranks.run(_batch_sizes, world_size=4, timeout=120)
    ranks.run(_other_values)


def _evaluation(strategy: str) -> None:
    eager = Normalized()
    options = {**OPTIONS, "deterministic": True, "strategy": strategy}
    compiled = autopar.compile(copy.deepcopy(eager), mesh((2,), ("dp",)), (vectors(4),), **by_flag(**options))
    storage = _stored(compiled)
    for step in range(2):
        torch.manual_seed(step)
        found = _step(compiled, vectors(4, step))
        torch.manual_seed(step)
        _assert_same(found, _step(eager, vectors(4, step)))
    buffers = dict(eager.named_buffers())
    for name, buffer in compiled.named_buffers():
        assert_close(buffer, buffers[name])
    for model in (compiled, eager):
        model.eval()
    with torch.no_grad():
        output = compiled(vectors(4, 7))
        assert not output.requires_grad
        assert_close(whole(output), eager(vectors(4, 7)))
    assert_close(dict(compiled.named_buffers())["norm.running_mean"], eager.norm.running_mean)
    for model in (compiled, eager):
        model.train()
    torch.manual_seed(9)
    found = _step(compiled, vectors(4))
    torch.manual_seed(9)
    _assert_same(found, _step(eager, vectors(4)))
    assert _stored(compiled) == storage


@WHOLE_AND_SPLIT
def test_evaluation_uses_running_statistics_and_no_dropout_on_the_same_storage(ranks: Ranks, strategy: str) -> None:
    ranks.run(_evaluation, strategy)


def _inference_first(strategy: str) -> None:
    for without_gradients in (torch.inference_mode, torch.no_grad):
        eager = MLP()
        compiled = autopar.compile(copy.deepcopy(eager), mesh((2,), ("dp",)), strategy=strategy, **by_flag(**OPTIONS))
        with without_gradients():
            assert_close(whole(compiled(vectors(4))), eager(vectors(4)))
        assert_same_step(compiled, eager, vectors(4))


@WHOLE_AND_SPLIT
def test_a_model_first_called_for_inference_trains_afterwards(ranks: Ranks, strategy: str) -> None:
    ranks.run(_inference_first, strategy)


def _thinned() -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    x = torch.ones(2, 4999)  # 4999 does not divide, so that only one axis can split the tensor, and along the batch
    compiled = autopar.compile(Thinned(0.3), mesh((2, 2), ("dp", "tp")), (x,), outputs="full", **by_flag(**OPTIONS))
    return [compiled(x), compiled(x), compiled.eval()(x)]


def test_dropout_agrees_where_data_is_equal_and_differs_where_it_is_not(ranks: Ranks) -> None:
    found = ranks.run(_thinned, world_size=4)
    for first, second, whole_ in found:
        assert_close(first, found[0][0], rtol=0, atol=0)
        assert not torch.equal(first, second), "two steps drew the same mask"
        assert not torch.equal(first[0], first[1]), "two parts drew the same mask"
        assert_close(first.unique(), torch.tensor([0.0, 1 / 0.7]))
        assert abs(float((first != 0).float().mean()) - 0.7) < 0.03
        assert_close(whole_, torch.ones(2, 4999))


@pytest.mark.parametrize("family", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "bert"))])
def test_deterministic_dropout_equals_one_process(ranks: Ranks, family: str) -> None:
    check(ranks, Case(family, (2, 2), dropout=0.1, options={**OPTIONS, "deterministic": True}, steps=3))


@pytest.mark.parametrize("family", ["mlp", pytest.param("llama", marks=pytest.mark.slow)])
def test_accumulated_gradients_equal_one_process(ranks: Ranks, family: str) -> None:
    check(ranks, Case(family, (2, 2), micro_steps=3, steps=2))


def _gpt2(folder: str) -> str:
    case = Case("gpt2", (2,), frozen=("h.0.",))
    eager, on = build(case), mesh((2,), ("dp",))
    ids = torch.arange(64).reshape(4, 16)
    compiled = autopar.compile(build(case), on, {"input_ids": ids, "labels": ids}, **by_flag(**OPTIONS))
    names = dict(compiled.named_parameters(remove_duplicate=False))
    assert names["lm_head.weight"] is names["transformer.wte.weight"]
    assert dict(compiled.named_parameters()).keys() == dict(eager.named_parameters()).keys()
    assert compiled.state_dict().keys() == eager.state_dict().keys()
    output = compiled(input_ids=ids, labels=ids)
    assert type(output) is type(eager(input_ids=ids, labels=ids))
    assert not isinstance(output.loss, DTensor) and output.loss.shape == ()
    assert not isinstance(output.logits, DTensor) and output.logits.shape == (4, 16, 257)
    assert_same_step(compiled, eager, input_ids=ids, labels=ids)
    assert names["transformer.h.0.mlp.c_fc.weight"].grad is None
    _planned_before(compiled, case, ids, folder)
    return compiled.plan.to_json()


def _planned_before(compiled: ParallelModule, case: Case, ids: Tensor, folder: str) -> None:
    """A loaded plan runs the same without solving."""
    path = f"{folder}/plan{dist.get_rank()}.json"
    compiled.plan.save(path)
    example = {"input_ids": ids, "labels": ids}
    with mock.patch("autopar.planning.best_plan.best_plan_of", side_effect=AssertionError("solved again")):
        again = autopar.compile(
            build(case), mesh((2,), ("dp",)), example, plan=autopar.Plan.load(path), hardware=SLOW_DEVICES
        )
    assert again.plan == compiled.plan
    _assert_same(_step(again, **example), _step(compiled, **example))


def test_a_tied_partly_frozen_model_keeps_names_outputs_and_plan(ranks: Ranks, tmp_path: Any) -> None:
    plans = ranks.run(_gpt2, str(tmp_path), timeout=120)
    assert plans[0] == plans[1]


def _frozen_later(strategy: str) -> None:
    eager, options = MLP(), {**OPTIONS, "strategy": strategy}
    compiled = autopar.compile(copy.deepcopy(eager), mesh((2,), ("dp",)), (vectors(4),), **by_flag(**options))
    for learns in (False, True):
        for model in (compiled, eager):
            dict(model.named_parameters())["middle.weight"].requires_grad_(learns)
        assert_same_step(compiled, eager, vectors(4))
    for model in (compiled, eager):
        model.requires_grad_(False)
    compiled = autopar.compile(copy.deepcopy(eager), mesh((2,), ("dp",)), (vectors(4),), **by_flag(**options))
    for model in (compiled, eager):
        model.requires_grad_(True)
    assert_same_step(compiled, eager, vectors(4))


@WHOLE_AND_SPLIT
def test_parameters_may_be_frozen_and_thawed_after_compiling(ranks: Ranks, strategy: str) -> None:
    ranks.run(_frozen_later, strategy)


def _inputs_and_outputs() -> None:
    on, eager = mesh((2, 2), ("dp", "tp")), MLP()
    make = lambda **options: autopar.compile(copy.deepcopy(eager), on, mode="manual", **by_flag(**OPTIONS, **options))  # noqa: E731
    compiled = make(example_inputs=(vectors(4),))
    expected = _step(eager, vectors(4))
    with CommDebugMode() as plain:
        compiled(vectors(4))
    for x in (
        distribute_tensor(vectors(4), on, [Shard(0), Replicate()]),
        distribute_tensor(vectors(4), on, [Shard(0), Shard(0)]),
        distribute_tensor(vectors(4), on["dp"], [Shard(0)]),
    ):
        _assert_same(_step(compiled, x), expected)
        with CommDebugMode() as moved:
            compiled(x)
        assert moved.get_comm_counts() == plain.get_comm_counts(), "an input that arrives split was moved"
    _assert_same(_step(compiled, vectors(4)), expected)
    _assert_same(_step(compiled, DTensor.from_local(vectors(4) / 4, on, [Partial(), Partial()])), expected)
    _assert_same(_step(compiled, distribute_tensor(vectors(3), on, [Shard(0), Replicate()])), _step(eager, vectors(3)))
    _input_gradients(compiled, eager)
    full = make(outputs="full")(vectors(4))
    assert not isinstance(full, DTensor)
    assert_close(full, eager(vectors(4)))


def _input_gradients(compiled: ParallelModule, eager: nn.Module) -> None:
    theirs = vectors(4).requires_grad_()
    eager(theirs).square().mean().backward()
    plain = vectors(4).requires_grad_()
    compiled(plain).square().mean().backward()
    assert_close(plain.grad, theirs.grad)
    split = distribute_tensor(vectors(4), compiled.mesh, [Shard(0), Replicate()]).requires_grad_()
    compiled(split).square().mean().backward()
    assert isinstance(split.grad, DTensor)
    assert_close(split.grad.full_tensor(), theirs.grad)


def test_inputs_may_be_plain_or_split_and_outputs_whole(ranks: Ranks) -> None:
    ranks.run(_inputs_and_outputs, world_size=4)


def _meta(strategy: str) -> None:
    eager = Tied()
    ids = torch.arange(16).reshape(4, 4)
    with torch.device("meta"):
        model = Tied()
    compiled = autopar.compile(model, mesh((2,), ("dp",)), (ids,), strategy=strategy, **by_flag(**OPTIONS))
    with pytest.raises(autopar.InputError, match=r"embedding.weight is on the meta device .* model.to_empty"):
        compiled(ids)
    compiled.to_empty(device="cpu")
    for load in (
        lambda: set_model_state_dict(compiled, eager.state_dict(), options=StateDictOptions(full_state_dict=True)),
        lambda: compiled.load_state_dict(eager.state_dict(), assign=True),
    ):
        load()
        assert len(list(compiled.parameters())) == 1, "the weights are no longer tied"
        assert_same_step(compiled, eager, ids)


@WHOLE_AND_SPLIT
def test_a_model_on_the_meta_device_is_compiled_and_filled_later(ranks: Ranks, strategy: str) -> None:
    ranks.run(_meta, strategy)


def _code() -> str:
    model = autopar.annotate(MLP(), "up", tp="column")
    autopar.annotate(model, "middle", tp="row")
    compiled = autopar.compile(model, mesh((1, 2), ("dp", "tp")), (vectors(4),), **by_flag(**OPTIONS))
    with contextlib.redirect_stdout(io.StringIO()) as text:
        compiled.print_code()
    return text.getvalue()


def test_printed_code_has_sections_layouts_and_collectives(ranks: Ranks) -> None:
    code = ranks.run(_code)[0]
    for part in ("# up\n", "# middle\n", "mesh axes (dp, tp)", "aten.linear(", "'tp'", "# I S(1)"):
        assert part in code, f"{part!r} is not in\n{code}"
    assert "reduce" in code


def _original(strategy: str) -> None:
    torch.manual_seed(dist.get_rank())
    model = MLP()
    model.register_buffer("offset", torch.rand(3))
    before = copy.deepcopy(model.state_dict())
    compiled = autopar.compile(model, mesh((2,), ("dp",)), (vectors(4),), strategy=strategy, **by_flag(**OPTIONS))
    torch.manual_seed(0)
    first = MLP()
    first.register_buffer("offset", torch.rand(3))
    for name, value in compiled.state_dict().items():
        assert_close(whole(value), first.state_dict()[name], rtol=0, atol=0)
    with torch.no_grad():
        for tensor in (*compiled.parameters(), *compiled.buffers()):
            tensor.add_(1)
    for name, value in model.state_dict().items():
        assert_close(value, before[name], rtol=0, atol=0)
    held = weakref.ref(model)
    del model, before
    gc.collect()
    assert held() is None, "the compiled model keeps the original alive"


@WHOLE_AND_SPLIT
def test_the_first_rank_gives_the_weights_and_the_original_is_left_alone(ranks: Ranks, strategy: str) -> None:
    ranks.run(_original, strategy)
