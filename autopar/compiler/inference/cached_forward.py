"""The forward of a language model of transformers with its cache as a value, which is given and given back.

    forward(input_ids, position_ids, …, autopar_cache={"keys": […], "values": […], "positions": …})
        -> {"keys": […], "values": […]}, for one token a sample with {"logits": …}

Keys and values are (batch, heads, positions, features) for each layer, positions (batch) where each sample's tokens
begin. Several tokens are the beginning of a prompt: they see each other alone. One token sees all that the cache has up
to its position; its attention is `autopar.cached_attention` in the place of PyTorch's, and no mask is made.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from autopar.compiler.inference.state import NAME
from autopar.errors import CaptureError, InputError
from autopar.ir.program.operators.attention.cached import CACHED_ATTENTION, WRITE_CACHE

SDPA = "sdpa"
LAYERS_WITH_POSITIONS = ("full_attention", "sliding_attention")
UNKNOWN = ("softcap", "s_aux", "position_bias", "sinks")
"""Keyword arguments that some models give their attention and the cached operator does not take."""


def generates(model: nn.Module) -> bool:
    """Return whether a model is a transformers model that generates text."""
    return isinstance(model, GenerationMixin) and isinstance(model, PreTrainedModel)


def layers_of(model: Any) -> tuple[tuple[int, int], ...]:
    """Return the heads and features of each layer's keys; raise InputError for a model without such a cache."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ()
    other = next((each for each in kinds if each not in LAYERS_WITH_POSITIONS), None)
    if model.config.is_encoder_decoder:
        fault = "has an encoder, whose keys and values are another cache"
    elif other is not None or getattr(model, "_is_stateful", False):
        fault = f"has layers with a state of their own{f' ({other})' if other else ''}"
    elif config._attn_implementation != SDPA:
        fault = f'runs attention as "{config._attn_implementation}"; say model.set_attn_implementation("{SDPA}") before'
    elif not _takes_positions(model):
        fault = "has a forward that takes no position_ids, or no further keywords"
    elif (shapes := model._get_static_cache_init_shape()) is None:
        fault = "has keys and values of different sizes (MLA)"
    else:
        heads, features = (each if isinstance(each, list) else [each] * config.num_hidden_layers for each in shapes)
        return tuple(zip(heads, features, strict=True))
    raise InputError(
        f"generate of a compiled {name}: it {fault}. Generation needs a decoder of attention layers with keys and "
        "values by head and position."
    )


def _takes_positions(model: nn.Module) -> bool:
    taken = inspect.signature(model.forward).parameters
    return "position_ids" in taken and any(each.kind is each.VAR_KEYWORD for each in taken.values())


@functools.cache
def with_cache(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a model whose forward may be given a cache; without one it is the model's own."""
    plain = kind.forward

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop(NAME, None)
        return plain(self, *args, **kwargs) if given is None else _with_state(plain, self, given, kwargs)

    body = {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return types.new_class(kind.__name__, (kind,), exec_body=lambda namespace: namespace.update(body))


def _with_state(plain: Any, model: Any, given: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    decodes = kwargs["input_ids"].shape[1] == 1
    cache = _StateCache(given["keys"], given["values"], given["positions"], decodes)
    with _attention_to(given["positions"]) if decodes else contextlib.nullcontext():
        found = plain(model, past_key_values=cache, return_dict=True, **kwargs)
    keys, values = cache.written()
    return {"keys": keys, "values": values} | ({"logits": found.logits} if decodes else {})


class _StateLayer(CacheLayerMixin):
    """One layer's keys and values, which are written into as values: each time there is another one."""

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor, decodes: bool) -> None:
        super().__init__()
        self.held = keys, values
        self.positions, self.decodes = positions, decodes
        self.is_initialized, self.is_written = True, False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the cache is complete."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write, and say what attention takes: for one token all of the cache, for a prompt's beginning what is new."""
        if self.is_written:
            raise CaptureError("a layer writes its keys and values twice in a forward; generate cannot hold both.")
        keys, values = (self._written(*each) for each in zip(self.held, (key_states, value_states), strict=True))
        self.held, self.is_written = (keys, values), True
        return self.held if self.decodes else (key_states, value_states)

    def _written(self, cache: Tensor, new: Tensor) -> Tensor:
        expected = cache.shape[0], cache.shape[1], new.shape[2], cache.shape[3]
        if tuple(new.shape) != expected or new.dtype != cache.dtype:
            raise CaptureError(
                f"a layer writes keys or values of {list(new.shape)} in {new.dtype} into a cache of "
                f"{list(cache.shape)} in {cache.dtype}; they must agree but for positions. Generation needs a model "
                "that keeps keys and values as its configuration says, in the dtype that it computes in."
            )
        return WRITE_CACHE(cache, new, self.positions)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the keys that attention takes, and the position of the first one."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0, the first position of a prompt; raise CaptureError while decoding, because positions are given
        then.
        """
        if self.decodes:
            raise CaptureError(
                "the model asks its cache for its length though it was given position_ids; samples have lengths of "
                "their own in generate, which cannot run this model."
            )
        return 0

    def get_max_length(self) -> int:
        """Return the number of positions of the cache."""
        return self.held[0].shape[2]


class _StateCache(Cache):
    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], positions: Tensor, decodes: bool) -> None:
        self.states = [_StateLayer(k, v, positions, decodes) for k, v in zip(keys, values, strict=True)]
        super().__init__(layers=list(self.states))

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the first query, for a mask."""
        return 0

    def written(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the keys and values of all layers as the forward leaves them."""
        missing = [number for number, layer in enumerate(self.states) if not layer.is_written]
        if missing:
            raise CaptureError(
                f"layer {missing[0]} writes no keys and values into the cache; generate needs a model each of whose "
                "layers does, once in a forward."
            )
        keys, values = zip(*(layer.held for layer in self.states), strict=True)
        return list(keys), list(values)


@contextlib.contextmanager
def _attention_to(positions: Tensor) -> Iterator[None]:
    """Let attention be that of one query at its position to a whole cache, without a mask."""

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        unknown = next((name for name in UNKNOWN if kwargs.get(name) is not None), None)
        if unknown is None and is_causal is False:
            unknown = "is_causal=False"
        if unknown is not None:
            raise CaptureError(
                f"{type(module).__name__} gives its attention {unknown}, which attention to a cache does not take; "
                "generate cannot run this model."
            )
        scale = scaling if scaling is not None else 1 / math.sqrt(query.shape[-1])
        out = CACHED_ATTENTION(query, key, value, positions, scale, sliding_window)
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS[SDPA] = attention
    ALL_MASK_ATTENTION_FUNCTIONS[SDPA] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[SDPA], ALL_MASK_ATTENTION_FUNCTIONS[SDPA]
