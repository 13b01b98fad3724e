"""The loop that makes tokens: transformers' `generate` reads the options, and this takes the place of its loop.

All tokens of a prompt but the last are run at once, padded at their end to a bucket; the last one, and then each new
one, is run alone, at the position that it has in its sample. Entries that padding wrote behind a prompt are overwritten
before they are read. The first rank of the mesh chooses tokens, and tells the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.compiler.inference.session import Session
from autopar.errors import InputError
from autopar.ir.sharding.mesh import Mesh
from autopar.runtime.lengths.length_buckets import Buckets, unit_of
from autopar.runtime.ranks.agreement import is_first_rank, many_processes

LEAST_PROMPT = 2  # positions that a bucket of prompts has: one is a token
REFUSED_ARGUMENTS = (
    "assistant_model",
    "cache",  # `past_key_values` before transformers 5.24
    "cache_implementation",
    "compile_config",
    "custom_generate",
    "encoder_outputs",
    "inputs_embeds",
    "negative_prompt_attention_mask",
    "negative_prompt_ids",
    "past_key_values",
    "prefill_chunk_size",
    "synced_gpus",
)
"""Arguments of `generate` that are refused, because they change how a compiled model runs."""
REFUSED_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "prompt_lookup_num_tokens": (None,),
    "dola_layers": (None,),
    "penalty_alpha": (None, 0, 0.0),
    "guidance_scale": (None, 1, 1.0),
    "return_dict_in_generate": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "use_cache": (None, True),
}
"""Setting of a GenerationConfig → the values that are accepted."""
READ = ("attention_mask", "position_ids", "logits_to_keep", "use_cache", "past_key_values", "cache", "cache_position")
"""Arguments of the model that transformers adds for its own loop."""


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise InputError for the first argument of `generate` that is not honoured."""
    for name in REFUSED_ARGUMENTS:
        if given.get(name) is not None:
            raise InputError(
                f"generate of a compiled model takes no {name}: it runs plans of its own, with its own cache. Leave it "
                "out, or generate with the model as it was before compile."
            )


def _check_settings(settings: Any, rest: Mapping[str, Any]) -> None:
    for name, allowed in REFUSED_SETTINGS.items():
        found = getattr(settings, name, None)
        if found not in allowed:
            raise InputError(
                f"generate of a compiled model takes no {name}={found!r}: it chooses the likeliest token, or draws "
                "one, and returns tokens. Leave it out, or generate with the model as it was before compile."
            )
    unknown = next((name for name, value in rest.items() if name not in READ and value is not None), None)
    if unknown is not None:
        raise InputError(
            f"generate of a compiled model takes no {unknown}; its inputs are input_ids and attention_mask."
        )


class Generation:
    """One call of `generate`: what its loop needs of the module, and the loop."""

    def __init__(self, module: Any, buckets: Buckets, random_state: Tensor, streamer: Any) -> None:
        self._module, self._buckets, self._random_state, self._streamer = module, buckets, random_state, streamer
        self._unit = unit_of(Mesh.of(module.mesh))

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **rest: Any,
    ) -> Tensor:
        """Generate tokens in place of transformers' own loop; return (batch, positions), the prompts first."""
        _check_settings(generation_config, rest)
        mesh = self._module.mesh
        input_ids = input_ids.to(mesh.device_type)
        lengths = _prompt_lengths(input_ids, rest.get("attention_mask"))
        check_equal_prompts(input_ids, lengths, mesh)
        longest = int(lengths.max())
        new = generation_config.max_length - input_ids.shape[1]
        session: Session = self._module.session(input_ids.shape[0], self._bucket_length(longest + new))
        if longest > 1:
            session.prefill(_aligned(input_ids, lengths, self._bucket_length(longest - 1, LEAST_PROMPT)))
        torch.set_rng_state(self._random_state)  # whatever was planned has drawn nothing
        has_eos = any(hasattr(each, "eos_token_id") for each in stopping_criteria)
        pad, decides = generation_config._pad_token_tensor, not many_processes(mesh) or is_first_rank(mesh)
        tokens, unfinished = input_ids[:, -1], torch.ones_like(lengths)
        for step in range(new):
            logits = session.logits(tokens, lengths - 1 + step)
            state = torch.stack((tokens, unfinished))
            if decides:
                scores = logits_processor(input_ids, logits.to(copy=True, dtype=torch.float32))
                if generation_config.do_sample:
                    tokens = torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)
                else:
                    tokens = scores.argmax(-1)
                if has_eos:
                    tokens = tokens * unfinished + pad.to(tokens.device) * (1 - unfinished)
                made = torch.cat((input_ids, tokens.unsqueeze(-1)), -1)
                state = torch.stack((tokens, unfinished & ~stopping_criteria(made, None)))
            tokens, unfinished = from_first(state, mesh)
            input_ids = torch.cat((input_ids, tokens.unsqueeze(-1)), -1)
            if self._streamer is not None:
                self._streamer.put(tokens.cpu())
            if not unfinished.any():
                break
        if self._streamer is not None:
            self._streamer.end()
        return input_ids

    def _bucket_length(self, length: int, least: int = 1) -> int:
        """Return the bucket of a length, which does not go beyond what the model has positions for."""
        found = self._buckets.length_for(max(length, least), self._unit)
        most = getattr(self._module.config.get_text_config(decoder=True), "max_position_embeddings", None) or found
        return max(min(found, most), length, least)


def _prompt_lengths(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the number of tokens of each prompt; raise InputError if prompts are not padded at their beginning."""
    batch, width = input_ids.shape
    if attention_mask is None:
        return torch.full((batch,), width, dtype=torch.int64, device=input_ids.device)
    mask = attention_mask.to(input_ids.device).bool()
    lengths = mask.sum(-1)
    expected = torch.arange(width, device=mask.device) >= width - lengths.unsqueeze(-1)
    if not torch.equal(mask, expected) or not lengths.all():
        raise InputError(
            "attention_mask hides tokens that are not the first of a prompt, or all of one; prompts of different "
            'lengths are padded at their beginning: say tokenizer.padding_side = "left".'
        )
    return lengths


def _aligned(input_ids: Tensor, lengths: Tensor, length: int) -> Tensor:
    """Return the tokens of prompts but for the last of each, from the first position on, behind them anything."""
    places = torch.arange(length, device=input_ids.device) + input_ids.shape[1] - lengths.unsqueeze(-1)
    return input_ids.gather(1, places.clamp(max=input_ids.shape[1] - 1))


def from_first(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the values that the first rank of a mesh has, on all of them."""
    if not many_processes(mesh):
        return x
    x = x.contiguous()
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        dist.broadcast(x, dist.get_global_rank(group, 0), group)
    return x


def check_equal_prompts(input_ids: Tensor, lengths: Tensor, mesh: DeviceMesh) -> None:
    """Raise InputError on all ranks where one has other prompts than the first."""
    if not many_processes(mesh):
        return
    sizes = torch.tensor(input_ids.shape, device=input_ids.device)
    differs = torch.zeros((), dtype=torch.int64, device=input_ids.device)
    if not torch.equal(from_first(sizes.clone(), mesh), sizes):
        differs += 1
    for axis in range(mesh.ndim):
        dist.all_reduce(differs, group=mesh.get_group(axis))
    if not differs:
        mine = torch.cat((input_ids, lengths.unsqueeze(-1)), -1)
        differs += not torch.equal(from_first(mine.clone(), mesh), mine)
        for axis in range(mesh.ndim):
            dist.all_reduce(differs, group=mesh.get_group(axis))
    if differs:
        raise InputError(
            "the ranks were given different prompts; generate takes the whole batch on every rank of the mesh, equal "
            "on all of them."
        )
