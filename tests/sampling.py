"""Which cases of a test that is marked `one_in(n)` are run."""

from __future__ import annotations


def is_run(number: int, n: int) -> bool:
    """Whether the case of this number is run: one of each n, always the same.

    Of the first n the first, of the next n the last, and so on: every n-th would always have the
    same dtype where there are n of them.
    """
    return (number + number // n) % n == 0
