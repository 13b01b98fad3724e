"""Schemas of JSON as values that read like a table: kinds of fields, and `check`, which names the faulty field.

LINK = Record({"name": Text(), "devices": Maybe(Whole(1))}, optional={"latency_s": Real(0)})
LINK.check({"name": "wire", "devices": "two"}, "links[0]")
Malformed: links[0].devices is 'two'; needed a whole number of at least 1
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

MAX_WHOLE = 2**63 - 1
MAX_LENGTH = 10**6


class Malformed(ValueError):
    """Error for input that does not fit its schema; the message begins with the position of the fault."""


class Schema(Protocol):
    """A kind of value; `str` says what is needed."""

    def check(self, found: Any, where: str) -> None:
        """Raise Malformed, with the place of the first difference, where the value is not of this kind."""
        ...


def differs(found: object, where: str, needed: Schema) -> NoReturn:
    """Raise Malformed for a value that is not of the kind that is needed."""
    raise Malformed(f"{where} is {reprlib.repr(found)}; needed {needed}")


@dataclass(frozen=True, slots=True)
class Text:
    """A text that can be written in UTF-8."""

    most: int = 10**5

    def __str__(self) -> str:
        return f"a text of at most {self.most} characters"

    def check(self, found: Any, where: str) -> None:
        if not isinstance(found, str) or len(found) > self.most:
            differs(found, where, self)
        if not found.isascii():
            try:
                found.encode()
            except UnicodeEncodeError:
                differs(found, where, self)


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of some words."""

    words: Collection[str]

    def __str__(self) -> str:
        return f"one of {', '.join(map(repr, self.words))}"

    def check(self, found: Any, where: str) -> None:
        if not isinstance(found, str) or found not in self.words:
            differs(found, where, self)


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def __str__(self) -> str:
        return "true or false"

    def check(self, found: Any, where: str) -> None:
        if not isinstance(found, bool):
            differs(found, where, self)


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from `least` to `most`."""

    least: int = 0
    most: int = MAX_WHOLE

    def __str__(self) -> str:
        return f"a whole number of at least {self.least}" + (f", at most {self.most}" if self.most < MAX_WHOLE else "")

    def check(self, found: Any, where: str) -> None:
        if not isinstance(found, int) or isinstance(found, bool) or not self.least <= found <= self.most:
            differs(found, where, self)


@dataclass(frozen=True, slots=True)
class Real:
    """A finite number of at least `least`."""

    least: float = -math.inf

    def __str__(self) -> str:
        return "a finite number" + (f" of at least {self.least}" if self.least > -math.inf else "")

    def check(self, found: Any, where: str) -> None:
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not self.least <= found <= sys.float_info.max:
            differs(found, where, self)


@dataclass(frozen=True, slots=True)
class Maybe:
    """Schema of a value that may be null."""

    kind: Schema

    def __str__(self) -> str:
        return f"{self.kind}, or null"

    def check(self, found: Any, where: str) -> None:
        if found is not None:
            self.kind.check(found, where)


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of one kind."""

    kind: Schema
    least: int = 0
    most: int = MAX_LENGTH

    def __str__(self) -> str:
        return f"a list of {self.least} to {self.most} values"

    def check(self, found: Any, where: str) -> None:
        if not isinstance(found, list) or not self.least <= len(found) <= self.most:
            differs(found, where, self)
        for number, value in enumerate(found):
            self.kind.check(value, f"{where}[{number}]")


@dataclass(frozen=True, slots=True)
class Row:
    """A list with one value of each kind, in their order."""

    kinds: tuple[Schema, ...]

    def __str__(self) -> str:
        return f"a list of {len(self.kinds)} values"

    def check(self, found: Any, where: str) -> None:
        if not isinstance(found, list) or len(found) != len(self.kinds):
            differs(found, where, self)
        for number, (kind, value) in enumerate(zip(self.kinds, found, strict=True)):
            kind.check(value, f"{where}[{number}]")


@dataclass(frozen=True, slots=True)
class Table:
    """An object of one kind of values, whatever its keys."""

    kind: Schema
    least: int = 0
    most: int = MAX_LENGTH

    def __str__(self) -> str:
        return f"an object of {self.least} to {self.most} values"

    def check(self, found: Any, where: str) -> None:
        if not isinstance(found, dict) or not self.least <= len(found) <= self.most:
            differs(found, where, self)
        for key, value in found.items():
            _NAME.check(key, f"a name in {where}")
            self.kind.check(value, f"{where}.{key}")


_NAME = Text()


@dataclass(frozen=True, slots=True)
class Record:
    """An object with fields by name; `optional` ones may be missing, `others` says whether more may be there."""

    fields: Mapping[str, Schema]
    optional: Mapping[str, Schema] = field(default_factory=dict)
    others: bool = False

    def __str__(self) -> str:
        return f"an object with {', '.join(map(repr, self.fields))}"

    def check(self, found: Any, where: str) -> None:
        if not isinstance(found, dict):
            differs(found, where, self)
        missing = next((name for name in self.fields if name not in found), None)
        if missing is not None:
            raise Malformed(f"{where or 'it'} lacks {missing!r}")
        for name, value in found.items():
            kind = self.fields.get(name) or self.optional.get(name)
            if kind is not None:
                kind.check(value, name if not where else f"{where}.{name}")
            elif not self.others:
                known = ", ".join(map(repr, (*self.fields, *self.optional)))
                raise Malformed(f"{where or 'it'} has {reprlib.repr(name)}; it may have {known}")
