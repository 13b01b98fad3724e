"""Conversion of an nn.Module and example inputs to a Program by `torch.export` on fake tensors and `normalize`.

Nothing of the model is computed or copied: a skeleton with fake parameters is traced. `guards` prevents what the trace
would change in silence; what the trace cannot follow raises a CaptureError.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._library.custom_ops import CustomOpDef
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from autopar.capture.assumptions import Assumption, UndecidedError
from autopar.capture.experts.loops import without_loops
from autopar.capture.finish import Form, finished
from autopar.capture.guards import check_no_backward_hooks, check_no_hooks_on_all_modules
from autopar.capture.inlining.inline import StandIns, inline
from autopar.capture.key_value_cache import given_without_cache, warn_of_packed_rows, without_cache
from autopar.capture.normalize import in_tiles, normalize, propagate, rehome
from autopar.capture.numbers.marked import Number
from autopar.capture.numbers.promotion import promoted_as_numbers
from autopar.capture.passes.autocast import Autocast
from autopar.capture.passes.refused_calls import NeedsValuesError, check_modules
from autopar.capture.passes.traced_graph import Source, TracedGraph
from autopar.capture.precision import cast_at_borders, check_no_autocast, in_compute_dtype
from autopar.capture.python.distributed import check_no_wrappers
from autopar.capture.python.recorder import Recorder, check_settled, tracing_again
from autopar.capture.python.tensor_hooks import with_own_hooks
from autopar.capture.static.advice import static_advice
from autopar.capture.static.arguments import Arguments
from autopar.capture.static.values import StaticValues
from autopar.capture.tiles.mlp import MlpTiles, takes_mlp_tiles
from autopar.capture.tiles.requested_tiles import Tiles
from autopar.capture.tiles.tiled_losses import AUTO, LossTiles, takes_tiles
from autopar.capture.tracing import Observed, export
from autopar.errors import CaptureError
from autopar.ir.program.precision import AS_IT_IS, Precision
from autopar.ir.program.program import Program, fault_of_form
from autopar.ir.program.python_state import INTERNALS, PythonState
from autopar.ir.torch_state import saved_tensor_hooks_apart, torch_state_restored


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A model that was traced and normalized once, from which its programs with and without tiles are made."""

    draft: TracedGraph
    form: Form
    stored: Mapping[str, torch.dtype]
    """The dtypes of parameters."""
    device: torch.device | None
    precision: Precision
    assumed: tuple[str, ...]
    python: PythonState

    def program(self, tiles: Tiles) -> Program:
        """Return the Program of the model, with its losses and MLPs in tiles; errors as `capture` has them."""
        draft, training = self.draft.copied(), self.form.training
        with torch.autocast("cpu", enabled=False):
            in_tiles(draft, tiles, training)
            tileable = training and takes_tiles(draft)
            mlp_tileable = training and tiles.mlp == AUTO and takes_mlp_tiles(draft)
            cast_at_borders(draft, self.stored, self.form.leaves, self.precision, self.form.num_outputs)
        if self.device is not None:
            rehome(draft.graph, self.device)
        program = finished(draft, self.form)
        program.reduced, program.accumulated = self.precision.reduced, self.precision.reduce
        program.assumed, program.python = self.assumed, self.python
        program.tileable, program.mlp_tileable = tileable, mlp_tileable
        return program


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    training: bool | None = None,
    device: torch.device | None = None,
    assume: Sequence[Assumption] = (),
    capacity_factor: float | None = None,
    loss_tiles: LossTiles = None,
    mlp_tiles: MlpTiles = None,
    precision: Precision = AS_IT_IS,
) -> Program:
    """Return the Program of `model(*args, **kwargs)`, for tensors of these shapes and dtypes and for these other
    values.

    Args:
        model: any module that `torch.export` can trace; its parameters may be on the meta device, and are not touched.
        args, kwargs: example inputs; only shapes and dtypes of tensors count, and the values of a StaticTensor.
        training: the mode to capture in; by default the model's own.
        device: where the program's calls make tensors, and whose autocast counts; by default the CPU and any autocast,
            which suits a program that is only planned.
        assume: branches on values whose outcome is known.
        capacity_factor: how many times its balanced share of a sample's rows an expert takes; None: all that come.
        loss_tiles: into how many tiles of rows the cross-entropy of a linear layer is taken; "auto": a plan chooses.
        mlp_tiles: into how many tiles of rows MLPs are taken; "auto" leaves them as they are, and says if they can be.
        precision: the dtypes of compute, of gradient reduction and of outputs; parameters are stored as the model's.

    Raises:
        InputError: a precision is requested inside an autocast region.
        CaptureError: the forward depends on the values of tensors, on random numbers that are not PyTorch's or on the
            time, or writes where it may not; a module has a backward hook.

    >>> capture(nn.Linear(2, 3), (torch.ones(4, 2),), {}).num_outputs
    1
    """
    traced = trace(
        model,
        args,
        kwargs,
        training=training,
        device=device,
        assume=assume,
        capacity_factor=capacity_factor,
        precision=precision,
    )
    return traced.program(Tiles(loss_tiles, mlp_tiles))


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    training: bool | None = None,
    device: torch.device | None = None,
    assume: Sequence[Assumption] = (),
    capacity_factor: float | None = None,
    precision: Precision = AS_IT_IS,
) -> Traced:
    """Trace a model to the graph that `capture` turns into a program; arguments and errors are those of `capture`."""
    autocast = Autocast.around(None if device is None else device.type)
    check_no_autocast(precision, autocast)
    options = training, device, capacity_factor, precision, autocast
    check_no_hooks_on_all_modules()

    def works(further: Sequence[Assumption]) -> bool:
        """Return whether the model can be traced with further assumptions, at least beyond what they name."""
        try:
            _traced(model, args, kwargs, (*assume, *further), *options)
        except UndecidedError as error:
            return not any(each.names(place) for each in further for place in error.branches.open)
        except Exception:
            return False
        return True

    def works_on(given: Arguments) -> bool:
        """Return whether the model can be traced for these arguments."""
        try:
            _traced(model, *given, assume, *options)
        except Exception:
            return False
        return True

    # Trace on the CPU, regardless of the device that runs the program.
    with saved_tensor_hooks_apart(), torch.autocast("cpu", enabled=False):
        try:
            first, recorder = _traced(model, args, kwargs, assume, *options)
        except (UndecidedError, NeedsValuesError) as error:
            message = error.branches.refusal(works) if isinstance(error, UndecidedError) else str(error)
            raise CaptureError(message + static_advice((args, dict(kwargs)), model.forward, works_on)) from error
        settled = True
        if recorder.evolved or recorder.registered:
            with tracing_again(recorder):
                second, again = _traced(model, args, kwargs, assume, *options, recorder.put_evolved)
            check_settled(recorder, again)
            settled = _compute_the_same(first.program(Tiles()), second.program(Tiles()))
    warn_of_packed_rows(model, kwargs)
    return replace(first, python=replace(recorder.state(settled), hooks=first.python.hooks, modes=first.python.modes))


@torch_state_restored()
def _traced(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    assume: Sequence[Assumption],
    training: bool | None,
    device: torch.device | None,
    capacity_factor: float | None,
    precision: Precision,
    autocast: Autocast | None,
    change: Callable[[nn.Module], None] = lambda traced: None,
) -> tuple[Traced, Recorder]:
    """Return a model that is changed before, traced, and what its forward reads and writes of Python."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    check_no_wrappers(model)
    check_no_backward_hooks(model)
    traced = _prepared(model, mode, training, precision)
    change(traced)
    kind = None if device is None else device.type
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    statics = StaticValues([in_compute_dtype(leaf, precision) for leaf in leaves], precision)
    used = statics.leaves
    fake_args, fake_kwargs = pytree.tree_map_only(
        Tensor, lambda x: _fake(x, mode), pytree.tree_unflatten(used, in_spec)
    )
    fake_kwargs = given_without_cache(fake_kwargs)
    observed = Observed.of(traced, model, assume)
    exported = export(traced, fake_args, fake_kwargs, autocast, observed, statics, kind)
    sources, values, tied = _sources_of_placeholders(exported, traced, used)
    draft = inline(
        exported.graph_module,
        sources,
        mode,
        values,
        autocast,
        StandIns(observed.functions, observed.gradients, observed.layers.bodies),
        kind,
    )
    out_spec = exported.call_spec.out_spec
    assert out_spec is not None
    num_outputs = len(draft.graph.output_node().args[0])  # type: ignore[arg-type]
    normalize(draft, capacity_factor)
    numbers = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Number)]
    if numbers:
        promoted_as_numbers(draft, numbers)
        propagate(draft)
    names = _leaf_names(model, args, kwargs)
    form = Form(tied, leaves, names, in_spec, out_spec, num_outputs, traced.training, type(model).__name__)
    stored = {name: parameter.dtype for name, parameter in model.named_parameters()}
    python = PythonState(hooks=tuple(observed.hooks.hooks), modes=tuple(observed.modes.items()))
    return Traced(draft, form, stored, device, precision, tuple(observed.branches.taken), python), observed.recorder


def _compute_the_same(one: Program, other: Program) -> bool:
    constants = zip(one.constants.values(), other.constants.values(), strict=False)
    return one.fingerprint == other.fingerprint and all(torch.equal(a, b) for a, b in constants)


def skeleton(model: nn.Module, precision: Precision = AS_IT_IS) -> nn.Module:
    """Return a copy of a model whose parameters and buffers are on the meta device, with their names and ties.

    Parameters have the dtype in which they are to be stored.
    """

    def empty(tensor: Tensor) -> Tensor:
        dtype = precision.stores(tensor.dtype) if isinstance(tensor, nn.Parameter) else tensor.dtype
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")

    return _copied(model, empty)


def skeleton_of(model: nn.Module, precision: Precision, training: bool) -> nn.Module:
    """Return the skeleton of a model, without gradients where there is no training."""
    made = skeleton(model, precision)
    return made if training else made.requires_grad_(False)


def freeze(model: nn.Module, frozen: frozenset[str] | None) -> None:
    """Let these parameters of a skeleton, and no others, need no gradient; None leaves all as they are."""
    for name, parameter in model.named_parameters() if frozen is not None else ():
        parameter.requires_grad_(name not in (frozen or ()))


def _prepared(model: nn.Module, mode: FakeTensorMode, training: bool | None, precision: Precision) -> nn.Module:
    """Return the skeleton to trace, on fake CPU tensors, in the wanted mode, without a key-value cache or loops over
    data.

    Parameters have the dtype in which they are used.
    """

    def fake(tensor: Tensor) -> Tensor:
        return _fake(in_compute_dtype(tensor, precision) if isinstance(tensor, nn.Parameter) else tensor, mode)

    traced = _copied(model, fake)
    if training is not None and training != traced.training:
        traced.train(training)
    without_cache(traced)
    without_loops(traced)
    return traced


def _copied(model: nn.Module, empty: Any) -> nn.Module:
    """Return a copy in which every parameter and buffer is `empty` of it, and other tensors are shared."""
    memo: dict[int, Any] = {}
    check_modules(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(
                f"{name} has no shape yet (of a lazy module, as nn.LazyLinear); run the model once on an example, "
                "which gives it one, before autopar sees it."
            )
        fault = fault_of_form(tensor)
        if fault:
            raise CaptureError(f"{name} {fault}.")
        if id(tensor) in memo:
            continue
        with torch.no_grad():
            made = empty(tensor)
        if isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = nn.Parameter(made, requires_grad=tensor.requires_grad)
        else:
            memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor):
                memo.setdefault(id(value), empty(value) if value.is_meta else value)
            elif isinstance(value, CustomOpDef):  # nothing can copy what torch.library.custom_op returns
                memo[id(value)] = value
    known = dict(memo)
    try:
        return with_own_hooks(copy.deepcopy(model, memo), model)
    except Exception as error:
        what = _attribute_that_cannot_be_copied(model, known)
        raise CaptureError(
            f"{what} cannot be copied ({type(error).__name__}: {error}), and autopar captures a copy of the model; "
            "keep it outside of the model, or give its class a __deepcopy__."
        ) from error


def _attribute_that_cannot_be_copied(model: nn.Module, memo: Mapping[int, Any]) -> str:
    for path, module in model.named_modules():
        for name in vars(module).keys() - INTERNALS:
            try:
                copy.deepcopy(vars(module)[name], dict(memo))
            except Exception:
                return f"the attribute {path}.{name}" if path else f"the attribute {name}"
    return type(model).__name__


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode, torch.inference_mode(False):
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


def _sources_of_placeholders(
    exported: torch.export.ExportedProgram, traced: nn.Module, leaves: Sequence[Any]
) -> tuple[dict[str, Source], dict[str, Tensor], dict[str, str]]:
    """Return the source and fake value of each tensor placeholder, and the further names of tied tensors."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for found in (traced.named_parameters(remove_duplicate=False), traced.named_buffers(remove_duplicate=False)):
        for name, tensor in found:
            tensors[name] = tensor
            if first.setdefault(id(tensor), name) != name:
                tied[name] = first[id(tensor)]
    sources: dict[str, Source] = {}
    values: dict[str, Tensor] = {}
    kinds = torch.export.graph_signature.InputKind
    user = 0
    for spec in exported.graph_signature.input_specs:
        placeholder = spec.arg.name
        if spec.kind is kinds.USER_INPUT:
            if isinstance(leaves[user], Tensor):
                sources[placeholder] = Source("input", index=user)
                values[placeholder] = leaves[user]
            user += 1
        elif spec.kind in (kinds.PARAMETER, kinds.BUFFER):
            assert spec.target is not None
            name = tied.get(spec.target, spec.target)
            sources[placeholder] = Source("parameter" if spec.kind is kinds.PARAMETER else "buffer", name)
            values[placeholder] = tensors[name]
        elif spec.kind is kinds.CONSTANT_TENSOR:
            assert spec.target is not None
            value = exported.constants[spec.target]
            assert isinstance(value, Tensor)
            sources[placeholder] = Source("constant", spec.target, value=value)
            values[placeholder] = value
        else:
            raise CaptureError(
                f"the model keeps an object ({spec.target}) that a graph cannot hold, as a torch.Generator; only "
                "tensors may enter."
            )
    return sources, values, tied


def _leaf_names(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a readable name per leaf of the inputs: `labels`, `images[0]`."""
    try:
        positional = list(inspect.signature(model.forward).bind_partial(*args).arguments)
    except (TypeError, ValueError):
        positional = []
    if len(positional) != len(args):
        positional = [f"args[{index}]" for index in range(len(args))]
    names: list[str] = []
    for name, value in (*zip(positional, args, strict=True), *kwargs.items()):
        paths, _ = pytree.tree_flatten_with_path(value)
        names += [name + pytree.keystr(path) for path, _ in paths]
    return tuple(names)
