"""Lookup of the decisions that an annotation pattern names.

Names are dotted. `*` stands for anything, dots included (fnmatch). The first of these steps that finds something wins:
whole names of modules and parameters, whole names of operations, then both again as the end of a name.
"%name" is one node of the graph: a call, or the placeholder of a parameter.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import fx

from autopar.costs.space.space import Decision, Space
from autopar.ir.program.calls import is_call, module_of
from autopar.ir.program.paths import ancestors, is_below, matches, relative_to, starred
from autopar.ir.sharding.annotation import NODE, Annotation


@dataclass(frozen=True, slots=True)
class Matches:
    """Matches of a pattern, as positions in `Space.decisions`."""

    kind: Literal["module", "parameter", "operation"]
    calls: tuple[int, ...]
    """Calls made inside the modules, calls that use the parameters, or the operations themselves."""
    outputs: tuple[int, ...]
    """Calls whose values leave the modules, or the operations themselves."""
    parameters: tuple[int, ...]


class Catalog:
    """Every name of a space that an annotation may use."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.calls = [number for number, decision in enumerate(space.decisions) if decision.kind == "call"]
        program = space.program
        names = {name: name for name in program.parameters} | {
            alias: first for alias, first in program.tied.items() if first in program.parameters
        }
        self.parameters = {name: space.index[program.parameters[first]] for name, first in names.items()}
        owners = {name.rpartition(".")[0] for name in self.parameters}
        self.modules = sorted({path for each in (*owners, *map(self.module, self.calls)) for path in ancestors(each)})

    def module(self, number: int) -> str:
        """Return the path of the module that makes a call."""
        return module_of(self.space.decisions[number].node)

    def find(self, annotation: Annotation) -> Matches | None:
        """Return the modules, parameters or operations that an annotation names; None if no name matches."""
        if annotation.pattern.startswith(NODE):
            return self._node(annotation.pattern.removeprefix(NODE))
        within = annotation.within
        for pattern in (annotation.pattern, f"*.{annotation.pattern}"):
            modules = [path for path in self.modules if matches(path, pattern, within)]
            parameters = [number for name, number in self.parameters.items() if matches(name, pattern, within)]
            if modules:
                return self._in_modules(modules, parameters)
            if parameters:
                return Matches("parameter", tuple(self._users(parameters)), (), _unique(parameters))
            operations = tuple(
                number
                for number in self.calls
                if is_below(self.module(number), within)
                and any(fnmatchcase(name, pattern) for name in self._operation_names(number, within))
            )
            if operations:
                return Matches("operation", operations, operations, ())
        return None

    def _node(self, name: str) -> Matches | None:
        number = self.space.index.get(name)
        kind = None if number is None else self.space.decisions[number].kind
        if number is not None and kind == "call":
            return Matches("operation", (number,), (number,), ())
        return Matches("parameter", (), (), (number,)) if number is not None and kind == "parameter" else None

    def near(self, annotation: Annotation) -> list[str]:
        """Return the names that look like the pattern, layers written as `*`, best first."""
        if annotation.pattern.startswith(NODE):
            nodes = [f"{NODE}{d.name}" for d in self.space.decisions if d.kind in ("call", "parameter")]
            return difflib.get_close_matches(annotation.pattern, nodes, n=3)
        names = {*self.modules, *self.parameters} - {""}
        names |= {starred(name) for name in names}
        names |= {operation_of(self.space.decisions[number]) for number in self.calls}
        relative = [relative_to(name, annotation.within) for name in names]
        return difflib.get_close_matches(annotation.pattern, sorted({name for name in relative if name}), n=3)

    def _in_modules(self, modules: list[str], named: list[int]) -> Matches:
        roots = set(modules)
        parameters = [
            number
            for name, number in self.parameters.items()
            if not roots.isdisjoint(ancestors(name.rpartition(".")[0]))
        ]
        calls = [number for number in self.calls if not roots.isdisjoint(ancestors(self.module(number)))]
        outputs = [number for number in calls if self._leaves(number, roots)]
        # A module whose forward is not called (its weight is used elsewhere) is matched through its parameters.
        return Matches(
            "module", tuple(calls or self._users(parameters)), tuple(outputs), _unique([*parameters, *named])
        )

    def _leaves(self, number: int, modules: set[str]) -> bool:
        """Return whether a call's value is used outside at least one of `modules` that contain the call."""
        inside = modules.intersection(ancestors(self.module(number)))
        users = list(_users_of(self.space.decisions[number].node))
        return any(user.op == "output" or not is_below(module_of(user), path) for path in inside for user in users)

    def _users(self, parameters: Iterable[int]) -> list[int]:
        """Return the calls that compute with the parameters, looking through those that only rearrange or cast one."""
        found: set[int] = set()
        left = [self.space.decisions[number].node for number in parameters]
        while left:
            for user in _users_of(left.pop()):
                if not is_call(user) or self.space.index[user.name] in found:
                    continue
                call = self.space.decisions[self.space.index[user.name]].candidates.call
                if call is not None and len(call.inputs) == 1:
                    left.append(user)
                else:
                    found.add(self.space.index[user.name])
        return sorted(found)

    def _operation_names(self, number: int, within: str) -> tuple[str, str, str]:
        """Return an operation's own name ("linear"), that of its node, and its own after the path of its module."""
        decision = self.space.decisions[number]
        name = operation_of(decision)
        return name, decision.node.name, f"{relative_to(module_of(decision.node), within)}.{name}".removeprefix(".")


def placeholders_of(arguments: Iterable[object]) -> Iterator[str]:
    """Yield the names of the placeholders from which arguments of a call are computed."""
    left = [each for each in arguments if isinstance(each, fx.Node)]
    while left:
        node = left.pop()
        if node.op == "placeholder":
            yield node.name
        left += node.all_input_nodes


def operation_of(decision: Decision) -> str:
    """Return the name of a call's operation, as "linear"."""
    assert decision.candidates.call is not None, f"{decision.name} is no call"
    return decision.candidates.call.name


def _unique(numbers: list[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(numbers))


def _users_of(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.op == "call_function" and not is_call(user):
            yield from user.users
        else:
            yield user
