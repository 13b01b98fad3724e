"""Checkpoints whose tensors transformers renames as it loads them, such as Mixtral's experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import autopar
from autopar.errors import InputError
from tests.support.parity import whole
from tests.support.ranks import Ranks, mesh


def _mixtral(device: str) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    config = transformers.MixtralConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, use_cache=False
    )
    with torch.device(device):
        return transformers.MixtralForCausalLM(config)


def _loaded(folder: str) -> None:
    model, ids = _mixtral("cpu"), torch.arange(8).view(2, 4)
    example = {"input_ids": ids, "labels": ids}
    model.save_pretrained(f"{folder}/hub")
    with pytest.raises(InputError, match=r"save_pretrained\(path, save_original_format=False\)"):
        autopar.load(_mixtral("meta"), mesh((1,), ("dp",)), f"{folder}/hub", example)
    type(model).from_pretrained(f"{folder}/hub").save_pretrained(f"{folder}/own", save_original_format=False)
    loaded = autopar.load(_mixtral("meta"), mesh((1,), ("dp",)), f"{folder}/own", example)
    for name, each in model.named_parameters():
        assert_close(whole(loaded.get_parameter(name)), each.detach())


def test_a_checkpoint_of_other_names_is_loaded_as_the_error_advises(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_loaded, str(tmp_path), world_size=1)
