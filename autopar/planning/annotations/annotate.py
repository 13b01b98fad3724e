"""The user's calls: `annotate` and `annotate_plan` constrain a model, `constrain` a value in a forward.

An annotation is stored on the annotated module and becomes a pin (autopar/planning/annotations/pins.py)
when a plan is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from autopar.errors import AnnotationError
from autopar.ir.sharding.annotation import Annotation, slices_of, specified_of
from autopar.ir.sharding.constraint import CONSTRAIN
from autopar.planning.annotations.pins import pins_of
from autopar.planning.annotations.tp_plans import ForeignPlan, translate

__all__ = ["Annotation", "annotate", "annotate_plan", "annotations_of", "constrain", "pins_of"]

_KEY = "_autopar_annotations"
_REPLICATED = -1

M = TypeVar("M", bound=nn.Module)


def annotate(
    model: M,
    pattern: str,
    /,
    *,
    slices: Sequence[Sequence[int]] | None = None,
    storage: str | Sequence[str] | None = None,
    regather: bool | None = None,
    stage: int | None = None,
    **axes: Any,
) -> M:
    """Say how everything that `pattern` matches is split, or where it runs; the planner holds to it. Returns the model.

    The pattern names modules, parameters or operations ("linear"); `*` stands for anything, dots included. It is
    matched against whole names first, then as the end of a name. `axes` are mesh axes, each with a role ("data",
    "column", "row", "sequence", "expert", "replicated"), a dim, None, or a placement of torch.distributed.tensor;
    `slices`, `storage`, `regather` and `stage` are explained in autopar/ir/sharding/annotation.py.

    >>> annotate(model, "layers.*.mlp.down_proj", tp="row")  # doctest: +SKIP

    Raises AnnotationError for what no model and no mesh could satisfy; the rest is found when a plan is made.
    """
    where = f'annotate("{pattern}", …)'
    named = (storage,) if isinstance(storage, str) else storage if storage is not None else ()
    if not isinstance(named, Sequence):
        raise AnnotationError(f'{where}: storage={storage!r}; give a mesh axis, "dp", or several, ("dp", "tp").')
    specified = tuple((axis, specified_of(value, where)) for axis, value in axes.items())
    return _remember(model, Annotation(pattern, specified, slices_of(slices, where), tuple(named), regather, stage))


def annotate_plan(model: M, plan: ForeignPlan, axis: str = "tp") -> M:
    """Annotate by a plan made for another system (pattern → style, over one axis). Returns the model.

    A style is a name of Hugging Face's `tp_plan` and `ep_plan` ("colwise", "rowwise", "grouped_gemm" …) or a
    `ParallelStyle` of torch.distributed.tensor.parallel; "auto" takes the `tp_plan` that a Hugging Face model brings
    along, "ep" its `ep_plan`: `annotate_plan(model, "ep", axis="ep")`.
    Raises AnnotationError for a style that is not known and for a model without a plan.
    """
    if not isinstance(axis, str) or not axis:
        raise AnnotationError(f'annotate_plan: axis={axis!r}; give the name of a mesh axis, as in axis="tp".')
    for pattern, specified in translate(model, plan):
        _remember(model, Annotation(pattern, ((axis, specified),)))
    return model


def annotations_of(model: nn.Module) -> tuple[Annotation, ...]:
    """Return all annotations of a model and of modules inside it, outermost module first."""
    return tuple(
        dataclasses.replace(annotation, within=name)
        for name, module in model.named_modules()
        for annotation in module.__dict__.get(_KEY, ())
    )


def constrain(x: Tensor, /, **axes: Any) -> Tensor:
    """Return `x` itself, which the planner will split along a dim per mesh axis (None: whole). For use in a forward.

    >>> constrain(torch.ones(2, 3), dp=0, tp=None).shape
    torch.Size([2, 3])

    Raises AnnotationError for what is no dim of `x`. Without autopar it copies `x` and changes nothing.
    """
    if not isinstance(x, Tensor):
        raise AnnotationError(f"constrain: found a {type(x).__name__}, needed a tensor.")
    specified = ", ".join(f"{axis}={value}" for axis, value in axes.items())
    where = f"constrain({list(x.shape)}{', ' if specified else ''}{specified})"
    if not axes:
        raise AnnotationError(
            f"{where}: the annotation is empty; name a mesh axis and a dim, as in constrain(x, dp=0)."
        )
    dims = [_dim_of(specified_of(value, where), x.ndim, axis, where) for axis, value in axes.items()]
    return CONSTRAIN(x, list(axes), dims)


def _dim_of(specified: object, ndim: int, axis: str, where: str) -> int:
    """Return the dim counted from 0, or -1 where the value stays whole."""
    if specified is None:
        return _REPLICATED
    if not isinstance(specified, int) or isinstance(specified, bool) or not -ndim <= specified < ndim:
        raise AnnotationError(
            f"{where}: found {specified!r} for axis {axis}, needed a dim of a tensor with {ndim} dims, "
            "or None to keep it whole."
        )
    return specified % ndim


def _remember(model: M, annotation: Annotation) -> M:
    if not isinstance(model, nn.Module):
        raise AnnotationError(f"{annotation}: the model is a {type(model).__name__}; give an nn.Module.")
    model.__dict__[_KEY] = (*model.__dict__.get(_KEY, ()), annotation)
    return model
