"""Draws of operators that are the user's own, and of whole tensors as one device does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import InputError
from autopar.runtime.collectives.mesh_axes import use_mesh
from autopar.runtime.implementations.draws import seeded
from autopar.runtime.implementations.randomness import use_randomness
from autopar.strategies import rule_of
from autopar.strategies.registered import REGISTERED
from autopar.strategies.rules.random import SEEDED
from tests.support.simulation.simulate import from_ranks, local_values, simulate
from tests.support.simulation.validate import Whole


@torch.library.custom_op("autopar_tests::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: Tensor) -> Tensor:
    """Normal numbers in the shape of a tensor."""
    return torch.randn_like(x)


SEEDED_CALL: Any = seeded  # as plain as it was before torch.compile is kept out of it
NOISE = torch.ops.autopar_tests.noise.default


@pytest.fixture
def rule() -> Iterator[None]:
    autopar.register_rule("autopar_tests::noise", "b d -> b d")
    yield
    REGISTERED.pop(NOISE)


@pytest.mark.usefixtures("rule")
def test_a_users_operator_that_draws_is_seeded_by_part() -> None:
    op = rule_of(Whole.of(NOISE, (torch.zeros(4, 6),), {}).call)
    assert op is not None and op.implementations == (SEEDED,)


def test_it_draws_the_same_for_the_same_seed_step_and_key_and_leaves_the_generator() -> None:
    def drawn(step: int, key: int) -> Tensor:
        with use_randomness(0, step):
            return SEEDED_CALL(torch.zeros(4, 6), op=NOISE, key=key, axes={}, sizes={"b": 4, "d": 6})

    before = torch.get_rng_state()
    draws = [drawn(0, 0), drawn(1, 0), drawn(0, 1)]
    assert torch.equal(drawn(0, 0), draws[0])
    assert len({tuple(each.flatten().tolist()) for each in draws}) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_one_device_draws_nothing_for_padding() -> None:
    p = torch.rand(3, 5)
    torch.manual_seed(1)
    expected = torch.bernoulli(p)
    padded = torch.cat([p, torch.ones(3, 1)], 1).chunk(2, 1)
    bernoulli, sizes = torch.ops.aten.bernoulli.default, {"a": 3, "b": 5}
    with simulate(2), use_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))), use_randomness(0, 0, True):
        local = from_ranks(padded)
        torch.manual_seed(1)
        found = local_values(SEEDED_CALL(local, op=bernoulli, key=0, axes={"b": ("tp",)}, sizes=sizes))
    assert torch.equal(torch.cat(found, 1)[:, :5], expected)


def test_in_parts_it_is_not_drawn_as_one_device_does() -> None:
    with use_randomness(0, 0, True), pytest.raises(InputError) as error:
        SEEDED_CALL(torch.zeros(4, 6), op=NOISE, key=0, axes={"b": ("dp",)}, sizes={"b": 8, "d": 6})
    assert str(error.value) == (
        "Run(deterministic=True) draws whole tensors, as one device does; found autopar_tests.noise.default, whose "
        "numbers "
        "are drawn by a rule that splits it over dp. Leave deterministic out, or register no rule for it."
    )
