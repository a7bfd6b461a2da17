"""Two sequences laid side by side, and names that are like one another."""

from __future__ import annotations

import random

import pytest

from paritas.comparison.matching import align
from paritas.comparison.operands import NearestNames


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("", "abc", ""),
        ("abc", "abc", "abc"),
        ("xabcy", "abc", "abc"),
        ("abcd", "acbd", "abd"),
        ("aXbYc", "aZbWc", "abc"),
        ("aaaa", "aa", "aa"),
    ],
)
def test_as_many_as_can_be_had_are_aligned(first, second, expected):
    pairs = align(first, second)
    assert len(pairs) == len(expected)
    assert all(first[at] == second[there] for at, there in pairs)


@pytest.mark.parametrize("kinds", [2, 5000])
def test_long_sequences_keep_their_order(kinds):
    seed = random.Random(0)
    first = [seed.randrange(kinds) for _ in range(4000)]
    second = [one for one in first if seed.random() < 0.9]
    pairs = align(first, second)
    assert len(pairs) > 0.8 * len(second)
    assert all(first[at] == second[there] for at, there in pairs)
    assert pairs == sorted(pairs)
    assert len({at for at, _ in pairs}) == len({there for _, there in pairs}) == len(pairs)


def test_the_nearest_names_come_first_and_nothing_is_near_to_what_is_like_nothing():
    names = [f"layers.{layer}.{part}" for layer in range(300) for part in ("attn", "mlp")]
    near = NearestNames(names)
    assert near.of("layers.17.attention")[0] == "layers.17.attn"
    assert len(near.of("layers.17.attention")) == 3
    assert near.of("QQQQ") == ()
    assert NearestNames([]).of("a") == ()
