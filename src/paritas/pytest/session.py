"""One run of pytest: the guard over all of it, and what belongs to no single test."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from paritas.checks.guard_settings import SWITCH, GuardSettings, GuardWatch, is_enabled
from paritas.errors import UsageError
from paritas.pytest.outcomes import OUTSIDE, CheckOutcome, test_folder
from paritas.results.wording import counted

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    import pytest

    from paritas.pytest import PluginOptions
    from paritas.pytest.parity import Parity
    from paritas.pytest.suite_journal import SuiteJournal
    from paritas.results.findings import Verdict


# --- `--paritas-guard` ----------------------------------------------------------------------------

# Compiled code outlives the test that compiled it. What a call of it shows belongs to the test that
# called, so that the journal of the guards has a page for each phase of each test, and turns it.


class CheckedCalls(NamedTuple):
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

    def __init__(self, options: PluginOptions) -> None:
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
        self._watch = GuardWatch(self.settings, self._make_journal)
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
            calls = counted(count, "call")
            notes += (f"{calls} raised, the compiled code and its graph alike: nothing to compare",)
        return notes

    def turn(self, *, strict: bool | None = None) -> CheckedCalls | None:
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
        from paritas._torch.dynamo import unguarded

        with unguarded():
            yield

    def _make_journal(self) -> SuiteJournal:
        from paritas.pytest.suite_journal import SuiteJournal

        self._journal = SuiteJournal(strict=self.settings.strict)
        return self._journal


# --- The run --------------------------------------------------------------------------------------

NOTE = "paritas has found in what this test compiled:"


class RunAccount(msgspec.Struct, kw_only=True):
    """What a process tells at its end, besides the reports of its tests; a worker sends it.

    Attributes:
        outside: verdicts about what ran while no test did, at collection say.
        notes: about the run as a whole.
        files: per test file whose every test was collected, the folder of its goldens and those
            of its tests.
    """

    outside: list[CheckOutcome] = []
    notes: list[str] = []
    files: dict[str, list[str]] = {}

    def merge(self, other: RunAccount) -> None:
        """Add what another process tells."""
        self.outside += other.outside
        self.notes += [note for note in other.notes if note not in self.notes]
        self.files |= other.files

    def encode(self) -> str:
        """As text, which any channel between processes takes."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> RunAccount:
        """What `encode` wrote."""
        return msgspec.json.decode(text, type=cls)


class Session:
    """The state of one run, in the stash of its configuration."""

    def __init__(self, options: PluginOptions) -> None:
        """Start the guard over the suite, where it was asked for.

        Raises:
            UsageError: a setting is wrong.
        """
        self.options = options
        self.account = RunAccount()
        self.suite: SuiteGuard | None = None
        # Of the test that runs.
        self._parity: Parity | None = None
        self._marks: dict[str, Any] = {}
        if options.guard:
            self.suite = SuiteGuard(options)
            self.suite.start()

    def _note_collected(self, tests: Iterable[str]) -> None:
        """Remember which tests there are, of files that have goldens."""
        for test in tests:
            folder = test_folder(self.options.root, self.options.golden_dir, test)
            if folder.parent.is_dir():
                self.account.files.setdefault(str(folder.parent), []).append(str(folder))

    def parity_of(self, item: pytest.Item) -> Parity:
        """What the fixture gives to a test."""
        from paritas.pytest.parity import Parity

        self._parity = Parity(item, self.options)
        return self._parity

    @property
    def has_failed_outside_tests(self) -> bool:
        """Whether something is wrong that no test can be blamed for."""
        return any(not outcome.passed for outcome in self.account.outside)

    def finish(self, tests: Iterable[str]) -> None:
        """End the guard, and take what is left on its page.

        Args:
            tests: all that were collected, or none where that were not all.
        """
        self._note_collected(tests)
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
        """What was checked since the last test ended belongs to none."""
        seen = None if self.suite is None else self.suite.turn(strict=strict)
        if seen is not None:
            from paritas.pytest.outcomes import short_outcome

            number = len(self.account.outside)
            counts = seen.counts()
            outcome = short_outcome(
                "suite guard", seen.verdict, self.options, OUTSIDE, number, **counts
            )
            self.account.outside.append(outcome)

    def watch(self, item: pytest.Item, phase: str) -> Generator[None, Any, Any]:
        """Let one phase of a test run, and fail it if a graph that ran in it is wrong."""
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
        """End a phase: with what the test itself raised, or else with what the guards found."""
        __tracebackhide__ = True
        failed: list[Verdict] = []
        if self._parity is not None and phase != "setup":
            failed += self._parity.conclude(interrupted=raised is not None)
        seen = None if self.suite is None else self.suite.turn(strict=strict)
        if seen is not None:
            from paritas.pytest.outcomes import Recorder

            Recorder(item, self.options).record("suite guard", seen.verdict, **seen.counts())
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
    """Fail the test, unless it has failed by itself: then tell it beside that."""
    import pytest

    from paritas.errors import MismatchError

    told = "\n".join(map(str, failed))
    if raised is None or isinstance(raised, pytest.skip.Exception):
        pytest.fail(told, pytrace=False)  # no line of the test's is to blame
    if not isinstance(raised, MismatchError):
        raised.add_note(f"{NOTE}\n{told}")


def _read_marks(item: pytest.Item) -> dict[str, Any]:
    """The settings of a test; torch stays away where it has none."""
    if item.get_closest_marker("parity") is None:
        return {}
    import pytest

    from paritas.pytest.parity import settings_of

    try:
        return settings_of(item)
    except UsageError as error:
        pytest.fail(str(error), pytrace=False)
