"""Strategies that people write by hand, each a function from a program and a mesh to annotations.

A preset finds its places in the captured graph and pins every call and every parameter on every axis, so that a plan
under it is the strategy itself; what a user says comes first, and the planner decides what neither says.

Each docstring says what a step moves on a decoder as Llama's (no biases, a gated MLP, a head of its own, a mean loss):

    collective/axis = bytes        the axis by the letter that its size has in the formulas; 1 where the mesh has it not
    collective/n_m = bytes         over both axes at once; if the mesh has one of them, its bytes and these are added up

in NCCL's convention (the whole tensor of an all_reduce, the output of an all_gather, the input of the others), in the
bytes that one device has to do with. The symbols are bytes of whole tensors, over the whole batch:

    P  all parameters                              A  hidden states [batch, positions, features]
    W  weights of matrix products, the head too    K  the keys that attention is given; its values are as large
    N  weights of norms                            F  what an up projection puts out
    T  the table that token ids look up            V  logits
    U  parameters whose values the backward has    R  one number (float32) for each token
       no use for: tables, biases, what is added,  L  number of layers (a number, as are the sizes of axes)
       weights that meet inputs

A mean loss in float32 adds 12 over all axes together that split its rows, overlapped with compute: 4 for its sum, and 8
for its number of tokens. A preset decides the layouts, and the planner the way from one to the next. The formulas are
those of the fewest bytes. The planner takes another way if latency counts for more, or if axes differ in size.
"""

if __name__ != "autopar.strategies.presets":
    raise ImportError(f"imported as {__name__!r}; write `import autopar.strategies.presets` instead.")

import difflib
import inspect
from collections.abc import Callable, Mapping

from autopar.console.names import ALIASES, JOINED, PIPELINE
from autopar.errors import StrategyError
from autopar.ir.program.program import Program
from autopar.ir.sharding.annotation import Annotation
from autopar.ir.sharding.mesh import Mesh
from autopar.strategies.presets import data, decoding, expert_presets, grid, sequence, tensor
from autopar.strategies.presets.joined import joined
from autopar.strategies.presets.preset_axes import Parts

__all__ = ["PRESETS", "Preset", "annotations_for", "preset_named"]

Preset = Callable[[Program, Mesh, bool], tuple[Annotation, ...]]
"""(program, mesh, strict) → annotations. A strict preset raises StrategyError if samples or positions do not divide;
otherwise what does not divide stays whole."""
PRESETS: Mapping[str, Preset | Callable[[], Parts]] = {
    preset.__name__: preset
    for preset in (
        data.fully_replicated,
        data.data_parallel,
        data.zero1,
        data.zero2,
        data.zero3,
        data.hsdp,
        tensor.megatron,
        tensor.megatron_sequence,
        tensor.async_tensor_parallel,
        tensor.megatron_regather,
        sequence.ulysses,
        sequence.gather_kv,
        sequence.ring,
        sequence.ring_self_attention,
        sequence.usp,
        sequence.context_parallel,
        grid.tensor_2d,
        grid.tensor_2_5d,
        grid.tensor_3d,
        tensor.fsdp_megatron,
        decoding.flash_decoding,
        expert_presets.expert_data,
        expert_presets.expert_model,
        expert_presets.expert_data_model,
        expert_presets.expert_folded,
    )
}
"""Presets by name. One that returns parts takes no arguments, and is joined with others by "+"."""


def _stands_alone(name: str) -> bool:
    return bool(inspect.signature(PRESETS[name]).parameters)


def preset_named(name: str) -> str:
    """Return the preset that a name or an alias ("fsdp") means, or those that are joined by "+" ("fsdp+tp").

    Raises StrategyError for a name that is not known, for "pp", which is an axis of the mesh, and for presets that are
    joined with no other.
    """
    known = [_one_named(each.strip()) for each in name.split(JOINED)]
    alone = next(filter(_stands_alone, known), None)
    if alone and len(known) > 1:
        joined_by = ", ".join(each for each in PRESETS if not _stands_alone(each))
        raise StrategyError(f"strategy={name!r}: {alone} is joined with no other preset. Join some of {joined_by}.")
    return JOINED.join(dict.fromkeys(known))


def _one_named(name: str) -> str:
    if name == PIPELINE:
        raise StrategyError(
            f'strategy="{PIPELINE}" is no preset: a pipeline is an axis of the mesh. Name an axis "{PIPELINE}", as in '
            f"{PIPELINE}=4,tp=2, and leave {PIPELINE} out of the strategy."
        )
    known = ALIASES.get(name, name)
    if known not in PRESETS:
        near = difflib.get_close_matches(name, (*PRESETS, *ALIASES), n=1)
        hint = f' Did you mean "{near[0]}"?' if near else ""
        short = ", ".join(f"{alias} ({preset})" for alias, preset in ALIASES.items())
        raise StrategyError(
            f"strategy={name!r} is not known; strategies are {', '.join(PRESETS)}, or in short {short}.{hint}"
        )
    return known


def annotations_for(name: str, program: Program, mesh: Mesh, strict: bool = True) -> tuple[Annotation, ...]:
    """Return the annotations of a preset, or of several joined by "+", for a program on a mesh.

    Raises StrategyError for a name that is not known, and if the model, the mesh or (if `strict`) the sizes of the
    inputs do not suit the preset.
    """
    name = preset_named(name)
    if JOINED not in name and _stands_alone(name):
        return PRESETS[name](program, mesh, strict)  # type: ignore[call-arg, return-value]
    return joined(name, joined_parts(name), program, mesh, strict)


def joined_parts(name: str) -> Parts:
    """Return what the presets of a name split together."""
    first, *others = (PRESETS[each]() for each in data.parts_named(name))  # type: ignore[call-arg]
    for other in others:
        first = first.joined(other, name)  # type: ignore[union-attr]
    return first  # type: ignore[return-value]
