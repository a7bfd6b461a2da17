"""What options take that is more than a word."""

from __future__ import annotations

import click
import pytest

from paritas.comparison.commands import (
    DIMS,
    RENAME,
    RULE,
)
from paritas.core.commands.options import KINDS, NumberRange
from paritas.formats.dumps import opening


def test_every_kind_of_dump_can_be_named():
    assert tuple(KINDS.choices) == opening.KINDS


@pytest.mark.parametrize(("text", "expected"), [("3", (3, 3)), ("0-4", (0, 4)), ("2-2", (2, 2))])
def test_a_span_is_a_number_or_a_range(text, expected):
    assert NumberRange("rank").convert(text, None, None) == expected


@pytest.mark.parametrize("text", ["", "x", "-1", "4-2", "1,2", "1-"])
def test_what_is_no_span_is_shown_with_what_would_be_one(text):
    with pytest.raises(click.BadParameter) as caught:
        NumberRange("rank").convert(text, None, None)
    assert caught.value.message == f"{text!r} is neither a rank (3) nor a range of ranks (2-5)"


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (RULE, "attn: rel_l2 <= 1e-3", ("attn", "rel_l2 <= 1e-3")),
        (RULE, "layers.*.attn : max_abs < 1", ("layers.*.attn", "max_abs < 1")),
        (RULE, "(?:a|b): max_abs < 1", ("(?:a|b)", "max_abs < 1")),
        (DIMS, "q: b s[cp:zigzag] h[tp] # dp:=x", ("q", "b s[cp:zigzag] h[tp] # dp:=x")),
        (RENAME, r"^model\.=", (r"^model\.", "")),
        (RENAME, r"a(?=b)(.*)=\1.c", (r"a(?=b)(.*)", r"\1.c")),
    ],
)
def test_an_expression_and_what_is_said_of_it_are_taken_apart(kind, text, expected):
    assert kind.convert(text, None, None) == expected


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (RULE, "attn"),
        (RULE, "attn:x"),
        (RULE, ": x"),
        (RULE, "attn: "),
        (RENAME, "a"),
        (RENAME, "=b"),
    ],
)
def test_a_missing_part_is_told_with_an_example(kind, text):
    with pytest.raises(click.BadParameter, match=r"does not have the form REGEX.*, as in '"):
        kind.convert(text, None, None)
