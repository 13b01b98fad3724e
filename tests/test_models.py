"""The built-in models: made by name, equal after equal seeds, and a clear error without transformers."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from autopar.errors import InputError
from autopar.models import NAMES, language_model


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


@pytest.mark.parametrize("name", NAMES)
def test_every_name_makes_a_model_without_memory(name: str) -> None:
    model = language_model(name, num_layers=1, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.decoder.config.num_hidden_layers == 1


def test_the_demonstration_has_about_ten_million_parameters() -> None:
    model = language_model("demo", device="meta")
    assert 9e6 < sum(parameter.numel() for parameter in model.parameters()) < 11e6


def test_an_unknown_name_is_an_error_that_lists_the_names() -> None:
    with pytest.raises(InputError, match=r"no built-in model 'lama'; there are demo, .*yours as module:function"):
        language_model("lama")


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r'pip install "autopar\[hf\]"'):
        language_model("demo")
