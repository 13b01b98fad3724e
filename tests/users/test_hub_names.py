"""Checkpoints under names and shapes of the Hub, which transformers converts as it loads them: Mixtral's experts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

import autopar
from autopar.errors import InputError
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "use_cache": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "head_dim": 4},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 4,
        "kv_lora_rank": 4,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    },
    "llama": {"tie_word_embeddings": True},
}


def _llava() -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    seen = {"model_type": "clip_vision_model", "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = LlavaConfig(
        text_config=SIZES | {"model_type": "llama"},  # type: ignore[arg-type]
        vision_config=seen | {"num_hidden_layers": 1, "image_size": 8, "patch_size": 4, "projection_dim": 8},  # type: ignore[arg-type]
        image_token_index=31,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


def _nomic_bert() -> Any:
    from transformers import NomicBertConfig, NomicBertModel

    sizes: Any = {name: SIZES[name] for name in list(SIZES)[:5]}
    return NomicBertModel(NomicBertConfig(**sizes), add_pooling_layer=False)


def _causal(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **KINDS[kind]))


def _built(kind: str, device: str = "cpu") -> Any:
    torch.manual_seed(0)
    others: dict[str, Callable[[], Any]] = {"llava": _llava, "nomic_bert": _nomic_bert}
    with torch.device(device):
        return others[kind]() if kind in others else _causal(kind)


def _batch(kind: str) -> dict[str, Tensor]:
    ids = torch.arange(16).view(4, 4)
    return {"input_ids": ids} if kind == "nomic_bert" else {"input_ids": ids, "labels": ids}


@contextlib.contextmanager
def _reads() -> Iterator[list[str]]:
    """Record the names of which values are read, not only shapes."""
    found: list[str] = []

    class Part:
        def __init__(self, name: str, part: Any) -> None:
            self.name, self.part, self.get_shape = name, part, part.get_shape

        def __getitem__(self, key: Any) -> Tensor:
            found.append(self.name)
            return self.part[key]

    class File:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file: Any = safetensors.safe_open(*args, **kwargs)
            self.keys = self.file.keys

        def __enter__(self) -> File:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.__exit__(*error)

        def get_slice(self, name: str) -> Part:
            return Part(name, self.file.get_slice(name))

        def get_tensor(self, name: str) -> Tensor:
            found.append(name)
            return self.file.get_tensor(name)

    with mock.patch("autopar.runtime.checkpoints.read.safe_open", File):
        yield found


def _loads(kind: str, folder: str, axes: dict[str, int], strategy: str | None) -> list[str]:
    """Load the checkpoint, compare this rank's parameters with the model's, and return the names that were read."""
    options: dict[str, Any] = {"microbatches": 2, "schedule": "1f1b"} if "pp" in axes else {"strategy": strategy}
    line = mesh(tuple(axes.values()), tuple(axes))
    with _reads() as read:
        model = autopar.load(
            _built(kind, "meta"), line, folder, _batch(kind), hardware=SLOW_DEVICES, **by_flag(**options)
        )
    alone = _built(kind)
    loaded = list(model.named_parameters())
    assert loaded
    for name, parameter in loaded:
        assert torch.equal(whole(parameter), alone.get_parameter(name)), name  # type: ignore[arg-type]
    return read


def _experts(names: list[str]) -> set[int]:
    return {int(found[1]) for name in names if (found := re.search(r"\.experts\.(\d+)\.", name))}


def _layers(names: list[str]) -> set[int]:
    return {int(found[1]) for name in names if (found := re.search(r"\.layers\.(\d+)\.", name))}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "axes", "strategy"),
    [
        ("mixtral", {"dp": 1, "ep": 2}, "expert_data"),
        ("deepseek_v3", {"dp": 2}, "zero3"),
        ("mixtral", {"dp": 2}, "zero3"),
        ("qwen3_moe", {"dp": 2}, "zero3"),
    ],
)
def test_ranks_read_their_own_experts_from_a_checkpoint_of_hugging_face(
    ranks: Ranks, tmp_path: Path, kind: str, axes: dict[str, int], strategy: str
) -> None:
    _built(kind).save_pretrained(tmp_path, max_shard_size="4KB")
    read = ranks.run(_loads, kind, str(tmp_path), axes, strategy, timeout=240)
    count = KINDS[kind].get("num_experts", 4)
    assert [_experts(each) for each in read] == [set(range(count // 2)), set(range(count // 2, count))]
    assert all(len(each) == len(set(each)) for each in read)


@pytest.mark.slow
def test_a_stage_reads_its_own_layers_from_a_checkpoint_of_hugging_face(ranks: Ranks, tmp_path: Path) -> None:
    _built("mixtral").save_pretrained(tmp_path)
    first, second = ranks.run(_loads, "mixtral", str(tmp_path), {"pp": 2}, None, timeout=240)
    assert (_layers(first), _layers(second)) == ({0}, {1})
    assert _experts(first) == _experts(second) == {0, 1, 2, 3}
    assert {*first, *second} == set(load_file(tmp_path / "model.safetensors"))
    assert "lm_head.weight" in second


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["llava", "nomic_bert", "llama"])
def test_renamed_and_split_tensors_are_loaded(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    model = _built(kind)
    (model.model if kind == "llama" else model).save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) - set(model.state_dict()), "names are others"
    ranks.run(_loads, kind, str(tmp_path), {"dp": 2}, "zero3", timeout=240)


def _transposed(folder: str) -> None:
    from transformers.core_model_loading import Transpose, WeightConverter

    rule = WeightConverter("mlp.up_proj", "mlp.up_proj", [Transpose(0, 1, check_dims=True)])
    with mock.patch("transformers.conversion_mapping.get_model_conversion_mapping", lambda model: [rule]):
        _loads("llama", folder, {"dp": 2}, "zero3")


@pytest.mark.slow
def test_tensors_of_the_same_name_and_another_shape_are_converted(ranks: Ranks, tmp_path: Path) -> None:
    state = {name: each.clone() for name, each in _built("llama").state_dict().items() if name != "lm_head.weight"}
    transposed = {name: each.T.contiguous() if "up_proj" in name else each for name, each in state.items()}
    save_file(transposed, tmp_path / "model.safetensors")
    ranks.run(_transposed, str(tmp_path), timeout=120)


def _skips(folder: str) -> None:
    compiled = autopar.compile(_built("deepseek_v3"), mesh((1,), ("dp",)), _batch("deepseek_v3"))
    expected = {name: whole(each) for name, each in compiled.named_parameters()}
    with torch.no_grad():
        for each in compiled.parameters():
            each.zero_()
    compiled.load_safetensors(folder)
    for name, each in compiled.named_parameters():
        assert_close(whole(each), expected[name])


def test_tensors_that_transformers_skips_are_skipped(ranks: Ranks, tmp_path: Path) -> None:
    _built("deepseek_v3").save_pretrained(tmp_path)
    more = {name: torch.zeros(1) for name in ("model.layers.61.eh_proj.weight", "model.layers.0.rotary_emb.inv_freq")}
    save_file({**load_file(tmp_path / "model.safetensors"), **more}, tmp_path / "model.safetensors")
    ranks.run(_skips, str(tmp_path), world_size=1, timeout=120)


EXPERTS = "model.layers.1.block_sparse_moe.experts"
FAULTS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "source": ({f"{EXPERTS}.1.w3.weight": None}, rf"it has no {EXPERTS}.1.w3.weight\. Names are .*, or those that"),
    "sources": (
        {f"{EXPERTS}.{n}.w3.weight": None for n in range(4)},
        r"no tensor like \.experts\.\*\.w3\.weight for mod",
    ),
    "expert": (
        {f"{EXPERTS}.3.w{n}.weight": None for n in (1, 2, 3)},
        rf"model.layers.1.mlp.experts.gate_up_proj, which transformers makes of {EXPERTS}.0.w1.weight, .* and 2 more, "
        r"is \[3, 24, 8\] in .*expert.safetensors, and \[4, 24, 8\] in the model; make the model with",
    ),
    "plain": ({"model.norm.weight": None}, r"it has no model.norm.weight\. Names"),
    "unknown": ({"further": torch.zeros(1)}, r"the model has no further\. Names"),
    "more": ({f"{EXPERTS}.4.w2.weight": torch.zeros(8, 12)}, r"experts.down_proj, which .* is \[5, 8, 12\]"),
    "twice": (
        {"model.layers.1.mlp.experts.down_proj": torch.zeros(4, 8, 12)},
        rf"several tensors for model.layers.1.mlp.experts.down_proj; keep one kind of {EXPERTS}.0.w2.weight",
    ),
    "shape": (
        {"model.norm.weight": torch.zeros(9)},
        r"model.norm.weight is \[9\] in .*shape.safetensors, and \[8\] in the",
    ),
    "unequal": (
        {f"{EXPERTS}.1.w2.weight": torch.zeros(8, 13)},
        rf"model.layers.1.mlp.experts.down_proj cannot be made of {EXPERTS}.0.w2.weight.* \(stack expects each",
    ),
}


def _refused(folder: str) -> None:
    compiled = autopar.compile(_built("mixtral"), mesh((2,), ("dp",)), _batch("mixtral"), strategy="zero3")
    for fault, (_, message) in FAULTS.items():
        with pytest.raises(InputError, match=message):
            compiled.load_safetensors(f"{folder}/{fault}.safetensors")
    root: Any = compiled.tree.root
    root.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(InputError, match=r"has a quantization_config: quantized checkpoints are not converted"):
        compiled.load_safetensors(folder)
    compiled.load_safetensors(f"{folder}/own")


def test_checkpoints_of_hugging_face_that_do_not_fit_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    model = _built("mixtral")
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "own", save_original_format=False)
    state = load_file(tmp_path / "model.safetensors")
    for fault, (changed, _) in FAULTS.items():
        tensors = {name: each for name, each in {**state, **changed}.items() if each is not None}
        save_file(tensors, tmp_path / f"{fault}.safetensors")
    ranks.run(_refused, str(tmp_path), timeout=120)
