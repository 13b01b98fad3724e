"""Pages are short, and so are their sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.prose import num_words, prose, sentences
from tests.test_house import ROOT

DOCS = ROOT / "docs"
PROJECT = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
PAGES = [*(ROOT / name for name in PROJECT), *sorted(DOCS.rglob("*.md"))]
MOST_WORDS = {"tutorials": 5_500, "how-to": 12_000, "explanation": 9_500, "examples": 500}
LIMITATIONS = 2_500
LONGEST = 30
"""Words of a sentence."""


def long_sentences(markdown: str) -> list[str]:
    return [each for each in sentences(markdown) if num_words(each) > LONGEST]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_is_long(page: Path) -> None:
    found = long_sentences(page.read_text())
    assert not found, f"{page.name} has sentences of more than {LONGEST} words; make two of each: {found}"


@pytest.mark.parametrize("kind", MOST_WORDS)
def test_the_pages_of_a_kind_are_read_in_an_hour(kind: str) -> None:
    words = {page.name: num_words(prose(page.read_text())) for page in (DOCS / kind).glob("*.md")}
    assert sum(words.values()) <= MOST_WORDS[kind], f"{kind} has {sum(words.values())} words: {words}"


def test_the_limitations_are_a_list() -> None:
    assert num_words(prose((DOCS / "reference" / "limitations.md").read_text())) <= LIMITATIONS


WORDS = " ".join(["word"] * 29)


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("One.\nTwo lines\nof it. Three? `four()` is code.", ["One.", "Two lines of it.", "Three?", "code is code."]),
        ("As e.g. this, i.e. Li et al. (2020). End.", ["As e.g. this, i.e. Li et al. (2020).", "End."]),
        ("It has 3.5 GB: half. (So it is.) Good.", ["It has 3.5 GB: half.", "(So it is.)", "Good."]),
        ("# Heading. Yes\n\nText:\n\n- one\n  line\n- two\n1. three", ["Text:", "one line", "two", "three"]),
        ("A\n\n```python\nx = 1. Y\n```\n\n| a. b | c |\n|---|---|\n\n$$\nx. y\n$$\n\nB", ["A", "B"]),
        ("It is 10.2<!--=a.b--> % **of** [all. it](x.md#y) is $a. b$.", ["It is 10.2 % of all.", "it is code."]),
    ],
)
def test_sentences_are_those_of_prose(markdown: str, expected: list[str]) -> None:
    assert list(sentences(markdown)) == expected


def test_a_sentence_of_more_than_thirty_words_is_found() -> None:
    assert not long_sentences(f"{WORDS} end. {WORDS} `a b c d e f`.")
    assert long_sentences(f"Short. {WORDS} and, end.") == [f"{WORDS} and, end."]
