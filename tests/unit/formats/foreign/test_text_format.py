"""Protobuf's text format."""

from __future__ import annotations

import pytest

from paritas.formats.foreign.text_messages import parse_text


class Heard:
    """All events, as one list."""

    def __init__(self):
        self.events = []

    def begin(self, field):
        self.events.append(field.decode() + " {")

    def value(self, field, text):
        self.events.append((field.decode(), text))

    def end(self):
        self.events.append("}")


@pytest.fixture
def hear(tmp_path):
    def parse(text):
        path = tmp_path / "text"
        path.write_bytes(text)
        heard = Heard()
        parse_text(path, heard)
        return heard.events

    return parse


def test_fields_messages_and_comments_are_told_apart(hear):
    text = b'name: "a"  # a { comment\nop { id: -3 inner: < f: 1.5e-3 > }; done: true,'
    expected = [("name", b"a"), "op {", ("id", b"-3"), "inner {", ("f", b"1.5e-3"), "}", "}"]
    assert hear(text) == [*expected, ("done", b"true")]


def test_a_string_may_hold_what_has_a_meaning_elsewhere(hear):
    text = rb's: "a: b { \"c\" } # \\" t: ' + rb"'it is \'d\' \"'"
    assert hear(text) == [("s", rb'a: b { "c" } # ' + b"\\"), ("t", b"it is 'd' \"")]


def test_escapes_are_undone(hear):
    text = rb's: "\n\t\r\101\x41\u00e9\?\'" '
    assert hear(text) == [("s", b"\n\t\rAA" + "é".encode() + b"?'")]


def test_strings_side_by_side_are_one(hear):
    assert hear(b's: "ab"\n "cd" t: 1') == [("s", b"abcd"), ("t", b"1")]


def test_a_list_is_its_values(hear):
    assert hear(b'dim: [1, 2, 3] s: ["a", "b"] e: []') == [
        *[("dim", b"1"), ("dim", b"2"), ("dim", b"3")],
        *[("s", b"a"), ("s", b"b")],
    ]


def test_an_empty_file_says_nothing(hear):
    assert hear(b"") == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"op { name: 1", "it is truncated: 1 messages do not end"),
        (b"op {", "it is truncated: 1 messages"),
        (b"op", "it is truncated after b'op'"),
        (b"op:", "it is truncated after b'op'"),
        (b"}", "expected a field at byte 0, got b'}'"),
        (b"a { >", "expected a field at byte 4, got b'>'"),
        (b'a: "b', "unknown syntax at byte 3"),
        (b"a b", "byte 2 has b'b' after b'a'"),
        (b"a: }", "expected a value at byte 3, got b'}'"),
        (b"a: [1, {", "unexpected b'{' at byte 7, in a list"),
        (b"a: [1", "it is truncated within a list"),
        (b'"a": 1', "expected a field"),
        (b"\x00\xff", "unknown syntax at byte 0"),
        (b"a {" * 200, "is nested deeper than 100 messages"),
    ],
)
def test_what_is_not_in_the_format_is_refused_with_the_place(hear, text, why):
    with pytest.raises(ValueError, match=why):
        hear(text)
