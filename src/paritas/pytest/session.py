"""One pytest run: the guard for the whole suite, and what belongs to no single test."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from paritas.checks.guard_settings import SWITCH, GuardSettings, GuardWatch, is_enabled
from paritas.errors import UsageError
from paritas.pytest.outcomes import (
    OUTSIDE,
    CheckOutcome,
    record_outcome,
    short_outcome,
    test_folder,
)
from paritas.results.wording import counted

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    import pytest

    from paritas.pytest import PluginOptions
    from paritas.pytest.parity import Parity, SuiteJournal
    from paritas.results.findings import Verdict


# --- `--paritas-guard` ----------------------------------------------------------------------------

# Compiled code outlives the test that compiled it, but a finding belongs to the test that called
# the code. So the journal of the guards starts a new page for each phase of each test.


class CheckedCalls(NamedTuple):
    """The calls on one page of the journal."""

    verdict: Verdict
    graphs: int
    calls: int
    checked: int

    def counts(self) -> dict[str, Any]:
        """The fields of an outcome."""
        return {"graphs": self.graphs, "calls": self.calls, "checked": self.checked}


class SuiteGuard:
    """Guards all compiled calls of the process; imports torch only at the first one."""

    def __init__(self, options: PluginOptions) -> None:
        """Check the settings.

        Raises:
            UsageError: a setting is wrong, or the environment disables guards.
        """
        if not is_enabled(None):
            value = os.environ[SWITCH]
            raise UsageError(
                f"--paritas-guard has no effect: {SWITCH}={value} in the environment disables "
                "guards; unset it"
            )
        self.settings = GuardSettings(
            on_mismatch="record", every=options.every, strict=options.strict
        )
        self._watch = GuardWatch(self.settings, self._make_journal)
        self._journal: SuiteJournal | None = None

    @property
    def failure(self) -> Exception | None:
        """Why nothing could be guarded; the test where it occurred may have ignored it."""
        return self._watch.failure

    def start(self) -> None:
        """Wait for the first compiled call."""
        self._watch.start()

    def stop(self) -> tuple[str, ...]:
        """Restore torch, and return notes on the run as a whole."""
        self._watch.stop()
        if self.failure is not None:
            return (f"nothing was guarded after an error: {self.failure}",)
        if self._journal is None:
            return ()
        notes = self._journal.verdict().notes
        if count := self._journal.raised:
            calls = counted(count, "call")
            notes += (f"{calls} raised in the compiled code and in its graph: nothing to compare",)
        return notes

    def turn(self, *, strict: bool | None = None) -> CheckedCalls | None:
        """Start a new page; return the calls on the old one, None if there are none.

        Args:
            strict: whether `unstable` fails on the new page; None: as in the settings.
        """
        if self._journal is None:
            return None
        return self._journal.turn(strict=self.settings.strict if strict is None else strict)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Do not guard what is compiled in this block."""
        from paritas._torch.dynamo import unguarded

        with unguarded():
            yield

    def _make_journal(self) -> SuiteJournal:
        from paritas.pytest.parity import SuiteJournal

        self._journal = SuiteJournal(strict=self.settings.strict)
        return self._journal


# --- The run --------------------------------------------------------------------------------------

NOTE = "paritas found this in the compiled code of the test:"


class RunAccount(msgspec.Struct, kw_only=True):
    """What a process reports at its end besides its tests; a worker of xdist sends it.

    Attributes:
        outside: verdicts on code that ran outside of tests, for example at collection.
        notes: on the run as a whole.
        files: for each fully collected test file, the folder of its goldens and the folders of its
            tests.
    """

    outside: list[CheckOutcome] = []
    notes: list[str] = []
    files: dict[str, list[str]] = {}

    def merge(self, other: RunAccount) -> None:
        """Add the account of another process."""
        self.outside += other.outside
        self.notes += [note for note in other.notes if note not in self.notes]
        self.files |= other.files

    def encode(self) -> str:
        """Encode as text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> RunAccount:
        """Decode the text of `encode`."""
        return msgspec.json.decode(text, type=cls)


class Session:
    """The state of one run, in the stash of its configuration."""

    def __init__(self, options: PluginOptions) -> None:
        """Start the guard for the suite if it is enabled.

        Raises:
            UsageError: a setting is wrong.
        """
        self.options = options
        self.account = RunAccount()
        self.suite: SuiteGuard | None = None
        # Of the running test.
        self._parity: Parity | None = None
        self._marks: dict[str, Any] = {}
        if options.guard:
            self.suite = SuiteGuard(options)
            self.suite.start()

    def parity_of(self, item: pytest.Item) -> Parity:
        """The value of the fixture for a test."""
        from paritas.pytest.parity import Parity

        self._parity = Parity(item, self.options)
        return self._parity

    @property
    def has_failed_outside_tests(self) -> bool:
        """Whether something failed outside of tests."""
        return any(not outcome.passed for outcome in self.account.outside)

    def finish(self, tests: Iterable[str]) -> None:
        """Stop the guard, and take the rest of its journal.

        Args:
            tests: all collected tests; empty if only a part was collected.
        """
        for test in tests:
            folder = test_folder(self.options.root, self.options.golden_dir, test)
            if folder.parent.is_dir():
                self.account.files.setdefault(str(folder.parent), []).append(str(folder))
        if self.suite is None:
            return
        self.take_outside()
        self.account.notes += self.suite.stop()
        if self.suite.failure is not None:
            worst = str(self.suite.failure)
            lost = CheckOutcome(kind="suite guard", status="unverified", passed=False, worst=worst)
            self.account.outside.append(lost)
        self.suite = None

    def take_outside(self, *, strict: bool | None = None) -> None:
        """Record calls since the end of the last test, which belong to no test."""
        seen = None if self.suite is None else self.suite.turn(strict=strict)
        if seen is not None:
            number = len(self.account.outside)
            outcome = short_outcome(
                "suite guard", seen.verdict, self.options, OUTSIDE, number, **seen.counts()
            )
            self.account.outside.append(outcome)

    def watch(self, item: pytest.Item, phase: str) -> Generator[None, Any, Any]:
        """Run one phase of a test, and fail it if a graph that ran in it is wrong."""
        __tracebackhide__ = True
        if phase == "setup":
            self._marks = {}
            self._marks = _read_marks(item)
        settings = self._marks
        strict = settings.get("strict")
        if phase == "setup":
            self.take_outside(strict=strict)
        raised: BaseException | None = None
        result = None
        with self._switched(on=settings.get("enabled") is not False):
            try:
                result = yield
            except BaseException as error:  # noqa: BLE001  (raised again by `conclude`)
                raised = error
        self.conclude(item, phase, raised, strict=strict)
        return result

    def conclude(
        self,
        item: pytest.Item,
        phase: str,
        raised: BaseException | None = None,
        *,
        strict: bool | None = None,
    ) -> None:
        """End a phase with the exception of the test, or else with the failures of the guards."""
        __tracebackhide__ = True
        failed: list[Verdict] = []
        if self._parity is not None and phase != "setup":
            failed += self._parity.conclude(interrupted=raised is not None)
        seen = None if self.suite is None else self.suite.turn(strict=strict)
        if seen is not None:
            record_outcome(item, self.options, "suite guard", seen.verdict, **seen.counts())
            failed += [] if seen.verdict.passed else [seen.verdict]
        if phase == "teardown":
            self._parity = None
        if failed:
            _fail_test(failed, raised)
        if raised is not None:
            raise raised

    @contextlib.contextmanager
    def _switched(self, *, on: bool) -> Iterator[None]:
        if on or self.suite is None:
            yield
            return
        with self.suite.off():
            yield


def _fail_test(failed: list[Verdict], raised: BaseException | None) -> None:
    """Fail the test, or add a note to its own exception."""
    import pytest

    from paritas.errors import MismatchError

    text = "\n".join(map(str, failed))
    if raised is None or isinstance(raised, pytest.skip.Exception):
        pytest.fail(text, pytrace=False)  # no single line of the test is responsible
    if not isinstance(raised, MismatchError):
        raised.add_note(f"{NOTE}\n{text}")


def _read_marks(item: pytest.Item) -> dict[str, Any]:
    """The settings of a test; torch is imported only if it has a mark."""
    if item.get_closest_marker("parity") is None:
        return {}
    import pytest

    from paritas.pytest.parity import settings_of

    try:
        return settings_of(item)
    except UsageError as error:
        pytest.fail(str(error), pytrace=False)
