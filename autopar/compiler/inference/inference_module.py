"""A compiled module that runs its forward alone, in evaluation mode, and generates where the model does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.compiler.inference.generation import Generation, check_arguments
from autopar.compiler.inference.layouts import best_laid, program_of
from autopar.compiler.inference.session import Session, ready
from autopar.compiler.inference.state import CacheSizes
from autopar.errors import InputError
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.request import PlanRequest
from autopar.runtime.lengths.length_buckets import Buckets
from autopar.runtime.module.compiled_module import ParallelModule
from autopar.runtime.module.inputs import Arguments
from autopar.runtime.module.parameters import Storage
from autopar.runtime.module.tree import Tree
from autopar.runtime.numbers.leaves import name_of
from autopar.runtime.ranks.agreement import from_first_rank

ANEW = "Compile the model with training=True to train it."


class InferenceModule(ParallelModule):
    """A model that runs on a mesh without training. Made by `autopar.compile(..., training=False)`."""

    request: PlanRequest = PlanRequest()
    """Requested properties of plans, as `compile` sets them."""
    _session: Session | None = None
    """Session of the last `generate`."""

    def __init__(self, tree: Tree, *args: Any, **options: Any) -> None:
        forwards = _of_transformers()
        if forwards is not None and forwards.generates(tree.root):
            tree.root.__class__ = forwards.with_cache(type(tree.root))
        super().__init__(tree, *args, **options)

    @property
    def device(self) -> torch.device:
        """Device of the parameters, also before they are laid out."""
        return torch.device(self._device)

    def lay_out(self, storage: Storage, model: nn.Module) -> None:
        """Lay out parameters and buffers as for training, then let none require a gradient."""
        super().lay_out(storage, model)
        for each in self._held.tensors:
            if isinstance(each, Tensor):
                each.requires_grad_(False)

    def train(self, mode: bool = True) -> InferenceModule:
        """Set the evaluation mode; raise InputError for training mode."""
        if mode:
            raise InputError(f"the model was compiled with training=False, and stays in evaluation mode. {ANEW}")
        return super().train(False)

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raise InputError: this module does not train."""
        raise InputError(f"train_step of a model that was compiled with training=False. {ANEW}")

    @torch.compiler.disable(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the global batch, without gradients."""
        with torch.no_grad():
            outputs = super().forward(*args, **kwargs)
        return pytree.tree_map_only(Tensor, _without_backward, outputs) if torch.is_grad_enabled() else outputs

    def generate(self, inputs: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the tokens (batch, positions) behind prompts, as transformers' `generate` of the model: greedy, or
        drawn.

        Called by all ranks with the same prompts, which get the same tokens. Arguments are those of transformers; what
        is not honoured is an InputError. A batch size, and a bucket of lengths, is planned when it first appears
        (docs/how-to/inference.md).
        """
        forwards, root = _of_transformers(), self.tree.root
        if forwards is None or not forwards.generates(root):
            raise InputError(
                f"generate of a {type(root).__name__}, which is no language model of transformers with a generate of "
                "its own; call the compiled module, and choose tokens by its outputs."
            )
        if self._given.axes:
            raise InputError(
                f"generate of a model that was compiled with inputs over {', '.join(self._given.axes)}; it takes the "
                'whole batch on every rank: compile with inputs="whole".'
            )
        forwards.layers_of(root)
        check_arguments(kwargs)
        buckets = Buckets() if self.varying is None else self.varying.buckets
        run = Generation(self, buckets, torch.get_rng_state(), kwargs.get("streamer"))
        with self._watch, torch.no_grad(), self._without_buckets():
            return super().generate(inputs, custom_generate=run, **kwargs)  # type: ignore[misc]  # of the model's class

    def session(self, batch: int, length: int) -> Session:
        """Return the session for a batch size and a cache length; free the cache of a session of other sizes."""
        forwards = _of_transformers()
        assert forwards is not None, "generate has found a model of transformers"
        dtypes = (slot.stand_in.dtype for slot in self.tree.parameters if slot.stand_in.is_floating_point())
        dtype = self.request.precision.computes(next(dtypes))
        sizes = CacheSizes(forwards.layers_of(self.tree.root), batch, length, dtype)
        before, self._session = self._session, None
        if before is None or before.sizes != sizes:
            before = None
            layout = from_first_rank(lambda: self._best_layout(sizes), self.mesh)
            keys, values = (sizes.parts(layout, self.mesh) for _ in range(2))
        else:
            layout, keys, values = before.layout, before.keys, before.values
        ids = torch.zeros((batch, 1), dtype=torch.int64, device=self.device)
        self._session = Session(self, sizes, layout, keys, values, ready(self, layout, keys, values, ids, ids), {})
        return self._session

    def _best_layout(self, sizes: CacheSizes) -> Layout:
        with self.tree.standing_in(False) as model:
            program = program_of(model, self.request, sizes, 1)
        stored = self._storage.layouts if self._storage is not None else {}
        return best_laid(program, self.request, Mesh.of(self.mesh), sizes, stored).layout

    @contextlib.contextmanager
    def _without_buckets(self) -> Iterator[None]:
        """Turn buckets of calls off, as generation pads prompts itself."""
        varying, self.varying = self.varying, None
        try:
            yield
        finally:
            self.varying = varying

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        arguments = super()._arguments(args, kwargs)
        for path, leaf in pytree.tree_flatten_with_path(arguments)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise InputError(
                    f"{name_of(path)} needs a gradient, which a model that was compiled with training=False does not "
                    f"give; give {name_of(path)}.detach(). {ANEW}"
                )
        return arguments

    def _frozen(self) -> frozenset[str]:
        """Return all parameters; raise InputError if one of them requires a gradient."""
        found = super()._frozen()
        slots = zip(self.tree.parameters, self._held.tensors, strict=True)
        learning = [slot.name for slot, each in slots if each is not None and slot.name not in found]
        if learning:
            raise InputError(
                f"{learning[0]} needs a gradient, which a model that was compiled with training=False does not give; "
                f"say requires_grad_(False) of it. {ANEW}"
            )
        return found


def _of_transformers() -> ModuleType | None:
    """Return the `cached_forward` module; None if transformers is not imported.

    Without that import no model can be one of transformers.
    """
    if "transformers" not in sys.modules:
        return None
    from autopar.compiler.inference import cached_forward

    return cached_forward


class _WithoutBackward(torch.autograd.Function):
    """An output as it is; who goes backward through it is told why that cannot be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise InputError(
            f"backward through a model that was compiled with training=False, which keeps nothing for it. {ANEW}"
        )


def _without_backward(x: Tensor) -> Tensor:
    if not x.is_floating_point() and not x.is_complex():
        return x
    return _WithoutBackward.apply(x, torch.zeros((), requires_grad=True))
