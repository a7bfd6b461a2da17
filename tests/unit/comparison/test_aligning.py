"""Which step of one dump belongs to which of the other."""

from __future__ import annotations

import pytest

from paritas.comparison.rules import align_steps, span_text
from paritas.errors import UsageError


def test_the_same_numbers_belong_together():
    assert align_steps({0, 1, 2}, {0, 1, 2}) == ({0: 0, 1: 1, 2: 2}, [])


def test_steps_of_one_side_only_are_told():
    mapping, notes = align_steps({0, 1, 2, 4}, {0, 1, 3})
    assert mapping == {0: 0, 1: 1}
    assert notes == [
        "steps 2, 4 are in but one dump, mine; ask for 0-1 to compare what both have",
        "step 3 is in but one dump, the golden one; ask for 0-1 to compare what both have",
    ]


def test_the_only_step_of_each_side_is_compared_whatever_its_number():
    assert align_steps({7}, {0}) == (
        {7: 0},
        ["my step 7 is compared with golden step 0: there is no other"],
    )


def test_without_a_common_number_nothing_is_guessed():
    mapping, notes = align_steps({5, 6}, {0, 1})
    assert mapping == {}
    assert notes == [
        (
            "no step is in both dumps: mine has 5-6, the golden one 0-1; say which belong "
            "together, for example 5:0"
        )
    ]
    assert align_steps(set(), {0}) == (
        {},
        ["step 0 is in but one dump, the golden one; the other one has none"],
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
        (["x"], "'x' cannot be read; write 3, 0-4, or 1:0"),
        (["3-1"], "'3-1' has 0 steps of mine"),
        (["1-3:0-1"], "3 steps of mine and 2 golden ones"),
        (["9"], "'9' asks for step 9, and my dump has 0-4"),
        (["4:7"], "'4:7' asks for step 7, and the golden dump has 0-4"),
        (["1:0", "1:2"], "puts my step 1 against golden step 2, and another against 0"),
        (["0-999999999"], "asks for step 5|has 1000000000 steps"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(asked, message):
    with pytest.raises(UsageError, match=message):
        align_steps(range(5), range(5), asked)


def test_steps_are_told_in_few_words():
    assert span_text({0, 1, 2, 5, 7, 8}) == "0-2, 5, 7-8"
