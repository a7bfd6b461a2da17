"""How far a comparison has come."""

from __future__ import annotations

import dataclasses

__all__ = ["Progress"]


@dataclasses.dataclass(frozen=True)
class Progress:
    """What is told of a comparison while it goes on.

    Attributes:
        done: how many things of this stage are done, pairs of values where it compares.
        total: how many there are; 0 where that is not known yet.
        nbytes: bytes of values compared so far, both sides.
        failing: rows so far that do not pass.
        stage: what is being done, in words.
    """

    done: int
    total: int
    nbytes: int
    failing: int
    stage: str
