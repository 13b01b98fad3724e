"""Scripts that users write: the same function in one process and on ranks, with the default plan and with ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import Ranks
from tests.users.scripts import architectures, fine_tuning, loops, moved_over, research
from tests.users.scripts.setting import Found, Setting

SCRIPTS: tuple[Callable[[Setting], Found], ...] = (
    fine_tuning.dictionaries_of_tensors,
    fine_tuning.adapters_then_merge,
    fine_tuning.quantized_frozen_base,
    fine_tuning.gradual_unfreezing,
    fine_tuning.a_new_head_on_trained_weights,
    fine_tuning.layerwise_learning_rates,
    loops.two_optimizers,
    loops.average_of_weights,
    loops.average_by_hand,
    loops.curriculum_of_lengths,
    loops.early_stopping,
    loops.resume,
    loops.accumulation_by_hand,
    loops.custom_sampler,
    loops.second_order_closure,
    loops.low_precision_by_autocast,
    research.gradient_noise,
    research.sharpness_aware,
    research.penalties_on_parameters,
    research.steps_by_hand,
    research.siamese,
    research.truncated_backpropagation,
    research.learned_weights_of_tasks,
    research.reversed_gradients,
    research.policy_gradient,
    research.adversarial_inputs,
    research.hooks_that_log,
    architectures.residual_network,
    architectures.diffusion,
    architectures.variational_autoencoder,
    architectures.graph_network,
    architectures.recurrent_language_model,
    architectures.encoder_with_padding,
    architectures.recommendation,
    architectures.speech,
    architectures.translation,
)
OPTIONS: dict[str, dict[str, Any]] = {"default": {}, "zero3": {"strategy": "zero3"}}
MOVED_OVER: tuple[Callable[[Setting], Found], ...] = (
    moved_over.distributed_sampler,
    moved_over.accumulated_with_clipping,
    moved_over.metrics_and_full_checkpoint,
)
"""Each rank has its own samples."""


def _on_ranks(script: Callable[[Setting], Found], folder: str, options: dict[str, Any]) -> Found:
    return script(Setting(Path(folder), options))


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_shows_what_it_shows_in_one_process(
    script: Callable[[Setting], Found], name: str, ranks: Ranks, tmp_path: Path
) -> None:
    alone = script(Setting(tmp_path))
    for found in ranks.run(_on_ranks, script, str(tmp_path), OPTIONS[name], timeout=120.0):
        _assert_equal(found, alone)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("script", MOVED_OVER, ids=lambda script: script.__name__)
def test_a_script_moved_over_from_ddp_shows_what_the_whole_batch_shows(
    script: Callable[[Setting], Found], name: str, ranks: Ranks, tmp_path: Path
) -> None:
    alone = script(Setting(tmp_path))
    options = {"inputs": "local", **OPTIONS[name]}
    for found in ranks.run(_on_ranks, script, str(tmp_path), options, timeout=120.0):
        _assert_equal(found, alone)


def _assert_equal(found: Found, alone: Found) -> None:
    assert found.keys() == alone.keys()
    for key, expected in alone.items():
        tolerance = 2e-2 if key.startswith("rough") else 1e-4
        torch.testing.assert_close(
            found[key], expected, rtol=tolerance, atol=tolerance / 10, msg=lambda text, key=key: f"{key}: {text}"
        )
