"""Messages of the library in the terms of a shell: `--devices 64` where Python writes `devices=64`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection

OTHER_FLAGS = {"training": "inference", "prompt": "sequence", "tokens": "decode"}
"""Option in Python → option of the command line, where the names differ."""
_GIVEN = re.compile(r"""(?<![\w.-])(\w+)=("[^"]*"|'[^']*'|-?\d\w*(?:\.\d\w*)?|[A-Za-z][\w-]*|…)""")
_NAMED = re.compile(r"(?<![\w.-])(\w+_\w+|(?<=[Ll]eave )\w+(?= out)|^\w+(?= is given ))(?![\w=(.])")
"""A bare name that can only be an option's: one with an underscore, or where messages say what to leave out."""
_TRACEBACK = "Traceback (most recent call last)"


def in_shell_terms(message: str, options: Collection[str]) -> str:
    """Return the message with the `options` of a command as flags; Python code and users' tracebacks stay.

    >>> in_shell_terms('devices=64 with a mesh of 2; give mesh="auto".', ["devices", "mesh"])
    '--devices 64 with a mesh of 2; give --mesh auto.'
    >>> in_shell_terms('write Mesh({"dp": 2}, hardware="h100")', ["hardware"])
    'write Mesh({"dp": 2}, hardware="h100")'
    """
    if _TRACEBACK in message:
        return message

    def flag(given: re.Match[str]) -> str:
        name, value = given.groups()
        if OTHER_FLAGS.get(name, name) not in options or _is_in_a_call(message, given.start()):
            return given.group()
        return _flag(name, value)

    def bare(named: re.Match[str]) -> str:
        is_option = named[1] in options and not _is_in_a_call(flagged, named.start())
        return _flag(named[1], "True") if is_option else named[1]

    flagged = _GIVEN.sub(flag, message)
    return _NAMED.sub(bare, flagged)


def _flag(name: str, value: str) -> str:
    spelled = f"--{OTHER_FLAGS.get(name, name).replace('_', '-')}"
    if value == "True" or (name == "training" and value == "False"):
        return spelled
    return f"{spelled} {_word(value)}"


def _word(value: str) -> str:
    """Return a Python value as a word of a shell."""
    if value == "False":
        return "off"
    return shlex.quote(value[1:-1]) if value[0] in "\"'" else value


def _is_in_a_call(text: str, end: int) -> bool:
    """Return whether text[end] stands between the parentheses of a Python call."""
    depth = 0
    for place in range(end - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(text[place], 0)
        if depth < 0:
            return place > 0 and (text[place - 1].isalnum() or text[place - 1] == "_")
    return False
