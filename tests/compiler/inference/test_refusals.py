"""Features that generation does not support are refused by name, whether a user or a model requests them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessorList

import autopar
from autopar.compiler.inference import cached_forward
from autopar.compiler.inference.cached_forward import _attention_to, _StateCache, layers_of
from autopar.errors import CaptureError, InputError
from tests.support.generating import generating, prompts
from tests.support.ranks import Ranks, mesh


def _specified(misuse: Callable[[], object]) -> str:
    try:
        misuse()
    except InputError as error:
        return str(error)
    return "nothing"


def _of_arguments() -> list[str]:
    """Return the error messages for arguments of `generate` that a compiled model does not support, on this rank."""
    on = mesh((2,), ("tp",))
    compiled = autopar.compile(generating("llama", num_hidden_layers=1), on, training=False, strategy="megatron")
    ids = prompts(2, 4)
    holes = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
    rank = torch.distributed.get_rank()
    calls: list[dict[str, Any]] = [
        {"num_beams": 2},
        {"return_dict_in_generate": True},
        {"use_cache": False},
        {"inputs_embeds": torch.zeros(2, 4, 64)},
        {"cache_implementation": "static"},
        {"attention_mask": holes},
        {"labels": ids},
    ]
    specified = [_specified(lambda each=each: compiled.generate(ids, max_new_tokens=2, **each)) for each in calls]
    return [*specified, _specified(lambda: compiled.generate(ids + rank, max_new_tokens=2))]


def test_arguments_that_are_not_honoured_are_refused_by_name(ranks: Ranks) -> None:
    expected = (
        "takes no num_beams=2",
        "takes no return_dict_in_generate=True",
        "takes no use_cache=False",
        "takes no inputs_embeds",
        "takes no cache_implementation",
        "attention_mask hides tokens that are not the first of a prompt",
        "takes no labels; its inputs are input_ids and attention_mask",
        "the ranks were given different prompts",
    )
    for specified in ranks.run(_of_arguments, world_size=2):
        assert [text for text, want in zip(specified, expected, strict=True) if want not in text] == []


def _with_parts() -> str:
    on = mesh((2,), ("dp",))
    compiled = autopar.compile(generating("llama", num_hidden_layers=1), on, training=False, inputs="local")
    return _specified(lambda: compiled.generate(prompts(2, 4), max_new_tokens=2))


def test_parts_of_the_batch_are_refused(ranks: Ranks) -> None:
    assert all(
        "it takes the whole batch on every rank" in specified for specified in ranks.run(_with_parts, world_size=2)
    )


def _model(name: str, **sizes: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**sizes)
    with torch.device("meta"):
        return getattr(transformers, {"T5": "T5ForConditionalGeneration"}.get(name, f"{name}ForCausalLM"))(config)


def _eager() -> Any:
    model = generating("llama", num_hidden_layers=1)
    model.set_attn_implementation("eager")
    return model


MODELS: list[tuple[Callable[[], Any], str]] = [
    (lambda: _model("T5", num_layers=1, num_decoder_layers=1), "has an encoder"),
    (lambda: _model("Mamba", num_hidden_layers=1), "has layers with a state of their own"),
    (_eager, r'runs attention as "eager"; say model.set_attn_implementation\("sdpa"\)'),
    (lambda: _model("Bloom", n_layer=1), "takes no position_ids|runs attention as"),
    (lambda: _model("DeepseekV3", num_hidden_layers=1, n_routed_experts=8, n_group=2), r"different sizes \(MLA\)"),
]


@pytest.mark.parametrize(("make", "specified"), MODELS, ids=["encoder", "state", "eager", "positions", "mla"])
def test_models_without_such_a_cache_are_refused(make: Callable[[], Any], specified: str) -> None:
    with pytest.raises(InputError, match=f"generate of a compiled .*: it .*({specified})"):
        layers_of(make())


def _cache(decodes: bool = True, layers: int = 1) -> _StateCache:
    states = [torch.zeros(2, 2, 8, 4) for _ in range(layers)]
    return _StateCache(states, [each.clone() for each in states], torch.zeros(2, dtype=torch.int64), decodes)


def _new(features: int = 4) -> Tensor:
    return torch.ones(2, 2, 1, features)


def test_a_layer_that_writes_twice_or_never_or_otherwise_is_refused() -> None:
    cache = _cache(layers=2)
    cache.update(_new(), _new(), 0)
    with pytest.raises(CaptureError, match="a layer writes its keys and values twice in a forward"):
        cache.update(_new(), _new(), 0)
    with pytest.raises(CaptureError, match="layer 1 writes no keys and values into the cache"):
        cache.written()
    with pytest.raises(
        CaptureError, match=r"keys or values of \[2, 2, 1, 5\] in torch.float32 into a cache of \[2, 2, 8"
    ):
        _cache().update(_new(5), _new(5), 0)


def test_a_model_that_counts_positions_by_the_length_of_its_cache_is_refused() -> None:
    assert _cache(decodes=False).get_seq_length() == 0
    with pytest.raises(CaptureError, match="asks its cache for its length though it was given position_ids"):
        _cache().get_seq_length()


@pytest.mark.parametrize("told", [{"softcap": 30.0}, {"s_aux": torch.zeros(2)}, {"is_causal": False}])
def test_attention_that_is_told_more_is_refused(told: dict[str, Any]) -> None:
    functions = cached_forward.ALL_ATTENTION_FUNCTIONS
    plain, (name,) = functions["sdpa"], told
    with _attention_to(torch.zeros(2, dtype=torch.int64)):
        attention = functions["sdpa"]
        with pytest.raises(
            CaptureError, match=f"gives its attention {name}.*, which attention to a cache does not take"
        ):
            attention(torch.nn.Identity(), _new(), _new(), _new(), None, **told)
    assert functions["sdpa"] is plain


class _Only(transformers.LogitsProcessor):
    """One token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.arange(scores.shape[-1]) != 5, -torch.inf)


def _honoured() -> dict[str, Any]:
    """Return the results of logits processors, end tokens and streamers on this rank."""
    on = mesh((2,), ("tp",))
    model = generating("llama", num_hidden_layers=1)
    compiled = autopar.compile(model, on, training=False, strategy="megatron")
    ids = prompts(2, 4)
    found = {
        "processor": compiled.generate(ids, max_new_tokens=3, logits_processor=LogitsProcessorList([_Only()])),
        "end": compiled.generate(ids, max_new_tokens=8, eos_token_id=list(range(48, 96)), do_sample=False),
        "plan": compiled.plan.descriptions != {},
    }
    expected = model.generate(ids, max_new_tokens=8, eos_token_id=list(range(48, 96)), do_sample=False)
    streamed: list[Tensor] = []
    streamer = type("_Streamer", (), {"put": lambda self, x: streamed.append(x), "end": lambda self: None})()
    compiled.generate(ids[:1], max_new_tokens=3, streamer=streamer)
    return found | {"expected": expected, "streamed": len(streamed)}


@pytest.mark.slow
def test_processors_ends_and_streams_count_as_in_transformers(ranks: Ranks) -> None:
    for found in ranks.run(_honoured, world_size=2):
        assert found["processor"][:, 4:].tolist() == [[5, 5, 5]] * 2
        assert torch.equal(found["end"], found["expected"])
        assert found["streamed"] == 4 and found["plan"]  # the prompt, and each token
