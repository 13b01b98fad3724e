"""The built-in models: made by name, equal after equal seeds, and a clear error without transformers."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import fx

from autopar.capture.export import capture
from autopar.errors import InputError
from autopar.ir.program.program import TensorInfo, info_of
from autopar.models.catalogue import BUILT_IN, NAMES, LanguageModel, built_in, language_model


def test_the_model_of_the_demonstration_starts_near_the_loss_of_a_guess() -> None:
    torch.manual_seed(0)
    model = language_model("demo", num_layers=1)
    ids, labels = torch.randint(256, (2, 2, 16))
    assert model(ids, labels).item() == pytest.approx(math.log(256), abs=0.5)


def test_the_loss_compares_each_position_with_its_label() -> None:
    torch.manual_seed(0)
    model = language_model("demo", num_layers=1)
    ids = torch.randint(256, (1, 4))
    logits_SV = model.decoder(input_ids=ids).logits[0]
    labels = logits_SV.argmin(-1)[None]
    expected = -logits_SV.log_softmax(-1)[torch.arange(4), labels[0]].mean()
    assert torch.allclose(model(ids, labels), expected)


def test_equal_seeds_make_equal_models() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(language_model("demo", num_layers=1).state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


CAUSAL = [name for name, model in BUILT_IN.items() if model.wrapper is LanguageModel]
BILLIONS = {
    "llama-1b": 1.24,
    "llama-8b": 8.03,
    "llama-70b": 70.55,
    "llama-405b": 405.9,
    "gpt2": 0.124,
    "t5-large": 0.738,
    "vit-h": 0.632,
}
"""Parameters as published: of the models' cards, and of the papers on T5 and ViT."""


@pytest.mark.parametrize("name", CAUSAL)
def test_every_causal_name_makes_a_model_without_memory(name: str) -> None:
    model = language_model(name, num_layers=1, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.decoder.config.num_hidden_layers == 1


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", NAMES)
def test_every_name_gives_a_loss_of_the_inputs_made_for_it(name: str) -> None:
    model, inputs = built_in(name, 2, 16, num_layers=1)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *inputs))
    assert all(tensor.shape[0] == 2 for tensor in inputs)
    (loss,) = capture(model, inputs, {}).output
    assert isinstance(loss, fx.Node) and info_of(loss) == TensorInfo((), torch.float32, requires_grad=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["mixtral-dense", "t5-large", "vit-h"])
def test_the_layers_requested_are_captured(name: str) -> None:
    shallow, deep = (
        capture(model, inputs, {}) for model, inputs in (built_in(name, 2, 16, num_layers=n) for n in (1, 2))
    )
    of_one_layer = [parameter for parameter in shallow.parameters if ".0." in parameter]
    assert len(deep.parameters) - len(shallow.parameters) >= 9
    assert (
        sum(".1." in parameter for parameter in deep.parameters) >= len(of_one_layer) - 2
    )  # position biases are shared


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_model_is_captured_whole_under_autocast(name: str) -> None:
    model, inputs = built_in(name, 8, 512)
    with torch.autocast("cpu", torch.bfloat16):
        program = capture(model, inputs, {}, training=True)
    used = {*program.parameters, *program.tied}
    assert used.issuperset(
        name for name, _ in model.named_parameters(remove_duplicate=False) if "mask_token" not in name
    )


@pytest.mark.parametrize("name", BILLIONS)
def test_a_model_has_as_many_parameters_as_its_name_says(name: str) -> None:
    model, _ = built_in(name, 1, 8)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_an_image_has_its_own_size_whatever_the_sequence() -> None:
    _, (images, labels) = built_in("vit-h", 4, 4096, num_layers=1)
    assert images.shape == (4, 3, 224, 224) and labels.shape == (4,)


def test_a_model_that_is_not_causal_is_no_language_model() -> None:
    with pytest.raises(InputError, match=r"t5-large is no causal language model; demo, llama-1b, .*gpt2 are"):
        language_model("t5-large")


def test_the_demonstration_has_about_ten_million_parameters() -> None:
    model = language_model("demo", device="meta")
    assert 9e6 < sum(parameter.numel() for parameter in model.parameters()) < 11e6


def test_an_unknown_name_is_an_error_that_lists_the_names() -> None:
    with pytest.raises(InputError, match=r"no built-in model 'lama'; there are demo, .*yours as module:function"):
        language_model("lama")
    with pytest.raises(InputError, match=r"no built-in model 'vit'; there are .*vit-h"):
        built_in("vit", 2, 16)


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r'pip install "autopar\[hf\]"'):
        language_model("demo")
