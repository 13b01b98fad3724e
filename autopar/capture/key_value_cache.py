"""Key-value caches of transformers, which serve generation: a captured forward makes none, and returns none."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from autopar.capture.python.user_code import is_users


def without_cache(model: nn.Module) -> None:
    """Switch the caches of a model off."""
    for config in _configs(model):
        if getattr(config, "use_cache", False):
            config.use_cache = False


def given_without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that asks for no cache."""
    return {name: False if name == "use_cache" and value is True else value for name, value in kwargs.items()}


def warn_of_packed_rows(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Warn where transformers reads position ids in another way because the cache is off."""
    requested = kwargs.get("use_cache")
    on = any(getattr(config, "use_cache", False) for config in _configs(model)) if requested is None else requested
    if not on or kwargs.get("position_ids") is None or kwargs.get("attention_mask") is not None:
        return
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_globals.get("__name__")):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"{type(model).__name__} is captured with use_cache=False, and without a cache transformers takes position_ids "
        "that begin anew for packed texts, which do not attend to each other. With a cache, as on one process now, "
        "they would. Set model.config.use_cache = False to train alike in both.",
        stacklevel=level,
    )


def _configs(model: nn.Module) -> list[Any]:
    configs = (getattr(module, "config", None) for module in model.modules())
    return [config for config in configs if config is not None]
