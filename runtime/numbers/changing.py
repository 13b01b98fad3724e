"""The numbers among a module's inputs: constants of a graph at first, and tensors of it once they change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable
from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autopar.capture.static.arguments import StaticTensor
from autopar.errors import warn_user
from autopar.ir.program.program import TensorInfo
from autopar.runtime.numbers.as_tensors import Capture, Refusal, as_tensors
from autopar.runtime.numbers.leaves import Arguments, names_of, replaceable

PLANNED = 3
"""Plans for different values of one number, after which it is warned of."""
ATTEMPTS = 2
"""Attempts to replace one number by a tensor.

One may fail because the program for a value such as 1 lacks a call that those for other values have.
"""

Kind = TypeVar("Kind", bound=Hashable)
KindOf = Callable[[Collection[int]], Kind]
"""Places of numbers whose values do not count → the kind of a call."""


class Numbers:
    """Changing numbers and static arguments among the inputs of one module."""

    def __init__(self) -> None:
        self._planned: dict[str, set[int | float]] = defaultdict(set)
        """Name → the values for which there are plans."""
        self._static: dict[str, set[str]] = defaultdict(set)
        """Name of a static argument → the texts of its values for which there are plans."""
        self._tensors: dict[Hashable, dict[int, str]] = {}
        """A kind of call, whatever its numbers are → the places and names of those that are tensors of its graph."""
        self._replaced: set[str] = set()
        """Names of numbers that have been replaced in some kind of call."""
        self._refused: dict[str, list[Refusal]] = defaultdict(list)

    def kind(self, arguments: Arguments, kind_of: KindOf[Kind]) -> tuple[Kind, dict[str, str]]:
        """Return the kind of a call, and its numbers that are tensors of the graph, by name, in words."""
        if not self._replaced:
            return kind_of(()), {}
        numbers = replaceable(arguments)
        tensors = self._tensors.get(kind_of(numbers), {})
        return kind_of(tensors), {name: repr(numbers[place]) for place, name in tensors.items()}

    def replaced(
        self, arguments: Arguments, kind_of: KindOf[Hashable], capture: Capture, mesh: DeviceMesh
    ) -> Arguments:
        """Return a call that is to be planned with tensors in place of the numbers that change, where that may be.

        Called by all ranks of the mesh.
        """
        numbers = replaceable(arguments)
        if not numbers or not self._planned:
            return arguments
        names, before = names_of(arguments), self._tensors.get(kind_of(numbers), {})
        changing = {
            place: number for place, number in numbers.items() if place in before or self._changes(names[place], number)
        }
        if not changing:
            return arguments
        found = as_tensors(arguments, changing, capture, mesh)
        for place, refusal in found.refused.items():
            self._refused[names[place]].append(refusal)
        return found.arguments

    def _changes(self, name: str, number: int | float) -> bool:
        others = self._planned.get(name, set()) - {number}
        return (name in self._replaced or bool(others)) and len(self._refused[name]) < ATTEMPTS

    def planned(self, arguments: Arguments, input_values: tuple[object, ...], kind_of: KindOf[Kind]) -> Kind:
        """Return the kind of a call that was planned; warn of a value that is planned again and again.

        `input_values` are the leaves as the program has them.
        """
        numbers = replaceable(arguments)
        if not any(type(leaf) in (int, float, StaticTensor) for leaf in pytree.tree_leaves(arguments)):
            return kind_of(())
        names = names_of(arguments)
        tensors = {place: names[place] for place in numbers if isinstance(input_values[place], TensorInfo)}
        self._tensors[kind_of(numbers)] = tensors
        self._replaced.update(tensors.values())
        for place, leaf in enumerate(pytree.tree_leaves(arguments)):
            if isinstance(leaf, StaticTensor):
                self._add_static(names[place], leaf.text)
            elif type(leaf) in (int, float) and place not in tensors:
                self._add(names[place], leaf)
        return kind_of(tensors)

    def _add_static(self, name: str, text: str) -> None:
        texts = self._static[name]
        if text not in texts and len(texts) == PLANNED - 1:
            warn_user(
                f"the model was captured and planned {PLANNED} times, as the values of the static argument {name} "
                "changed, each time for other ones. Give it few different values, for example by bringing images to "
                "few sizes; all plans are kept."
            )
        texts.add(text)

    def _add(self, name: str, value: int | float) -> None:
        values = self._planned[name]
        if value in values:
            return
        values.add(value)
        if len(values) == PLANNED:
            warn_user(_warning(name, values, value, self._refused[name]))


def _warning(name: str, values: Collection[int | float], value: int | float, refused: list[Refusal]) -> str:
    """Return the warning for a number whose values are planned one by one, with the reason."""
    seen = ", ".join(map(str, sorted(values)))
    text = f"the model was captured and planned {len(values)} times, as the number {name} changed ({seen})"
    if refused and not refused[-1].is_captured:
        return f"{text}: {refused[-1].why}. Let forward compute with it, as by torch.where, or give fewer values."
    reason = f": a tensor would be another computation ({refused[-1].why})" if refused else ""
    return f"{text}{reason}. Give it as a tensor, torch.tensor({value}), which one plan serves whatever its value is."
