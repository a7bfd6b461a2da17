"""A journal whose page can be turned: the calls of one test after those of another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paritas.checks.guarded_calls import GraphEntry, GuardJournal
from paritas.pytest.session import CheckedCalls
from paritas.results.findings import Aspect, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paritas.checks.failures import FailedGraph
    from paritas.results.findings import Finding, Verdict


class SuiteJournal(GuardJournal):
    """Counts graphs over the whole run, and keeps findings by the page.

    Attributes:
        raised: calls in which the compiled code and its graph both raised. There is nothing to
            compare then, and whether an error was due is for the test to say.
    """

    def __init__(self, *, strict: bool = False) -> None:
        """Start with an empty page."""
        super().__init__(strict=strict)
        self._page = _Page(strict=strict)
        self.raised = 0

    def turn(self, *, strict: bool) -> CheckedCalls | None:
        """Begin a new page; gives what is on the old one, or None where nothing is."""
        with self._lock:
            page, self._page = self._page, _Page(strict=strict)
            page.passes, self.passes = self.passes, 0
            page.splits, self.splits = self.splits, 0
            calls = sum(entry.calls for entry in self.graphs)
            for entry in self.graphs:
                entry.calls = 0
        checked = sum(entry.checked for entry in page.graphs)
        if not page.has_something:
            return None
        return CheckedCalls(page.verdict(), len(page.graphs), calls, checked)

    def enter(self, label: str, source: str = "", unguarded: str = "") -> GraphEntry:
        """Enter a graph; it is on the page only once it is called, or cannot be guarded."""
        with self._lock:
            if unguarded:
                return self._page.enter(label, source, unguarded)
            return super().enter(label, source)

    def note_call(self, entry: GraphEntry, part: Verdict) -> None:
        """Write down one checked call, on the page that is open."""
        with self._lock:
            if part.findings and all(map(_is_raised_by_both, part.findings)):
                self.raised += 1
                return
            self._page.note_call(self._page.entry_like(entry), part)

    def add(self, findings: Iterable[Finding], notes: Iterable[str] = ()) -> None:
        """Likewise."""
        with self._lock:
            self._page.add(findings, notes)

    def keep(self, label: str, make: Callable[[], FailedGraph | None]) -> list[FailedGraph]:
        """Keep a failing call for as long as its page is."""
        with self._lock:
            return self._page.keep(label, make)

    def verdict(self) -> Verdict:
        """Of the page that is open."""
        with self._lock:
            return self._page.verdict()


class _Page(GuardJournal):
    """The calls between two turns."""

    def __init__(self, *, strict: bool) -> None:
        super().__init__(strict=strict)
        self._entries: dict[str, GraphEntry] = {}

    @property
    def has_something(self) -> bool:
        """Whether anything was checked, could not be, or is worth a word."""
        return bool(self.graphs or self._findings or self.passes or self.splits)

    def entry_like(self, entry: GraphEntry) -> GraphEntry:
        """This page's own entry for a graph."""
        if entry.label not in self._entries:
            self._entries[entry.label] = self.enter(entry.label, entry.source)
        return self._entries[entry.label]


def _is_raised_by_both(finding: Finding) -> bool:
    return finding.aspect is Aspect.EXCEPTION and finding.status is Status.UNVERIFIED
