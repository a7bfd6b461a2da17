"""Delta debugging: the smallest set that still shows something."""

from __future__ import annotations

import pytest

from paritas.core.compiled.locate import minimise
from paritas.core.time_limit import UNLIMITED, TimeLimit

ITEMS = [f"n{i}" for i in range(40)]


@pytest.mark.parametrize(
    "needed",
    [{"n0"}, {"n39"}, {"n3", "n4"}, {"n0", "n39"}, {"n1", "n13", "n20", "n38"}],
    ids=lambda needed: "+".join(sorted(needed)),
)
def test_exactly_what_is_needed_is_left(needed):
    asked = []

    def shows(part):
        asked.append(part)
        return needed <= set(part)

    assert set(minimise(ITEMS, shows, UNLIMITED)) == needed
    assert len(asked) <= 40 * len(needed)
    assert len({tuple(part) for part in asked}) == len(asked), "a compile was made twice"


def test_order_is_kept():
    assert minimise(ITEMS, lambda part: {"n30", "n2"} <= set(part), UNLIMITED) == ["n2", "n30"]


def test_without_time_everything_is_left():
    assert minimise(ITEMS, lambda part: "n5" in part, TimeLimit(-1)) == ITEMS


def test_one_of_several_ways_to_show_it_is_enough():
    left = minimise(ITEMS, lambda part: "n5" in part or "n30" in part, UNLIMITED)
    assert left in (["n5"], ["n30"])
