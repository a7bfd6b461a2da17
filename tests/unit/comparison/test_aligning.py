"""Which step of one dump belongs to which of the other."""

from __future__ import annotations

import pytest

from paritas.comparison.rules import align_steps, span_text
from paritas.core.errors import UsageError


def test_the_same_numbers_belong_together():
    assert align_steps({0, 1, 2}, {0, 1, 2}) == ({0: 0, 1: 1, 2: 2}, [])


def test_steps_of_one_side_only_are_told():
    mapping, notes = align_steps({0, 1, 2, 4}, {0, 1, 3})
    assert mapping == {0: 0, 1: 1}
    assert notes == [
        "only my dump has steps 2, 4; use --steps 0-1 to compare only the common steps",
        "only the golden dump has step 3; use --steps 0-1 to compare only the common steps",
    ]


def test_the_only_step_of_each_side_is_compared_whatever_its_number():
    assert align_steps({7}, {0}) == (
        {7: 0},
        ["my step 7 is compared with golden step 0, the only ones"],
    )


def test_without_a_common_number_nothing_is_guessed():
    mapping, notes = align_steps({5, 6}, {0, 1})
    assert mapping == {}
    assert notes == [
        (
            "the dumps have no step in common: mine has 5-6, the golden one 0-1; use --steps to "
            "match them, for example 5:0"
        )
    ]
    assert align_steps(set(), {0}) == (
        {},
        ["only the golden dump has step 0; the other dump has no steps"],
    )


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (["3"], {3: 3}),
        (["0-2"], {0: 0, 1: 1, 2: 2}),
        (["1:0"], {1: 0}),
        (["1-3:0-2"], {1: 0, 2: 1, 3: 2}),
        (["1:0, 2:0", "3"], {1: 0, 2: 0, 3: 3}),
    ],
)
def test_what_was_asked_for_is_done(asked, expected):
    assert align_steps(range(5), range(5), asked) == (expected, [])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["x"], "cannot parse 'x'; write 3 or 0-4, or 1:0"),
        (["3-1"], "'3-1' selects 0 of my steps"),
        (["1-3:0-1"], "3 of my steps and 2 golden steps"),
        (["9"], "'9' selects step 9, but my dump has 0-4"),
        (["4:7"], "'4:7' selects step 7, but the golden dump has 0-4"),
        (["1:0", "1:2"], "maps my step 1 to golden step 2, but it is already mapped to 0"),
        (["0-999999999"], "selects step 5|selects 1000000000 of my steps"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(asked, message):
    with pytest.raises(UsageError, match=message):
        align_steps(range(5), range(5), asked)


def test_steps_are_told_in_few_words():
    assert span_text({0, 1, 2, 5, 7, 8}) == "0-2, 5, 7-8"
