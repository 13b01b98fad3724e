"""A module whose parameters are stored as a plan says: their names, state dict and ties are those of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.guards import unseen
from autopar.capture.passes.autocast import Autocast
from autopar.capture.python.grad_mode import of_this_call
from autopar.capture.python.kinds import PythonKinds, warn_of_many
from autopar.capture.static.arguments import with_static
from autopar.console.units import parse_bytes
from autopar.costs.space.returned import Returned
from autopar.errors import InputError
from autopar.ir.program.program import Program
from autopar.ir.program.python_state import INTERNALS
from autopar.ir.program.python_state import Watch as PythonWatch
from autopar.ir.sharding.layout import Layout
from autopar.runtime.checkpoints.pretrained import write_pretrained
from autopar.runtime.checkpoints.read import give_values, read
from autopar.runtime.lengths.inputs import Sizes
from autopar.runtime.lengths.outputs import Padding
from autopar.runtime.lengths.varying import Varying
from autopar.runtime.module.executable import Runs
from autopar.runtime.module.inputs import Arguments, call_signature, canonical_arguments, kind_of, values_of
from autopar.runtime.module.local_batch import Given, parts_as_dtensors
from autopar.runtime.module.parameters import Storage, as_stored, tie, ties_of
from autopar.runtime.module.replaced import TreeTensors, checked
from autopar.runtime.module.tree import MODULE_INTERFACE, State, Tree
from autopar.runtime.module.unset_buffers import UnsetBuffers, not_persistent, persistent
from autopar.runtime.module_interface.copying import Copyable
from autopar.runtime.module_interface.direct_calls import check_direct_calls
from autopar.runtime.module_interface.model_class import also_of_the_class_of
from autopar.runtime.module_interface.optimizers import watch_optimizers
from autopar.runtime.module_interface.refused import NotToBeWrapped, check_not_inside_ddp, refuse_composable_functions
from autopar.runtime.numbers.changing import Numbers
from autopar.runtime.numbers.leaves import described
from autopar.runtime.outputs.returning import Result, Returning
from autopar.runtime.ranks.agreement import gathered
from autopar.runtime.ranks.calls import Calls
from autopar.runtime.ranks.failure import watched
from autopar.runtime.recompute.graph import Compilation
from autopar.runtime.recompute.random_state import RandomState


class StoredModule(Copyable, NotToBeWrapped, nn.Module, Generic[Runs]):
    """A module that gets its parameters when its first inputs are known, as `lay_out` stores them.

    Its submodules copy the model's own, in a `Tree` whose root has the same parameters, buffers and state-dict hooks.
    """

    FIRST_CALL = "call it once"

    scaler: Any = None
    """A `ShardedGradScaler` whose scale `train_step` puts on the gradients; its `step` and `update` stay the caller's.

    Its process group is that of all ranks of the mesh: all of them skip an update, or none.
    """
    compilation: Compilation | None = None
    """Options given to `compile`; None before."""
    varying: Varying | None = None
    """Brings calls to the sizes of buckets, where there are any."""
    _padding: Padding | None = None
    """Padding of the most recent call."""
    _compiled: ClassVar[type]
    """This class, where that of an instance is the model's, too."""

    def __init__(
        self,
        tree: Tree,
        mesh: DeviceMesh,
        prepare: Callable[[Arguments, bool, frozenset[str] | None], Runs],
        capture: Callable[[Arguments, bool, frozenset[str] | None], Program],
        random_state: RandomState,
        forgives: type[Exception],
        given: Given,
        returned: Returned,
        stage_devices: DeviceMesh | None = None,
    ) -> None:
        """`prepare` takes arguments, training, and the names of frozen parameters if known; once per kind of input.

        `capture` takes the same, and makes the program without a plan.
        """
        super().__init__()
        for name in MODULE_INTERFACE:
            self.__dict__[name] = vars(tree.root)[name]
        self.tree, self.training = tree, tree.root.training
        self._forward_signature = call_signature(tree.root)
        self._given, self._input_mesh = given, stage_devices or mesh
        self._mesh, self._device = mesh, mesh.device_type
        self._watch = watched(self, mesh, forgives)
        self._calls = Calls(self._watch, given.check)
        self._returning = Returning(returned, self._input_mesh, self._calls)
        self._prepare, self._capture = prepare, capture
        self._numbers = Numbers()
        self._python = PythonKinds(tree.root, tree.left_hooks)
        self._known: dict[tuple[object, State, object], list[tuple[PythonWatch, Runs]]] = {}
        """A kind of input → programs for it, and the Python state for which each was captured."""
        self._latest: Runs | None = None
        self.random_state = random_state
        """Seed and step of what the model draws; its state dict has them, too."""
        self.unset_buffers = UnsetBuffers()
        self._state: State | None = None
        self._storage: Storage | None = None
        self._held = TreeTensors(tree)
        """Parameters in the tree's slots, when they were last laid out or checked."""

    def lay_out(self, storage: Storage, model: nn.Module) -> None:
        """Store the parameters and buffers of `model` on this rank; called by all ranks of the mesh."""
        self.tree.put(storage.of(model))
        self._storage, self._held = storage, TreeTensors(self.tree)
        watch_optimizers(self, model, self._held.tensors)

    def compile(self, *args: Any, regional: bool = False, **kwargs: Any) -> None:
        """Run graphs under `torch.compile` from now on, in `train_step` too, as `torch.nn.Module.compile` does.

        Takes the arguments of `torch.compile` that follow the model. `regional`: layers are compiled one by one, equal
        ones once; weights are moved between them as without `torch.compile`.
        """
        self.compilation = Compilation(lambda graph: torch.compile(graph, *args, **kwargs), regional)

    def follow(self, original: nn.Module | None) -> None:
        """Be a module of the model's class, and let what is set in attributes of the original count, too.

        That is so as long as somebody holds the original; a copy of a compiled module has none.
        """
        refuse_composable_functions(self, self.tree.root)
        check_direct_calls(self.tree.root, bool(self._given.axes))
        self.__class__ = also_of_the_class_of(self.tree.root, type(self))
        self._python.follow(original)

    def __getattr__(self, name: str) -> Any:
        """Look up an attribute as the model does: the instance's own first, then the `__getattr__` of its class."""
        python = vars(self).get("_python")
        if python is not None and python.shown and python.keeps(name):
            return getattr(python.root, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute as `torch.nn.Module` does; one that is the model's own, or new, is set in the model."""
        python = vars(self).get("_python")
        if python is None or not python.shown or name in vars(self) or not python.takes(self._compiled, name, value):
            super().__setattr__(name, value)
        else:
            setattr(python.root, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute as `torch.nn.Module` does; one that the model keeps is deleted there."""
        python = vars(self).get("_python")
        if python is not None and name not in vars(self) and name in vars(python.root) and name not in INTERNALS:
            delattr(python.root, name)
        else:
            super().__delattr__(name)

    @property
    def axes_of_parts(self) -> tuple[str, ...]:
        """Return the axes of the mesh over which ranks give different parts of the batch, as `inputs=` states."""
        return self._given.axes

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Return the call with every argument by name, and DTensors for parts of the batch."""
        check_not_inside_ddp()
        arguments = canonical_arguments(self._forward_signature, args, kwargs)
        if self._given.static:
            arguments = with_static(arguments, self._given.static, self.tree.root.forward)
        if self.varying is not None:
            arguments, self._padding = self.varying.fitted(arguments, self._sizes_of_all)
        if not self._given.axes:
            return arguments
        return parts_as_dtensors(arguments, self._input_mesh, self._given.axes, self._returning.averages)

    def _in_bucket(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Return the call with every argument by name, in the sizes of its bucket."""
        arguments = canonical_arguments(self._forward_signature, args, kwargs)
        return arguments if self.varying is None else self.varying.fitted(arguments, self._sizes_of_all)[0]

    def _sizes_of_all(self, mine: Sizes) -> list[Sizes]:
        """Return the sizes of all ranks' parts, in the order of the mesh; this rank's where all have the same."""
        if not self._given.axes or not self._watch.many or self._calls.is_quiet:
            return [mine]
        self._calls.agree("sizes", lambda: {"inputs": "a part of the batch, in a bucket"}, dict)
        return gathered(mine, self._input_mesh)

    def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """Capture and plan for each of the stated lengths of `Run(buckets=…)`, with inputs as these; the longest first.

        Called by all ranks. Raises InputError where no lengths are stated.
        """
        if self.varying is None:
            raise InputError("the model was compiled without buckets; give autopar.compile(..., run=Run(buckets=…)).")
        for example in self.varying.examples(canonical_arguments(self._forward_signature, args, kwargs)):
            self.prepare(*example)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Runs:
        """Return the executable or pipeline for inputs such as these."""
        raise NotImplementedError

    def _ready(self) -> Runs:
        """Return the latest executable or pipeline, with replaced parameters stored.

        Raises InputError if the module has no parameters yet.
        """
        if self._latest is None:
            raise InputError(
                "the model was compiled without example_inputs, so it has no parameters and no plan yet; "
                f"{self.FIRST_CALL}, or give autopar.compile(..., example_inputs=...)."
            )
        self._take_in_what_was_put()
        return self._latest

    def _prepared(self, arguments: Arguments, batch: Arguments | None = None, *, runs: bool | None = None) -> Runs:
        """Return the executable or pipeline for these arguments, prepared when they first appear.

        `batch` is the batch of which they are the first micro-batch. Without it they are an example, whose values do
        not count and which does not run; `runs` overrides the latter. Raises InputError if another rank is called
        differently.
        """
        frozen = None
        if self._latest is not None:
            self._take_in_what_was_put()
            frozen = self._frozen()
        else:
            self.tree.look()
        state = self.tree.state(self.training)
        if self._state is None or not self._state.may_come_back(state):
            self._known = {key: runs for key, runs in self._known.items() if key[1].may_come_back(state)}
        vars(self)["_state"] = state

        def kind_for(tensors: Collection[int]) -> tuple[object, State, frozenset[str] | None]:
            return kind_of(arguments, self._device, tensors), state, frozen

        kind, numbers = self._numbers.kind(arguments, kind_for)
        known = self._known.get(kind, [])
        number = self._python.fitting(known)
        whole = None if self._given.axes else self._padding  # ranks with parts have told each other of theirs
        self._calls.agree(
            (kind, number, whole),
            lambda: self._facts(arguments, frozen, number) | ({} if whole is None else {"sizes": str(whole)}),
            lambda: {} if batch is None else values_of(batch),
            numbers,
        )
        if number == len(known):
            # A first call for inference is prepared for training all the same, and one inside a checkpoint apart from
            # counts: only the innermost hooks see saved tensors.
            apart = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
            with unseen(), of_this_call(), torch.inference_mode(False), torch.enable_grad(), apart:
                capture = lambda given: self._capture(given, self.training, frozen)  # noqa: E731
                given = self._numbers.replaced(arguments, kind_for, capture, self._mesh)
                found = self._prepare(given, self.training, frozen)
            # The first graph gave the module its parameters, and the key must name those that are frozen.
            frozen = self._frozen() if frozen is None else frozen
            known = self._known.setdefault(self._numbers.planned(arguments, found.input_values, kind_for), [])
            known.append((self._python.watched(found.python), found))
            warn_of_many(known)
            number = -1
        watch, latest = known[number]
        vars(self)["_latest"] = latest
        if batch is not None if runs is None else runs:
            watch.leave_written()
        return latest

    def _returned(self, runs: Runs, program: Program, values: Sequence[Any], layouts: Sequence[Layout | None]) -> Any:
        """Return the outputs of a call to the user, in the structure that the model returns."""
        counted: Sequence[Any] = (None,) * program.num_outputs
        if self.varying is not None and self._padding is not None:  # outputs may have to be cut
            counted = self.varying.counted[runs]
        results = list(map(Result, values, layouts, counted))
        return self._returning.outputs(program, results, self._padding)

    def _facts(self, arguments: Arguments, frozen: frozenset[str] | None, python: int) -> dict[str, str | list[str]]:
        """Describe a call for comparison with other ranks."""
        _, *below = self.tree.root.named_modules()
        autocast = Autocast.around(self._device)
        return {
            **described(arguments),
            "mode": "training" if self.training else "evaluation",
            "modules in another mode": [name for name, module in below if module.training != self.training],
            "hooks": str(len(self._state.hooks) if self._state else 0),
            "autocast": "off" if autocast is None else str(autocast.dtype),
            "Python state": f"the {python + 1}. that forward has read with these inputs",
            "frozen parameters": sorted(frozen or ()),
        }

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return the named parameters as `torch.nn.Module` does; raise InputError before a lazy compile's inputs."""
        self._ready()
        return super().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """Return the named buffers as `torch.nn.Module` does; raise InputError before a lazy compile's first inputs."""
        self._ready()
        return super().named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict as `torch.nn.Module` does; raise InputError before a lazy compile's first inputs."""
        self._ready()
        return super().state_dict(*args, **kwargs)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save as the model's own class does, extra state included, and add the random state."""
        self.tree.root._save_to_state_dict(destination, prefix, keep_vars)
        self.random_state.write_into(destination._metadata[prefix[:-1]])

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load as the model's own class does, extra state included, and read the random state."""
        self.tree.root._load_from_state_dict(*args, **kwargs)
        _, _, metadata, *_ = args
        self.random_state.read_from(metadata)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict as `torch.nn.Module` does; parameters may also be whole tensors, equal on every rank."""
        self._ready()
        if not isinstance(state_dict, Mapping):
            raise InputError(f"a state dict is a mapping of names to tensors; found a {type(state_dict).__name__}.")
        ties = ties_of(self)
        state: Any = as_stored(self, state_dict)
        # Modules whose tensors other ranks have must not make up what an older version of theirs had not saved.
        known = state._metadata
        newest = {n: {**known.get(n, {}), "version": module._version} for n, module in self.tree.absent().items()}
        state._metadata = {**known, **newest}
        result = super().load_state_dict(state, *args, **kwargs)
        tie(self, ties)
        self._held = TreeTensors(self.tree)
        return result

    def load_safetensors(self, path: str | Path) -> None:
        """Read all parameters and persistent buffers from safetensors: each rank its own parts, one after the other.

        `path` is a file, or a folder as Hugging Face writes it. For a model of transformers, names and shapes may be
        those of the Hub, and buffers without values that no checkpoint has are computed again.
        Raises InputError where names or shapes are others.
        """
        self._ready()
        give_values(self.tree.root, self.unset_buffers.names(self))
        names = dict(nn.Module.named_parameters(self, remove_duplicate=False)) | persistent(self)
        read(self.tree.root, self.tree.standing_in(self.training), names, self.tree.first_name, path)

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: None = None,
        max_shard_size: str | int = "5GB",
    ) -> None:
        """Write parameters and persistent buffers as Hugging Face does, to be read by `from_pretrained` and `load`.

        Called by all ranks of the mesh. Tensors are gathered one by one and written in files of at most
        `max_shard_size`; tied ones under their first name; the model's `config` and `generation_config` are written
        next to them, where it has them. A PeftModel writes its adapters, as PEFT does. `is_main_process` has no effect.
        Raises InputError for a `state_dict`, and on every rank where one cannot write.
        """
        self._ready()
        if state_dict is not None:
            raise InputError("save_pretrained of a compiled module gathers its own parameters; leave state_dict out.")
        stored = dict(nn.Module.named_parameters(self)) | persistent(self)
        stand_ins = self.tree.standing_in(self.training)
        write_pretrained(self.tree.root, stand_ins, stored, self._mesh, save_directory, parse_bytes(max_shard_size))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply a function as `torch.nn.Module` does (`to`, `to_empty` …), but keep tied parameters tied."""
        self._ready()
        ties, unset = ties_of(self), self.unset_buffers.names(self)
        super()._apply(fn, recurse)
        tie(self, ties)
        self._held = TreeTensors(self.tree)
        self.unset_buffers.mark(self, unset)
        return self

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Empty the module as `torch.nn.Module.to_empty` does, but keep the values of non-persistent buffers."""
        self._ready()
        before = dict(not_persistent(self))
        super().to_empty(device=device, recurse=recurse)
        self.unset_buffers.restore(self, before)
        return self

    def _take_in_what_was_put(self) -> None:
        """Store parameters that were put in the place of others as those were; InputError where that cannot be."""
        self.tree.look()
        if self._held.is_still_there():
            return
        assert self._storage is not None
        replaced = checked(self.tree, self._held.tensors)
        for name, given in replaced.items():
            stored = self._storage.filled(name, given)
            for slot in self.tree.parameters:
                if self.tree.first_name[slot.name] == name:
                    slot.tensors[slot.leaf] = stored
        self._held = TreeTensors(self.tree)

    def _frozen(self) -> frozenset[str]:
        """Return the frozen parameters, on which the graph depends, as they get no gradient."""
        slots = zip(self.tree.parameters, self._held.tensors, strict=True)
        return frozenset([slot.name for slot, each in slots if each is not None and not each.requires_grad])
