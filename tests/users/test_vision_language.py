"""Models of pictures and texts train as on one process, those that read the sizes of pictures with static arguments."""

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
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniAudioEncoderConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder

import autopar
from autopar.errors import CaptureError
from autopar.ir.sharding.mesh import Mesh
from tests.support.eager import assert_as_eager
from tests.support.options import by_flag
from tests.support.parity import mesh, whole
from tests.support.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore")
IMAGE, VIDEO = 60, 61
QWEN = ("qwen2", "qwen2.5")
SQUARE, OBLONG = ((1, 4, 4), (1, 4, 4)), ((1, 2, 8), (1, 8, 2))
"""Patches in time, height and width of the pictures of a batch; as many of both."""
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


def _batch(name: str, pictures: tuple[tuple[int, ...], ...] = SQUARE) -> dict[str, Tensor]:
    ids = torch.arange(24).reshape(2, 12) % 50
    ids[:, 2:6] = IMAGE
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch["labels"] = ids.masked_fill(ids == IMAGE, -100)
    if name == "gemma3":
        batch["token_type_ids"] = (ids == IMAGE).long()
    if name.startswith("qwen"):
        ids[:, 1], ids[:, 6] = 62, 63
        batch["image_grid_thw"] = torch.tensor(pictures)
        batch["mm_token_type_ids"] = (ids == IMAGE).int()
        return batch | {"pixel_values": torch.arange(32.0 * 96).reshape(32, 96).sin()}
    side = 28 if name == "gemma3" else 8
    return batch | {"pixel_values": torch.arange(2.0 * 3 * side * side).reshape(2, 3, side, side).sin()}


def _batches(name: str) -> list[dict[str, Tensor]]:
    """Inputs of three steps; positions are given if the model computes them from the values of its inputs."""
    if name not in QWEN:
        return [_batch(name)] * 3
    model, batches = _built(name), [_batch(name), _batch(name, OBLONG), _batch(name)]
    for batch in batches:
        ids, types = batch["input_ids"], batch.pop("mm_token_type_ids")
        batch["position_ids"], _ = model.model.get_rope_index(ids, types, batch["image_grid_thw"])  # type: ignore[operator,union-attr]
    return batches


def _options(name: str) -> dict[str, Any]:
    return {"static_argnames": ["image_grid_thw"]} if name in QWEN else {}


Trained = tuple[list[float], dict[str, Tensor | None], dict[str, Tensor | None]]


def _trained(model: Any, batches: list[dict[str, Tensor]]) -> Trained:
    """Return the losses, the gradients of the second step, and the parameters at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    losses, gradients = [], {}
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        gradients = gradients if len(losses) == 2 else {name: whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients, {name: whole(value) for name, value in model.named_parameters()}


def _on_ranks(name: str, strategy: str) -> tuple[Trained, int]:
    batches, options = _batches(name), _options(name)
    model = autopar.compile(
        _built(name).train(), mesh((2,), ("dp",)), batches[0], strategy=strategy, **by_flag(seed=0, **options)
    )
    return _trained(model, batches), len(model._known)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", ["gemma3", "qwen2.5", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llava", "qwen2"))]
)
def test_one_step_is_that_of_one_process(name: str) -> None:
    model, batch = _built(name).train(), _batches(name)[0]
    static = _options(name).get("static_argnames", ())
    assert_as_eager(model, kwargs=batch, loss=lambda output: output.loss, tolerance=1e-4, static=static)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "strategy"), [("gemma3", "zero3"), ("qwen2", "zero3"), ("qwen2.5", "zero3"), ("qwen2.5", "megatron")]
)
def test_it_trains_on_ranks_as_on_one_process(ranks: Ranks, model: str, strategy: str) -> None:
    expected = _trained(_built(model).train(), _batches(model))
    for found, num_plans in ranks.run(_on_ranks, model, strategy, world_size=2, timeout=240):
        assert num_plans == (2 if model in QWEN else 1), "pictures of other sizes are planned anew"
        assert found[0] == pytest.approx(expected[0], rel=1e-4)
        torch.testing.assert_close(found[1:], expected[1:], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in QWEN])
def test_videos_have_static_grids(name: str) -> None:
    model, batch = _built(name).train(), _batch(name, ((2, 4, 2), (2, 2, 4)))
    ids, types = batch["input_ids"], batch.pop("mm_token_type_ids") * 2
    ids[ids == IMAGE] = VIDEO
    batch["pixel_values_videos"], grids = batch.pop("pixel_values"), batch.pop("image_grid_thw")
    batch["position_ids"], _ = model.model.get_rope_index(ids, types, None, grids)  # type: ignore[operator,union-attr]
    batch["video_grid_thw"] = grids
    loss_of = lambda output: output.loss  # noqa: E731
    assert_as_eager(model, kwargs=batch, loss=loss_of, tolerance=1e-4, static=["video_grid_thw"])


def test_sound_has_static_lengths() -> None:
    sizes: dict[str, Any] = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
    config = Qwen2_5OmniAudioEncoderConfig(num_mel_bins=8, n_window=4, output_dim=16, max_source_positions=64, **sizes)
    torch.manual_seed(0)
    batch = {"input_features": torch.arange(8 * 36.0).reshape(8, 36).sin(), "feature_lens": torch.tensor([16, 20])}
    loss_of = lambda output: output.last_hidden_state.square().mean()  # noqa: E731
    model = Qwen2_5OmniAudioEncoder(config).train()
    assert_as_eager(model, kwargs=batch, loss=loss_of, tolerance=1e-4, static=["feature_lens"])


@pytest.mark.slow
@pytest.mark.parametrize("name", QWEN)
def test_the_refusal_names_the_arguments_that_decide_sizes(name: str) -> None:
    batch = _batches(name)[0]
    with pytest.raises(CaptureError, match=r"decides on the value of a tensor while it runs.*one path") as found:
        autopar.plan(_built(name).train(), Mesh({"dp": 2}), batch)
    assert "assume=" not in str(found.value)
    assert 'static_argnames=["image_grid_thw"]), with which' in str(found.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", QWEN)
def test_without_positions_the_model_computes_them_from_static_token_types(name: str) -> None:
    named = ["image_grid_thw", "mm_token_type_ids", "attention_mask"]
    with pytest.raises(CaptureError) as found:
        autopar.plan(_built(name).train(), Mesh({"dp": 2}), _batch(name))
    assert all(f'"{each}"' in str(found.value) for each in named)
    assert_as_eager(
        _built(name).train(), kwargs=_batch(name), loss=lambda output: output.loss, tolerance=1e-4, static=named
    )
