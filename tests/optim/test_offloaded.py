"""AdamW on the host, on whole parameters: equal to torch's, whatever passes through host memory in which pieces."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.optim import OffloadedAdamW, clip_grad_norm_, offloaded, staging
from autopar.optim.host_gradients import gradient_on_host
from autopar.optim.staging import SLOTS, Staged, staging_bytes

STEPS, FEW = 5, 7
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters pass in many pieces, of which the last is a smaller one."""
    monkeypatch.setattr(staging, "PIECE", FEW)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu().flatten(1)).float().square().mean()


def _model(dtype: torch.dtype = torch.float32) -> _Model:
    torch.manual_seed(0)
    return _Model().to(dtype)


def _batch(number: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(number)).to(dtype)


def _train(model: nn.Module, optimizer: Any, numbers: range = range(STEPS), backwards: int = 1) -> dict[str, Tensor]:
    dtype = next(model.parameters()).dtype
    for number in numbers:
        optimizer.zero_grad()
        for part in range(backwards):
            model(_batch(number * backwards + part, dtype)).backward()
        optimizer.step()
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, of which one has settings of its own."""
    named = list(model.named_parameters())
    return [
        {"params": [each for name, each in named if "bias" not in name]},
        {"params": [each for name, each in named if "bias" in name], "weight_decay": 0.0, "lr": 3e-3},
    ]


@pytest.mark.parametrize("piece", [FEW, 2**22])
@pytest.mark.parametrize(("gradients", "backwards"), [("device", 1), ("host", 1), ("host", 2)])
def test_float32_is_trained_as_by_adamw_of_torch(
    gradients: Any, backwards: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "PIECE", piece)
    ours, theirs = _model(), _model()
    found = _train(ours, OffloadedAdamW(_groups(ours), **SETTINGS, gradients=gradients), backwards=backwards)
    wanted = _train(theirs, torch.optim.AdamW(_groups(theirs), **SETTINGS, fused=True), backwards=backwards)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


class _MixedPrecision:
    """The reference: AdamW on copies in float32 of parameters and gradients, rounded back into the parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.masters = [nn.Parameter(each.detach().float()) for each in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, **SETTINGS, fused=True)

    def zero_grad(self) -> None:
        for each in self.parameters:
            each.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)


@pytest.mark.parametrize("gradients", ["device", "host"])
def test_bfloat16_with_master_copies_is_trained_in_mixed_precision(gradients: Any) -> None:
    ours, theirs = _model(torch.bfloat16), _model(torch.bfloat16)
    optimizer = OffloadedAdamW(ours.named_parameters(), **SETTINGS, master_copies=True, gradients=gradients)
    reference = _MixedPrecision(theirs)
    torch.testing.assert_close(_train(ours, optimizer), _train(theirs, reference), rtol=0, atol=0)
    masters = [optimizer.state[each]["master"] for each in ours.parameters()]
    torch.testing.assert_close(masters, [each.detach() for each in reference.masters], rtol=1e-6, atol=1e-7)


def test_bfloat16_without_master_copies_is_trained_in_bfloat16() -> None:
    ours, theirs = _model(torch.bfloat16), _model(torch.bfloat16)
    optimizer = OffloadedAdamW(ours.parameters(), **SETTINGS)
    wanted = _train(theirs, torch.optim.AdamW(theirs.parameters(), **SETTINGS, fused=True))
    torch.testing.assert_close(_train(ours, optimizer), wanted, rtol=1e-2, atol=1e-3)
    assert all(optimizer.state[each]["exp_avg"].dtype == torch.bfloat16 for each in ours.parameters())


def test_parameters_keep_their_order_in_memory() -> None:
    ours, theirs = _model(), _model()
    ours.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    assert not ours.conv.weight.is_contiguous()
    optimizer = OffloadedAdamW(ours.parameters(), **SETTINGS)
    wanted = _train(theirs, torch.optim.AdamW(theirs.parameters(), **SETTINGS))
    torch.testing.assert_close(_train(ours, optimizer), wanted, rtol=1e-4, atol=1e-5)
    moments, whole = optimizer.state[ours.conv.weight]["exp_avg"], ours.conv.weight
    assert moments.stride() == whole.stride()


def test_clipping_and_scaling_find_gradients_on_the_device() -> None:
    found = []
    for kind in (OffloadedAdamW, torch.optim.AdamW):
        model, scaler = _model(), torch.amp.GradScaler("cpu", init_scale=64.0)
        optimizer = kind(model.parameters(), **SETTINGS)
        for number in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(model(_batch(number, torch.float32))).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
        found.append([each.detach() for each in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_next_to_the_backward_are_those_behind_it(dtype: torch.dtype) -> None:
    ours, theirs = _model(dtype), _model(dtype)
    specified: dict[str, Any] = {**SETTINGS, "master_copies": True, "gradients": "host"}
    optimizer = OffloadedAdamW(_groups(ours), **specified)
    handles = optimizer.step_in_backward()
    before = ours.head.weight.detach().clone()
    ours(_batch(0, dtype)).backward()
    assert not torch.equal(before, ours.head.weight) and optimizer.state[ours.head.weight]["step"] == 1
    optimizer.step()  # which has nothing left to do
    found = _train(ours, optimizer, range(1, STEPS))
    other = OffloadedAdamW(_groups(theirs), **specified)
    torch.testing.assert_close(found, _train(theirs, other), rtol=0, atol=0)
    for handle in handles:
        handle.remove()
    both = [_train(each, own, range(STEPS, STEPS + 1)) for each, own in ((ours, optimizer), (theirs, other))]
    torch.testing.assert_close(*both, rtol=0, atol=0)


def test_the_host_steps_while_the_backward_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the first layer waits until the host has stepped the last one."""
    stepped, waited, update = threading.Event(), [], offloaded._update

    def seen(*args: Any) -> None:
        update(*args)
        stepped.set()

    monkeypatch.setattr(offloaded, "_update", seen)
    model = _model()
    OffloadedAdamW(model.parameters(), gradients="host").step_in_backward()
    model.conv.weight.register_hook(lambda _: waited.append(stepped.wait(20)))
    model(_batch(0, torch.float32)).backward()
    assert waited == [True]


def test_what_fails_next_to_the_backward_fails_it_and_the_next_goes_on() -> None:
    parameter = nn.Parameter(torch.zeros(4, 4)[:, :2])
    other = nn.Parameter(torch.ones(2))
    optimizer = OffloadedAdamW([parameter, other], gradients="host")
    optimizer.step_in_backward()
    with pytest.raises(InputError, match="lies in memory with gaps"):
        (parameter.sum() + other.sum()).backward()
    optimizer.zero_grad()
    other.sum().backward()
    assert (other < 1).all()


def test_a_backward_that_fails_leaves_the_next_one_to_wait_for_its_steps() -> None:
    early, late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = OffloadedAdamW([early, late], gradients="host")
    optimizer.step_in_backward()
    broken = (early * 1).clone()
    broken.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (late.sum() + broken.sum()).backward()
    for count in (1, 2):
        (early.sum() + late.sum()).backward()
        assert optimizer.state[early]["step"] == count and optimizer.state[late]["step"] >= count


def test_steps_next_to_the_backward_need_gradients_on_the_host() -> None:
    with pytest.raises(InputError, match=r'step_in_backward .* wait on the device; make it with gradients="host"'):
        OffloadedAdamW(_model().parameters()).step_in_backward()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("most", [0.01, 1e6])
def test_clipping_finds_gradients_on_the_host(most: float, norm_type: float) -> None:
    ours, theirs = _model(), _model()
    optimizer = OffloadedAdamW(ours.parameters(), **SETTINGS, gradients="host")
    for each in (ours, theirs):
        for number in range(2):
            each(_batch(number, torch.float32)).backward()
    one, two = (each.conv.get_parameter("bias") for each in (ours, theirs))
    one.grad = torch.ones_like(one)  # which no hook has brought
    assert two.grad is not None
    two.grad += 1
    unused = nn.Parameter(torch.ones(2))
    norm = clip_grad_norm_([*ours.parameters(), unused], most, norm_type)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs.parameters(), most, norm_type))
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        on_host = gradient_on_host(one)
        assert on_host is not None and two.grad is not None
        torch.testing.assert_close(on_host, two.grad.flatten())
    optimizer.zero_grad()
    assert gradient_on_host(ours.conv.weight) is None


def test_gradients_on_the_host_leave_none_behind_and_are_forgotten() -> None:
    model = _model()
    optimizer = OffloadedAdamW(model.parameters(), **SETTINGS, gradients="host")
    model(_batch(0, torch.float32)).backward()
    assert all(each.grad is None for each in model.parameters())
    before = [each.detach().clone() for each in model.parameters()]
    optimizer.zero_grad()
    optimizer.step()
    torch.testing.assert_close([each.detach() for each in model.parameters()], before, rtol=0, atol=0)


def test_a_gradient_that_no_hook_has_brought_is_added() -> None:
    model, other = _model(), _model()
    ours = OffloadedAdamW(model.parameters(), **SETTINGS, gradients="host")
    theirs = torch.optim.AdamW(other.parameters(), **SETTINGS, fused=True)
    for each in (model, other):
        each(_batch(0, torch.float32)).backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        one.grad = torch.ones_like(one)
        assert two.grad is not None
        two.grad += 1
    ours.step()
    theirs.step()
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=1e-6, atol=1e-7)
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_from_the_state_of_an_optimizer(dtype: torch.dtype) -> None:
    model, other = _model(dtype), _model(dtype)
    optimizer = OffloadedAdamW(model.named_parameters(), **SETTINGS, master_copies=True)
    _train(model, optimizer)
    resumed = OffloadedAdamW(other.named_parameters(), lr=1.0, master_copies=True)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(model.state_dict())
    later = range(STEPS, 2 * STEPS)
    torch.testing.assert_close(_train(other, resumed, later), _train(model, optimizer, later), rtol=0, atol=0)
    torch.testing.assert_close(resumed.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_written_in_between_are_those_that_a_step_begins_with(dtype: torch.dtype) -> None:
    model = _model(dtype)
    optimizer = OffloadedAdamW(model.parameters(), lr=0.0, weight_decay=0.0, master_copies=True)
    _train(model, optimizer, range(2))
    master = optimizer.state[model.head.weight].get("master", torch.empty(0)).clone()
    with torch.no_grad():
        model.head.bias.copy_(torch.arange(5))
        model.head.weight.copy_(model.head.weight.clone())  # the same again
    found = _train(model, optimizer, range(2, 3))
    torch.testing.assert_close(found["head.bias"], torch.arange(5).to(dtype))
    if dtype == torch.bfloat16:
        torch.testing.assert_close(optimizer.state[model.head.weight]["master"], master, rtol=0, atol=0)


def test_master_copies_keep_what_rounding_would_lose_when_their_weights_are_loaded_again() -> None:
    model = _model(torch.bfloat16)
    optimizer = OffloadedAdamW(model.parameters(), **SETTINGS, master_copies=True)
    _train(model, optimizer)
    masters = [optimizer.state[each]["master"].clone() for each in model.parameters()]
    assert any((master.bfloat16().float() != master).any() for master in masters)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    for group in optimizer.param_groups:
        group.update(lr=0.0)
    _train(model, optimizer, range(STEPS, STEPS + 1))
    found = [optimizer.state[each]["master"] for each in model.parameters()]
    torch.testing.assert_close(found, masters, rtol=0, atol=0)


def test_host_memory_is_that_of_state_staging_and_gradients() -> None:
    model = _model(torch.bfloat16)
    sizes = [each.numel() for each in model.parameters()]
    staged = staging_bytes(Staged(size, 2, widened=True) for size in sizes)
    largest = min(max(sizes), staging.PIECE)
    assert staged == SLOTS * 2 * 2 * largest + 4 * largest
    for gradients, waiting in (("device", 0), ("host", 2 * sum(sizes))):
        optimizer = OffloadedAdamW(model.parameters(), master_copies=True, gradients=gradients)  # pyright: ignore[reportArgumentType]
        assert optimizer.host_bytes == 0
        _train(model, optimizer, range(1))
        assert optimizer.host_bytes == 3 * 4 * sum(sizes) + staged + waiting


def test_a_step_without_gradients_does_nothing() -> None:
    model = _model()
    optimizer = OffloadedAdamW(model.parameters())
    assert optimizer.step(lambda: 3.0) == 3.0
    assert optimizer.host_bytes == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradients": "gpu"}, """gradients='gpu'; give "device" or "host"."""),
        ({"betas": (0.9, 1.0)}, r"AdamW was given .*betas=\(0.9, 1.0\)"),
    ],
)
def test_settings_that_are_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        OffloadedAdamW(_model().parameters(), **settings)


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(InputError, match=r"a parameter of torch.complex64; .* an optimizer of their own"):
        OffloadedAdamW([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])


def test_parameters_with_gaps_in_memory_are_refused() -> None:
    parameter = nn.Parameter(torch.zeros(4, 4)[:, :2])
    parameter.grad = torch.zeros(4, 2)
    with pytest.raises(InputError, match=r"shape \(4, 2\) lies in memory with gaps.*contiguous"):
        OffloadedAdamW([parameter]).step()


def test_parameters_on_several_devices_are_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))]
    for each in parameters:
        each.grad = torch.zeros_like(each)
    with pytest.raises(InputError, match="parameters on cpu, meta; make one for each device"):
        OffloadedAdamW(parameters).step()


def test_a_scaler_is_refused_where_gradients_wait_on_the_host() -> None:
    model, scaler = _model(), torch.amp.GradScaler("cpu")
    optimizer = OffloadedAdamW(model.parameters(), gradients="host")
    scaler.scale(model(_batch(0, torch.float32))).backward()
    with pytest.raises(InputError, match=r'a GradScaler has scaled.*gradients="device"'):
        scaler.step(optimizer)


def test_state_of_another_kind_is_refused() -> None:
    model = _model(torch.bfloat16)
    plain, master = OffloadedAdamW(model.parameters()), OffloadedAdamW(model.parameters(), master_copies=True)
    _train(model, plain, range(1))
    with pytest.raises(
        InputError, match=r"no 'master' of a parameter of shape .*found 'step', 'exp_avg', 'exp_avg_sq'"
    ):
        master.load_state_dict(plain.state_dict())
    saved = plain.state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(InputError, match=r"'exp_avg' of shape \(3,\) where this rank has a part of shape"):
        plain.load_state_dict(saved)
