"""The state of optimizers of matrices goes from one mesh and strategy to another, as that of others does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import autopar
from autopar.optim import GaLoreAdamW, Muon
from tests.optim.test_compiled import KINDS
from tests.support.families import FAMILIES
from tests.support.optimizing import losses_of
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

WHOLE = StateDictOptions(full_state_dict=True)


def _made(kind: str, strategy: str) -> tuple[Any, Muon | GaLoreAdamW]:
    args, kwargs = FAMILIES["llama"].inputs(0)
    model = autopar.compile(
        FAMILIES["llama"].build(), mesh((2,), ("dp",)), kwargs or args, strategy=strategy, hardware=SLOW_DEVICES
    )
    made_by, settings = KINDS[kind]
    return model, made_by(model.named_parameters(), **settings)


def _steps(model: Any, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    def loss_of(number: int) -> Any:
        args, kwargs = FAMILIES["llama"].inputs(number)
        return FAMILIES["llama"].loss(model(*args, **kwargs))

    return losses_of(optimizer, numbers, loss_of)


def _resumed(kind: str) -> tuple[list[float], list[float], Any, Any]:
    """Losses of a run that goes on, and of one that does by another strategy from its checkpoint; the state of both."""
    model, optimizer = _made(kind, "zero3")
    _steps(model, optimizer, range(3))
    weights, state = get_state_dict(model, optimizer, options=WHOLE)
    going_on = _steps(model, optimizer, range(3, 6))
    other, again = _made(kind, "megatron")
    set_state_dict(other, again, model_state_dict=weights, optim_state_dict=state, options=WHOLE)
    _, back = get_state_dict(other, again, options=WHOLE)
    return going_on, _steps(other, again, range(3, 6)), state["state"], back["state"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_a_checkpoint_by_another_strategy(ranks: Ranks, kind: str) -> None:
    for going_on, resumed, state, back in ranks.run(_resumed, kind, world_size=2, timeout=240):
        torch.testing.assert_close(back, state, rtol=0, atol=0)
        torch.testing.assert_close(resumed, going_on, rtol=1e-3 if kind == "muon" else 1e-4, atol=0)
