"""Two parts of the planted faults: for building, and for the figures.

The part of a fault follows from its name, so nobody chose it and a kind of fault is in one part
only. The measured part is for the published figures: do not look at its single faults to change
what paritas states, because then it measures nothing. Faults for counting confidence are drawn
(`drawn.py`).
"""

from __future__ import annotations

import dataclasses
import zlib

PARTS = ("building", "measured")


def part_of(name: str) -> str:
    """The part of a family of faults: a third of them is measured."""
    return "measured" if zlib.crc32(name.encode()) % 3 == 2 else "building"


@dataclasses.dataclass(frozen=True)
class Sample:
    """A fault and what was said of it.

    Attributes:
        family: the fault, without dtype, shape and seed.
        kinds: the kinds of which each is right; empty if the fault has no name.
        said: the kind that was stated first; empty if none was.
        grade: the class of the statement.
        stated: its confidence.
    """

    family: str
    name: str
    kinds: tuple[str, ...]
    said: str = ""
    grade: str = ""
    stated: float = 0.0

    @property
    def outcome(self) -> str:
        """`right`, `none` or `wrong`."""
        if not self.said:
            return "none"
        return "right" if self.said in self.kinds else "wrong"
