"""Extension of griffe: examples in docstrings, wherever they stand, are shown as code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
_DIRECTIVE = re.compile(r" *# doctest: .*")


class Doctests(Extension):
    """Puts fences around examples."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of one object, which Markdown would read as a quotation."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """Return a docstring with fences around its examples, and without what these tell doctest."""
    return _EXAMPLE.sub(lambda found: f"```pycon\n{_DIRECTIVE.sub('', found[0])}\n```", docstring)
