"""Bytes that a device holds besides tensors, and the limit on tensors that a limit on the device leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costs.hardware.load import known_profiles, load
from autopar.costs.hardware.profile import RESERVED
from autopar.costs.hardware.reserved import NOTHING, Reserved
from autopar.errors import InfeasibleError, PlanError

GPU = Reserved(1.25, context_bytes=500, communicator_bytes=300, workspace_bytes=200)


def test_a_device_holds_tensors_times_the_factor_and_what_is_fixed() -> None:
    assert GPU.on_device(800) == 2000 and GPU.fixed_bytes == 1000
    assert GPU.parts(800) == {
        "allocator": 200, "CUDA context": 500, "NCCL buffers": 300, "cuBLAS workspaces": 200,
    }  # fmt: skip
    assert sum(GPU.parts(800).values()) + 800 == GPU.on_device(800)


@given(
    st.integers(0, 10**13), st.floats(1, 4), st.integers(0, 10**10), st.integers(0, 10**10)
)  # fmt: skip
def test_the_most_tensors_within_a_limit_fit_and_a_byte_more_does_not(
    tensors: int, factor: float, context: int, buffers: int
) -> None:
    reserved = Reserved(factor, context, buffers)
    limit = reserved.on_device(tensors)
    most = reserved.tensors_within(limit)
    assert most >= tensors and reserved.on_device(most) <= limit < reserved.on_device(most + 1)


def test_nothing_changes_no_limit() -> None:
    assert NOTHING.tensors_within(12345) == NOTHING.on_device(12345) == 12345
    assert not NOTHING and not NOTHING.parts(12345) and GPU
    NOTHING.check(0)


def test_a_limit_that_leaves_nothing_for_tensors_is_refused_with_the_parts() -> None:
    GPU.check(1000)
    with pytest.raises(
        InfeasibleError,
        match=r"is 999 B \(999 bytes\) per device, but 1\.00 kB of it are no tensors: CUDA context 500 B, NCCL buffers "
        r"300 B, cuBLAS workspaces 200 B\. Raise the limit, or give Memory\(conventions=\"tensors\"\)",
    ):
        GPU.check(999)


def test_a_limit_is_explained_in_bytes_of_both_kinds() -> None:
    assert GPU.explained(2000, 1200) == (
        "On the device the limit is 2.00 kB, which leaves 800 B for tensors: allocator × 1.25, CUDA context 500 B, "
        "NCCL buffers 300 B, cuBLAS workspaces 200 B. The least is 1.20 kB of tensors, 2.50 kB on the device."
    )
    assert GPU.explained(2000).endswith("cuBLAS workspaces 200 B.")


@pytest.mark.parametrize("name", known_profiles())
def test_gpus_hold_something_besides_tensors_and_a_host_nothing(name: str) -> None:
    hardware = load(name)
    numbers = {field: getattr(hardware, field) for field in RESERVED}
    if name == "cpu":
        assert numbers == {"allocator_factor": 1.0, **dict.fromkeys(RESERVED[1:], 0)}
    else:
        assert 1 < numbers.pop("allocator_factor") < 1.1 and all(each > 2**23 for each in numbers.values())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("allocator_factor", 0.9, "allocator_factor is 0.9; give a factor of at least 1"),
        ("context_bytes", -1, "context_bytes is -1; give bytes of at least 0"),
        ("communicator_bytes", -1, "communicator_bytes is -1; give bytes"),
        ("workspace_bytes", -1, "workspace_bytes is -1; give bytes"),
    ],
)
def test_a_profile_with_less_than_nothing_is_refused(field: str, value: float, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(load("cpu"), **{field: value})
