"""Session of generation for one batch size and one cache length: plans of a token and of prompts, ready to run.

The plan of a token comes first, because most of the time is spent in it. It decides the layout of the cache, and that
of weights that are not stored yet. The plans of prompts keep both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.compiler.inference.state import NAME, CacheSizes, as_dtensors
from autopar.ir.sharding.layout import Layout
from autopar.runtime.module.compiled_module import ParallelModule
from autopar.runtime.module.executable import Executable, Surroundings
from autopar.runtime.module.inputs import Arguments, CallSignature, canonical_arguments

IDS, POSITION_IDS, POSITIONS = "input ids", "position ids", "positions"


def arguments_of(
    signature: CallSignature,
    ids: Any,
    keys: Sequence[Any],
    values: Sequence[Any],
    positions: Any,
    position_ids: Any = None,
) -> Arguments:
    """Return a call of a forward with a cache, with every argument by name; for one token a sample with
    `position_ids`.
    """
    specified = {} if position_ids is None else {"position_ids": position_ids}
    cache = {"keys": list(keys), "values": list(values), "positions": positions}
    return canonical_arguments(signature, (), {"input_ids": ids, **specified, NAME: cache})


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """A graph and what it takes again and again."""

    executable: Executable
    held: Mapping[str, Tensor]
    names: Mapping[str, str]
    """Label of each input that changes from run to run → its placeholder, for inputs that the graph takes."""
    caches: Sequence[Tensor]
    """Local parts of the caches, in the order of the graph's first outputs."""

    @classmethod
    def of(
        cls, module: ParallelModule, executable: Executable, labels: Arguments, caches: Mapping[str, Tensor]
    ) -> Ready:
        """Return the arguments that are ready for a call; `labels` name their tensors, and caches stay in place."""
        leaves = zip(pytree.tree_leaves(labels), executable.program.inputs, strict=True)
        names = {label: placeholder for label, placeholder in leaves if placeholder is not None}
        held = {**executable.constants, **executable.weights_of(module), **executable.buffers_of(module)}
        held |= {names[label]: part for label, part in caches.items() if label in names}
        changing = {label: name for label, name in names.items() if label not in caches}
        return cls(executable, held, changing, tuple(caches.values()))

    def run(self, module: ParallelModule, changing: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """Return the flat outputs; caches are written where they lie."""
        given = {self.names[label]: each for label, each in changing.items() if label in self.names}
        inputs = [given[name] if name in given else self.held[name] for name in self.executable.local.placeholders]
        random = module.random_state.begin(self.executable.draws)
        with torch.no_grad(), Surroundings(self.executable, random):
            outputs = self.executable.graph.runner(module.compilation)(*inputs)
        module.random_state.end()
        for cache, found in zip(self.caches, outputs, strict=False):
            if found is not cache:  # it was written into a copy, moved to another layout and back
                cache.copy_(found)
        return outputs


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """A cache, and what runs on it."""

    module: ParallelModule
    sizes: CacheSizes
    layout: Layout
    keys: Sequence[Tensor]
    """This rank's parts."""
    values: Sequence[Tensor]
    token: Ready
    prompts: dict[int, Ready]
    """Positions → what runs the beginning of a prompt of so many."""

    def prefill(self, ids: Tensor) -> None:
        """Write the keys and values of prompts (batch, positions) into the cache, from its beginning on."""
        length = ids.shape[1]
        if length not in self.prompts:
            self.prompts[length] = self._ready(ids, None)
        positions = torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)
        self.prompts[length].run(self.module, {IDS: ids, POSITIONS: positions})

    def logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the scores (batch, vocabulary) of what follows one token (batch) of each sample at its position
        (batch).
        """
        given = {IDS: ids.unsqueeze(-1), POSITION_IDS: positions.unsqueeze(-1), POSITIONS: positions}
        outputs = self.token.run(self.module, given)
        return outputs[2 * len(self.keys)][:, -1]

    def _ready(self, ids: Tensor, position_ids: Tensor | None) -> Ready:
        return ready(self.module, self.layout, self.keys, self.values, ids, position_ids)


def ready(
    module: ParallelModule,
    layout: Layout,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    ids: Tensor,
    position_ids: Tensor | None,
) -> Ready:
    """Return the graph that decodes a token or, if `position_ids` is None, prefills the beginning of a prompt.

    Each is planned when it first appears.
    """
    signature, mesh = module._forward_signature, module.mesh
    positions = torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)
    whole_keys, whole_values = (as_dtensors(each, layout, mesh) for each in (keys, values))
    executable = module._prepared(arguments_of(signature, ids, whole_keys, whole_values, positions, position_ids))
    of_keys, of_values = ([f"{side} {number}" for number in range(len(keys))] for side in ("keys", "values"))
    at = None if position_ids is None else POSITION_IDS
    labels = arguments_of(signature, IDS, of_keys, of_values, POSITIONS, at)
    caches = dict(zip((*of_keys, *of_values), (*keys, *values), strict=True))
    return Ready.of(module, executable, labels, caches)
