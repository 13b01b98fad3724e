"""Tensor-parallel plans made for other systems, in autopar's words: Hugging Face's `tp_plan`, torch's ParallelStyle.

A style says where a module's weight is split; the reductions and gathers around it follow from the layouts, so styles
that only place a collective (of an output, of a gradient) say nothing here.
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
from autopar.sharding.annotation import Said

ForeignPlan = Mapping[str, str | ParallelStyle] | Literal["auto"]

# Names that transformers registered from 4.48 to 5.23.
_SAID: dict[str, Said] = {
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
        *("moe_tp_experts", "moe_identity_expert", "mla_kv_a_proj", "ep_router", "ep_dispatch_experts"),
    )
)


def translate(model: nn.Module, plan: ForeignPlan) -> Iterator[tuple[str, Said]]:
    """The patterns of a plan with what each says about the axis of tensor parallelism.

    Raises AnnotationError for a style that is not known, and for "auto" where the model brings no plan along.
    """
    if isinstance(plan, Mapping):
        entries = dict(plan)
    elif isinstance(plan, str) and plan == "auto":
        # A model class lists modules that only some of its configurations have.
        entries = {pattern: style for pattern, style in plan_of(model).items() if _names_something(model, pattern)}
    else:
        raise AnnotationError(f'annotate_plan: found {plan!r}, needed a mapping from patterns to styles, or "auto".')
    for pattern, style in entries.items():
        if not _says_nothing(style):
            yield pattern, _said(pattern, style)


def plan_of(model: nn.Module) -> Mapping[str, str]:
    """The `tp_plan` of a Hugging Face model; AnnotationError where it has none."""
    config = getattr(model, "config", None)
    for found in (
        getattr(model, "tp_plan", None),
        getattr(model, "_tp_plan", None),
        getattr(config, "base_model_tp_plan", None),
    ):
        if isinstance(found, Mapping) and found:
            return found
    raise AnnotationError(
        f'annotate_plan(model, "auto"): {type(model).__name__} brings no tp_plan along; give a mapping, '
        'for example {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}.'
    )


def _says_nothing(style: object) -> bool:
    only_moves = PrepareModuleInput | PrepareModuleOutput | PrepareModuleInputOutput
    return style in _NOTHING if isinstance(style, str) else isinstance(style, only_moves)


def _said(pattern: str, style: object) -> Said:
    if isinstance(style, str) and style in _SAID:
        return _SAID[style]
    if isinstance(style, ColwiseParallel):
        return "column"
    if isinstance(style, RowwiseParallel):
        return "row"
    if isinstance(style, SequenceParallel):
        return style.sequence_sharding[0].dim
    raise AnnotationError(
        f'annotate_plan: "{pattern}" has the style {style!r}; known are {", ".join(sorted({*_SAID, *_NOTHING}))}, '
        "and ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModule… of torch.distributed.tensor.parallel."
    )


def _names_something(model: nn.Module, pattern: str) -> bool:
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))]
    return any(fnmatchcase(name, each) for each in (pattern, f"*.{pattern}") for name in names)
