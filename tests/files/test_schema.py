"""JSON is checked field by field against a schema, and every deviation is named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autopar.files.reading import read_json
from autopar.files.schema import Flag, ListOf, Malformed, Maybe, OneOf, Real, Record, Row, Schema, Table, Text, Whole

LINK = Record({"name": Text(5), "devices": Maybe(Whole(1))}, optional={"latency_s": Real(0)})


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (LINK, {"name": "wire", "devices": None}),
        (LINK, {"devices": 2, "name": "ü", "latency_s": 0}),
        (Record({}, others=True), {"any": object()}),
        (ListOf(Flag()), [True, False]),
        (Row((OneOf(("a", "b")), Real())), ["b", -1e300]),
        (Table(Whole()), {}),
    ],
)
def test_what_is_of_its_kind_passes(schema: Schema, value: Any) -> None:
    schema.check(value, "it")


@pytest.mark.parametrize(
    ("schema", "value", "message"),
    [
        (LINK, [], "links is []; needed an object with 'name', 'devices'"),
        (LINK, {"name": "wire"}, "links lacks 'devices'"),
        (LINK, {"name": "wire", "devices": "two"}, "links.devices is 'two'; needed a whole number of at least 1"),
        (LINK, {"name": "wire", "devices": 0}, "links.devices is 0; needed a whole number of at least 1"),
        (LINK, {"name": "long wire", "devices": 2}, "links.name is 'long wire'; needed a text of at most 5 characters"),
        (LINK, {"name": "\ud800", "devices": 2}, r"links.name is '\ud800'; needed a text of at most 5 characters"),
        (LINK, {"name": "w", "devices": 2, "x": 1}, "links has 'x'; it may have 'name', 'devices', 'latency_s'"),
        (ListOf(LINK), [{}], "links[0] lacks 'name'"),
        (ListOf(Flag(), 1, 2), [], "links is []; needed a list of 1 to 2 values"),
        (ListOf(Flag()), [1], "links[0] is 1; needed true or false"),
        (Row((Flag(), Flag())), [True], "links is [True]; needed a list of 2 values"),
        (Table(Whole(0, 3)), {"a": 4}, "links.a is 4; needed a whole number of at least 0, at most 3"),
        (Table(Whole(), most=1), {"a": 4, "b": 5}, "links is {'a': 4, 'b': 5}; needed an object of 0 to 1 values"),
        (Whole(), True, "links is True; needed a whole number of at least 0"),
        (Whole(), 2**63, f"links is {2**63}; needed a whole number"),
        (Real(), "1", "links is '1'; needed a finite number"),
        (Real(), math.nan, "links is nan; needed a finite number"),
        (Real(0), -0.1, "links is -0.1; needed a finite number of at least 0"),
        (OneOf(("a", "b")), ["a"], "links is ['a']; needed one of 'a', 'b'"),
    ],
)
def test_what_differs_is_named_with_what_was_needed(schema: Schema, value: Any, message: str) -> None:
    with pytest.raises(Malformed) as caught:
        schema.check(value, "links")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", "1e999", "-1e999", "1" * 301, "1" * 5000, "[" * 10**5, "", "{'a': 1}"]
)
def test_text_beyond_json_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        read_json(text)


def test_numbers_that_a_float_can_hold_are_read() -> None:
    assert read_json('[1e308, -2.5, 12345678901234567890, "NaN"]') == [1e308, -2.5, 12345678901234567890, "NaN"]
