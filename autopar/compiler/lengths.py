"""Check on small sizes, before the first padded call, that padding to buckets does not change a model's outputs."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autopar.capture.export import skeleton
from autopar.compiler.garbage_collection import uncollected
from autopar.errors import AutoparError, InputError
from autopar.ir.program.precision import AS_IT_IS
from autopar.ir.program.program import Program
from autopar.planning.request import PlanRequest
from autopar.runtime.lengths.equality import Unequal, first_unequal
from autopar.runtime.lengths.inputs import Arguments, Role, Sizes, padded, random, roles_of, sizes_of
from autopar.runtime.lengths.length_buckets import Buckets
from autopar.runtime.lengths.outputs import Counted, counted_dims
from autopar.runtime.module.tree import Tree
from autopar.runtime.ranks.agreement import from_first_rank

SAMPLES, PADDED_SAMPLES = 2, 4
ADVICE = {
    "length": "Let nothing mix positions with those behind them: causal attention, or an attention_mask; labels that "
    "the loss ignores (-100) and a mean over the others",
    "batch": "Have the loss be a mean over labels that are not ignored (-100), and let nothing mix samples",
}


class Counting:
    """Positions and samples in the outputs of one model, found once per mode and per kind of inputs (sizes aside)."""

    def __init__(self, tree: Tree, request: PlanRequest, mesh: DeviceMesh) -> None:
        self._tree, self._request, self._mesh = tree, request, mesh
        self._known: dict[Hashable, tuple[Counted, ...]] = {}

    def of(self, arguments: Arguments, training: bool, buckets: Buckets) -> tuple[Counted, ...]:
        """Return the `Counted` of each output for inputs such as these, in a mode.

        All ranks call this together. Raises as `SmallSizes.counted`.
        """
        leaves, spec = pytree.tree_flatten(arguments)
        kinds = ((leaf.ndim, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        kind = str(spec), tuple(kinds), roles_of(arguments, buckets), self._tree.state(training)
        if kind not in self._known:
            self._known[kind] = from_first_rank(lambda: self._found(arguments, training, buckets), self._mesh)
        return self._known[kind]

    def _found(self, arguments: Arguments, training: bool, buckets: Buckets) -> tuple[Counted, ...]:
        held = {slot.name: slot.tensors.get(slot.leaf) for slot in self._tree.buffers}
        buffers = {name: each for name, each in held.items() if isinstance(each, Tensor) and not each.is_meta}
        with self._tree.standing_in(training) as model:
            return SmallSizes(model, training, buckets, self._request).counted(arguments, buffers)


@dataclass(frozen=True, slots=True)
class SmallSizes:
    """A model captured in small sizes: the modules, in the mode that counts, and the requested options."""

    model: nn.Module
    training: bool
    buckets: Buckets
    request: PlanRequest

    def counted(self, arguments: Arguments, buffers: Mapping[str, Tensor]) -> tuple[Counted, ...]:
        """Return which dims of each output count positions and samples.

        Only names, numbers of dims and dtypes of `arguments` matter. Raises InputError if padding would change an
        output.
        """
        buckets = self.buckets
        short, long = buckets.check_lengths
        roles = roles_of(arguments, buckets)
        requested = sizes_of(arguments, roles)
        sizes = Sizes(None if requested.length is None else short, None if requested.batch is None else SAMPLES)
        inputs = random(arguments, roles, sizes)
        program = self._captured(inputs)
        larger: dict[str, Program] = {}
        if sizes.length is not None:
            larger["length"] = self._compared(program, inputs, roles, replace(sizes, length=long), "length", buffers)
        if buckets.batches is not None:
            more = replace(sizes, batch=PADDED_SAMPLES)
            larger["batch"] = self._compared(program, inputs, roles, more, "batch", buffers)
        return counted_dims(program, sizes, larger.get("length"), larger.get("batch"))

    def _compared(
        self,
        program: Program,
        inputs: Arguments,
        roles: tuple[Role | None, ...],
        sizes: Sizes,
        what: str,
        buffers: Mapping[str, Tensor],
    ) -> Program:
        """Return the program of padded inputs; InputError where its outputs are others."""
        behind = padded(inputs, roles, sizes)
        other = self._captured(behind)
        found = first_unequal(program, other, inputs, behind, buffers) if self.buckets.check else None
        if found is not None:
            raise InputError(f"{_refusal(found, what)} {ADVICE[what]}. {_way_out(what)}")
        return other

    @uncollected()
    def _captured(self, inputs: Arguments) -> Program:
        """Return the program of these inputs, in float64, whatever the model is stored in."""
        model = skeleton(self.model).double()
        off = [torch.autocast(device, enabled=False) for device in ("cpu", "cuda")]
        try:
            with warnings.catch_warnings(), off[0], off[1]:
                warnings.simplefilter("ignore")  # they were issued for the original model
                traced = replace(self.request, precision=AS_IT_IS).traced(model, *inputs, training=self.training)
                return traced.program(self.request.tiles)
        except AutoparError as error:
            short, long = self.buckets.check_lengths
            raise InputError(
                f"buckets are checked on {SAMPLES} and {PADDED_SAMPLES} samples of {short} and {long} positions, in "
                f"float64, for which the model cannot be captured; give lengths that it takes, as "
                f"Buckets(check_lengths=(64, 128)). The error: {error}"
            ) from error


def _refusal(found: Unequal, what: str) -> str:
    cause = f": {found.cause}" if found.cause else ""
    return f"output {found.output} of the model differs if the {what} is padded{cause}."


def _way_out(what: str) -> str:
    option = {"length": 'give Run(buckets="none")', "batch": "say Buckets(batches=None)"}[what]
    return f"If you know better, say Buckets(check=False); to plan each {what} anew, {option}."
