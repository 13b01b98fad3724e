"""Tools around a model on a pipeline: clipping, checkpoints, optimizer states, names, the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.testing import assert_close

from tests.support.parity import whole
from tests.support.pipeline_training import PipelineCase, accumulated, batch_of, build, compiled, microbatches_of
from tests.support.ranks import Ranks

# Each rank of a pipeline has names of its own in its groups of parameters: flat states carry them per parameter.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def train(case: PipelineCase, model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train a compiled model; the losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        args, kwargs = batch_of(microbatches_of(case, step))
        losses.append(float(model.train_step(*args, **kwargs)))
        optimizer.step()
    return losses


def train_alone(case: PipelineCase, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(accumulated(case, model, step))
        optimizer.step()
    return losses


def assert_same(model: nn.Module, alone: nn.Module) -> None:
    """Compare the parameters and buffers that a rank holds with those of one process."""
    theirs = {**dict(alone.named_parameters()), **dict(alone.named_buffers())}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        assert_close(whole(value), whole(theirs[name]), rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def _clipped(case: PipelineCase) -> None:
    model = compiled(case)
    args, kwargs = batch_of(microbatches_of(case, 0))
    for norm_type in (2.0, 1.0, float("inf")):
        for max_norm in (1e-2, 1e3):
            alone = build(case)
            accumulated(case, alone, 0)
            expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), max_norm, norm_type)
            model.zero_grad()
            model.train_step(*args, **kwargs)
            found = model.clip_grad_norm_(max_norm, norm_type)
            assert_close(whole(found), expected, rtol=1e-4, atol=1e-6)
            theirs = dict(alone.named_parameters())
            for name, parameter in model.named_parameters():
                gradient = theirs[name].grad
                assert gradient is not None
                scale = max(1e-3, float(gradient.abs().max()))
                assert_close(whole(parameter.grad), gradient, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "case",
    [
        PipelineCase("gpt2", "pp2"),
        PipelineCase("mlp", "pp2xtp2"),
        pytest.param(PipelineCase("mlp", "dp2xtp2"), marks=pytest.mark.slow),  # no pipeline
        pytest.param(PipelineCase("gpt2", "pp2xtp2"), marks=pytest.mark.slow),
        pytest.param(PipelineCase("gpt2", "pp2", "zbv"), marks=pytest.mark.slow),
        pytest.param(PipelineCase("gpt2", "pp2xdp2xtp2", "interleaved_1f1b"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_are_clipped_by_the_norm_of_all_stages_with_tied_weights_counted_once(
    ranks: Ranks, case: PipelineCase
) -> None:
    ranks.run(_clipped, case, world_size=case.world_size)


def _saved(case: PipelineCase, folder: str) -> None:
    model = compiled(case)
    optimizer = adamw(model)
    train(case, model, optimizer, range(2))
    weights, moments = get_state_dict(model, optimizer, options=FLAT)
    save({"model": weights, "optimizer": moments}, checkpoint_id=folder)


def _loaded(case: PipelineCase, folder: str) -> list[float]:
    """Go on with a checkpoint of another mesh; the losses."""
    model = compiled(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = adamw(model)
    weights, moments = get_state_dict(model, optimizer, options=FLAT)
    load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=FLAT)
    losses = train(case, model, optimizer, range(2, 4))
    alone = build(case)
    train_alone(case, alone, adamw(alone), range(4))
    assert_same(model, alone)
    return losses


@pytest.mark.parametrize(
    ("family", "stages", "rest"),
    [
        pytest.param("resnet", "pp2xtp2", "dp4", marks=pytest.mark.slow),
        ("mlp", "pp2", "dp2"),  # stages store every parameter whole
        pytest.param("gpt2", "pp2xtp2", "dp4", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_goes_from_a_pipeline_to_a_mesh_without_one_and_back(
    ranks: Ranks, family: str, stages: str, rest: str, tmp_path: Any
) -> None:
    pipeline, line = PipelineCase(family, stages), PipelineCase(family, rest)
    alone = build(line)
    expected = train_alone(line, alone, adamw(alone), range(4))[2:]
    for source, target in ((pipeline, line), (line, pipeline)):
        folder = str(tmp_path / source.mesh)
        ranks.run(_saved, source, folder, world_size=source.world_size)
        for found in ranks.run(_loaded, target, folder, world_size=target.world_size, timeout=120):
            assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def _names(case: PipelineCase) -> tuple[set[str], dict[str, tuple[int, ...]]]:
    state = compiled(case).state_dict()
    return set(state), {name: tuple(value.shape) for name, value in state.items()}


@pytest.mark.parametrize("family", ["gpt2", "resnet"])
def test_the_ranks_together_have_the_names_and_shapes_of_the_model(ranks: Ranks, family: str) -> None:
    case = PipelineCase(family, "pp2", "interleaved_1f1b")
    expected = build(case).state_dict()
    found = ranks.run(_names, case)
    assert set().union(*(names for names, _ in found)) == expected.keys()
    assert all(names != expected.keys() for names, _ in found)
    for _, shapes in found:
        assert shapes == {name: tuple(expected[name].shape) for name in shapes}


def _kinds(case: PipelineCase) -> set[str]:
    return {type(parameter.data).__name__ for parameter in compiled(case).parameters()}


def test_all_ranks_store_dtensors_where_one_stage_splits_a_parameter(ranks: Ranks) -> None:
    options = {"strategy": "data_parallel"}
    whole_ = PipelineCase("mlp", "pp2xdp2", options=options)
    split = PipelineCase("mlp", "pp2xdp2", options=options, annotations=(("model.0.layer.weight", {"storage": "dp"}),))
    assert ranks.run(_kinds, whole_, world_size=4) == [{"Tensor"}] * 4
    assert ranks.run(_kinds, split, world_size=4) == [{"DTensor"}] * 4


def _from_meta(case: PipelineCase) -> None:
    with torch.device("meta"):
        meta = build(case)
    model = compiled(case, meta)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    alone = build(case)
    mine = model.state_dict()
    model.load_state_dict({name: value for name, value in alone.state_dict().items() if name in mine})
    losses = train(case, model, adamw(model), range(2))
    assert_close(losses, train_alone(case, alone, adamw(alone), range(2)), rtol=1e-4, atol=1e-5)
    assert_same(model, alone)


@pytest.mark.parametrize("family", ["mlp", "gpt2"])
def test_a_model_on_the_meta_device_is_cut_and_gets_its_values_later(ranks: Ranks, family: str) -> None:
    ranks.run(_from_meta, PipelineCase(family, "pp2"))


def _whole_state() -> None:
    """Every rank gives the model the whole state dict of one process."""
    case = PipelineCase("gpt2", "pp2xtp2")
    model, alone = compiled(case), build(case)
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.mul_(0.5)
    state: dict[str, Tensor] = alone.state_dict()
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    assert_same(model, alone)
    args, kwargs = batch_of(microbatches_of(case, 0))
    assert_close(float(model.train_step(*args, **kwargs)), accumulated(case, alone, 0), rtol=1e-4, atol=1e-5)


def test_a_rank_loads_its_part_of_whole_tensors(ranks: Ranks) -> None:
    ranks.run(_whole_state, world_size=4)
