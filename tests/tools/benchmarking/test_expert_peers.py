"""Expert parallelism of others: it trains as one process does, and says why where it does not apply."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.costs.hardware.load import load
from autopar.ir.sharding.mesh import Mesh
from autopar.models.named import trainable
from autopar.models.plain import Perceptron
from autopar.tools.benchmarking.baselines import InapplicableError
from autopar.tools.benchmarking.bench import bench
from autopar.tools.benchmarking.trainers import EXPERT_PEERS, Terms, Trainer, contestant
from tests.support.ranks import Ranks

BATCH = 4


def subject() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return trainable("tiny-moe", BATCH, 8, 1, "cpu", seed=0)


def _trained(name: str) -> tuple[list[float], list[float]]:
    """Return the relative distance of each gradient and each parameter from those of one process.

    Gradients are those of the first step; parameters are compared after two steps. All elements of a parameter count
    together (2-norm): where a gradient is almost 0, AdamW's step has the sign of its rounding error.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    built, alone = contestant(name, *subject(), mesh, Terms(load("cpu"))), Trainer(*subject())
    pairs = list(zip(built.model.parameters(), alone.model.parameters(), strict=True))
    built.step()
    alone.step()
    gradients = [_apart(ours.grad, theirs.grad, math.inf) for ours, theirs in pairs]
    built.step()
    alone.step()
    return gradients, [_apart(ours, theirs, 2) for ours, theirs in pairs]


def _apart(ours: Tensor | None, theirs: Tensor | None, norm: float) -> float:
    """Return the relative difference of a rank's part and that part of the whole; experts are split along dim 0."""
    assert ours is not None and theirs is not None
    own = ours.to_local() if isinstance(ours, DTensor) else ours
    parts = theirs.shape[0] // own.shape[0]
    whole = theirs.chunk(parts)[dist.get_rank() % parts]
    assert own.shape == whole.shape
    return float((own - whole).norm(norm) / whole.norm(norm))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", EXPERT_PEERS)
def test_gradients_and_weights_are_those_of_one_process(name: str, ranks: Ranks) -> None:
    for gradients, weights in ranks.run(_trained, name, world_size=4):
        assert max(gradients) < 1e-5
        assert max(weights) < 1e-4


@pytest.mark.slow  # 10 s, of which most to start ranks and to plan
def test_all_train_next_to_the_presets_of_experts() -> None:
    strategies = ("expert_data", "expert_folded", *EXPERT_PEERS)
    result = bench("tiny-moe", Mesh({"ep": 2}), strategies, steps=1, batch=4, sequence=8, layers=1, hardware="cpu")
    assert all(each.measured is not None and each.agrees for each in result.measurements)
    assert result.measurements[0].moved_as_predicted is True


def _refused(name: str, hide: str, num_experts: int) -> str:
    """Why a peer does not apply, with a module hidden, and a model that has no experts where there are to be none."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    model, inputs = subject() if num_experts else (Perceptron(1, 4, 4), (torch.zeros(4, 4),))
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.num_experts = num_experts  # pyright: ignore[reportArgumentType]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InapplicableError) as refused:
        if hide:
            patch.setitem(sys.modules, hide, None)
        EXPERT_PEERS[name](model, mesh, inputs)
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "hide", "num_experts", "reason"),
    [
        ("ep-by-hand", "", 0, "the model has no module of experts stacked as gate_up_proj and down_proj"),
        ("transformers-ep", "", 5, "5 experts do not divide over 2 ranks"),
        ("transformers-ep", "transformers.distributed.expert_parallel", 8, "the transformers that are installed"),
    ],
)
def test_what_does_not_apply_has_a_reason(name: str, hide: str, num_experts: int, reason: str, ranks: Ranks) -> None:
    assert all(specified.startswith(reason) for specified in ranks.run(_refused, name, hide, num_experts))


@pytest.mark.slow
def test_a_fake_world_has_no_numbers_of_tokens() -> None:
    result = bench("tiny-moe", Mesh({"ep": 8}), ("ep-by-hand", "transformers-ep"), steps=1, layers=1, fake=True)
    assert {each.reason for each in result.measurements} == {
        "how many tokens a rank gets is read from the results of a collective; a fake world has none"
    }
