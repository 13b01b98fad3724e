"""Plans in the words of other systems: what these compute is what the model computes, on ranks without autopar."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import autopar
from autopar.costs.plans.answers import ParallelizePlan
from autopar.costs.plans.plan import Plan
from autopar.views.translation.hugging_face import folded_styles
from tests.support.families import FAMILIES
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

TP, BOTH = {"tp": 2}, {"dp": 2, "tp": 2}
X_BD = torch.linspace(-1, 1, 32).reshape(4, 8)
IDS_BS = torch.arange(24).reshape(4, 6) % 12


class Pair(nn.Module):
    """8 → 16 → 8."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x_BD))).square().mean()


class Between(nn.Module):
    """Something between two matrices: a scale of all features, one of each head, or a softmax over features."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.up, self.down, self.what = nn.Linear(8, 16), nn.Linear(16, 8), what
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4 if what == "heads" else 16))

    def forward(self, x_BD: Tensor) -> Tensor:
        y_BD = self.up(x_BD)
        if self.what == "heads":
            y_BD = (y_BD.unflatten(-1, (-1, 4)) * self.weight).flatten(1)
        else:
            y_BD = y_BD.softmax(1) if self.what == "softmax" else y_BD * self.weight
        return self.down(y_BD).square().mean() + self.weight.square().mean()


class Twice(nn.Module):
    """One matrix in two modules, and one module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.inner = nn.Linear(8, 8)

    def forward(self, ids_BS: Tensor) -> Tensor:
        return self.head(self.inner(self.inner(self.embed(ids_BS)).tanh())).square().mean()


def _plan(model: nn.Module, inputs: Any, axes: dict[str, int], **options: Any) -> Plan:
    return autopar.plan(model, autopar.Mesh(axes), inputs, hardware=SLOW_DEVICES, **by_flag(**options))


def _whole(value: Tensor | None) -> Tensor:
    assert value is not None
    return value.full_tensor() if isinstance(value, DTensor) else value


def _computes_the_same(make: Callable[[], nn.Module], inputs: Any, found: ParallelizePlan, axes: dict[str, int]) -> int:
    """Loss and gradients of torch's model on the ranks are those of one process; the number of styles."""
    torch.manual_seed(0)
    expected, model = make(), make()
    model.load_state_dict(expected.state_dict())
    ranks = mesh(tuple(axes.values()), tuple(axes))
    found.apply(model, ranks)
    over = (*found.replicated, *found.sharded)
    part, count = 0, 1
    for name in over:
        part, count = part * ranks[name].size() + ranks.get_local_rank(name), count * ranks[name].size()

    def loss_of(module: nn.Module, batch: Any) -> Tensor:
        out = module(**batch) if isinstance(batch, dict) else module(*batch)
        return out if isinstance(out, Tensor) else out.loss

    def own(batch: Any) -> Any:
        if isinstance(batch, dict):
            return {key: value.chunk(count)[part] for key, value in batch.items()}
        return tuple(value.chunk(count)[part] for value in batch)

    loss_of(expected, inputs).backward()
    loss = loss_of(model, own(inputs))
    assert_close(_whole(loss).detach(), loss_of(expected, own(inputs)).detach(), rtol=1e-5, atol=1e-6)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert_close(_whole(parameter.grad), dict(expected.named_parameters())[name].grad, rtol=1e-4, atol=1e-6)
    return len(found.styles)


def _specified(make: Callable[[], nn.Module], **roles: str) -> Callable[[], nn.Module]:
    """The model with a role of some modules on tp."""

    def build() -> nn.Module:
        model = make()
        for name, role in roles.items():
            autopar.annotate(model, name, tp=role)
        return model

    return build


def _pairs(plans: list[ParallelizePlan]) -> list[int]:
    return [_computes_the_same(Pair, (X_BD,), found, TP) for found in plans]


def _with_something_between() -> None:
    for what, specified in (("features", {}), ("heads", {"mul": "column"}), ("softmax", {"softmax": "data"})):
        make = _specified(functools.partial(Between, what), up="column", down="row", **specified)
        found = _plan(make(), (X_BD,), TP).parallelize_plan()
        assert _computes_the_same(make, (X_BD,), found, TP) == 2
        assert "Shard" not in str(found.styles["up"].output_layouts), "its outputs are gathered"


def _shared() -> None:
    twice = _specified(Twice, head="column", inner="column")
    found = _plan(twice(), (IDS_BS,), TP).parallelize_plan()
    assert _computes_the_same(twice, (IDS_BS,), found, TP) == 0
    lost = " ".join(found.lost)
    assert "head: shares its matrix or is called several times" in lost
    assert "inner: shares its matrix or is called several times" in lost


def _llamas(plans: list[ParallelizePlan]) -> list[int]:
    family = FAMILIES["llama"]
    return [_computes_the_same(family.build, family.inputs(0)[1], found, BOTH) for found in plans]


def test_any_roles_of_two_matrices_compute_what_the_model_does(ranks: Ranks) -> None:
    pairs = itertools.product(("column", "row", "replicated"), repeat=2)
    models = [_specified(Pair, up=up, down=down)() for up, down in pairs]
    plans = [_plan(model, (X_BD,), TP).parallelize_plan() for model in models]
    assert ranks.run(_pairs, plans)[0] == [2, 2, 1, 2, 2, 1, 1, 1, 0]


def test_what_lies_between_two_matrices_is_whole_where_local_code_would_be_wrong(ranks: Ranks) -> None:
    ranks.run(_with_something_between)


def test_a_matrix_of_two_modules_stays_whole(ranks: Ranks) -> None:
    ranks.run(_shared)


LLAMA = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}


@functools.cache
def _llama(strategy: str) -> Plan:
    family = FAMILIES["llama"]
    return _plan(family.build(), family.inputs(0)[1], BOTH, strategy=strategy)


@pytest.mark.slow  # four ranks, two plans; what it adds to the small models is two axes
def test_a_llama_trains_by_torch_as_planned(ranks: Ranks) -> None:
    plans = [_llama(strategy).parallelize_plan() for strategy in ("megatron", "hsdp")]
    axes = [(found.replicated, found.sharded) for found in plans]
    assert axes == [((), ("dp",)), (("dp",), ("tp",))]
    assert ranks.run(_llamas, plans, world_size=4)[0] == [16, 0]


@pytest.mark.slow
def test_megatron_on_a_llama_is_the_tp_plan_that_transformers_has_for_it() -> None:
    found = _llama("megatron").tp_plan()
    assert (found.axis, dict(found.styles)) == ("tp", LLAMA)
    assert found.lost == (
        "the model: cross_entropy_loss is divided by column on tp (1×), and computed whole there",
        "dp: divided by data, weights whole; a tp_plan is about one axis",
    )


def test_a_plan_comes_back_from_its_own_tp_plan() -> None:
    plan = _plan(_specified(Pair, up="column", down="row")(), (X_BD,), TP)
    again = _plan(autopar.annotate_plan(Pair(), plan.tp_plan().styles), (X_BD,), TP)
    assert dict(plan.tp_plan().styles) == {"up": "colwise", "down": "rowwise"}
    assert again.choices == plan.choices


def test_modules_of_several_styles_are_not_folded() -> None:
    styles = {"layers.0.up": "replicate", "layers.1.up": "colwise", "layers.0.q": "colwise", "layers.1.q": "colwise"}
    folded = {"layers.0.up": "replicate", "layers.1.up": "colwise", "layers.*.q": "colwise"}
    assert folded_styles(styles) == folded


def _transformers(folder: Path, styles: dict[str, str], name: str) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    inputs = FAMILIES[name].inputs(0)[1]
    expected = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    config = DistributedConfig(tp_size=2, tp_plan=styles)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", distributed_config=config)
    loss, alone = model(**inputs).loss, expected(**inputs).loss
    assert_close(_whole(loss), alone, rtol=1e-5, atol=1e-6)
    loss.backward()
    alone.backward()
    gradients = {name: parameter.grad for name, parameter in expected.named_parameters()}
    split = 0
    for key, parameter in model.named_parameters():
        split += isinstance(parameter, DTensor)
        assert_close(_whole(parameter.grad), gradients[key], rtol=1e-4, atol=1e-6)
    assert split >= 14


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_transformers_runs_what_tp_plan_says(name: str, ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed.tensor_parallel")
    family = FAMILIES[name]
    model = family.build()
    styles = _plan(model, family.inputs(0)[1], TP, strategy="megatron").tp_plan().styles
    if name == "qwen3":
        assert styles["model.layers.*.self_attn.q_norm"] == "replicated_with_grad_allreduce"
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    ranks.run(_transformers, tmp_path, dict(styles), name)
