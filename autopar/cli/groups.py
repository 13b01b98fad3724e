"""Flags of the groups of options: one for each field, with its docstring as help; read without PyTorch."""

from __future__ import annotations

import argparse
from typing import Any, TypeVar

from autopar.files.schema import Flag, Maybe, OneOf, Real, Schema, Text, Whole
from autopar.planning.options.definition import EitherOf, Group, Option, Satisfying, docs_of, options_of
from autopar.planning.options.groups import Experts, Memory, Pipeline, Search

OF_PLANS: tuple[type[Group], ...] = (Memory, Pipeline, Experts, Search)
"""Groups whose fields are flags."""
MAX_COUNT = 10**7  # samples, tokens, layers, …: sizes stay below 64 bits
G = TypeVar("G", bound=Group)


def add_flags(parser: argparse.ArgumentParser, group: type[Group]) -> None:
    """Add a flag for each field of a group; a flag that is not given leaves no value."""
    for each in options_of(group):
        parser.add_argument(flag_of(each), **_argument(each), help=_help(docs_of(group)[each.name]))


def given(group: type[G], options: argparse.Namespace) -> G:
    """Return the group that the flags say; InputError for values that do not go together."""
    specified = {each.name: getattr(options, each.flat, None) for each in options_of(group)}
    return group(**{name: value for name, value in specified.items() if value is not None})


def flag_of(option: Option) -> str:
    return f"--{option.flat.replace('_', '-')}"


def _argument(option: Option) -> dict[str, Any]:
    kind = option.kind.kind if isinstance(option.kind, Maybe) else option.kind
    if isinstance(kind, Flag):
        return {"action": "store_true", "default": None}
    match kind:
        case OneOf(words) | EitherOf(OneOf(words), Satisfying()):  # whose values no text says
            return {"choices": words}
    return {"type": lambda text: _read(kind, text)}


def _read(kind: Schema, text: str) -> Any:
    """Return the value of a kind that a text says; ArgumentTypeError for a text that says none."""
    match kind:
        case EitherOf(OneOf(words), number) | EitherOf(number, OneOf(words)):
            return text if text in words else _read(number, text)
        case Whole(least):
            return whole_number(text, least)
        case Real():
            return float(text)
        case Satisfying():
            return kind.read(text)
        case Text():
            return text
    raise AssertionError(f"no flag for {kind}")


def whole_number(text: str, least: int = 1) -> int:
    """Return the number that a text says; ArgumentTypeError if it is too small, or too large for 64-bit counts."""
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    if number > MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text[:20]} is more than {MAX_COUNT}")
    return number


def _help(text: str) -> str:
    return (text[0].lower() + text[1:]).rstrip(".").replace("%", "%%")
