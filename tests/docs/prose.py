"""Sentences and words of Markdown, without what is no prose: code, tables, mathematics, comments and markup."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_BLOCKS = re.compile(
    r"^---\n.*?^---$"  # front matter
    r"|^(?P<indent> *)(?P<fence>```+|~~~+).*?^(?P=indent)(?P=fence)`*~*[ ]*$"
    r"|^\$\$.*?\$\$[ ]*$"
    r"|<!--.*?-->",
    re.DOTALL | re.MULTILINE,
)
_FENCED = re.compile(r'^```(\w+)(?: title="([\w.-]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_TABLE = re.compile(r"^ *\|.*$", re.MULTILINE)
_ITEM = re.compile(r"^ *(?:[-*+]|\d+\.) +|^#+ .*$|^ *!!! .*$|^[=-]+$|^\[[^\]]+\]:.*$", re.MULTILINE)
_CODE = re.compile(r"(`+).+?\1|\$[^$\n]+\$", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])")
_MARKUP = re.compile(r"<[^>]+>|\*{1,3}(?=\S)|(?<=\S)\*{1,3}|\b_{1,3}\B|\B_{1,3}\b|^ *> ?|\{[^}\n]*\}", re.MULTILINE)
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|al|vs|cf|etc|ca|resp|Fig|Eq|Sec|No|[A-Z]))$")
_END = re.compile(r"[.!?:]+[\"'”’)\]]*(?=\s|$)")
CODE = "code"
"""Word that stands for a piece of code or a formula in a sentence."""


class Block(NamedTuple):
    """A fenced block: its language, the name of the file that it is, if it has one, and its text."""

    language: str
    title: str
    text: str


def blocks(markdown: str) -> list[Block]:
    """Return the fenced blocks that begin a line, in order."""
    return [Block(*found) for found in _FENCED.findall(markdown)]


def prose(markdown: str) -> str:
    """Return the text without code blocks, formulas and comments; paragraphs are apart by empty lines."""
    return _BLOCKS.sub("", markdown)


def sentences(markdown: str) -> Iterator[str]:
    """Yield the sentences of a page; a heading is none, an item of a list ends one.

    A colon ends a sentence only where a paragraph ends with it.
    """
    text = _ITEM.sub("\n\n", _TABLE.sub("\n", _CODE.sub(CODE, prose(markdown))))
    text = _MARKUP.sub("", _LINK.sub(r"\1", text))
    for paragraph in re.split(r"\n\s*\n", text):
        yield from _sentences_of(" ".join(paragraph.split()))


def _sentences_of(paragraph: str) -> Iterator[str]:
    start = 0
    for end in _END.finditer(paragraph):
        if not end.group().startswith(":") and not _ABBREVIATION.search(paragraph[start : end.start()]):
            yield paragraph[start : end.end()].strip()
            start = end.end()
    if paragraph[start:].strip():
        yield paragraph[start:].strip()


def num_words(text: str) -> int:
    """Return the number of words: what holds a letter or a digit between spaces."""
    return sum(any(character.isalnum() for character in word) for word in text.split())
