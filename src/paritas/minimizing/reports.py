"""What shrinking came to, as data that goes into a file; whatever it was that was shrunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from paritas.numerics.diagnoses import Diagnosis

if TYPE_CHECKING:
    from paritas.minimizing.shrinking import Shrunk

__all__ = ["ShrinkReport", "report_of"]


class ShrinkReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A script, and how it came about.

    Attributes:
        script: its path.
        data: of the values it loads, if they lie beside it.
        shows: whether it was run and showed the failure by itself.
        what: the failure, in words.
        before: how large the program was, in words.
        after: how large it is now.
        diagnosis: what kind of wrong it is.
        steps: what was done, in order.
        remedies: compiler options each of which makes the failure go away.
        queries: how many programs were tried.
        seconds: it took.
        ended: False if it was stopped before it could get no smaller.
        interrupted: it was Ctrl-C that stopped it.
        said: what the script printed last.
    """

    script: str
    shows: bool
    what: str
    data: str | None = None
    before: str = ""
    after: str = ""
    diagnosis: Diagnosis | None = None
    steps: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    queries: int = 0
    seconds: float = 0.0
    ended: bool = True
    interrupted: bool = False
    said: str = ""

    @property
    def exit_code(self) -> int:
        """1, for a fault was found; 3 where the script does not show it itself; 130 on Ctrl-C."""
        if self.interrupted:
            return 130
        return 1 if self.shows else 3


def report_of(shrunk: Shrunk) -> ShrinkReport:
    """The report on a program of a compiler."""
    written = shrunk.script
    lines = written.output.strip().splitlines()
    return ShrinkReport(
        script=str(written.path),
        data=None if written.data_path is None else str(written.data_path),
        shows=written.failed,
        what=shrunk.signature.sentence,
        before=_calls(shrunk.nodes_before),
        after=_calls(shrunk.nodes_after),
        diagnosis=shrunk.diagnosis,
        steps=shrunk.steps,
        remedies=shrunk.remedies,
        queries=shrunk.queries,
        seconds=shrunk.seconds,
        ended=shrunk.ended,
        interrupted=shrunk.interrupted,
        said=lines[-1] if lines else "",
    )


def _calls(count: int) -> str:
    return f"{count} operator call{'' if count == 1 else 's'}"
