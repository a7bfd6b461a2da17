"""Structs as JSON: the fast way gives what looking at every number gives."""

from __future__ import annotations

import math

import msgspec
import pytest

from paritas.core.results.report import json_of, json_of_each, spell_nonfinite


class Line(msgspec.Struct):
    name: str
    values: tuple[float | int | None, ...] = ()
    inner: dict[str, float] = {}


# The last two hold bytes that look like those of a NaN, and are none.
LINES = [
    Line("finite", (1.0, -0.0, 5e-324, 1.7976931348623157e308, None, 3)),
    Line("nan", (math.nan, 1.0)),
    Line("inside", inner={"worst": -math.inf}),
    Line("long", (2**70, math.inf)),
    Line("long and finite", (2**70,)),
    Line("Ë\x7fð" * 3),
    Line("number", (0xCB7FF8,)),
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: ascii(line.name))
def test_json_is_what_looking_at_every_number_gives(line):
    assert json_of(line) == msgspec.json.encode(spell_nonfinite(msgspec.to_builtins(line)))


def test_many_are_put_into_what_is_around_them_as_they_are():
    whole = msgspec.json.decode(msgspec.json.encode({"lines": json_of_each(LINES[:3])}))
    assert [line["values"] for line in whole["lines"]] == [
        [1.0, -0.0, 5e-324, 1.7976931348623157e308, None, 3],
        ["nan", 1.0],
        [],
    ]


def test_a_name_that_is_no_text_is_refused_as_ever():
    with pytest.raises(UnicodeEncodeError):
        json_of(Line("\udcff"))
