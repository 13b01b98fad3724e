"""Training on one CUDA device, compared with one process there: as the only rank of a group, and as simulated ranks.

`make gpu` runs those marked `cuda`; what a CPU can run, too, is slow there and covered by other tests. One device
cannot show NCCL between devices, nor what collectives and computing hide of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.optim import OffloadedAdamW
from autopar.runtime.step_graphs.step import WARM_UP
from tests.support.expert_families import WITH_EXPERTS
from tests.support.families import FAMILIES
from tests.support.further_families import FURTHER
from tests.support.options import by_flag
from tests.support.simulation.training import Steps, fault_of, loss_of, train_alone, train_on_ranks

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
NEEDS_CUDA = (
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} finds no CUDA device here"),
)
CPU, GPU = pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=NEEDS_CUDA)
ON_BOTH, ON_CUDA = (pytest.mark.parametrize("device", devices) for devices in ([CPU, GPU], [GPU]))


@pytest.fixture
def mesh(device: str) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(BACKENDS[device], store=HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(device, (1,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


EVERY = {**FAMILIES, **WITH_EXPERTS, **FURTHER}


def _batch(family: str, device: str, number: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return pytree.tree_map_only(Tensor, lambda x: x.to(device), EVERY[family].inputs(number))


def _trained(
    family: str, model: nn.Module, device: str, context: Callable[[], Any] = nullcontext, steps: int = 3
) -> dict[str, Tensor]:
    """The losses of some steps, and the gradients and parameters of the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    found: dict[str, Tensor] = {}
    for number in range(steps):
        optimizer.zero_grad()
        args, kwargs = _batch(family, device, number)
        with context():
            loss = EVERY[family].loss(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        found[f"loss {number}"] = loss.detach().clone()  # a CUDA graph's next step writes over what it gave
    for name, parameter in model.named_parameters():
        assert parameter.device.type == device
        found[name] = parameter.detach()
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad
    return found


def _compiled(family: str, mesh: DeviceMesh, **options: Any) -> Any:
    args, kwargs = _batch(family, mesh.device_type)
    return autopar.compile(EVERY[family].build().to(mesh.device_type), mesh, kwargs or args, **by_flag(**options))


@ON_BOTH
@pytest.mark.parametrize("family", ["gpt2", "llama", "resnet", "bert"])
def test_the_only_rank_trains_as_one_process(device: str, family: str, mesh: DeviceMesh) -> None:
    found = _trained(family, _compiled(family, mesh, strategy="zero3"), device)
    expected = _trained(family, FAMILIES[family].build().to(device), device)
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


@ON_BOTH
@pytest.mark.parametrize(
    ("axes", "options"),
    [({"dp": 2}, {"strategy": "zero3", "prefetch": 1}), ({"dp": 2, "tp": 2}, {"strategy": "fsdp_megatron"})],
    ids=["zero3", "fsdp_megatron"],
)
def test_simulated_ranks_on_the_device_train_as_one_process(
    device: str, axes: dict[str, int], options: dict[str, Any]
) -> None:
    def model() -> nn.Module:
        return FAMILIES["llama"].build().double().to(device)

    steps = Steps([_batch("llama", device, number)[1] for number in range(2)])
    found = train_on_ranks(model(), steps, axes, options, device=device)
    assert found.split > 0.5
    assert not fault_of(found, train_alone(model(), steps))


@ON_BOTH
def test_autocast_casts_as_on_one_process(device: str, mesh: DeviceMesh) -> None:
    def autocast() -> torch.autocast:
        return torch.autocast(device, torch.bfloat16)

    model = _compiled("llama", mesh, strategy="data_parallel")
    found = _trained("llama", model, device, autocast, steps=1)
    expected = _trained("llama", FAMILIES["llama"].build().to(device), device, autocast, steps=1)
    wide = _trained("llama", FAMILIES["llama"].build().to(device), device, steps=1)
    assert_close(found["loss 0"], expected["loss 0"], rtol=1e-4, atol=1e-5)
    assert not torch.equal(found["loss 0"], wide["loss 0"]), "autocast has changed nothing"


@ON_BOTH
def test_a_dropout_draws_by_seed_and_step_and_the_backward_draws_it_again(device: str, mesh: DeviceMesh) -> None:
    model: Any = autopar.compile(nn.Sequential(nn.Dropout()), mesh, (torch.ones(64, 16, device=device),))

    def drawn(seed: int, step: int = 0) -> Tensor:
        model.random_state.load_state_dict({"seed": seed, "step": step})
        x = torch.ones(64, 16, device=device, requires_grad=True)
        y = loss_of(model(x))
        y.sum().backward()
        assert_close(x.grad, y.detach())
        return y.detach()

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert not torch.equal(drawn(1), drawn(1, step=1))
    assert 0.3 < float((drawn(3) == 0).float().mean()) < 0.7


@ON_CUDA
def test_torch_compile_trains_as_eager(device: str, mesh: DeviceMesh) -> None:
    model = _compiled("llama", mesh, strategy="zero3")
    model.compile()
    expected = _trained("llama", FAMILIES["llama"].build().to(device), device)
    assert_close(_trained("llama", model, device), expected, rtol=1e-3, atol=1e-4)


@ON_CUDA
@pytest.mark.parametrize("strategy", ["zero3", "data_parallel"])
def test_a_step_as_one_cuda_graph_trains_as_eager(device: str, mesh: DeviceMesh, strategy: str) -> None:
    """`train_step`, and a loop with its optimizer: gradients stay where they are, and no call waits for the device."""
    found = []
    for graph in (True, "none"):
        model = _compiled("llama", mesh, strategy=strategy, run=autopar.Run(cuda_graph=graph))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, capturable=True)

        def step(model: Any = model, optimizer: Any = optimizer, **kwargs: Any) -> Tensor:
            loss = FAMILIES["llama"].loss(model(**kwargs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        losses: list[Tensor] = []
        places = set()
        for number in range(WARM_UP + 3):
            losses.append(model.train_step(**_batch("llama", device, number)[1]).clone())
            if number > WARM_UP:
                places.add(next(model.parameters()).grad.to_local().data_ptr())
            optimizer.step()
            optimizer.zero_grad()
        assert graph != True or len(places) == 1  # noqa: E712 - "none" is true, too
        whole = model.cuda_graph(step) if graph is True else step
        for number in range(WARM_UP + 3):
            losses.append(whole(**_batch("llama", device, number)[1]).detach().clone())
        found.append(losses)
    assert_close(*found, rtol=1e-4, atol=1e-5)


@ON_CUDA
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
def test_a_schedule_as_one_cuda_graph_trains_as_eager(device: str, mesh: DeviceMesh, schedule: str) -> None:
    """Two stages of one rank, for `train_step` and for a loop; messages between ranks need more devices."""
    stages = init_device_mesh(device, (1,), mesh_dim_names=("pp",))
    pipeline = autopar.Pipeline(schedule=schedule, stages_per_rank=2)
    found = []
    for graph in (True, "none"):
        run = autopar.Run(cuda_graph=graph)
        model = _compiled("llama", stages, pipeline=pipeline, microbatches=2, run=run)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, capturable=True)

        def step(model: Any = model, optimizer: Any = optimizer, **kwargs: Any) -> Tensor:
            loss = model.train_step(**kwargs)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        losses: list[Tensor] = []
        for number in range(WARM_UP + 3):
            losses.append(model.train_step(**_batch("llama", device, number)[1]).clone())
            optimizer.step()
            optimizer.zero_grad()
        whole = model.cuda_graph(step) if graph is True else step
        losses += [whole(**_batch("llama", device, number)[1]).clone() for number in range(WARM_UP + 3)]
        found.append([*losses, *(each.detach() for each in model.parameters())])
    assert_close(*found, rtol=1e-4, atol=1e-5)


@ON_CUDA
def test_a_dropout_in_a_cuda_graph_drops_what_it_drops_without(device: str, mesh: DeviceMesh) -> None:
    found = []
    for graph in (True, "none"):
        run = autopar.Run(cuda_graph=graph, seed=3)
        torch.manual_seed(0)
        x = torch.ones(2, 64, 256, device=device)
        model: Any = autopar.compile(_Attention(0.2).to(device), mesh, (x,), run=run)
        steps = [model.train_step(x).clone() for _ in range(WARM_UP + 3)]
        found.append([*steps, *(each.grad for each in model.parameters())])
    assert_close(*found, rtol=1e-4, atol=1e-5)
    assert len({float(loss) for loss in found[0][: WARM_UP + 3]}) > 1, "all steps drop the same"


class _Attention(nn.Module):
    """Causal attention of four heads, with dropout of probabilities and results."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.p = nn.Linear(256, 3 * 256), p

    def forward(self, x_BSM: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (4, 64)).transpose(1, 2) for x in self.qkv(x_BSM).chunk(3, -1))
        return F.dropout(F.scaled_dot_product_attention(q, k, v, None, self.p, True), self.p).square().mean()


class _Called(TorchDispatchMode):
    """The names of the operations that run inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@ON_CUDA
def test_attention_runs_by_the_fused_kernel_that_one_process_takes(device: str, mesh: DeviceMesh) -> None:
    model, x = _Attention().to(device, torch.bfloat16), torch.randn(2, 512, 256, device=device, dtype=torch.bfloat16)
    with _Called() as alone:
        model(x)
    compiled = autopar.compile(model, mesh, (x,))
    compiled(x)
    with _Called() as found:
        compiled(x)
    kernels = {name for name in alone.names if "dot_product" in name}
    assert kernels and kernels <= found.names


@ON_CUDA
def test_a_step_waits_for_nothing_on_the_host(device: str, mesh: DeviceMesh) -> None:
    model = _compiled("llama", mesh, strategy="zero3")
    _, kwargs = _batch("llama", device)
    FAMILIES["llama"].loss(model(**kwargs)).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        FAMILIES["llama"].loss(model(**kwargs)).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@ON_CUDA
@pytest.mark.parametrize(
    ("gradients", "backwards", "overlapped"),
    [("device", 1, False), ("host", 1, False), ("host", 2, False), ("host", 1, True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_on_the_host_is_updated_as_on_the_device(
    device: str, gradients: Any, backwards: int, overlapped: bool, dtype: torch.dtype
) -> None:
    """Copies on streams of their own wait for what the device computes, and it waits for them.

    Gradients of several `backwards` are added up on the way, and with `overlapped` steps overlap with the backward.
    """
    found = []
    for kind in (OffloadedAdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 4096)).to(device, dtype)
        given = {"gradients": gradients} if kind is OffloadedAdamW else {}
        optimizer = kind(model.parameters(), lr=1e-3, eps=1e-4, **given)
        if overlapped and isinstance(optimizer, OffloadedAdamW):
            optimizer.step_in_backward()
        for number in range(4 * backwards):
            x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(number)).to(device, dtype)
            if number % backwards == 0:
                optimizer.zero_grad()
            model(x).float().square().mean().backward()
            if (number + 1) % backwards == 0:
                optimizer.step()
        found.append([each.detach() for each in model.parameters()])
        states = [x for each in model.parameters() for x in optimizer.state[each].values() if x.ndim]
        assert {each.device.type for each in states} == {"cpu" if kind is OffloadedAdamW else "cuda"}
    assert_close(*found, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3 if dtype == torch.bfloat16 else 1e-5)
