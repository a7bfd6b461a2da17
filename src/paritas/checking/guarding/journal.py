"""What a guard saw: graphs, calls, findings; and the one verdict over all of it."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

from paritas.checking.remembering import remember
from paritas.numerics.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.numerics.wording import headline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paritas.checking.remembering import FailedGraph

NO_GRAPH = "torch.compile compiled nothing: it captured no operator (see TORCH_LOGS=graph_breaks)"
# Graphs whose failing calls are kept with copies of their arguments.
MOST_KEPT = 4


@dataclasses.dataclass
class GraphEntry:
    """One compiled graph.

    Attributes:
        label: what findings about it begin with.
        source: where in the user's program it comes from.
        calls: how often it was called.
        checked: how many of the calls were checked.
        failed: how many of those differed.
        compared: how many items were compared, over all calls.
        unguarded: why it could not be guarded at all, or "".
    """

    label: str
    source: str = ""
    calls: int = 0
    checked: int = 0
    failed: int = 0
    compared: int = 0
    unguarded: str = ""


class Journal:
    """Collects over all graphs of a guard; threads may write to it at once."""

    def __init__(self, *, strict: bool = False) -> None:
        """Start empty."""
        self.strict = strict
        self.graphs: list[GraphEntry] = []
        self._findings: dict[tuple[str, Aspect], Finding] = {}
        self._repeats: dict[tuple[str, Aspect], int] = {}
        self._notes: dict[str, None] = {}
        self._lock = threading.RLock()
        self._captured = 0
        self._failed: list[FailedGraph] = []
        self.passes = 0
        self.splits = 0

    def next_capture(self) -> int:
        """The number of the next captured graph."""
        with self._lock:
            self._captured += 1
            return self._captured - 1

    def enter(self, label: str, source: str = "", unguarded: str = "") -> GraphEntry:
        """Enter a graph; one that could not be guarded says why."""
        entry = GraphEntry(label, source, unguarded=unguarded)
        with self._lock:
            self.graphs.append(entry)
        return entry

    def note_call(self, entry: GraphEntry, part: Verdict) -> None:
        """Write down one checked call."""
        with self._lock:
            entry.checked += 1
            entry.compared += part.coverage.compared
            entry.failed += bool(part.failures)
            self.add(part.findings, part.notes)

    def add(self, findings: Iterable[Finding], notes: Iterable[str] = ()) -> None:
        """Keep the gravest finding about each item, and count how often it was as grave."""
        with self._lock:
            self._notes |= dict.fromkeys(notes)
            for finding in findings:
                key = (finding.path, finding.aspect)
                known = self._findings.get(key)
                if known is not None and finding.status is known.status:
                    self._repeats[key] += 1
                elif known is None or finding.status.gravity > known.status.gravity:
                    self._findings[key] = finding
                    self._repeats[key] = 1

    def keep(self, label: str, make: Callable[[], FailedGraph | None]) -> list[FailedGraph]:
        """Keep the first call of a graph that failed; of the first few graphs."""
        with self._lock:
            known = [failed for failed in self._failed if failed.label == label]
            if not known and len(self._failed) < MOST_KEPT:
                made = make()
                known = [] if made is None else [made]
                self._failed += known
            return known

    def verdict(self) -> Verdict:
        """Everything seen so far, rolled up. Nothing checked is `unverified`."""
        with self._lock:
            findings = list(self._findings.values())
            for entry in self.graphs:
                findings += _unverified(entry)
            compared = sum(entry.compared for entry in self.graphs) + self.passes + self.splits
            skipped = tuple(
                f"{entry.label}: {entry.calls - entry.checked} of {entry.calls} calls, as asked"
                for entry in self.graphs
                if entry.checked and entry.calls > entry.checked
            )
            verdict = Verdict(
                findings=tuple(findings),
                coverage=Coverage(compared=compared, skipped=skipped),
                notes=(*(self._notes or self._nothing()), *self._repetitions()),
                strict=self.strict,
            )
            remember(verdict, self._failed)
            return verdict

    def summary(self) -> str:
        """Everything seen so far, in one line."""
        verdict = self.verdict()
        with self._lock:
            graphs, calls = len(self.graphs), sum(entry.calls for entry in self.graphs)
            checked = sum(entry.checked for entry in self.graphs)
        counts = f"{_counted(graphs, 'graph')}, {checked} of {_counted(calls, 'call')} checked"
        line = f"{headline(verdict)} ({counts})"
        if not verdict.failures:
            return "; ".join((line, *verdict.notes))
        first = verdict.failures[0]
        return f"{line}; first: {first.path}" + (f" at {first.source}" if first.source else "")

    def _nothing(self) -> list[str]:
        return [] if self.graphs else [NO_GRAPH]

    def _repetitions(self) -> list[str]:
        return [
            f"{finding.path}: {finding.status.value} in {self._repeats[key]} calls"
            for key, finding in self._findings.items()
            if self._repeats[key] > 1
            and finding.origin is None
            and not finding.status.passes(strict=self.strict)
        ]


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _unverified(entry: GraphEntry) -> list[Finding]:
    """A graph that was compiled but not guarded is told of. One never called needs no check."""
    if not entry.unguarded:
        return []
    return [
        Finding(
            path=entry.label,
            aspect=Aspect.HARNESS,
            status=Status.UNVERIFIED,
            reason=entry.unguarded,
            source=entry.source or None,
        )
    ]
