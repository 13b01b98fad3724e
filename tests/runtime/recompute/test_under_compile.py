"""torch.compile on plans that compute segments or gather weights again, on micro-batches and on stages.

The workers hold a module under torch.compile against the same module without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.testing import assert_close

import autopar
from autopar.errors import PipelineError
from autopar.runtime.collectives import regather
from tests.support.families import FAMILIES, Family, Inputs
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh

AXES = ((2,), ("dp",))


HIDDEN_BYTES = 128 * 64 * 4  # of what one of the two blocks of `Deep` makes of the samples of a rank


class Deep(nn.Module):
    """Two blocks, each with an expansion."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def _vectors(seed: int) -> Inputs:
    return (torch.randn(256, 16, generator=torch.Generator().manual_seed(seed)),), {}


MODELS = {**FAMILIES, "deep": Family("deep", Deep, _vectors, lambda loss: loss)}


class Counting:
    """A backend that runs what AOTAutograd gives it, and counts."""

    def __init__(self) -> None:
        self.saved_bytes = 0
        self.gathers: list[int] = []
        """All-gathers of the forward and of the backward."""
        self.backend = aot_autograd(
            fw_compiler=self._forward,
            bw_compiler=self._backward,
            partition_fn=min_cut_rematerialization_partition,
        )

    def _forward(self, graph: fx.GraphModule, _: Sequence[Any]) -> Any:
        values = [getattr(x, "meta", {}).get("val") for x in graph.graph.output_node().args[0]]  # type: ignore[union-attr]
        self.saved_bytes += sum(x.nbytes for x in values if isinstance(x, Tensor) and isinstance(x.numel(), int))
        return self._backward(graph, _)

    def _backward(self, graph: fx.GraphModule, _: Sequence[Any]) -> Any:
        self.gathers.append(sum("all_gather" in str(node.target) for node in graph.graph.nodes))
        return graph


def _model(family: str, options: dict[str, Any], **build: Any) -> Any:
    args, kwargs = MODELS[family].inputs(0)
    model = MODELS[family].build(**build)
    return autopar.compile(model, mesh(*AXES), kwargs or args, hardware=SLOW_DEVICES, **by_flag(seed=5, **options))


def _copy(x: Tensor) -> Tensor:
    found = whole(x)
    assert found is not None
    return found.detach().clone()


def _steps(model: Any, call: Any, family: str) -> list[Tensor]:
    """Losses and gradients of two steps."""
    found = []
    for batch in range(2):
        args, kwargs = MODELS[family].inputs(batch)
        model.zero_grad()
        loss = MODELS[family].loss(call(*args, **kwargs))
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found += [_copy(x) for x in (loss, *gradients)]
    return found


def _same(family: str, options: dict[str, Any], in_place: bool, **build: Any) -> tuple[int, list[int]]:
    """Bytes that the forward hands to the backward, and all-gathers of both."""
    torch._dynamo.reset()
    model, plain, counting = _model(family, options, **build), _model(family, options, **build), Counting()
    call: Any = model
    if in_place:
        model.compile(backend=counting.backend, fullgraph=True)
    else:
        call = torch.compile(model, backend=counting.backend, fullgraph=True)
    assert_close(_steps(model, call, family), _steps(plain, plain, family), rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()
    return counting.saved_bytes, counting.gathers


def _kept_and_gathered(family: str, modes: Sequence[str]) -> dict[str, tuple[int, list[int]]]:
    return {mode: _same(family, {"strategy": "zero3", "recompute": mode}, in_place=mode == "full") for mode in modes}


@pytest.mark.parametrize(
    ("family", "modes", "gathers"),
    [
        ("deep", ("full",), (4, 2)),  # of each block weights, and biases, which a backward does not need
        # The embedding, two layers, the head; an embedding needs no weights in its backward.
        pytest.param("llama", ("none", "selective", "full"), (4, 3), marks=pytest.mark.slow),
    ],
)
def test_what_is_computed_or_gathered_again_is_so_when_compiled(
    ranks: Ranks, family: str, modes: tuple[str, ...], gathers: tuple[int, int]
) -> None:
    found = ranks.run(_kept_and_gathered, family, modes, timeout=400)[0]
    saved = [found[mode][0] for mode in modes]
    assert saved == sorted(saved, reverse=True) and len(set(saved)) == len(saved)
    assert family != "deep" or saved[-1] < 2 * HIDDEN_BYTES
    assert all(tuple(each) == gathers for _, each in found.values())


def _communicates_again() -> list[int]:
    options = {"strategy": "megatron_sequence"}
    return [_same("llama", {**options, "recompute": mode}, True)[0] for mode in ("full_save_collectives", "full")]


@pytest.mark.slow
def test_collectives_run_again_when_compiled(ranks: Ranks) -> None:
    saving_collectives, full = ranks.run(_communicates_again, timeout=240)[0]
    assert full < saving_collectives


def _draws_and_frozen() -> None:
    _same("gpt2", {"strategy": "data_parallel", "recompute": "full"}, in_place=False, dropout=0.1)
    _same("lora", {"strategy": "zero3", "recompute": "full"}, in_place=True)


@pytest.mark.slow
def test_dropout_and_frozen_weights_are_the_same_when_compiled(ranks: Ranks) -> None:
    ranks.run(_draws_and_frozen, timeout=240)


def _by_layers(family: str, options: dict[str, Any], build: dict[str, Any]) -> tuple[int, int, list[int]]:
    """Gathers that are issued without torch.compile and with layers compiled, and all-gathers of their graphs."""
    torch._dynamo.reset()
    model, plain, counting = _model(family, options, **build), _model(family, options, **build), Counting()
    model.compile(backend=counting.backend, fullgraph=True, regional=True)
    with mock.patch.object(regather, "issued", wraps=regather.issued) as again:
        expected, count = _steps(plain, plain, family), again.call_count
        found = _steps(model, model, family)
    assert_close(found, expected, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()
    return count, again.call_count - count, counting.gathers


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "options", "build", "num_graphs"),
    [
        ("deep", {"strategy": "zero3", "recompute": "full"}, {}, 4),
        ("llama", {"strategy": "zero3", "precision": "bf16-mixed", "recompute": "selective"}, {}, 4),
        pytest.param("gpt2", {"strategy": "zero3", "recompute": "full"}, {"dropout": 0.1}, 4, marks=pytest.mark.slow),
        pytest.param("lora", {"strategy": "zero3", "prefetch": 2}, {}, 4, marks=pytest.mark.slow),
    ],
    ids=["deep", "llama", "gpt2", "lora"],
)
def test_layers_compiled_one_by_one_train_alike_and_gather_weights_again(
    ranks: Ranks, family: str, options: dict[str, Any], build: dict[str, Any], num_graphs: int
) -> None:
    plain, compiled, gathers = ranks.run(_by_layers, family, options, build, timeout=240)[0]
    assert plain == compiled > 0
    assert len(gathers) <= 2 * num_graphs
    assert sum(gathers) == (family == "gpt2")  # of embedded positions


def _stages(axes: tuple[str, ...], schedule: str | None, regional: bool = False, precision: str | None = None) -> None:
    def trained(compiles: bool) -> list[Tensor]:
        torch.manual_seed(0)
        options: dict[str, Any] = {} if schedule is None else {"schedule": schedule}
        model = autopar.compile(
            Deep(),
            mesh((2,), axes),
            (torch.ones(8, 16),),
            hardware=SLOW_DEVICES,
            microbatches=2,
            precision=precision,
            **by_flag(recompute="full", **options),
        )
        if compiles:
            model.compile(backend="aot_eager", fullgraph=True, regional=regional)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        found = []
        for step in range(2):
            batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            found.append(model.train_step(batch))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found.append(_copy(model(torch.ones(8, 16))))
        return [*found, *map(_copy, model.parameters())]

    torch._dynamo.reset()
    assert_close(trained(True), trained(False), rtol=1e-5 if precision is None else 1e-2, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    torch._dynamo.reset()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("axes", "schedule", "regional", "precision"),
    [
        (("pp",), "1f1b", False, "bf16-mixed"),
        (("pp",), "1f1b", True, None),
        (("dp",), None, False, None),
    ],
)
def test_train_step_is_compiled_in_place(
    ranks: Ranks, axes: tuple[str, ...], schedule: str | None, regional: bool, precision: str | None
) -> None:
    ranks.run(_stages, axes, schedule, regional, precision, timeout=120)


def _halved() -> str:
    try:
        _stages(("pp",), "zbv")
    except PipelineError as error:
        return str(error)
    return f"rank {dist.get_rank()} trained"


def test_a_schedule_of_halved_backwards_is_not_compiled(ranks: Ranks) -> None:
    for message in ranks.run(_halved):
        assert message == (
            '"zbv" makes gradients of inputs and of weights apart, and torch.compile makes one backward of both; use '
            'Pipeline(schedule="1f1b") or "interleaved_1f1b", or do without model.compile().'
        )
