"""Wrappers that divide or replicate a model, around one that is divided already: refused, by what they do first.

None of them asks a module whether it may be wrapped. DistributedDataParallel asks which parameters it is to leave out,
FullyShardedDataParallel marks every module, `fully_shard`, `replicate` and other composable functions look whether they
were applied before: each of these places answers with an error.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NoReturn

from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.nn.parallel import DistributedDataParallel

from autopar.errors import InputError


class NotToBeWrapped:
    """Base of modules that run on a mesh by themselves."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        raise refusal("DistributedDataParallel")

    @property
    def _is_fsdp_managed_module(self) -> bool:
        return False

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, value: bool) -> NoReturn:
        raise refusal("FullyShardedDataParallel")


class _NeverApplied(OrderedDict[Any, Any]):
    """State that composable functions keep in a module; the look-up with which they begin raises an error."""

    def __contains__(self, function: object) -> bool:
        raise refusal(getattr(function, "__name__", str(function)))


def refuse_composable_functions(root: nn.Module, tree: nn.Module) -> None:
    """Let `fully_shard` and its like fail on a compiled module, and on those below it."""
    for module in (root, *tree.modules()):
        vars(module)[STATE_KEY] = _NeverApplied()


def check_not_inside_ddp() -> None:
    """Raise InputError in a call that DistributedDataParallel makes: the compiled module is a part of what it wraps."""
    if DistributedDataParallel._active_ddp_module is not None:
        raise refusal("DistributedDataParallel")


def refusal(wrapper: str) -> InputError:
    return InputError(
        f"{wrapper} around a model that autopar.compile returned: its plan already divides and replicates it over its "
        f"mesh, and its backward sums gradients. Leave {wrapper} out; give each rank its part of the batch with "
        'autopar.compile(..., inputs="local"); for transformers there is autopar.integrations.trainer.Trainer.'
    )
