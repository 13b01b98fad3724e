"""Models of pictures and texts train as on one process; what reads the sizes of pictures as numbers is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

import autopar
from autopar.errors import CaptureError
from autopar.sharding.mesh import Mesh
from tests.support.eager import assert_as_eager
from tests.support.parity import mesh, whole
from tests.support.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore")
IMAGE = 60
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SEEN: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}


def _gemma3() -> nn.Module:
    seen = SEEN | {"num_hidden_layers": 1, "image_size": 28, "patch_size": 7}
    text = TEXT | {"head_dim": 16, "sliding_window": 8}
    config = Gemma3Config(text_config=text, vision_config=seen, mm_tokens_per_image=4, image_token_index=IMAGE)  # type: ignore[arg-type]
    return Gemma3ForConditionalGeneration(config)


def _llava() -> nn.Module:
    seen = SEEN | {"model_type": "clip_vision_model", "num_hidden_layers": 2, "image_size": 8, "patch_size": 4}
    config = LlavaConfig(
        text_config=TEXT | {"model_type": "llama"},  # type: ignore[arg-type]
        vision_config=seen | {"projection_dim": 16},  # type: ignore[arg-type]
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


def _qwen(newer: bool) -> nn.Module:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    text = TEXT | {"rope_parameters": rope}
    tokens = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    patches = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if newer:
        seen = {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 16, "window_size": 16}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=patches | seen, **tokens)  # type: ignore[arg-type]
        return Qwen2_5_VLForConditionalGeneration(config)
    seen = {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=patches | seen, **tokens))  # type: ignore[arg-type]


def _built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return {"gemma3": _gemma3, "llava": _llava, "qwen2": lambda: _qwen(False), "qwen2.5": lambda: _qwen(True)}[name]()


def _batch(name: str) -> dict[str, Tensor]:
    ids = torch.arange(24).reshape(2, 12) % 50
    ids[:, 2:6] = IMAGE
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch["labels"] = ids.masked_fill(ids == IMAGE, -100)
    if name == "gemma3":
        batch["token_type_ids"] = (ids == IMAGE).long()
    if name.startswith("qwen"):
        ids[:, 1], ids[:, 6] = 62, 63
        grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
        patches = torch.arange(32.0 * 96).reshape(32, 96).sin()
        return batch | {"pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).int()}
    side = 28 if name == "gemma3" else 8
    return batch | {"pixel_values": torch.arange(2.0 * 3 * side * side).reshape(2, 3, side, side).sin()}


def _trained(model: Any, batch: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor | None]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: whole(value) for name, value in model.named_parameters()}


def _on_ranks(name: str) -> tuple[list[float], dict[str, Tensor | None]]:
    batch = _batch(name)
    return _trained(autopar.compile(_built(name).train(), mesh((2,), ("dp",)), batch, strategy="zero3", seed=0), batch)


@pytest.mark.parametrize("name", ["gemma3", pytest.param("llava", marks=pytest.mark.slow)])
def test_one_step_is_that_of_one_process(name: str) -> None:
    assert_as_eager(_built(name).train(), kwargs=_batch(name), loss=lambda output: output.loss, tolerance=1e-4)


@pytest.mark.slow
def test_gemma3_with_token_types_trains_on_ranks_as_on_one_process(ranks: Ranks) -> None:
    expected = _trained(_built("gemma3").train(), _batch("gemma3"))
    for losses, values in ranks.run(_on_ranks, "gemma3", world_size=2):
        assert losses == pytest.approx(expected[0], rel=1e-4)
        for name, value in values.items():
            torch.testing.assert_close(value, expected[1][name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("name", [pytest.param("qwen2", marks=pytest.mark.slow), "qwen2.5"])
def test_sizes_of_pictures_that_are_values_of_an_input_are_refused_without_advice_that_fails(name: str) -> None:
    with pytest.raises(CaptureError, match=r"decides on the value of a tensor while it runs.*one path") as found:
        autopar.plan(_built(name).train(), Mesh({"dp": 2}), _batch(name))
    assert "assume=" not in str(found.value)
