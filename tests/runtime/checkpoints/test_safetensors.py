"""Checkpoints of Hugging Face loaded onto ranks and written back: values, missing tables, tied weights, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
MESHES = {"zero3": ((2,), ("dp",)), "megatron": ((2, 2), ("dp", "tp")), "data_parallel": ((2, 2), ("pp", "dp"))}
"""Strategy → the mesh that it is tried on."""


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def steps(model: Any, first: int) -> list[float]:
    """The losses of two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in (first, first + 1):
        optimizer.zero_grad()
        if hasattr(model, "train_step"):
            loss = model.train_step(**batch(step))
        else:
            loss = model(**batch(step)).loss
            loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def on_meta() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(CONFIG)


def _goes_on(folder: str, saved: str, strategy: str) -> list[float]:
    shape = mesh(*MESHES[strategy])
    options: dict[str, Any] = {"microbatches": 2} if "pp" in (shape.mesh_dim_names or ()) else {}
    model = autopar.load(
        on_meta(), shape, folder, batch(0), strategy=strategy, hardware=SLOW_DEVICES, **by_flag(**options)
    )
    losses = steps(model, 2)
    model.save_pretrained(saved, max_shard_size="10KB")
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero3", "data_parallel", "megatron"])
def test_a_checkpoint_trains_on_ranks_and_comes_back_as_one_process_has_it(
    ranks: Ranks, tmp_path: Path, strategy: str
) -> None:
    torch.manual_seed(0)
    alone = LlamaForCausalLM(CONFIG)
    steps(alone, 0)
    alone.save_pretrained(tmp_path / "before", max_shard_size="20KB")
    expected = steps(alone, 2)

    shape, _ = MESHES[strategy]
    saved = tmp_path / "after"
    for found in ranks.run(_goes_on, str(tmp_path / "before"), str(saved), strategy, world_size=2 ** len(shape)):
        assert_close(found, expected)

    back = LlamaForCausalLM.from_pretrained(saved)
    for (name, ours), theirs in zip(back.named_parameters(), alone.parameters(), strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"], "a tied weight is written once"
    assert {path.name for path in saved.glob("*.safetensors")} == set(index["weight_map"].values())
    assert json.loads((saved / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert_close(steps(back, 4), steps(alone, 4))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(3, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)).square().mean()


def _uneven(folder: str) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Small()
    model = autopar.load(model, mesh((2,), ("dp",)), folder, (torch.zeros(4, 3),), strategy="zero3")
    model.save_pretrained(f"{folder}/again")
    return load_file(f"{folder}/again/model.safetensors")


@pytest.mark.slow
def test_parts_that_do_not_divide_and_buffers_are_read_and_written(ranks: Ranks, tmp_path: Path) -> None:
    state = Small().state_dict()
    state["norm.num_batches_tracked"] = torch.tensor(7)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "again").mkdir()
    save_file({"old": torch.zeros(1)}, tmp_path / "again" / "model-00002-of-00003.safetensors")
    for found in ranks.run(_uneven, str(tmp_path)):
        assert found.keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(found[name], value)
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["model.safetensors"]


def _refused(folder: str) -> None:
    line, inputs = mesh((2,), ("dp",)), (torch.zeros(4, 3),)
    with pytest.raises(autopar.InputError, match=r"up.weight has values, and memory, on every rank"):
        autopar.load(Small(), line, folder, inputs)
    compiled = autopar.compile(Small(), line, inputs, strategy="zero3")
    for path, message in (
        ("missing", "it has no up.bias, norm.weight, norm.bias, norm.running_mean and 2 more"),
        ("unknown", "the model has no further"),
        ("shape", r"up.weight is \[3, 3\] in .*, and \[5, 3\] in the model"),
        ("text", "is no safetensors file"),
        ("nothing", "is no file; give a .safetensors file"),
    ):
        with pytest.raises(autopar.InputError, match=message):
            compiled.load_safetensors(f"{folder}/{path}.safetensors")
    for path, message in (
        ("half", r"names .*gone.safetensors, which is not there"),
        ("odd", 'has no "weight_map"'),
        ("broken", "cannot be read"),
    ):
        with pytest.raises(autopar.InputError, match=message):
            compiled.load_safetensors(f"{folder}/{path}")
    with pytest.raises(autopar.InputError, match="leave state_dict out"):
        compiled.save_pretrained(folder, state_dict={})  # type: ignore[arg-type]
    with pytest.raises(autopar.InputError, match=r"the checkpoint cannot be written to .*text.safetensors"):
        compiled.save_pretrained(f"{folder}/text.safetensors")


def test_checkpoints_that_do_not_fit_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    state = Small().state_dict()
    save_file({"up.weight": state["up.weight"]}, tmp_path / "missing.safetensors")
    save_file({**state, "further": torch.zeros(1)}, tmp_path / "unknown.safetensors")
    save_file({**state, "up.weight": torch.zeros(3, 3)}, tmp_path / "shape.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    for folder, text in (("half", '{"weight_map": {"up.weight": "gone.safetensors"}}'), ("odd", "[]"), ("broken", "{")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors.index.json").write_text(text)
    ranks.run(_refused, str(tmp_path))
