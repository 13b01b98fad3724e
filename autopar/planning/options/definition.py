"""Definition of options: fields of frozen groups, each with the kind of its values and its name by itself.

    @dataclass(frozen=True, slots=True, repr=False)
    class Search(Group):
        time_limit: float = option(120.0, SECONDS)
        \"""Seconds of capture and search.\"""

`compile` takes groups (`search=Search(time_limit=60)`). The command line has a flag for each field (`--time-limit 60`),
with the docstring as help. A field has the name `flat` there, if its own says too little without the group.
"""

from __future__ import annotations

import ast
import inspect
import reprlib
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar, Self

from autopar.errors import InputError
from autopar.files.schema import Malformed, Maybe, Schema, differs

OFF = "none"
"""Value that turns an option off, for options that have one."""
_METADATA = "option"


@dataclass(frozen=True, slots=True)
class Satisfying:
    """Schema of the values that a predicate accepts; `read` makes one from a text of the command line."""

    accepts: Callable[[Any], bool]
    needed: str
    read: Callable[[str], Any] = str

    def __str__(self) -> str:
        return self.needed

    def check(self, found: Any, where: str) -> None:
        """Raise Malformed for a value that is not of the schema."""
        if not self.accepts(found):
            differs(found, where, self)


@dataclass(frozen=True, slots=True)
class EitherOf:
    """Schema of values of one kind or of another."""

    first: Schema
    second: Schema

    def __str__(self) -> str:
        return f"{self.first}, or {self.second}"

    def check(self, found: Any, where: str) -> None:
        """Raise Malformed for a value that is not of the schema."""
        try:
            self.first.check(found, where)
        except Malformed:
            self.second.check(found, where)


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a group: its name, its default and what it may be."""

    name: str
    default: Any
    kind: Schema
    flat: str
    """Name of the option without its group, as on the command line."""
    of_training: bool
    """True if a forward alone leaves it at its default, or off."""
    of_each_rank: bool
    """True if ranks may choose differently."""


def option(default: Any, kind: Schema, *, flat: str = "", of_training: bool = False, of_each_rank: bool = False) -> Any:
    """Return the field of a group; the parameters are those of `Option`."""
    return field(default=default, metadata={_METADATA: (kind, flat, of_training, of_each_rank)})


class Group:
    """Base of all groups of options."""

    __slots__ = ()
    has_shorthand: ClassVar[bool] = False
    """True if a value of the first field may be given in place of the group."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise InputError for the first field whose value is not of its kind; keep lists as tuples."""
        for each in options_of(type(self)):
            value = getattr(self, each.name)
            check_kind(each.kind, value, f"{type(self).__name__}({each.name}={reprlib.repr(value)})")
            if isinstance(value, list):
                object.__setattr__(self, each.name, tuple(value))

    @classmethod
    def of(cls, given: object) -> Self:
        """Return the group that an option stands for: itself, its shorthand, or None for all defaults."""
        if isinstance(given, cls):
            return given
        if given is None or cls.has_shorthand:
            make: Any = cls  # whose fields, those of a subclass, are not known here
            return make() if given is None else make(given)
        name = cls.__name__
        raise InputError(f"{name.lower()}={reprlib.repr(given)}; give autopar.{name}(…), or None for its defaults.")

    def given(self) -> Iterator[tuple[Option, Any]]:
        """Yield the fields that have another value than their default, with these values."""
        for each in options_of(type(self)):
            value = getattr(self, each.name)
            if type(value) is not type(each.default) or value != each.default:
                yield each, value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{each.name}={value!r}' for each, value in self.given())})"


def check_kind(kind: Schema, value: object, shown: str) -> None:
    """Raise InputError for a value that is not of a kind; the message begins as it is `shown`."""
    try:
        kind.check(value, "")
    except Malformed:
        needed = f"{kind.kind}, or None" if isinstance(kind, Maybe) else str(kind)
        raise InputError(f"{shown}; give {needed}.") from None


def flat_name(each: Field[Any]) -> str:
    """Return the name of an option without its group, as on the command line."""
    own = each.metadata[_METADATA][1] if _METADATA in each.metadata else ""
    return own or each.name


@cache
def options_of(group: type[Group]) -> tuple[Option, ...]:
    """Return the options of a group, in the order of its fields."""
    found = []
    for each in fields(group):  # type: ignore[arg-type]
        kind, _, of_training, of_each_rank = each.metadata[_METADATA]
        found.append(Option(each.name, each.default, kind, flat_name(each), of_training, of_each_rank))
    return tuple(found)


@cache
def docs_of(group: type[Group]) -> Mapping[str, str]:
    """Return the docstring of each field of a group, read from its source."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(group))).body[0]
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, below in pairwise(definition.body):
        value = below.value if isinstance(below, ast.Expr) else None
        if isinstance(statement, ast.AnnAssign) and isinstance(value, ast.Constant):
            found[ast.unparse(statement.target)] = " ".join(str(value.value).split())
    return found
