"""Plans made for other systems, in autopar's words: Hugging Face's `tp_plan` and `ep_plan`, torch's ParallelStyle.

A style says where a module's weight is split; the reductions and gathers around it follow from the layouts, so styles
that only place a collective (of an output, of a gradient) say nothing here.

Hugging Face's styles of matrices are those of nn.Linear [out, in]: "rowwise" splits the last dim. For experts whose
matrices are [in, out] that is a column; a plan shows it by packing gate and up, which are outputs, "packed_rowwise".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from autopar.errors import AnnotationError
from autopar.ir.sharding.annotation import Specified
from autopar.planning.annotations.ep_plans import DISPATCHED, exchange_of

ForeignPlan = Mapping[str, str | ParallelStyle] | Literal["auto", "ep"]
BROUGHT = {"auto": "tp_plan", "ep": "ep_plan"}
"""Model attribute that holds a Hugging Face model's own plan, by the word that requests it."""
EXAMPLES = {
    "tp_plan": '{"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}',
    "ep_plan": '{"layers.*.mlp.experts": "ep_dispatch_experts"}, or annotate the experts, as in ep="expert"',
}

# Names that transformers registered from 4.48 to 5.23.
_SPECIFIED: dict[str, Specified] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise", "local_colwise"), "column"),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "local_rowwise"), "row"),
    "local_packed_rowwise": "row",
    "embedding_colwise": "column",
    "embedding_rowwise": "row",
    "sequence_parallel": "sequence",
    "grouped_gemm": "expert",
    "replicate": None,
}
_NOTHING = frozenset(
    (
        *("replicated_with_grad_allreduce", "all_reduce", "gather", "local", "local_params", "isolated"),
        *("moe_tp_experts", "moe_identity_expert", "mla_kv_a_proj", "ep_router"),
    )
)
_TRANSPOSED = ("packed_rowwise", "local_packed_rowwise")
_OTHER_WAY: dict[Specified, Specified] = {"column": "row", "row": "column"}


def translate(model: nn.Module, plan: ForeignPlan) -> Iterator[tuple[str, Specified]]:
    """Yield the patterns of a plan with what each says about the axis of the plan.

    Raises AnnotationError for a style that is not known, and for "auto" and "ep" where the model brings no plan along.
    """
    if isinstance(plan, Mapping):
        entries = dict(plan)
    elif isinstance(plan, str) and plan in BROUGHT:
        # A model class lists modules that only some of its configurations have.
        entries = {name: style for name, style in plan_of(model, plan).items() if _names_something(model, name)}
    else:
        raise AnnotationError(
            f'annotate_plan: found {plan!r}, needed a mapping from patterns to styles, "auto" or "ep".'
        )
    transposed = _transposed(model, entries)
    for pattern, style in entries.items():
        if isinstance(style, str) and style == DISPATCHED:
            yield from exchange_of(model, pattern)
        elif not _says_nothing(style):
            specified = _specified(pattern, style)
            yield pattern, _OTHER_WAY.get(specified, specified) if pattern in transposed else specified


def plan_of(model: nn.Module, requested: str) -> Mapping[str, str]:
    """Return the plan of a Hugging Face model that "auto" or "ep" asks for; AnnotationError where it has none."""
    name, config = BROUGHT[requested], getattr(model, "config", None)
    for found in (
        getattr(model, name, None),
        getattr(model, f"_{name}", None),
        getattr(config, f"base_model_{name}", None),
    ):
        if isinstance(found, Mapping) and found:
            return found
    raise AnnotationError(
        f'annotate_plan(model, "{requested}"): {type(model).__name__} brings no {name} along; give a mapping, '
        f"for example {EXAMPLES[name]}."
    )


def _transposed(model: nn.Module, entries: Mapping[str, object]) -> frozenset[str]:
    """Return the patterns of matrices [experts, in, out]: those of modules with packed ones among them."""
    batches = [name for name, parameter in model.named_parameters() if parameter.dim() == 3]
    found = {pattern for pattern in entries if _matches(pattern, batches)}
    modules = {pattern.rpartition(".")[0] for pattern in found if entries[pattern] in _TRANSPOSED}
    return frozenset(pattern for pattern in found if pattern.rpartition(".")[0] in modules)


def _says_nothing(style: object) -> bool:
    only_moves = PrepareModuleInput | PrepareModuleOutput | PrepareModuleInputOutput
    return style in _NOTHING if isinstance(style, str) else isinstance(style, only_moves)


def _specified(pattern: str, style: object) -> Specified:
    if isinstance(style, str) and style in _SPECIFIED:
        return _SPECIFIED[style]
    if isinstance(style, ColwiseParallel):
        return "column"
    if isinstance(style, RowwiseParallel):
        return "row"
    if isinstance(style, SequenceParallel):
        return style.sequence_sharding[0].dim
    known = ", ".join(sorted({*_SPECIFIED, *_NOTHING, DISPATCHED}))
    raise AnnotationError(
        f'annotate_plan: "{pattern}" has the style {style!r}; known are {known}, '
        "and ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModule… of torch.distributed.tensor.parallel."
    )


def _names_something(model: nn.Module, pattern: str) -> bool:
    return _matches(
        pattern, [name for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))]
    )


def _matches(pattern: str, names: list[str]) -> bool:
    """Return whether the pattern matches one of the names, as a whole or as its end."""
    return any(fnmatchcase(name, each) for each in (pattern, f"*.{pattern}") for name in names)
