"""Buckets for the texts of a dataset, if the collator pads each batch to its own longest text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from autopar.runtime.lengths.length_buckets import COMMON, Buckets

LOOKED_AT = 64
"""Samples that are collated one by one, to see whether they differ in length."""


def buckets_for(
    samples: Iterable[Any], collate: Callable[[list[Any]], Any], model: nn.Module, processing: Any
) -> Buckets | None:
    """Return buckets if batches of these samples differ in length; None if they are of one length, or no texts.

    None also if the inputs of a sample differ in length among each other, as those of encoders and decoders do: buckets
    pad all inputs alike.
    """
    found: set[int] = set()
    for sample in samples:
        lengths = _lengths(collate([dict(sample) if isinstance(sample, Mapping) else sample]))
        if len(lengths) != 1:
            return None
        found |= lengths
    return Buckets(padding=_padding(model, processing)) if len(found) > 1 else None


def _lengths(batch: Any) -> set[int]:
    """Return the numbers of positions that the inputs of a batch have."""
    named = batch.items() if isinstance(batch, Mapping) else ()
    return {value.shape[1] for name, value in named if name in COMMON and isinstance(value, Tensor) and value.ndim > 1}


def _padding(model: nn.Module, processing: Any) -> dict[str, float]:
    """Return the padding value of token ids, of the tokenizer or else of the model's configuration, by input."""
    tokenizer = getattr(processing, "tokenizer", processing)
    specified = (getattr(each, "pad_token_id", None) for each in (tokenizer, getattr(model, "config", None)))
    pad = next((each for each in specified if isinstance(each, int)), COMMON["input_ids"])
    return {**COMMON, "input_ids": pad, "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0)}
