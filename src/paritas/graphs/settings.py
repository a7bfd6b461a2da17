"""How a graph is to be checked."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from paritas.errors import UsageError

if TYPE_CHECKING:
    from paritas.numerics.graph_reports import Confirm

__all__ = ["OPTION_SOURCES", "Settings"]

Source = Literal["declared", "library", "discover", "all"]
OPTION_SOURCES = ("declared", "library", "discover", "all")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is asked of every operator of a graph.

    Attributes:
        options: where splits come from: those the graph declares, those the library knows, those
            that running the operator shows; `all` has every one of them. None takes what the graph
            declares, and asks the library about calls of which it declares nothing.
        ranks: over how many ranks each is split.
        cap: no dimension is longer than this; None leaves the shapes as they are.
        seed: of drawn values and of the checks.
        strict: count `unstable` as a failure.
        imports: modules to import first: they bring operators, annotations and functions of yours.
            A graph's own names are never imported beyond torch's operators.
        device: where operators run, for example `cuda`; None is the host.
        confirm: by what ranks that are processes talk, on which each split is checked once more;
            None leaves it at simulated ranks.
        memory: bytes that the values of one call may take at most.
    """

    options: Source | None = None
    ranks: tuple[int, ...] = (2,)
    cap: int | None = None
    seed: int = 0
    strict: bool = False
    imports: tuple[str, ...] = ()
    device: str | None = None
    confirm: Confirm | None = None
    memory: int = 4 << 30

    def __post_init__(self) -> None:
        if self.options is not None and self.options not in OPTION_SOURCES:
            known = ", ".join(OPTION_SOURCES)
            raise UsageError(f"options={self.options!r}: known are {known}")
        if not self.ranks or any(type(n) is not int or n < 2 for n in self.ranks):  # noqa: PLR2004
            raise UsageError(f"ranks={self.ranks!r}: give whole numbers from 2 on")
        if self.cap is not None and (type(self.cap) is not int or self.cap < 1):
            raise UsageError(f"cap={self.cap!r}: give the longest dimension, 1 or more")
