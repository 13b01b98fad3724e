"""transformers' Trainer on texts of different lengths, padded by the collator to the longest of each rank's batch."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close

import autopar
from autopar.errors import InputError
from autopar.integrations.varying_texts import buckets_for
from autopar.runtime.lengths.length_buckets import Buckets
from autopar.runtime.ranks.calls import _difference
from tests.support.language_models import language_model, texts
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh

pytest.importorskip("accelerate")
BATCH, STEPS, PAD = 4, 3, 63


def _texts() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 15, (BATCH * STEPS,), generator=generator).tolist()
    return [{"input_ids": torch.randint(0, PAD, (length,), generator=generator)} for length in lengths]


def _collated(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = [row["input_ids"] for row in rows]
    padded, labels = (pad_sequence(ids, True, value) for value in (PAD, -100))
    mask = pad_sequence([torch.ones_like(each) for each in ids], True, 0)
    return {"input_ids": padded, "attention_mask": mask, "labels": labels}


def _own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum", label_smoothing=0.2)
    return total / (num_items_in_batch if num_items_in_batch is not None else (targets != -100).sum())


def _trained(folder: str, compiled: bool, loss: str = "the model's") -> dict[str, Any]:
    import transformers
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from autopar.integrations.trainer import Trainer

    world = {"WORLD_SIZE": dist.get_world_size(), "RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank()}
    names = {name: str(value) for name, value in world.items()}
    with mock.patch.dict(os.environ, {**names, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}):
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            per_device_train_batch_size=BATCH // dist.get_world_size(),
            per_device_eval_batch_size=BATCH // dist.get_world_size(),
            max_steps=STEPS,
            logging_steps=1,
            learning_rate=1e-2,
            label_smoothing_factor=0.1 if loss == "smoothed" else 0.0,
        )
        torch.manual_seed(0)
        sizes: Any = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=PAD)
        options: Any = {"data_collator": _collated, "train_dataset": _texts(), "eval_dataset": _texts()[:8]}
        options["compute_loss_func"] = _own_loss if loss == "own" else None
        kind: Any = transformers.Trainer
        if compiled:
            kind, options["mesh"] = Trainer, mesh((dist.get_world_size(),), ("dp",))
            options["options"] = {"strategy": "zero3", "hardware": SLOW_DEVICES}
        trainer = kind(model=transformers.LlamaForCausalLM(config), args=arguments, **options)
        trainer.train()
        predicted = trainer.predict(_texts()[:8])
    for each in (AcceleratorState, GradientState, PartialState):
        each._reset_state()
    found = {f"loss {step}": line["loss"] for step, line in enumerate(trainer.state.log_history) if "loss" in line}
    found |= {name: whole(each) for name, each in trainer.model.named_parameters()}
    # Behind its text a row has what its batch was padded with, which is of another length on each rank.
    logits = [row[: len(text["input_ids"])] for row, text in zip(predicted.predictions, _texts(), strict=False)]
    return found | {"predicted": logits, "evaluated": predicted.metrics["test_loss"]}


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["the model's", "smoothed", "own"])
def test_the_trainer_pads_batches_of_different_lengths_alike(ranks: Ranks, tmp_path: Any, loss: str) -> None:
    (expected,) = ranks.run(_trained, str(tmp_path), False, loss, world_size=1)
    assert f"loss {STEPS - 1}" in expected
    for found in ranks.run(_trained, str(tmp_path), True, loss, world_size=2):
        assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_buckets_are_used_only_where_batches_differ_in_length() -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=0, num_attention_heads=2, pad_token_id=7)
    model, rows = BertForMaskedLM(config), _texts()
    found = buckets_for(rows, _collated, model, None)
    assert found is not None
    assert (found.lengths, found.padding["input_ids"], found.padding["labels"]) == ("powers of two", 7, -100)
    tokenizer = SimpleNamespace(pad_token_id=3, pad_token_type_id=1)
    for processing in (tokenizer, SimpleNamespace(tokenizer=tokenizer)):
        found = buckets_for(rows, _collated, model, processing)
        assert found is not None
        assert (found.padding["input_ids"], found.padding["token_type_ids"]) == (3, 1)
    assert buckets_for(rows[:1] * 8, _collated, model, None) is None
    assert buckets_for(rows, lambda each: {"pixel_values": torch.zeros(len(each), 3)}, model, None) is None
    with_decoder = lambda each: {**_collated(each), "labels": torch.zeros(len(each), 2)}  # noqa: E731
    assert buckets_for(rows, with_decoder, model, None) is None


def _advised() -> None:
    """Check that the advice in the error makes the call succeed."""
    rank = dist.get_rank()
    for sizes, advice, options in (
        (((2, 6), (2, 5)), 'Only lengths differ, which Run(buckets="auto") pads', {"buckets": "auto"}),
        (
            ((2, 8), (1, 8)),
            "Only numbers of samples differ: give every rank as many, for example with drop_last=True, or pad the "
            'missing ones with Run(buckets=autopar.Buckets(batches="largest")',
            {"buckets": Buckets(batches="largest")},
        ),
    ):
        size = sizes[rank]
        with pytest.raises(InputError, match=re.escape(advice)):
            _language_model({})(**texts(*size))
        assert _language_model(options)(**texts(*size))["loss"].isfinite()


def _language_model(options: dict[str, Any]) -> Any:
    return autopar.compile(
        language_model(), mesh((2,), ("dp",)), inputs="local", strategy="data_parallel", **by_flag(**options)
    )


def test_ranks_with_batches_of_different_sizes_are_told_which_buckets_help(ranks: Ranks) -> None:
    ranks.run(_advised)


def test_inputs_of_unknown_names_are_to_be_padded_by_name() -> None:
    here, there = ({"batch['x']": f"float32[8, {length}, 4] as S(0) over dp"} for length in (6, 5))
    text = _difference((0, here), (1, there))
    assert text.endswith(
        "Only lengths differ, which Run(buckets=autopar.Buckets(padding={'x': …})) pads alike on all ranks."
    )
    here, there = ({"labels": f"int64[{batch}, {length}] as S(0) over dp"} for batch, length in ((8, 6), (6, 5)))
    text = _difference((0, here), (1, there))
    assert text.endswith('Only sizes differ, which Run(buckets=autopar.Buckets(batches="largest")) pads alike.')
    one, other = {"x": "float32[8, 6]"}, {"x": "float32[8, 5]"}
    assert "Every rank needs inputs of the same shapes" in _difference((0, one), (1, other))
