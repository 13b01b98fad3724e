"""Conversion of annotations to pins, which say what strategies of each decision remain.

A pin is a mask over a decision's candidate strategies. A role or a dim pins one mesh axis, slices pin the input
layouts, storage pins parameters, a call of `constrain` its output; pins on one decision intersect. In manual mode
everything that no annotation mentions is pinned, too (`manual`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from autopar.costs.space.space import Decision, Space
from autopar.costs.space.strategy import Strategy
from autopar.errors import AnnotationError, warn_user
from autopar.ir.program.calls import module_of
from autopar.ir.program.operators.mlp_in_tiles import MLP_IN_TILES
from autopar.ir.sharding.annotation import FACTOR, NODE, Annotation, Specified
from autopar.ir.sharding.constraint import is_constraint
from autopar.ir.sharding.layout import I, Layout, Placement, R, S, Z
from autopar.ir.sharding.rule import TOGETHER, VIA, factors_of
from autopar.planning.annotations import refusals
from autopar.planning.annotations.manual import without_warnings
from autopar.planning.annotations.matching import Catalog, Matches, placeholders_of
from autopar.planning.annotations.offered import is_weighted, offered_roles, offered_slices, output_shapes

Mode = Literal["auto", "semi_auto", "manual"]
Mask = np.ndarray
"""True for every candidate strategy that is allowed."""


def pins_of(
    annotations: Sequence[Annotation], space: Space, mode: Mode, storage: Mapping[str, Layout]
) -> dict[int, Mask]:
    """Return the pins of a space: decision → mask over its strategies; decisions without annotations are absent.

    Annotations of a stage only are left to autopar/planning/pipeline/stages/pins.py.
    `storage` fixes the layout in which parameters, by name, are stored already.
    An annotation that matches nothing is an error in the modes "semi_auto" and "manual", a UserWarning in "auto".

    Raises AnnotationError for annotations that cannot hold, alone or together.
    """
    pins = _Pins(space, frozenset(storage))
    catalog = Catalog(space)
    annotations = [each for each in annotations if each.says_layouts]
    for annotation in (each for each in annotations if not each.strategy):
        _check_axes(annotation, space)
        found = catalog.find(annotation)
        if found is not None:
            pins.annotate(annotation, found)
            continue
        text = _matches_nothing(annotation, catalog)
        if mode != "auto":
            raise AnnotationError(text)
        warn_user(text)
    for number in catalog.calls:
        pins.constrain(number)
    added = without_warnings(space, pins.masks) if mode == "manual" else ()
    pins.store(storage)
    for annotation in (*(each for each in annotations if each.strategy), *added):
        found = catalog.find(annotation)
        assert found is not None, f"{annotation} matches nothing"
        pins.annotate(annotation, found)
    return pins.masks


def regather_pins(annotations: Sequence[Annotation], space: Space, storage: Mapping[str, Layout]) -> dict[int, Mask]:
    """Return the pins on how weights are gathered, alone, of a space that is a part of the one that was annotated.

    A weight that several calls share has no choice there; if one of them is left, it has. Annotations that match
    nothing say nothing.
    """
    pins, catalog = _Pins(space, frozenset(storage)), Catalog(space)
    specified = (each for each in annotations if each.regather is not None)
    for annotation in sorted(specified, key=lambda each: bool(each.strategy)):
        found = catalog.find(annotation)
        if found is not None:
            pins.regather(annotation, found)
    return pins.masks


class _Pins:
    """Pins so far, with the annotations that requested them."""

    def __init__(self, space: Space, fixed: frozenset[str]) -> None:
        self.space = space
        self.fixed = {space.index[space.program.parameters[name]] for name in fixed if name in space.program.parameters}
        self.masks: dict[int, Mask] = {}
        self.sources: dict[int, list[tuple[str, Mask]]] = defaultdict(list)
        """Decision → its requests: the text of each annotation, and its mask."""
        self.known_roles: dict[object, np.ndarray] = {}
        self.known_masks: dict[object, Mask] = {}

    def annotate(self, annotation: Annotation, found: Matches) -> None:
        """Pin everything that an annotation says about the decisions it matches."""
        for axis, specified in annotation.axes:
            if self.space.mesh.size(axis) == 1:
                continue  # an axis of one device splits nothing, whatever is requested
            if isinstance(specified, str) and specified.startswith(FACTOR):
                self._factor(annotation, found, axis, specified.removeprefix(FACTOR))
            elif isinstance(specified, str):
                self._role(annotation, found, axis, specified)
            else:
                self._dim(annotation, found, axis, specified)
        if annotation.slices is not None:
            self._slices(annotation, found)
        if annotation.storage:
            self._storage(annotation, found)
        if annotation.regather is not None:
            self.regather(annotation, found)

    def _role(self, annotation: Annotation, found: Matches, axis: str, role: str) -> None:
        index = self.space.mesh.index(axis)
        contractions = [n for n in found.calls if is_weighted(self._decision(n))]
        calls = contractions if contractions and role in ("column", "row") else found.calls
        masks = {n: self._roles(n)[:, index] == self._role_of_call(annotation, found, n, role) for n in calls}
        offered = {number: mask for number, mask in masks.items() if mask.any()}
        if not offered:
            raise AnnotationError(f"{annotation}: {refusals.why_no_role(self.space, calls, axis, role)}")
        for number, mask in offered.items():
            self._add(number, annotation, mask)

    def _role_of_call(self, annotation: Annotation, found: Matches, number: int, role: str) -> str:
        """Return the role of a call: columns of the first layers of an MLP in tiles are the rows of the last one."""
        node = self._decision(number).node
        if node.target is not MLP_IN_TILES or role not in ("column", "row"):
            return role
        first, last = (
            {self.space.index[name] for name in placeholders_of(each)} for each in (node.args[1:5], node.args[5:])
        )
        if first.isdisjoint(found.parameters) or not last.isdisjoint(found.parameters):
            return role
        if role == "row":
            raise AnnotationError(f"{annotation}: {refusals.why_no_row_of_first_layer(self._decision(number))}")
        return "row"

    def _factor(self, annotation: Annotation, found: Matches, axis: str, factor: str) -> None:
        """Pin a factor that the rules of all matched operations have."""
        index = self.space.mesh.index(axis)
        if found.kind != "operation":
            raise AnnotationError(f"{annotation}: {refusals.why_no_operation_named(found, annotation.pattern, axis)}")
        for number in found.calls:
            mask = self._mask_of(number, ("factor", index, factor), lambda s: _splits(s, index, factor))
            if not mask.any():
                decision = self._decision(number)
                raise AnnotationError(f"{annotation}: {refusals.why_no_factor(self.space, decision, axis, factor)}")
            self._add(number, annotation, mask)

    def _dim(self, annotation: Annotation, found: Matches, axis: str, specified: Specified) -> None:
        assert not isinstance(specified, str)
        index = self.space.mesh.index(axis)
        numbers = found.parameters if found.kind == "parameter" else found.outputs
        tensors = [number for number in numbers if specified is None or _has_dim(self._decision(number), specified)]
        if not tensors:
            raise AnnotationError(
                f"{annotation}: {refusals.why_no_dim(self.space, numbers, annotation.pattern, specified)}"
            )
        for number in tensors:
            decision = self._decision(number)
            if number in self.fixed:
                continue
            mask = self._mask_of(
                number, ("dim", index, specified), lambda s, d=decision: _splits_outputs(s, d, index, specified)
            )
            if not mask.any():
                raise AnnotationError(f"{annotation}: {refusals.why_no_split(self.space, decision, axis, specified)}")
            self._add(number, annotation, mask)

    def _slices(self, annotation: Annotation, found: Matches) -> None:
        slices = annotation.slices
        assert slices is not None
        fitting = [number for number in found.calls if _fits(self._decision(number), slices)]
        weighted = [number for number in fitting if is_weighted(self._decision(number))]
        if not fitting:
            raise AnnotationError(f"{annotation}: {refusals.why_no_operation(self.space, found.calls, slices)}")
        for number in weighted or fitting:
            decision = self._decision(number)
            counts = offered_slices(decision, self.space.mesh.sizes)
            mask = np.array([each is not None and each[: len(slices)] == slices for each in counts])
            if not mask.any():
                raise AnnotationError(f"{annotation}: {refusals.why_no_slices(self.space, decision, slices)}")
            self._add(number, annotation, mask)

    def _storage(self, annotation: Annotation, found: Matches) -> None:
        """Pin storage; parameters too small for the axes stay free, unless no matched one can be split."""
        axes = [self.space.mesh.index(axis) for axis in annotation.storage if self.space.mesh.size(axis) > 1]
        masks = {
            number: _mask(self._decision(number), lambda strategy: all(strategy.outputs[0][a].is_split for a in axes))
            for number in found.parameters
        }
        possible = {number: mask for number, mask in masks.items() if mask.any()}
        if not possible:
            raise AnnotationError(f"{annotation}: {refusals.why_no_storage(self.space, found, annotation.storage)}")
        for number, mask in possible.items():
            if number not in self.fixed:
                self._add(number, annotation, mask)

    def regather(self, annotation: Annotation, found: Matches) -> None:
        """Pin regathering, except for parameters that the backward does not need or that several calls share.

        Unless all of these take views, such as the slices of a packed weight.
        """
        matched = {self._decision(number).name for number in found.parameters}
        casts = [self.space.index[cast] for cast, weight in self.space.weight_casts.items() if weight in matched]
        for number in (*found.parameters, *casts):
            strategies = self._decision(number).candidates.strategies
            if any(strategy.saved for strategy in strategies) and number not in self.fixed:
                mask = np.array([not s.outputs[0].is_split or s.saved != annotation.regather for s in strategies])
                self._add(number, annotation, mask)
        for number in filter(self._shrinks, casts):
            self._cast_in_parts(number, annotation)

    def _shrinks(self, cast: int) -> bool:
        """Return whether a cast shrinks a weight, so that the cast runs before the weight is communicated."""
        call = self._decision(cast).candidates.call
        assert call is not None, "a cast is a call"
        return call.outputs[0].dtype.itemsize < call.inputs[0].dtype.itemsize

    def _cast_in_parts(self, cast: int, annotation: Annotation) -> None:
        """Pin a cast to the storage axes, unless its weight is pinned to be whole on one of them."""
        axes = [self.space.mesh.index(axis) for axis in annotation.storage if self.space.mesh.size(axis) > 1]
        weight = self.space.index[self.space.weight_casts[self._decision(cast).name]]
        stored, mask = (
            _mask(self._decision(each), lambda strategy: all(strategy.outputs[0][a].is_split for a in axes))
            for each in (weight, cast)
        )
        if mask.any() and (weight not in self.masks or (self.masks[weight] & stored).any()):
            self._add(cast, annotation, mask)

    def constrain(self, number: int) -> None:
        """Apply the pin of an `autopar.constrain` call; other calls carry none."""
        decision = self._decision(number)
        call = decision.candidates.call
        if call is None or not is_constraint(call.target):
            return
        dims = {axis: None if dim < 0 else dim for axis, dim in zip(call["axes"], call["dims"], strict=True)}
        specified = ", ".join(f"{axis}={dim}" for axis, dim in dims.items())
        text = f"constrain({call.inputs[0]}, {specified}) in {module_of(decision.node) or 'the model'}"
        for axis in dims:
            _check_axis(axis, text, self.space)
        indices = {self.space.mesh.index(axis): dim for axis, dim in dims.items() if self.space.mesh.size(axis) > 1}
        mask = _mask(decision, lambda s: all(_splits_outputs(s, decision, axis, dim) for axis, dim in indices.items()))
        if not mask.any():
            raise AnnotationError(f"{text}: {refusals.why_no_layout(self.space, decision, dims)}")
        self._add(number, text, mask)

    def store(self, storage: Mapping[str, Layout]) -> None:
        """Pin parameters to the layouts in which they are stored already."""
        for name, layout in storage.items():
            placeholder = self.space.program.parameters.get(name)
            if placeholder is not None:
                number = self.space.index[placeholder]
                sizes = self.space.mesh.sizes
                whole = Layout(I if size == 1 else placement for size, placement in zip(sizes, layout, strict=True))
                mask = _mask(self._decision(number), lambda strategy, wanted=whole: strategy.outputs[0] == wanted)
                assert mask.any(), f"{name} is stored as {layout}, which is no candidate of it"
                self.masks[number] = mask

    def _add(self, number: int, asking: Annotation | str, mask: Mask) -> None:
        """Intersect a decision's pin with `mask`; AnnotationError naming both sides where nothing is left.

        A preset gives way instead: the pin stays as it was.
        """
        before = self.masks.get(number)
        both = mask if before is None else before & mask
        if isinstance(asking, Annotation) and asking.strategy and not both.any():
            return
        text = str(asking)
        if not both.any():
            others = self.sources[number]
            other = next((text for text, each in others if not (each & mask).any()), others[-1][0])
            raise AnnotationError(refusals.contradiction(self.space, self._decision(number), text, other))
        self.masks[number] = both
        self.sources[number].append((text, mask))

    def _mask_of(self, number: int, key: tuple[object, ...], allowed: Callable[[Strategy], bool]) -> Mask:
        """Return a mask over a decision's candidates, built once for the equal decisions of all layers."""
        candidates = self._decision(number).candidates
        if (id(candidates), *key) not in self.known_masks:
            self.known_masks[id(candidates), *key] = _mask(self._decision(number), allowed)
        return self.known_masks[id(candidates), *key]

    def _roles(self, number: int) -> np.ndarray:
        """Return `offered_roles` of a decision, computed once for the equal calls of all layers."""
        decision = self._decision(number)
        key = (id(decision.candidates), frozenset(decision.roles.items()))
        if key not in self.known_roles:
            self.known_roles[key] = offered_roles(decision)
        return self.known_roles[key]

    def _decision(self, number: int) -> Decision:
        return self.space.decisions[number]


def _check_axes(annotation: Annotation, space: Space) -> None:
    for axis in (*(axis for axis, _ in annotation.axes), *annotation.storage):
        _check_axis(axis, str(annotation), space)


def _check_axis(axis: str, text: str, space: Space) -> None:
    if axis not in space.mesh.axes:
        raise AnnotationError(
            f'{text}: the mesh has no axis "{axis}"; its axes are {", ".join(space.mesh.names)}. '
            f"Name one of these, or add the axis to the mesh."
        )


def _matches_nothing(annotation: Annotation, catalog: Catalog) -> str:
    near = catalog.near(annotation)
    hint = f"Near it are {', '.join(near)}." if near else "Use `*` for the numbers of layers, or an operation's name."
    if annotation.pattern.startswith(NODE):
        hint = hint if near else "The names are those of the rows of plan.save(path)."
        return f'{annotation}: the graph has no call and no parameter "{annotation.pattern}". {hint}'
    return (
        f"{annotation}: no module, parameter or operation that the model uses matches "
        f'"{annotation.pattern}" or "*.{annotation.pattern}". {hint}'
    )


def _mask(decision: Decision, allowed: Callable[[Strategy], bool]) -> Mask:
    return np.array([allowed(strategy) for strategy in decision.candidates.strategies])


def _splits(strategy: Strategy, axis: int, named: str) -> bool:
    """Return whether a strategy splits an axis as named: by that factor, and by that implementation if one is given.

    A name "+x" matches every choice that splits x together with another factor. An implementation that stands for its
    last factor alone matches the name of that factor.
    """
    choice, (factor, _, implementation) = strategy.choices[axis], named.partition(VIA)
    runs = strategy.implementation
    if implementation and implementation != runs.name:
        return False
    if runs.stands_for_last and factors_of(choice)[-1:] == (factor,):
        return True
    return factor == choice or (factor[:1] == TOGETHER and factor.removeprefix(TOGETHER) in factors_of(choice)[1:])


def _has_dim(decision: Decision, dim: int) -> bool:
    return any(-len(shape) <= dim < len(shape) for shape in output_shapes(decision))


def _splits_outputs(strategy: Strategy, decision: Decision, axis: int, specified: int | None) -> bool:
    """Return whether a strategy splits all outputs that have dim `specified` along it on a mesh axis.

    Without a dim, return whether all outputs are equal on every device of the axis.
    """
    placements: list[tuple[Placement, int]] = [
        (layout[axis], len(shape)) for layout, shape in zip(strategy.outputs, output_shapes(decision), strict=True)
    ]
    if specified is None:
        return all(placement in (I, R) for placement, _ in placements)
    split = [(each, specified % ndim) for each, ndim in placements if -ndim <= specified < ndim]
    return all(placement in (S(dim), Z(dim)) for placement, dim in split)


def _fits(decision: Decision, slices: Sequence[Sequence[int]]) -> bool:
    """Return whether `slices` has one tuple of matching rank per input; a weighted operation's last may be absent.

    The optional input is the bias.
    """
    call = decision.candidates.call
    assert call is not None
    optional = 1 if is_weighted(decision) else 0
    ranks = [len(info.shape) for info in call.inputs]
    return 0 <= len(ranks) - len(slices) <= optional and [len(each) for each in slices] == ranks[: len(slices)]
