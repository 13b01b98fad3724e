"""A compiled PeftModel is saved as PEFT saves it, and PEFT loads it into a fresh base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.testing import assert_close

import autopar
from autopar.errors import InputError
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

peft = pytest.importorskip("peft")
IDS = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


def _base() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, use_cache=False)
    return transformers.LlamaForCausalLM(config).double()


def _lora() -> Any:
    """Two adapters, one of them with a whole layer that is trained."""
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    )
    model = peft.get_peft_model(_base(), config)
    model.add_adapter("further", peft.LoraConfig(r=3, target_modules=["v_proj"], init_lora_weights=False))
    return model.double()


def _train(model: Any) -> None:
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        if hasattr(model, "train_step"):
            model.train_step(**BATCH)
        else:
            model(**BATCH).loss.backward()
        optimizer.step()


def _saved(folder: str, names: tuple[str, ...], options: dict[str, Any]) -> None:
    shape = mesh((2,), names)
    model = autopar.compile(_lora(), shape, BATCH, hardware=SLOW_DEVICES, **by_flag(**options))
    _train(model)
    model.save_pretrained(folder)


def _check(folder: Path) -> None:
    alone = _lora()
    _train(alone)
    alone.save_pretrained(folder / "alone")
    names = {str(path.relative_to(folder / "alone")) for path in (folder / "alone").rglob("*")}
    assert {str(path.relative_to(folder / "ranks")) for path in (folder / "ranks").rglob("*")} == names
    assert json.loads((folder / "ranks" / "adapter_config.json").read_text())["inference_mode"]
    for adapter, path in (("default", "ranks"), ("further", "ranks/further")):
        back = peft.PeftModel.from_pretrained(_base(), folder / path).double()
        alone.set_adapter(adapter)
        assert_close(back(input_ids=IDS).logits, alone.eval()(input_ids=IDS).logits)


@pytest.mark.slow
def test_peft_loads_what_ranks_have_saved(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_saved, str(tmp_path / "ranks"), ("dp",), {"strategy": "zero3"}, world_size=2, timeout=240)
    _check(tmp_path)


@pytest.mark.slow
def test_the_stages_of_a_pipeline_save_one_adapter(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_saved, str(tmp_path / "ranks"), ("pp",), {"microbatches": 2}, world_size=2, timeout=240)
    _check(tmp_path)


def _refused(folder: str) -> None:
    config = peft.VBLoRAConfig(
        r=1, num_vectors=8, vector_length=4, topk=2, target_modules=["q_proj"], save_only_topk_weights=True
    )
    original = peft.get_peft_model(_base(), config).eval()  # training would branch on values
    model: Any = autopar.compile(original, mesh((2,), ("dp",)), BATCH, strategy="zero3")
    with pytest.raises(InputError, match=r"type VBLORA, for which PEFT writes computed values. Gather the model"):
        model.save_pretrained(folder)
    original.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    original.save_pretrained(f"{folder}/{torch.distributed.get_rank()}")
    with pytest.raises(InputError, match="the adapters cannot be written to"):
        autopar.compile(_lora(), mesh((2,), ("dp",)), BATCH, strategy="zero3").save_pretrained(__file__)


@pytest.mark.slow
def test_an_adapter_that_peft_computes_is_refused_and_saved_as_advised(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_refused, str(tmp_path), world_size=2, timeout=240)
    assert (tmp_path / "0" / "adapter_model.safetensors").exists()


def _with_adapters() -> Any:
    """A model of transformers with two adapters of its own `add_adapter`, of which the second is active."""
    model = _base()
    for name, part in (("first", "v_proj"), ("second", "q_proj")):
        model.add_adapter(peft.LoraConfig(r=2, target_modules=[part], init_lora_weights=False), name)
    return model.double()


def _saved_as_transformers_does(folder: str, names: tuple[str, ...], options: dict[str, Any]) -> None:
    original = _with_adapters()
    model: Any = autopar.compile(original, mesh((2,), names), BATCH, hardware=SLOW_DEVICES, **by_flag(**options))
    _train(model)
    model.save_pretrained(folder)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("axis", "options"), [("dp", {"strategy": "zero3"}), ("pp", {"microbatches": 2})], ids=["zero3", "pipeline"]
)
def test_transformers_loads_the_active_adapter_that_ranks_have_saved(
    ranks: Ranks, tmp_path: Path, axis: str, options: dict[str, Any]
) -> None:
    ranks.run(_saved_as_transformers_does, str(tmp_path / "ranks"), (axis,), options, world_size=2, timeout=240)
    alone = _with_adapters()
    _train(alone)
    alone.save_pretrained(tmp_path / "alone")
    expected = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    found = load_file(tmp_path / "ranks" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert_close(found, expected)
    assert [path.name for path in sorted((tmp_path / "ranks").iterdir())] == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    back = _base()
    back.load_adapter(str(tmp_path / "ranks"))
    assert_close(back.double()(input_ids=IDS).logits, alone.eval()(input_ids=IDS).logits)


def _several(folder: str) -> None:
    original = _with_adapters()
    original.set_adapter(["first", "second"])
    model: Any = autopar.compile(original, mesh((2,), ("dp",)), BATCH, strategy="zero3")
    with pytest.raises(InputError, match=r"first, second are active.* Call model.set_adapter\(name\)"):
        model.save_pretrained(folder)
    model.set_adapter("second")
    model.save_pretrained(folder)


def test_several_active_adapters_are_refused_and_saved_as_advised(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_several, str(tmp_path), world_size=2, timeout=240)
    assert (tmp_path / "adapter_config.json").exists()
