"""Cost of an optimizer step on the host per element, and the bytes that are on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.costs.hardware.load import load
from autopar.costs.pricing.offload import check_host, host_bytes, host_step
from autopar.costs.pricing.optimizer import Offload, Optimizer
from autopar.costs.pricing.optimizer_step import step_seconds
from autopar.errors import InputError, PlanError
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.optim.staging import SLOTS

GPU = replace(load("h100"), host_link_bytes_per_s=1.0, host_memory_bytes_per_s=80.0, op_latency_s=0.0)
HOST = replace(GPU, launch_s=0.0)
ADAMW = Optimizer("adamw", offload=Offload(8))
MASTERS = replace(ADAMW, master_copies=True)
FLOAT, HALF = (TensorInfo((6, 4), dtype, True) for dtype in (torch.float32, torch.bfloat16))


def test_a_gpu_copies_next_to_the_step_of_its_host_which_its_devices_share() -> None:
    found = host_step(FLOAT, GPU, ADAMW)
    assert (found.down, found.up) == (8.0, 4.0)
    assert found.host == pytest.approx((3 * 4 + 2 * 8 + 12) / 10)
    assert found.seconds == 8.0
    assert host_step(FLOAT, replace(GPU, host_link_bytes_per_s=1e3), ADAMW).seconds == pytest.approx(4.0)
    assert host_step(FLOAT, GPU, replace(ADAMW, offload=Offload(1))).host == pytest.approx(0.5)


def test_master_copies_stay_on_the_host_and_are_cast_there() -> None:
    found = host_step(HALF, GPU, MASTERS)
    assert (found.down, found.up) == (2.0, 2.0)
    assert found.host == pytest.approx((3 * 4 + 2 * 8 + (2 + 4 + 4 + 2) + 4) / 10)
    assert host_step(FLOAT, GPU, MASTERS) == host_step(FLOAT, GPU, ADAMW)


def test_where_the_device_is_the_host_nothing_passes_next_to_anything() -> None:
    found = host_step(FLOAT, HOST, ADAMW)
    assert found.host == pytest.approx((3 * 4 + 2 * 8) / 10)
    assert found.seconds == pytest.approx(8.0 + 2.8 + 4.0)


def test_gradients_that_leave_in_the_backward_are_not_in_the_step() -> None:
    early = replace(ADAMW, gradients="host")
    there, found = host_step(FLOAT, GPU, ADAMW), host_step(FLOAT, GPU, early)
    assert (found.before, found.down, found.up) == (4.0, 4.0, 4.0)
    assert there.host - found.host == pytest.approx(4 / 10)  # which the link writes before
    assert found.seconds == 4.0
    assert host_step(HALF, GPU, replace(early, master_copies=True)).down == 0
    assert host_step(FLOAT, HOST, early).seconds == pytest.approx(host_step(FLOAT, HOST, ADAMW).seconds)
    assert host_bytes([(FLOAT, Layout.parse("S(0)"))], (2,), early)["gradients"] == 48


def test_a_step_takes_what_its_elements_take_on_a_device() -> None:
    mesh = Mesh({"dp": 2})
    for layout, elements in (("I", 24), ("S(0)", 12)):
        seconds = step_seconds(FLOAT, Layout.parse(layout), mesh, GPU, ADAMW, False)
        assert seconds == elements * host_step(FLOAT, GPU, ADAMW).seconds


def test_state_is_on_the_host_with_what_passes() -> None:
    frozen = TensorInfo((100,), torch.float32, False)
    whole, split = Layout.parse("I"), Layout.parse("S(0)")
    parameters = [(FLOAT, split), (HALF, whole), (frozen, whole)]
    found = host_bytes(parameters, (2,), MASTERS)
    assert found == {"optimizer": 8 * 12 + 8 * 24, "master copies": 4 * 24, "staging": SLOTS * 2 * 48 + 4 * 24}
    assert host_bytes(parameters, (2,), Optimizer()) == {}


@pytest.mark.parametrize("missing", ["host_link_bytes_per_s", "host_memory_bytes_per_s"])
def test_a_profile_without_its_host_is_refused(missing: str) -> None:
    check_host(GPU)
    with pytest.raises(PlanError, match=f"'h100' does not say how fast its host is.*{missing}.* 0.*calibrate again"):
        check_host(replace(GPU, **{missing: 0.0}))


@pytest.mark.parametrize("name", ["sgd", "adamw-8bit", "muon", "galore", "none"])
def test_the_host_steps_for_adamw_alone(name: str) -> None:
    with pytest.raises(InputError, match=f"offload was given with optimizer='{name}'.*OffloadedAdamW"):
        Optimizer(name, offload=Offload())
    with pytest.raises(InputError, match=f"gradients=\"host\" was given with optimizer='{name}'.*OffloadedAdamW"):
        Optimizer(name, gradients="host")


def test_gradients_are_on_the_device_or_the_host() -> None:
    assert not Optimizer(gradients="host").frees_gradients  # where nothing is offloaded
    with pytest.raises(InputError, match=r"""gradients='gpu'; give "device" or "host"\."""):
        Optimizer(gradients="gpu")  # pyright: ignore[reportArgumentType]
