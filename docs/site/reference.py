"""Generated parts of the documentation: `python -m docs.site.reference` writes them (`make reference`).

A page has them between two comments, with the kind of part and its arguments in the first one:

    <!-- generated: options Memory -->
    <!-- end -->

Everything comes from the one definition of it in the code, so a test can compare the pages with the code.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from griffe import Docstring, DocstringSectionKind

import autopar
from autopar.cli.groups import OF_PLANS, flag_of
from autopar.cli.parser import parser
from autopar.compiler.arguments import GROUPS, plan_request
from autopar.console.names import ALIASES
from autopar.costs.hardware.load import PROFILES, known_profiles
from autopar.costs.hardware.network import Network
from autopar.costs.hardware.profile import Hardware, Link, Protocol
from autopar.costs.hardware.reserved import Reserved
from autopar.costs.plans import comparison, schema, workload
from autopar.costs.plans.decision_rows import Instant, KeptWhole, MemoryUse, PlanRow
from autopar.costs.plans.plan import Plan
from autopar.files.schema import Flag, ListOf, Maybe, OneOf, Real, Record, Row, Schema, Table, Text, Whole
from autopar.planning.options.definition import docs_of, options_of
from autopar.planning.pipeline.plan import PIPELINE_PLAN, PipelinePlan, StagePlan
from autopar.strategies import presets
from autopar.strategies.presets import PRESETS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PART = re.compile(r"(<!-- generated: ([\w-]+)( [^>\n]*)? -->\n).*?(<!-- end -->)", re.DOTALL)
NONE = "—"


def regenerated(page: Path) -> str:
    """Return the text of a page with its generated parts as the code has them now."""

    def part(found: re.Match[str]) -> str:
        made = KINDS[found[2]](page, *shlex.split(found[3] or ""))
        return f"{found[1]}\n{made.strip()}\n\n{found[4]}"

    return PART.sub(part, page.read_text())


def pages() -> list[Path]:
    """Return the pages that have generated parts."""
    return [page for page in sorted(DOCS.rglob("*.md")) if PART.search(page.read_text())]


def _table(heads: Sequence[str], rows: Iterator[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(_cell(str(each)) for each in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|") or NONE


def _code(value: object) -> str:
    return f"`{value}`" if value not in (None, "") else NONE


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0].rstrip(".:")


# Indexes.


def _pages_of_folder(page: Path, *first: str) -> str:
    """Make a table of the other pages of a folder with their first sentences; those named come first, in this order."""
    found = {each.stem: each for each in sorted(page.parent.glob("*.md")) if each != page}
    ordered = [found[each] for each in dict.fromkeys((*first, *found)) if each in found]
    openings = [(each.name, *_opening(each.read_text())) for each in ordered]
    return _table(("page", "content"), ((f"[{title}]({name})", specified) for name, title, specified in openings))


def _opening(text: str) -> tuple[str, str]:
    """Return the heading and the first sentence of a page."""
    heading, *lines = re.sub(r"<!--.*?-->|\]\([^)]*\)|\[", "", text, flags=re.DOTALL).splitlines()
    return heading.lstrip("# "), _first_sentence("\n".join(each for each in lines if not each.startswith("#")))


def _scripts_of_folder(page: Path) -> str:
    """Make a table of the scripts of a folder with the first sentences of their docstrings."""
    found = sorted(page.parent.glob("*.py"))
    docstrings = [ast.get_docstring(ast.parse(each.read_text())) or "" for each in found]
    rows = zip(found, docstrings, strict=True)
    return _table(
        ("script", "content"), ((f"[{each.name}]({each.name})", _first_sentence(specified)) for each, specified in rows)
    )


# The API.


def _names(page: Path, *names: str) -> str:
    """Make a table of names with their summaries; the site has the documentation of each in its place."""
    return _table(("name", "summary"), ((_code(name), _first_sentence(_docstring(name))) for name in names))


def _docstring(name: str) -> str:
    """Return the docstring of a dotted name; a module is not imported for it, as some import other libraries."""
    module, _, own = name.rpartition(".")
    file = (ROOT / module.replace(".", "/")).with_suffix(".py")
    if not file.exists():
        return getattr(importlib.import_module(module), own).__doc__ or ""
    found = [each for each in ast.parse(file.read_text()).body if getattr(each, "name", "") == own]
    return ast.get_docstring(found[0]) or ""  # type: ignore[arg-type]


# Options.


def _options(page: Path, group: str) -> str:
    """Make a table of the fields of a group of options."""
    kind = GROUPS[group.lower()]
    docs = docs_of(kind)
    flags = [flag_of(each) if kind in OF_PLANS else "" for each in options_of(kind)]
    return _table(
        ("field", "values", "default", "flag", "meaning"),
        (
            (_code(each.name), _or_none(each.kind), _code(repr(each.default)), _code(flag), docs[each.name])
            for each, flag in zip(options_of(kind), flags, strict=True)
        ),
    )


def _or_none(kind: Schema) -> str:
    return f"{kind.kind}, or None" if isinstance(kind, Maybe) else str(kind)


def _arguments(page: Path, function: str) -> str:
    """Make a table of the arguments of a function, with the defaults of options that it takes as **options."""
    documented = _documented_arguments(getattr(autopar, function))
    taken = {**inspect.signature(plan_request).parameters, **inspect.signature(getattr(autopar, function)).parameters}
    defaults = {
        name: NONE if taken[name].default is inspect.Parameter.empty else _code(repr(taken[name].default))
        for name in documented
    }
    return _table(
        ("argument", "type", "default", "meaning"),
        (
            (_code(name), _code(taken[name].annotation), defaults[name], specified[0].upper() + specified[1:])
            for name, specified in documented.items()
        ),
    )


@cache
def _documented_arguments(function: Callable[..., Any]) -> Mapping[str, str]:
    """Return the arguments that a docstring says, with its words."""
    sections = Docstring(inspect.getdoc(function) or "").parse("google", warnings=False)
    arguments = next(each for each in sections if each.kind is DocstringSectionKind.parameters)
    return {each.name: each.description for each in arguments.value}


# Strategies.


def _presets(page: Path) -> str:
    """Make a table of all presets."""
    short = {preset: alias for alias, preset in ALIASES.items()}
    rows = (
        (f"[`{name}`](#{name})", _code(short.get(name)), _first_sentence(preset.__doc__ or ""))
        for name, preset in PRESETS.items()
    )
    return _table(("strategy", "short", "splits"), rows)


def _preset(page: Path, name: str) -> str:
    """Return the docstring of a preset, its formulas as code."""
    return _markdown(PRESETS[name].__doc__)


def _symbols(page: Path) -> str:
    """Return what the docstring of all presets says of bytes and symbols."""
    return _markdown(presets.__doc__).partition("\n\n")[2].partition("\n\n")[2]


def _markdown(docstring: str | None) -> str:
    code = re.compile(r"(?:^ {4}.*\n?|\n(?= {4}))+", re.MULTILINE)
    return code.sub(lambda found: f"\n```\n{inspect.cleandoc(found[0])}\n```\n", inspect.cleandoc(docstring or ""))


# Files.

RECORDS: Mapping[str, tuple[Record, tuple[type, ...]]] = {
    "plan": (schema.PLAN, (Plan,)),
    "pipeline plan": (PIPELINE_PLAN, (PipelinePlan,)),
    "row": (schema.ROW, (PlanRow,)),
    "memory": (schema.MEMORY, (MemoryUse, Instant)),
    "kept whole": (schema.KEPT_WHOLE, (KeptWhole,)),
    "reserved": (schema.RESERVED, (Reserved, Hardware)),
    "workload": (workload.WORKLOAD, (workload.Workload,)),
    "comparison": (comparison.COMPARISON, (comparison.Comparison,)),
    "contender": (comparison.COMPARISON.fields["contenders"].kind, (comparison.Contender,)),  # type: ignore[attr-defined]
    "stage": (PIPELINE_PLAN.fields["stages"].kind, (StagePlan,)),  # type: ignore[attr-defined]
    "mesh": (schema.MESH, ()),
}
"""Records of a plan's file, each with the classes whose fields say what its fields mean."""

OTHER_FIELDS = {
    "format": "Version of the file.",
    schema.PIPELINE_FORMAT: "Version of the file.",
    "axes": "Axis → its size, the outermost first.",
    "hardware": "Name or path of the hardware profile.",
    "bytes": "Bytes of the device at the peak, tensors included.",
}
"""Meanings of the fields that no class has."""


def _record(page: Path, name: str) -> str:
    """Make a table of the fields of a record."""
    record, classes = RECORDS[name]
    docs = OTHER_FIELDS | {field: specified for each in classes for field, specified in docs_of(each).items()}  # type: ignore[arg-type]
    rows = [(field, kind, "yes") for field, kind in record.fields.items()]
    rows += [(field, kind, "no") for field, kind in record.optional.items()]
    return _table(
        ("field", "value", "required", "meaning"),
        ((_code(field), _value(kind), required, docs[field]) for field, kind, required in rows),
    )


def _value(kind: Schema) -> str:
    """Return a schema in words, with a link to the table of each record."""
    linked = next((name for name, (record, _) in RECORDS.items() if record is kind), None)
    if linked:
        return f"[{linked}](#{linked.replace(' ', '-')})"
    match kind:
        case Text():
            return "text"
        case Flag():
            return "true or false"
        case OneOf(words):
            return ", ".join(f'`"{word}"`' for word in words)
        case Whole(least, most) if least == most:
            return f"`{least}`"
        case Maybe(inner):
            return f"{_value(inner)}, or null"
        case ListOf(inner):
            return f"list of {_value(inner)}"
        case Table(inner):
            return f"object: name → {_value(inner)}"
        case Row(kinds):
            return f"[{', '.join(map(_value, kinds))}]"
        case Record(fields, optional):
            return f"object ({'; '.join(f'`{name}`: {_value(each)}' for name, each in {**fields, **optional}.items())})"
        case Whole() | Real():
            return str(kind).replace("of at least ", "≥ ").removeprefix("a ")
    return str(kind)


# Hardware profiles.


def _numbers(page: Path) -> str:
    """Make a table of the meaning of each number of a profile."""
    parts = {"": Hardware, "links[…].": Link, "links[…].protocols[…].": Protocol, "links[…].network.": Network}
    found = [
        (f"{before}{name}", specified) for before, kind in parts.items() for name, specified in docs_of(kind).items()
    ]  # type: ignore[arg-type]
    return _table(("number", "meaning"), ((_code(name), specified) for name, specified in found))


def _profiles(page: Path) -> str:
    """Make a table of the profiles: what people compare first."""
    read = {name: json.loads((PROFILES / f"{name}.json").read_text()) for name in known_profiles()}
    return _table(
        ("profile", "bfloat16 peak", "memory", "memory bandwidth", "links, per device and direction", "variants"),
        (
            (
                f"[`{name}`](#{name})",
                f"{_plain(each['flops'].get('bfloat16', each['flops']['float32'])) / 1e12:,.4g} TFLOP/s",
                f"{_plain(each['memory_bytes']) / 1e9:,.4g} GB",
                f"{_plain(each['memory_bytes_per_s']) / 1e9:,.4g} GB/s",
                ", ".join(f"{link['name']} {_plain(link['bytes_per_s']) / 1e9:,.4g} GB/s" for link in each["links"]),
                ", ".join(f"`{variant}`" for variant in each.get("variants", ())),
            )
            for name, each in read.items()
        ),
    )


def _plain(number: Any) -> float:
    return number["value"] if isinstance(number, Mapping) else number


def _profile(page: Path, name: str) -> str:
    """Make a table of the numbers of a profile with their sources."""
    profile = json.loads((PROFILES / f"{name}.json").read_text())
    return _table(("number", "value", "source"), (_row(*each) for each in _leaves(profile)))


def _row(where: str, value: Any, source: str) -> tuple[str, str, str]:
    return (
        _code(where),
        f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value),
        source,
    )


def _leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield the numbers of a profile: where each stands, its value and its source."""
    if isinstance(value, Mapping) and "source" in value:
        yield where, value["value"], value["source"]
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _leaves(each, f"{where}.{name}".lstrip("."))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            name = each.get("name", number) if isinstance(each, Mapping) else number
            algorithm = f"{each['algorithm']}/" if isinstance(each, Mapping) and "algorithm" in each else ""
            yield from _leaves(each, f"{where}[{algorithm}{name}]")


# The command line.


def commands() -> Mapping[str, argparse.ArgumentParser]:
    """Return the parsers of the subcommands by name."""
    return next(each for each in parser()._actions if isinstance(each, argparse._SubParsersAction)).choices


def _command(page: Path, name: str) -> str:
    """Make a table of the arguments of a command."""
    shown = [each for each in commands()[name]._actions if each.dest != "help"]
    rows = (
        (
            _code(", ".join(each.option_strings) or each.metavar or each.dest),
            _accepted(each),
            _default(each),
            _help(each),
        )
        for each in shown
    )
    return _table(("argument", "values", "default", "meaning"), rows)


def _accepted(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "(flag)"
    return ", ".join(f"`{each}`" for each in action.choices) if action.choices else _code(action.metavar)


def _default(action: argparse.Action) -> str:
    return NONE if action.default in (None, False, []) or action.nargs == 0 else _code(action.default)


def _help(action: argparse.Action) -> str:
    specified = (action.help or "").replace("%%", "%")
    return specified[:1].upper() + specified[1:]


KINDS: Mapping[str, Callable[..., str]] = {
    "pages": _pages_of_folder,
    "scripts": _scripts_of_folder,
    "names": _names,
    "options": _options,
    "arguments": _arguments,
    "presets": _presets,
    "preset": _preset,
    "symbols": _symbols,
    "record": _record,
    "numbers": _numbers,
    "profiles": _profiles,
    "profile": _profile,
    "command": _command,
}
"""Kind of a generated part → the function from its page and its arguments to Markdown."""


def main() -> None:
    """Write every page whose generated parts have changed."""
    for page in pages():
        text = regenerated(page)
        if text != page.read_text():
            page.write_text(text)
            print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
