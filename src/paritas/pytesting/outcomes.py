"""How one check of a test ended, short enough to travel with the test's report.

pytest hands `user_properties` on to JUnit XML, and xdist hands them to its controller: the summary
is made of the same lines that a build server reads. Nothing here needs torch, so that a controller
that runs no test stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from paritas.pytesting.glancing import PROPERTY

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paritas.numerics.findings import Verdict

__all__ = ["OUTSIDE", "PROPERTY", "Kind", "Outcome", "outcome_of", "outcomes_in"]

# A line is for a table or a build server: the whole verdict is in the test's own failure.
LONGEST_LINE = 300
# In place of a test, for what ran while none did.
OUTSIDE = "outside of tests"

Kind = Literal["verify", "guard", "golden", "suite guard"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One verdict in short.

    Attributes:
        kind: what gave it: `parity.verify`, `parity.guard`, `parity.golden` or `--paritas-guard`.
        status: the verdict's, as a word.
        passed: whether it counts as a pass.
        compared: how many items were compared.
        enabled: off, nothing was compared because that was asked for.
        name: of the golden, or of the guarded backend.
        worst: the gravest finding in one line, or "".
        graphs: how many compiled graphs were checked.
        calls: how many calls of them there were.
        checked: how many of those were checked.
        written: of a golden, `written` or `changed` where its files are new.
        golden: the folder of the golden, relative to the root of the run.
        page: the HTML page about it, relative likewise, or "".
    """

    kind: Kind
    status: str
    passed: bool
    compared: int = 0
    enabled: bool = True
    name: str = ""
    worst: str = ""
    graphs: int = 0
    calls: int = 0
    checked: int = 0
    written: Literal["", "written", "changed"] = ""
    golden: str = ""
    page: str = ""

    def encode(self) -> str:
        """As one line of JSON."""
        return msgspec.json.encode(self).decode()


def outcome_of(kind: Kind, verdict: Verdict) -> Outcome:
    """A verdict in short."""
    failures = verdict.failures
    return Outcome(
        kind=kind,
        status=verdict.status.value,
        passed=verdict.passed,
        compared=verdict.coverage.compared,
        enabled=verdict.enabled,
        worst=_line(failures[0].path, failures[0].reason) if failures else "",
    )


def outcomes_in(properties: Iterable[tuple[str, object]]) -> Iterator[Outcome]:
    """Those among the properties of a report."""
    for name, value in properties:
        if name == PROPERTY and isinstance(value, str):
            yield msgspec.json.decode(value, type=Outcome)


def _line(path: str, reason: str) -> str:
    words = " ".join(f"{path}: {reason}".split()) if reason else path
    return words if len(words) <= LONGEST_LINE else f"{words[: LONGEST_LINE - 1]}…"
