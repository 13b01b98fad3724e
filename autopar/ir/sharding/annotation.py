"""User's statement about a part of a model: an `Annotation`, one value, checked as far as possible without a graph.

tp="row"            a role: which factor of the operation the axis splits (the words of autopar/ir/sharding/rule.py)
tp=0                a dim: the output, or the stored parameter, is split along it; negative dims count from the end
tp=None             the output, or the stored parameter, is equal everywhere
tp=Shard(0)         the same as 0, and Replicate() the same as None (torch.distributed.tensor)
slices=((2, 1), …)  a tuple per tensor input with the number of slices of each dim (MindSpore's shard)
storage="dp"        parameters are stored split over the axis, along whichever dim (ZeRO-3, FSDP)
regather=True       parameters stored in parts are gathered again for the backward (ZeRO-3); False saves them (ZeRO-2)
stage=1             the calls of a module run on this stage of the pipeline (autopar/planning/pipeline/stages/pins.py),
from 0 on

A pattern that begins with "%" is the name of one node of the captured graph, as the plan's table and JSON show it. For
such a node, and for operations, an annotation may also name a factor of the rule, or several that are split together:
tp="factor:h", ep="factor:a0+x". The form "factor:+x" stands for all splits of x together with another factor. A suffix
" via " names the implementation, if the rule has several: cp="factor:s+t via ring_self_attention".
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from torch.distributed.tensor import Placement, Replicate, Shard

from autopar.errors import AnnotationError
from autopar.ir.sharding.rule import VIA

ROLES = ("data", "column", "row", "sequence", "expert", "replicated")
NODE = "%"
"""Begins a pattern that is the name of one node."""
FACTOR = "factor:"
"""Prefix of a user-specified role that is the name of a factor."""

Specified = str | int | None
"""A role, a dim, None (replicated), or "factor:" with the name of a factor, or several joined by "+"."""
Slices = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Annotation:
    """Statement about everything that `pattern` matches; `str` prints the call that made it.

    >>> print(Annotation("lm_head", axes=(("tp", "column"),)))
    annotate("lm_head", tp="column")
    """

    pattern: str
    axes: tuple[tuple[str, Specified], ...] = ()
    """Mesh axis → the user-specified role or layout on it."""
    slices: Slices | None = None
    storage: tuple[str, ...] = ()
    regather: bool | None = None
    stage: int | None = None
    within: str = ""
    """Dotted path of the module that was annotated, below which the pattern matches; "" for the whole model."""
    strategy: str = ""
    """Name of the preset that says it; "" for the user, before whom a preset gives way."""

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not self.pattern:
            raise AnnotationError(
                f'annotate({self.pattern!r}): needed a pattern, as in "layers.*.mlp.down_proj", or "*" for everything.'
            )
        if not self.says_layouts and self.stage is None:
            raise AnnotationError(
                f'{self}: the annotation is empty; name a mesh axis, as in tp="column", or slices=((2, 1), …), '
                'storage="dp", regather=True, or stage=1.'
            )
        for axis, specified in self.axes:
            self._check_specified(axis, specified)
        if self.slices is not None:
            self._check_slices()
        if not all(isinstance(axis, str) and axis for axis in self.storage):
            raise AnnotationError(f'{self}: storage names mesh axes: "dp", or ("dp", "tp") for several.')
        if not (self.regather is None or isinstance(self.regather, bool)):
            raise AnnotationError(f"{self}: regather is {self.regather!r}, needed True or False.")
        if self.stage is not None and (type(self.stage) is not int or self.stage < 0):
            raise AnnotationError(f"{self}: stage is {self.stage!r}, needed a stage of the pipeline, counted from 0.")

    @property
    def says_layouts(self) -> bool:
        """Return True if the annotation specifies more than the stage."""
        return bool(self.axes or self.slices is not None or self.storage or self.regather is not None)

    @property
    def implementations(self) -> frozenset[str]:
        """Names of requested implementations."""
        return frozenset(
            specified.partition(VIA)[2] for _, specified in self.axes if isinstance(specified, str) and VIA in specified
        )

    def __str__(self) -> str:
        words = [f'"{self.pattern}"']
        words += [
            f'{axis}="{specified}"' if isinstance(specified, str) else f"{axis}={specified}"
            for axis, specified in self.axes
        ]
        if self.slices is not None:
            words.append(f"slices={self.slices}")
        if self.storage:
            words.append(f'storage="{self.storage[0]}"' if len(self.storage) == 1 else f"storage={self.storage}")
        if self.regather is not None:
            words.append(f"regather={self.regather}")
        if self.stage is not None:
            words.append(f"stage={self.stage}")
        where = f' on module "{self.within}"' if self.within else ""
        who = f"{self.strategy}: " if self.strategy else ""
        return f"{who}annotate({', '.join(words)}){where}"

    def _check_specified(self, axis: str, specified: object) -> None:
        if specified is None or (isinstance(specified, int) and not isinstance(specified, bool)):
            return
        if not isinstance(specified, str):
            raise AnnotationError(
                f"{self}: found {specified!r} for axis {axis}, needed a role ({', '.join(ROLES)}), a dim, None, "
                "Shard(dim) or Replicate()."
            )
        if not specified.startswith(FACTOR) and specified not in ROLES:
            near = difflib.get_close_matches(specified, ROLES, n=1)
            hint = f' Did you mean "{near[0]}"?' if near else ""
            raise AnnotationError(f'{self}: "{specified}" is no role; roles are {", ".join(ROLES)}.{hint}')

    def _check_slices(self) -> None:
        assert self.slices is not None
        for each in self.slices:
            for count in each:
                if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                    raise AnnotationError(
                        f"{self}: found {count!r} slices of a dim, needed a whole number of at least 1; "
                        "1 keeps the dim whole."
                    )
        if not self.slices:
            raise AnnotationError(f"{self}: slices is empty; give a tuple per tensor input, as in ((2, 1, 1), (4, 1)).")


def specified_of(value: object, where: str) -> Specified:
    """Return a role, a dim or None, also from a placement of torch; AnnotationError where it is a partial one."""
    if isinstance(value, Shard):
        return value.dim
    if isinstance(value, Replicate):
        return None
    if isinstance(value, Placement):
        raise AnnotationError(
            f'{where}: {value} cannot be requested; a sum over an axis comes from the role "row", '
            "a split from Shard(dim), a whole tensor from Replicate()."
        )
    return value  # type: ignore[return-value]


def slices_of(value: object, where: str) -> Slices | None:
    """Return tuples of tuples from any nesting of tuples and lists of that depth."""
    if value is None:
        return None
    if isinstance(value, tuple | list) and all(isinstance(each, tuple | list) for each in value):
        return tuple(tuple(each) for each in value)
    raise AnnotationError(
        f"{where}: slices={value!r}; give a tuple per tensor input, as in slices=((2, 1, 1), (4, 1))."
    )
