"""`--paritas-guard`: every `torch.compile` of a suite guarded, each check told to its own test.

Compiled code outlives the test that compiled it. What a call of it shows belongs to the test that
called, so that the journal of the guards has a page for each phase of each test, and turns it.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from paritas.checking.guarding.settings import SWITCH, GuardSettings, is_enabled
from paritas.checking.guarding.watching import Watch
from paritas.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.numerics.findings import Verdict
    from paritas.pytesting.options import Options
    from paritas.pytesting.suite_journal import SuiteJournal

__all__ = ["Seen", "SuiteGuard"]


class Seen(NamedTuple):
    """What was checked between two turns of the page."""

    verdict: Verdict
    graphs: int
    calls: int
    checked: int

    def counts(self) -> dict[str, Any]:
        """As fields of an outcome."""
        return {"graphs": self.graphs, "calls": self.calls, "checked": self.checked}


class SuiteGuard:
    """Guards from the first compiled call of the process on; torch is not imported before that."""

    def __init__(self, options: Options) -> None:
        """Check the settings.

        Raises:
            UsageError: one is wrong, or guards are switched off in the environment.
        """
        if not is_enabled(None):
            value = os.environ[SWITCH]
            raise UsageError(
                f"--paritas-guard, but {SWITCH}={value} in the environment switches guards off; "
                "unset it"
            )
        self.settings = GuardSettings(
            on_mismatch="record", every=options.every, strict=options.strict
        )
        self._watch = Watch(self.settings, self._make_journal)
        self._journal: SuiteJournal | None = None

    @property
    def failure(self) -> Exception | None:
        """Why nothing could be guarded; the test in which that came up may have passed over it."""
        return self._watch.failure

    def start(self) -> None:
        """Wait for the first compiled call."""
        self._watch.start()

    def stop(self) -> tuple[str, ...]:
        """Leave torch as it was; gives what is to be said of the run as a whole."""
        self._watch.stop()
        if self.failure is not None:
            return (f"after {self.failure}, nothing was guarded",)
        if self._journal is None:
            return ()
        notes = self._journal.verdict().notes
        if count := self._journal.raised:
            calls = f"{count} call{'' if count == 1 else 's'}"
            notes += (f"{calls} raised, the compiled code and its graph alike: nothing to compare",)
        return notes

    def turn(self, *, strict: bool | None = None) -> Seen | None:
        """What was checked since the last turn; None for nothing.

        Args:
            strict: whether `unstable` fails in what comes next; None for as the settings say.
        """
        if self._journal is None:
            return None
        return self._journal.turn(strict=self.settings.strict if strict is None else strict)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Leave what is compiled in here alone."""
        from paritas._torch.stance import unguarded

        with unguarded():
            yield

    def _make_journal(self) -> SuiteJournal:
        from paritas.pytesting.suite_journal import SuiteJournal

        self._journal = SuiteJournal(strict=self.settings.strict)
        return self._journal
