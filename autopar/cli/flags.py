"""Messages of the library in the terms of a shell: `--devices 64` where Python writes `devices=64`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection

from autopar.cli.groups import OF_PLANS
from autopar.planning.options.definition import options_of

FIELDS = {group.__name__: {each.name: each.flat for each in options_of(group)} for group in OF_PLANS}
"""Group → its fields, each with the name of its flag."""
OTHER_FLAGS = {name: flat for fields in FIELDS.values() for name, flat in fields.items() if "_" in name}
OTHER_FLAGS |= {"training": "inference", "prompt": "sequence", "tokens": "decode"}
"""Option in Python → option of the command line, where the names differ."""
_VALUE = r"""(?:"[^"]*"|'[^']*'|[(\[][^()\[\]]*[)\]]|[^()\[\],"' ]+)"""
_GROUP = re.compile(rf"(?<![\w.])({'|'.join(FIELDS)})\((\w+={_VALUE}(?:, \w+={_VALUE})*)\)")
_FIELD = re.compile(rf"(\w+)=({_VALUE})")
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
    >>> in_shell_terms('give Pipeline(schedule="1f1b", stages_per_rank=2)', ["schedule", "stages_per_rank"])
    'give --schedule 1f1b --stages-per-rank 2'
    """
    if _TRACEBACK in message:
        return message

    def of_group(given: re.Match[str]) -> str:
        specified = [(FIELDS[given[1]].get(name, ""), value) for name, value in _FIELD.findall(given[2])]
        return (
            " ".join(_flag(*each) for each in specified)
            if all(name in options for name, _ in specified)
            else given.group()
        )

    def flag(given: re.Match[str]) -> str:
        name, value = given.groups()
        if OTHER_FLAGS.get(name, name) not in options or _is_in_a_call(ungrouped, given.start()):
            return given.group()
        return _flag(name, value)

    def bare(named: re.Match[str]) -> str:
        is_option = OTHER_FLAGS.get(named[1], named[1]) in options and not _is_in_a_call(flagged, named.start())
        return _flag(named[1], "True") if is_option else named[1]

    ungrouped = _GROUP.sub(of_group, message)
    flagged = _GIVEN.sub(flag, ungrouped)
    return _NAMED.sub(bare, flagged)


def _flag(name: str, value: str) -> str:
    spelled = f"--{OTHER_FLAGS.get(name, name).replace('_', '-')}"
    if value == "True" or (name == "training" and value == "False"):
        return spelled
    return f"{spelled} {_word(value)}"


def _word(value: str) -> str:
    if value[0] in "([":
        return ",".join(each.strip(" \"'") for each in value[1:-1].split(",") if each.strip())
    return shlex.quote(value[1:-1]) if value[0] in "\"'" else value


def _is_in_a_call(text: str, end: int) -> bool:
    """Return whether text[end] stands between the parentheses of a Python call."""
    depth = 0
    for place in range(end - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(text[place], 0)
        if depth < 0:
            return place > 0 and (text[place - 1].isalnum() or text[place - 1] == "_")
    return False
